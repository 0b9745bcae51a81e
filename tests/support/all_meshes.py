"""python -m tests.support.all_meshes [--part=I/N] [--draws=N] [--seed=N] [--models=…]: all meshes.

Compares meshes of 8 CPU devices with one device: every axis by itself, every pair of axes in both
shapes, and every triple, for each model. Each case draws whether attention has a window, how rows
that are split over context are computed, whether layers are repeated, whether the rows are computed
in microbatches and the loss in chunks, how often a pipeline goes around, and whether the width is
below or above the tokens of a shard. Rows are packed, and the devices are in a random order. The
draws of a case do not depend on the other cases, so that parts can run at different times. Eight
layers are never narrow: half a unit in the last place of each weight changes gradients of a LLaMA
of 8 layers that are 16 wide by up to 3.6e-5, and of 4 layers by up to 7e-6.

Prints one JSON line per case, and at the end the cases that differ by more than 1e-5. All 168 cases
take eight minutes on one core.
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
KEY_HEADS = {'gpt': 8, 'llama': 2, 'moe': 8}


def meshes() -> Iterator[dict[str, int]]:
  """Sizes by axis, for 8 devices."""
  for three in itertools.combinations(AXES, 3):
    yield dict.fromkeys(three, 2)
  for first, second in itertools.combinations(AXES, 2):
    yield {first: 2, second: 4}
    yield {first: 4, second: 2}
  for axis in AXES:
    yield {axis: 8}


def case_of(model: str, sizes: dict[str, int], draw: random.Random) -> tuple[str, dict[str, Any]]:
  """The case of mesh_grid and its attributes: those of the mesh, and options that are drawn."""
  names = ['stage', 'replica', 'data', 'mdl', 'expert', 'context']
  chosen: dict[str, Any] = {
    'MESH_AXES': [a for a in names if a in sizes or a in ('replica', 'data', 'mdl')],
    'USE_REPEATED_LAYER': 'stage' in sizes or draw.random() < 0.5, 'NUM_LAYERS': 2,
    'NUM_MICROBATCHES': draw.choice((1, 2)), 'ROWS': 16, 'ORDER': draw.randrange(1 << 16),
  }  # fmt: skip
  if draw.random() < 0.5:
    chosen['SLIDING_WINDOW'] = 6
  if 'stage' in sizes:
    chosen['NUM_PIPELINE_REPEATS'] = draw.choice((1, 2)) if sizes['stage'] < 8 else 1
    chosen['NUM_LAYERS'] = sizes['stage'] * chosen['NUM_PIPELINE_REPEATS']
  if 'context' in sizes:
    heads = KEY_HEADS[model] % (sizes['context'] * sizes.get('mdl', 1)) == 0
    chosen['CONTEXT_ATTENTION'] = draw.choice(('gather', 'ring', 'heads' if heads else 'ring'))
  width, chunks = draw.choice((16, 128)), draw.choice((1, 4))
  return f'{model}/{width if chosen["NUM_LAYERS"] < 8 else 128}/{chunks}', chosen


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--part', default='1/1', help='I/N: the I-th of every N cases')
  parser.add_argument('--draws', type=int, default=1, help='cases of a mesh and a model')
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--models', default=','.join(MODELS))
  args = parser.parse_args()
  flags = os.environ.get('XLA_FLAGS', '')
  os.environ['XLA_FLAGS'] = f'--xla_force_host_platform_device_count=8 {flags}'
  from tests.support import mesh_grid

  first, every = (int(n) for n in args.part.split('/'))
  cases = list(itertools.product(args.models.split(','), meshes(), range(args.draws)))
  wrong, count = [], 0
  for model, sizes, number in cases[first - 1 :: every]:
    case, changes = case_of(model, sizes, random.Random(f'{args.seed} {model} {sizes} {number}'))
    ici = [sizes.get(axis, 1) for axis in changes['MESH_AXES']]
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
