"""python -m benchmarks.dial FOLDER [--depths 2 3 4 6] [--rates 0.5 1 2] [--steps=200]

Which learning rate is best at several depths of paxlite.recipes.Chat, on the text of the demos: a
line of JSON for each run, and one for each depth. All depths see the same batches of 4 sequences of
256 tokens of the packaged vocabulary; the dial decides all else. `--values NAME=VALUE` sets further
values. A run that is in FOLDER already is not repeated.
"""

import argparse
import datetime
import json
import math
import pathlib
import subprocess
import sys

import jax

from paxlite.experiments.datasets import EmbeddedText
from paxlite.recipes import Chat


class Dialed(EmbeddedText, Chat(depth=4)):  # type: ignore[misc]
  """What the depths have in common."""

  FPROP_DTYPE = 'float32'
  PACKED_INPUT = False
  MAX_SEQ_LEN = 256
  ICI_MESH_SHAPE = [1, 1, 1]
  DCN_MESH_SHAPE = [1, 1, 1]
  PERCORE_BATCH_SIZE = 4
  EVAL_BATCH_SIZE = 16
  MAX_EVAL_BATCHES = 10
  CHECKPOINT_MAX_TO_KEEP = 1


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('folder', type=pathlib.Path)
  parser.add_argument('--depths', nargs='*', type=int, default=[2, 3, 4, 6])
  parser.add_argument('--rates', nargs='*', type=float, default=[0.5, 1, 2])
  parser.add_argument('--steps', type=int, default=200)
  parser.add_argument('--values', nargs='*', default=[], metavar='NAME=VALUE')
  args = parser.parse_args()
  for depth in args.depths:
    found = {rate: loss(args.folder, depth, rate, args.steps, args.values) for rate in args.rates}
    best = min(found, key=found.__getitem__)
    print(json.dumps(dict(depth=depth, best=best, losses=found)), flush=True)


def loss(folder: pathlib.Path, depth: int, rate: float, steps: int, values: list[str]) -> float:
  """Returns the held-out loss of a run in nats a token; infinity if it is not finite."""
  name = '_'.join([f'depth{depth}', f'rate{rate:g}', f'steps{steps}', *values])
  place = folder / name
  evaluations = place / 'eval_metrics.jsonl'
  if not evaluations.is_file():
    tokens = steps * 4 * 256
    words = [
      f'DEPTH={depth}', f'LEARNING_RATE={Dialed.LEARNING_RATE * rate:g}', f'TRAIN_TOKENS={tokens}',
      f'EVAL_INTERVAL_STEPS={steps}', f'CHECKPOINT_EVERY_N_STEPS={steps}', *values,
    ]  # fmt: skip
    command = [sys.executable, '-m', 'paxlite', 'train', 'benchmarks.dial.Dialed', *words]
    subprocess.run([*command, f'--folder={place}'], check=True, stdout=subprocess.DEVNULL)
  record = json.loads(evaluations.read_text().splitlines()[-1])
  found = record['avg_xent']
  about = dict(
    depth=depth, rate=rate, steps=steps, values=values, loss=found,
    bits_per_byte=record.get('bits_per_byte'), jax=jax.__version__,
    date=datetime.datetime.now(datetime.UTC).date().isoformat(),
  )  # fmt: skip
  print(json.dumps(about), flush=True)
  return found if math.isfinite(found) else math.inf


if __name__ == '__main__':
  main()
