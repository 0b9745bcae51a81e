"""python -m benchmarks.verified_steps [--every=100,10] [--devices=1] [--rounds=5] [NAME=VALUE …]

Measures what VERIFY_EVERY_N_STEPS costs on CPUs: blocks of 100 steps of one process that verifies
no step, and of the same one that verifies each 100th or each 10th. The blocks take turns. Prints
the medians of their seconds, by the clock and of the processor, and the ratios to the blocks that
verify nothing. --devices divides the processor into devices, each with its own rows.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence

import jax

_ROWS = 8  # of a batch
_MODEL = {  # half a million parameters
  'NUM_LAYERS': '2', 'MODEL_DIMS': '128', 'HIDDEN_DIMS': '512', 'NUM_HEADS': '4',
  'VOCAB_SIZE': '512', 'MAX_SEQ_LEN': '128', 'MAX_STEPS': '1000000',
  'EVAL_INTERVAL_STEPS': '1000000',
}  # fmt: skip


class Side:
  """A run that verifies each so many steps, 0: none; its steps are done one by one."""

  def __init__(self, every: int, devices: int, values: dict[str, str]):
    from paxlite.programs.launch import build_experiment
    from paxlite.programs.run import Run

    more = {'VERIFY_EVERY_N_STEPS': str(every), 'ICI_MESH_SHAPE': f'[{devices},1,1]'}
    e = build_experiment(
      'TinyGPT', [], _MODEL | {'PERCORE_BATCH_SIZE': f'{_ROWS / devices:g}'} | values | more
    )
    with tempfile.TemporaryDirectory() as folder:
      trainer = Run(e, pathlib.Path(folder), save=False).trainer()
      self._state, _ = trainer.store.initial()
    task = trainer.store.task
    self._batches = trainer.data.batches(0, task.batch_sharding)
    shapes = self._batches.shapes()
    compiler = dataclasses.replace(trainer.compiler, on_compiled=lambda compiled: None)
    with task.compiling():
      self._compiled, _ = compiler(task.lower_step(shapes), (task.abstract, shapes))
    self._verifier, self._step = trainer.verifier, 0

  def do(self, steps: int) -> tuple[float, float]:
    """Does steps; returns their seconds by the clock, and those of the processor."""
    before = time.perf_counter(), time.process_time()
    for _ in range(steps):
      self._step += 1
      batch = self._batches.draw(self._state.params)
      if self._verifier is None:
        self._state, _ = self._compiled(self._state, batch)
      else:
        self._state, _ = self._verifier(self._compiled, self._state, batch, self._step)
    jax.block_until_ready(self._state)
    return time.perf_counter() - before[0], time.process_time() - before[1]


def main(argv: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--every', default='100,10')
  parser.add_argument('--devices', type=int, default=1)
  parser.add_argument('--steps', type=int, default=100, help='of a block')
  parser.add_argument('--rounds', type=int, default=5)
  parser.add_argument('--json', help='append the result to this file')
  parser.add_argument('values', nargs='*', metavar='NAME=VALUE')
  args = parser.parse_args(argv)
  jax.config.update('jax_num_cpu_devices', args.devices)
  values = dict(value.split('=', 1) for value in args.values)
  numbers = [0, *map(int, args.every.split(','))]
  sides = {every: Side(every, args.devices, values) for every in numbers}
  for every, side in sides.items():
    side.do(max(every, 10))  # what a verified step compiles
  times: dict[int, list[tuple[float, float]]] = {every: [] for every in sides}
  for _ in range(args.rounds):
    for every, side in sides.items():
      times[every].append(side.do(args.steps))
  medians = {e: [statistics.median(t) for t in zip(*of, strict=True)] for e, of in times.items()}
  result = {
    'devices': args.devices, 'steps': args.steps, 'rounds': args.rounds, 'values': values,
    'date': time.strftime('%Y-%m-%d'), 'machine': f'{os.cpu_count()} × {platform.machine()}',
    'seconds': {str(e): [round(x, 3) for x in m] for e, m in medians.items()},
    'ratios': {
      str(e): [round(x / y, 3) for x, y in zip(m, medians[0], strict=True)]
      for e, m in medians.items()
    },
  }  # fmt: skip
  print(f'{args.devices} devices, blocks of {args.steps} steps, medians of {args.rounds}')
  print(f'{"verified":>10} {"seconds":>9} {"ratio":>6} {"processor s":>12} {"ratio":>6}')
  for every, (wall, used) in medians.items():
    one, two = wall / medians[0][0], used / medians[0][1]
    name = f'each {every}th' if every else 'none'
    print(f'{name:>10} {wall:9.3f} {one:6.3f} {used:12.3f} {two:6.3f}')
  if args.json:
    with open(args.json, 'a') as f:
      f.write(json.dumps(result) + '\n')


if __name__ == '__main__':
  main()
