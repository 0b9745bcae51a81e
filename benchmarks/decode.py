"""python benchmarks/decode.py --checkpoint=weights/smollm [--rounds=3]

Compares generation with transformers' generate on torch and with llama.cpp, in float32, greedy, in
turn. Prompts have 128 tokens and 128 tokens are generated, for batches of 1, 8 and 32. --ragged:
prompts of 16 to 240 tokens and answers of 16 to 240 instead; transformers pads prompts on the left
and generates as many tokens as the longest answer has. The checkpoint must be of a model that
Hugging Face has too; it is exported for transformers. llama.cpp gets one prompt at a time and a
file from --gguf (the package llama-cpp-python). Prints medians and ratios.
"""

import argparse
import json
import os
import pathlib
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

Prompts = list[list[int]]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--checkpoint', required=True, help='run folder, or imported weights')
  parser.add_argument('--rounds', type=int, default=3)
  parser.add_argument('--prompt', type=int, default=128, help='tokens of a prompt')
  parser.add_argument('--new', type=int, default=128, help='tokens after it')
  parser.add_argument('--batch', type=int, nargs='+', default=[1, 8, 32], help='rows')
  parser.add_argument('--ragged', action='store_true', help='prompts and answers of many lengths')
  parser.add_argument('--gguf', help='the same weights for llama.cpp, in float32')
  parser.add_argument('--json', help='append the result to this file')
  args = parser.parse_args()

  from paxlite.generation.inference import load_checkpoint

  inference = load_checkpoint(args.checkpoint, overrides={'FPROP_DTYPE': 'float32'})
  sides = {'paxlite': of_paxlite(inference), 'transformers': of_transformers(args.checkpoint)}
  if args.gguf:
    sides['llama.cpp'] = of_llama(args.gguf)
  for batch in args.batch:
    prompts, news = drawn(batch, args, inference.experiment.VOCAB_SIZE)
    # llama.cpp's Python has no batches of sequences
    taking = {k: v for k, v in sides.items() if k != 'llama.cpp' or batch == 1}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in taking}
    for round_ in range(args.rounds + 1):
      for name, side in taking.items():
        first = side(prompts, [1] * batch)
        whole = side(prompts, news)
        if round_ or args.rounds == 1:  # the first round compiles
          times[name].append((first, whole - first))
    tokens = {'prefill': sum(map(len, prompts)), 'decode': sum(news) - batch}
    result: dict[str, Any] = {
      'model': pathlib.Path(args.checkpoint).name,
      'batch': batch,
      'ragged': args.ragged,
      'rounds': args.rounds,
      'date': time.strftime('%Y-%m-%d'),
      'machine': f'{os.cpu_count()} cores',
      'python': platform.python_version(),
      'jax': jax.__version__,
    }
    for i, (step, count) in enumerate(tokens.items()):
      medians = {name: statistics.median(t[i] for t in found) for name, found in times.items()}
      rates = {name: count / seconds for name, seconds in medians.items()}
      result[step] = {f'{name}_tokens_per_second': round(rate, 1) for name, rate in rates.items()}
      ours = rates['paxlite']
      ratios = {name: round(ours / rate, 2) for name, rate in rates.items() if name != 'paxlite'}
      result[step]['ratios'] = ratios
      told = '   '.join(f'{name} {rate:8,.1f}' for name, rate in rates.items())
      print(f'batch {batch} {step:8}tokens/s: {told}   ratios {ratios}', flush=True)
    if args.json:
      with open(args.json, 'a') as f:
        f.write(json.dumps(result) + '\n')


def drawn(batch: int, args: argparse.Namespace, vocab_size: int) -> tuple[Prompts, list[int]]:
  """Returns random prompts, and how many tokens are generated after each."""
  rng = np.random.default_rng(0)
  lengths, news = [args.prompt] * batch, [args.new] * batch
  if args.ragged:
    lengths, news = (rng.integers(16, 241, batch).tolist() for _ in range(2))
  return [rng.integers(5, vocab_size, n).tolist() for n in lengths], news


def of_paxlite(inference: Any) -> Callable[[Prompts, list[int]], float]:
  """Returns a function of prompts and numbers of new tokens that returns seconds."""
  from paxlite.generation.request import Request

  engine = inference.engine(most_rows=32)

  def side(prompts: Prompts, news: list[int]) -> float:
    engine.params = inference.params  # so that no prompt is known
    start = time.perf_counter()
    answers = engine.generate([Request(p, n) for p, n in zip(prompts, news, strict=True)])
    seconds = time.perf_counter() - start
    assert [len(answer.ids) for answer in answers] == news
    return seconds

  return side


def of_transformers(checkpoint: str) -> Callable[[Prompts, list[int]], float]:
  """Returns the same for transformers' generate."""
  import torch
  import transformers

  from paxlite.weights.commands import export_weights

  with tempfile.TemporaryDirectory() as folder:
    path = f'{folder}/hf'
    export_weights.main(['--to=hf', f'--checkpoint={checkpoint}', f'--path={path}'])
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
  model.generation_config.eos_token_id = None  # so that neither side stops early

  def side(prompts: Prompts, news: list[int]) -> float:
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    start = time.perf_counter()
    with torch.no_grad():
      model.generate(
        ids, attention_mask=mask, max_new_tokens=max(news), do_sample=False, pad_token_id=0
      )
    return time.perf_counter() - start

  return side


def of_llama(path: str) -> Callable[[Prompts, list[int]], float]:
  """Returns the same for llama.cpp, one prompt after another."""
  import llama_cpp

  llama = llama_cpp.Llama(path, n_ctx=512, n_threads=os.cpu_count(), verbose=False)

  def side(prompts: Prompts, news: list[int]) -> float:
    start = time.perf_counter()
    for prompt, new in zip(prompts, news, strict=True):
      llama.reset()
      tokens = llama.generate(prompt, top_k=1, temp=0.0)
      for _ in range(new):
        next(tokens)
    return time.perf_counter() - start

  return side


if __name__ == '__main__':
  main()
