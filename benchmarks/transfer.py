"""python -m benchmarks.transfer FOLDER [--widths 48 192] [--rates 0.25 0.5 1 2 4 8] [--steps=200]

Which learning rate is best for a narrow and for a wide model, with and without the rules of
paxlite.ladder, trained by AdamW on the text of the demos: a line of JSON for each width. The values
are those of the widest model, DemoGPTAdam with LEARNING_RATE=0.002. A run that is in FOLDER already
is not repeated.
"""

import argparse
import json
import pathlib
import subprocess
import sys

from paxlite.experiments.demo import DemoGPTAdam
from paxlite.experiments.language_model import LanguageModel
from paxlite.ladder import rungs, sizes, transfer
from paxlite.ladder.sizes import Size


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('folder', type=pathlib.Path)
  parser.add_argument('--widths', nargs='*', type=int, default=[48, 192])
  parser.add_argument('--rates', nargs='*', type=float, default=[0.25, 0.5, 1, 2, 4, 8])
  parser.add_argument('--steps', type=int, default=200)
  args = parser.parse_args()
  widest = max(args.widths)
  e = DemoGPTAdam(
    MODEL_DIMS=widest,
    NUM_HEADS=widest // 24,
    HIDDEN_DIMS=3 * widest,
    NUM_LAYERS=2,
    LEARNING_RATE=2e-3,
    LR_COS_WARMUP=20,
    LR_COS_DECAY_END=args.steps,
    MAX_STEPS=args.steps,
    EVAL_INTERVAL_STEPS=args.steps,
    SAMPLE_PROMPT=None,
  )
  stated = {name: str(value) for name, value in vars(e).items() if name.isupper()}
  for width in args.widths:
    size = Size(width, e.NUM_LAYERS)
    of = {'rules': transfer.values_of(e, size, Size.of(e)), 'plain': sizes.values_of(e, size)}
    found = {
      kind: {rate: loss(args.folder, kind, e, size, rate, stated, values) for rate in args.rates}
      for kind, values in of.items()
      if width != widest or kind == 'rules'  # where both are the same
    }
    best = {kind: min(losses, key=losses.__getitem__) for kind, losses in found.items()}
    print(json.dumps(dict(width=width, best=best, losses=found)), flush=True)


def loss(
  folder: pathlib.Path, kind: str, e: LanguageModel, size: Size, rate: float,
  stated: dict[str, str], values: dict[str, object],
) -> float:  # fmt: skip
  """Returns the held-out loss of a run in nats."""
  place = folder / f'{size}_{kind}_{rate:g}'
  evaluations = place / 'eval_metrics.jsonl'
  if not evaluations.is_file():
    words = rungs.words(stated, {**values, 'LEARNING_RATE': e.LEARNING_RATE * rate})
    command = [sys.executable, '-m', 'paxlite', 'train', 'DemoGPTAdam', f'--folder={place}', *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
  return json.loads(evaluations.read_text().splitlines()[-1])['avg_xent']


if __name__ == '__main__':
  main()
