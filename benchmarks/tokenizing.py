"""python benchmarks/tokenizing.py [--vocab=x.model …] [--megabytes=400] [--rounds=3]

Compares the tokenize tool, as a whole process on all cores, with the tokenizer alone: the same
number of processes, each of which encodes the same documents from memory, one by one, and drops the
ids. They run in turn. Prints the medians of tokens per second and core, and their ratio.
"""

import argparse
import json
import multiprocessing
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time

from paxlite.data import packaged
from paxlite.data.tokenizer import open_tokenizer
from paxlite.files.text_files import read_text

_MINIMUM = 1_000  # characters per document


def documents(megabytes: float) -> list[str]:
  """Returns documents of several paragraphs of the packaged texts, which are repeated."""
  found: list[str] = []
  document = ''
  for paragraph in '\n\n'.join(map(read_text, packaged.TEXTS)).split('\n\n'):
    document += paragraph + '\n\n'
    if len(document) > _MINIMUM:
      found.append(document)
      document = ''
  size = sum(map(len, found))
  return found * max(1, round(megabytes * 1e6 / size))


def raw(vocab: str, texts: list[str], barrier, rates) -> None:
  encode = open_tokenizer(vocab).encode
  encode(texts[0])
  barrier.wait()
  started = time.perf_counter()
  count = sum(len(encode(text)) for text in texts)
  rates.put(count / (time.perf_counter() - started))


def raw_rate(vocab: str, texts: list[str], processes: int) -> float:
  """Returns the mean number of tokens per second of one of several processes."""
  context = multiprocessing.get_context('fork')
  barrier, rates = context.Barrier(processes), context.Queue()
  arguments = (vocab, texts, barrier, rates)
  started = [context.Process(target=raw, args=arguments) for _ in range(processes)]
  for process in started:
    process.start()
  found = [rates.get() for _ in started]
  for process in started:
    process.join()
  return statistics.mean(found)


def tool_rate(vocab: str, source: str, folder: str, processes: int) -> float:
  """Returns tokens per second and process, from the start of the command to its end."""
  command = [sys.executable, '-m', 'paxlite', 'tokenize', f'--vocab={vocab}',
             f'--output={folder}', f'--processes={processes}', source]  # fmt: skip
  started = time.perf_counter()
  subprocess.run(command, check=True, capture_output=True)
  seconds = time.perf_counter() - started
  meta = json.loads((pathlib.Path(folder) / 'train' / 'meta.json').read_text())
  return meta['token_count'] / seconds / processes


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--vocab', nargs='+', default=[packaged.VOCAB])
  parser.add_argument('--megabytes', type=float, default=400)
  parser.add_argument('--rounds', type=int, default=3)
  parser.add_argument('--json', help='append the result to this file')
  args = parser.parse_args()

  os.environ['TOKENIZERS_PARALLELISM'] = 'false'
  texts = documents(args.megabytes)
  processes = os.cpu_count() or 1
  for vocab in args.vocab:
    alone: list[float] = []
    whole: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
      source = pathlib.Path(folder) / 'texts.jsonl'
      source.write_text(''.join(json.dumps({'text': t}) + '\n' for t in texts))
      megabytes = source.stat().st_size / 1e6
      for i in range(args.rounds):
        alone.append(raw_rate(vocab, texts[: len(texts) // processes], processes))
        whole.append(tool_rate(vocab, str(source), f'{folder}/{i}', processes))
    tool, tokenizer = statistics.median(whole), statistics.median(alone)
    print(
      f'{vocab}: {megabytes:.0f} MB on {processes} cores: {tool / 1e3:,.0f} k tokens/s and core;'
      f' the tokenizer alone {tokenizer / 1e3:,.0f} k, ratio {tool / tokenizer:.2f}',
      flush=True,
    )
    if args.json:
      result = {
        'vocab': pathlib.Path(vocab).name,
        'megabytes': round(megabytes),
        'processes': processes,
        'rounds': args.rounds,
        'tool_tokens_per_second_and_core': round(tool),
        'tokenizer_tokens_per_second_and_core': round(tokenizer),
        'ratio': round(tool / tokenizer, 3),
        'date': time.strftime('%Y-%m-%d'),
        'python': platform.python_version(),
      }
      with open(args.json, 'a') as f:
        f.write(json.dumps(result) + '\n')


if __name__ == '__main__':
  main()
