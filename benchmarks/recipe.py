"""python -m benchmarks.recipe FOLDER [--sizes 1.1M 5.3M 10.6M] [--seeds 1234 1 2]

How many tokens MuonRecipe (DemoGPT) needs for the held-out loss that AdamW (DemoGPTAdam) ends with,
on the text of the demos: a line of JSON for each size and seed. Each run has a schedule of its own
length, and a run that is in FOLDER already is not repeated. Seconds are those of this machine, and
mean something only if nothing else runs.
"""

import argparse
import json
import pathlib
import subprocess
import sys

SIZES = {
  '1.1M': dict(NUM_LAYERS=3, MODEL_DIMS=96, NUM_HEADS=3),
  '5.3M': {},
  '10.6M': dict(NUM_LAYERS=6, MODEL_DIMS=320, NUM_HEADS=5),
}
STEPS = 750  # of AdamW: one pass over the text
RATES = {'1.1M': 2e-3, '5.3M': 1e-3, '10.6M': 1e-3}  # the best of some: see docs/optimizers.md
LENGTHS = {'1.1M': (300, 375), '5.3M': (225, 300), '10.6M': (225, 300)}  # of the recipe


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('folder', type=pathlib.Path)
  parser.add_argument('--sizes', nargs='*', default=list(SIZES), choices=SIZES)
  parser.add_argument('--seeds', nargs='*', type=int, default=[1234, 1, 2])
  args = parser.parse_args()
  for size in args.sizes:
    width = SIZES[size].get('MODEL_DIMS', 256)
    for seed in args.seeds:
      adam = loss(
        args.folder / f'adamw_{size}_{STEPS}_s{seed}', 'DemoGPTAdam', STEPS, size, seed,
        HIDDEN_DIMS=3 * width, LEARNING_RATE=RATES[size],
      )  # fmt: skip
      recipe = {
        steps: loss(
          args.folder / f'recipe_{size}_{steps}_s{seed}', 'DemoGPT', steps, size, seed,
          HIDDEN_DIMS=9 * width // 2,
        )
        for steps in LENGTHS[size]
      }  # fmt: skip
      found = {'size': size, 'seed': seed, 'adamw': adam, 'recipe': recipe}
      print(json.dumps(found | {'tokens': share(adam, recipe)}), flush=True)


def loss(
  folder: pathlib.Path, experiment: str, steps: int, size: str, seed: int, **values: object
) -> float:
  """Returns the held-out loss in nats that a run ends with."""
  values = SIZES[size] | values | dict(SEED=seed, MAX_STEPS=steps, EVAL_INTERVAL_STEPS=steps)
  words = [f'{name}={value}' for name, value in values.items()]
  train = [sys.executable, '-m', 'paxlite', 'train', experiment, f'--folder={folder}', *words]
  subprocess.run(train, check=True, stdout=subprocess.DEVNULL)
  last = (folder / 'eval_metrics.jsonl').read_text().splitlines()[-1]
  return json.loads(last)['avg_xent']


def share(adam: float, recipe: dict[int, float]) -> float:
  """Returns the tokens for the loss of AdamW as a share of its tokens, on a line through both."""
  (few, first), (many, second) = recipe.items()
  steps = few + (first - adam) / (first - second) * (many - few)
  return round(steps / STEPS, 3)


if __name__ == '__main__':
  main()
