"""python benchmarks/decode.py --checkpoint=weights/smollm [--rounds=3]

Compares prefill and decoding with transformers' generate on torch, in float32, greedy, in turn.
Prompts have 128 tokens and 128 tokens are generated, for batches of 1 and 8. The checkpoint must be
of a model that Hugging Face has too; it is exported for transformers. Prints medians and ratios.
"""

import argparse
import json
import os
import pathlib
import platform
import statistics
import tempfile
import time

import jax
import numpy as np


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--checkpoint', required=True, help='a job_log_dir, or imported weights')
  parser.add_argument('--rounds', type=int, default=3)
  parser.add_argument('--prompt', type=int, default=128, help='tokens of a prompt')
  parser.add_argument('--new', type=int, default=128, help='tokens after it')
  parser.add_argument('--batch', type=int, nargs='+', default=[1, 8], help='rows')
  parser.add_argument('--json', help='append the result to this file')
  args = parser.parse_args()

  import torch
  import transformers

  from paxlite.eval.inference import load_checkpoint
  from paxlite.generation.decoding import Generator
  from paxlite.tools import export_weights

  inference = load_checkpoint(args.checkpoint, overrides={'FPROP_DTYPE': 'float32'})
  e = inference.experiment
  with tempfile.TemporaryDirectory() as folder:
    path = f'{folder}/hf'
    export_weights.main(['--to=hf', f'--checkpoint={args.checkpoint}', f'--path={path}'])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
  # So that neither side stops early.
  theirs.generation_config.eos_token_id = None
  generator = Generator(inference.model, inference.params, e.MAX_SEQ_LEN)

  def ours(prompts: list[list[int]]) -> tuple[float, float]:
    start = time.perf_counter()
    state = jax.block_until_ready(generator.prefill(prompts, args.new))
    middle = time.perf_counter()
    jax.block_until_ready(generator.extend(state, args.new - 1))
    return middle - start, time.perf_counter() - middle

  def their_generate(prompts: list[list[int]]) -> tuple[float, float]:
    ids = torch.tensor(prompts)
    mask = torch.ones_like(ids)
    seconds = []
    for new in (1, args.new):
      start = time.perf_counter()
      with torch.no_grad():
        theirs.generate(
          ids, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0
        )
      seconds.append(time.perf_counter() - start)
    return seconds[0], seconds[1] - seconds[0]

  for batch in args.batch:
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, e.VOCAB_SIZE, (batch, args.prompt)).tolist()
    times: dict = {ours: [], their_generate: []}
    for side in times:
      side(prompts)
    for _ in range(args.rounds):
      for side, found in times.items():
        found.append(side(prompts))
    result = {
      'model': pathlib.Path(args.checkpoint).name,
      'batch': batch,
      'rounds': args.rounds,
      'date': time.strftime('%Y-%m-%d'),
      'machine': f'{os.cpu_count()} cores',
      'python': platform.python_version(),
      'jax': jax.__version__,
      'torch': torch.__version__,
      'transformers': transformers.__version__,
    }
    steps = {'prefill': batch * args.prompt, 'decode': batch * (args.new - 1)}
    for i, (step, tokens) in enumerate(steps.items()):
      mine, other = (statistics.median(t[i] for t in found) for found in times.values())
      result[step] = {
        'paxlite_tokens_per_second': round(tokens / mine, 1),
        'transformers_tokens_per_second': round(tokens / other, 1),
        'ratio': round(other / mine, 2),
      }
      print(
        f'batch {batch} {step:8}paxlite {tokens / mine:8,.1f} tokens/s   transformers '
        f'{tokens / other:8,.1f} tokens/s   ratio {other / mine:.2f}',
        flush=True,
      )
    if args.json:
      with open(args.json, 'a') as f:
        f.write(json.dumps(result) + '\n')


if __name__ == '__main__':
  main()
