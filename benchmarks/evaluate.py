"""python benchmarks/evaluate.py --checkpoint=weights/smollm --tasks lambada:FILE.jsonl

Measures zero-shot examples per second. Compares rows in buckets of lengths with rows that are
padded to the longest row of the task and to MAX_SEQ_LEN, in turn, with the same number of tokens
per batch. Compilation is not counted.
"""

import argparse
import json
import platform
import statistics
import time

import jax

from paxlite.eval.eval_tasks import read_tasks
from paxlite.eval.scoring import Scorer
from paxlite.eval.zero_shot import contexts_of
from paxlite.generation.inference import load_checkpoint


class PaddedScorer(Scorer):
  """A Scorer whose rows all have the same length."""

  length = 0

  def _bucket(self, length: int) -> int:
    return self.length


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--checkpoint', required=True)
  parser.add_argument('--tasks', required=True, nargs='+')
  parser.add_argument('--limit', type=int, default=100)
  parser.add_argument('--rounds', type=int, default=3)
  parser.add_argument('--short', action='store_true', help='leave MAX_SEQ_LEN out: it takes long')
  parser.add_argument('--batch_tokens', type=int, default=4096)
  parser.add_argument('--json', help='append the result to this file')
  args = parser.parse_args()

  inference = load_checkpoint(args.checkpoint, overrides={'FPROP_DTYPE': 'float32'})
  e = inference.experiment
  arguments = (inference.model, inference.params, e.MAX_SEQ_LEN, args.batch_tokens,
               inference.mesh, e.rules)  # fmt: skip
  contexts = contexts_of(inference)
  for task in read_tasks(args.tasks, args.limit):
    asked = [
      contexts.pair(text, None, after) for example in task.examples for text, after in example.asked
    ]
    longest = min(e.MAX_SEQ_LEN, max(len(c.context) + len(c.continuation) - 1 for c in asked))
    sides = {'buckets': Scorer(*arguments)}
    lengths = {'longest': longest} | ({} if args.short else {'MAX_SEQ_LEN': e.MAX_SEQ_LEN})
    for name, length in lengths.items():
      sides[name] = padded = PaddedScorer(*arguments)
      padded.length = length
    times: dict[str, list[float]] = {name: [] for name in sides}
    for counted in range(args.rounds + 1):
      for name, score in sides.items():
        started = time.perf_counter()
        score(asked)
        if counted:  # the first round compiles
          times[name].append(time.perf_counter() - started)
    rates = {name: len(task.examples) / statistics.median(t) for name, t in times.items()}
    ratios = {f'over_{name}': rates['buckets'] / rates[name] for name in list(rates)[1:]}
    print(
      f'{task.name}: {len(task.examples)} examples, the longest {longest} tokens: '
      + ', '.join(f'{name} {rate:.2f}/s' for name, rate in rates.items())
      + ''.join(f', {name} {ratio:.2f}' for name, ratio in ratios.items()),
      flush=True,
    )
    if args.json:
      result = {
        'task': task.name,
        'examples': len(task.examples),
        'longest': longest,
        'rounds': args.rounds,
        'batch_tokens': args.batch_tokens,
        'examples_per_second': {k: round(v, 2) for k, v in rates.items()},
        'ratios': {k: round(v, 2) for k, v in ratios.items()},
        'date': time.strftime('%Y-%m-%d'),
        'python': platform.python_version(),
        'jax': jax.__version__,
      }
      with open(args.json, 'a') as f:
        f.write(json.dumps(result) + '\n')


if __name__ == '__main__':
  main()
