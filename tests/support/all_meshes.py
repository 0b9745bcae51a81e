"""python -m tests.support.all_meshes [--draws=N] [--seed=N]: compares all meshes with one device.

On 8 CPU devices: every axis by itself, every pair of axes in both shapes, and every triple, for
each model. Each case draws whether attention has a window, the rows are computed in microbatches,
and the loss in chunks, and whether the width is below or above the tokens of a shard. Rows are
packed.

Prints one JSON line per case, and at the end the cases that differ by more than 1e-5.
"""

import argparse
import itertools
import json
import os
import random
from collections.abc import Iterator
from typing import Any

AXES = ('replica', 'data', 'mdl', 'expert', 'context', 'stage')
MODELS = ('gpt', 'llama', 'moe')


def meshes() -> Iterator[dict[str, int]]:
  """Sizes by axis, for 8 devices."""
  for three in itertools.combinations(AXES, 3):
    yield dict.fromkeys(three, 2)
  for first, second in itertools.combinations(AXES, 2):
    yield {first: 2, second: 4}
    yield {first: 4, second: 2}
  for axis in AXES:
    yield {axis: 8}


def changes_of(sizes: dict[str, int], draw: random.Random) -> dict[str, Any]:
  """The attributes of a mesh, and options that are drawn."""
  names = ['stage', 'replica', 'data', 'mdl', 'expert', 'context']
  layers = max(sizes.get('stage', 1), 2)
  window = draw.choice((0, 6))
  return dict(
    MESH_AXES=[a for a in names if a in sizes or a in ('replica', 'data', 'mdl')],
    USE_REPEATED_LAYER='stage' in sizes or draw.random() < 0.5,
    NUM_LAYERS=layers,
    NUM_MICROBATCHES=draw.choice((1, 2)),
    ROWS=16,
    **dict(SLIDING_WINDOW=window) if window else {},
  )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--draws', type=int, default=1, help='cases of a mesh and a model')
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--models', default=','.join(MODELS))
  args = parser.parse_args()
  os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8'
  from tests.support import mesh_grid

  draw = random.Random(args.seed)
  wrong, count = [], 0
  for sizes, model, _ in itertools.product(meshes(), args.models.split(','), range(args.draws)):
    changes = changes_of(sizes, draw)
    ici = [sizes.get(axis, 1) for axis in changes['MESH_AXES']]
    case = f'{model}/{draw.choice((16, 128))}/{draw.choice((1, 4))}'
    try:
      found = mesh_grid.check(ici, [1] * len(ici), case, changes)
    except Exception as e:  # one that is refused does not end the others
      found = {'case': case, 'error': f'{type(e).__name__}: {e}'[:300]}
    found |= {'sizes': sizes, 'changes': changes}
    print(json.dumps(found), flush=True)
    count += 1
    if 'error' in found or not max(found['loss'], found['gradient']) < 1e-5:
      wrong.append(found)
  print(f'{count} cases, {len(wrong)} of them differ or are refused:')
  for found in wrong:
    print(json.dumps(found))


if __name__ == '__main__':
  main()
