"""python -m benchmarks.rewards NAME=FOLDER[,MEASURE[,FIRST]] … --svg=docs/rewards.svg [--json=…]

Draws how a measure of runs rises: `reward`, the mean reward of the answers of a step, or one of an
evaluation, such as exact_match, which was FIRST before training. Each point of a reward is the mean
of the records of 1/40 of a run.
"""

import argparse
import json
import pathlib

import numpy as np

from benchmarks.convergence import svg

_POINTS = 40


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('runs', nargs='+', metavar='NAME=FOLDER[,MEASURE[,FIRST]]')
  parser.add_argument('--svg', type=pathlib.Path, required=True, help='where the plot goes')
  parser.add_argument('--json', type=pathlib.Path, help='where the points go')
  args = parser.parse_args()
  curves = {}
  for run in args.runs:
    name, _, place = run.partition('=')
    folder, measure, *first = [*place.split(','), 'reward'][: max(2, place.count(',') + 1)]
    before = [(0, float(value)) for value in first]
    curves[name] = before + points(pathlib.Path(folder), measure)
    print(f'{name}: {curves[name][0]} … {curves[name][-1]}')
  args.svg.write_text(svg(curves, legend=300))
  if args.json:
    args.json.write_text(json.dumps(curves) + '\n')


def points(folder: pathlib.Path, measure: str) -> list[tuple[int, float]]:
  """Returns pairs of a step and the value there."""
  file = 'metrics.jsonl' if measure == 'reward' else 'eval_metrics.jsonl'
  lines = (folder / file).read_text().splitlines()
  found = [(r['step'], r[measure]) for r in map(json.loads, lines) if measure in r]
  if measure != 'reward':
    return found
  parts = np.array_split(np.array(found), min(_POINTS, len(found)))
  return [(int(part[-1, 0]), round(float(part[:, 1].mean()), 4)) for part in parts]


if __name__ == '__main__':
  main()
