"""python -m benchmarks.local_states [--size=124M] [--every=10] [--steps=30] [--json=FILE]

Measures what LOCAL_CHECKPOINT_EVERY_N_STEPS costs: the wall time of a step, from record to record,
of two processes that keep local states in /dev/shm, and of two that do not. Both take turns, and
the medians of their rounds are compared. Nothing else should run on the machine.
"""

import argparse
import json
import os
import pathlib
import signal
import statistics
import sys
import tempfile
import time

from paxlite.experiments.datasets import Synthetic
from paxlite.experiments.gpt import GPT126M
from tests.support.processes import start_processes


class Two(Synthetic, GPT126M):
  """124M parameters, whose parts are spread over two processes with a device each."""

  MAX_SEQ_LEN = 512
  FPROP_DTYPE = 'float32'
  DCN_MESH_SHAPE = [1, 1, 1]
  EVAL_INTERVAL_STEPS = 1_000_000
  CHECKPOINT_EVERY_N_STEPS = 1_000_000
  CHECKPOINT_EVERY_N_MINUTES = 0
  MAX_STEPS = 1_000_000


class SmallTwo(Two):
  NUM_LAYERS = 2
  MODEL_DIMS = 128
  HIDDEN_DIMS = 512
  NUM_HEADS = 2
  DIMS_PER_HEAD = 64


_SIZES = {'124M': 'Two', 'small': 'SmallTwo'}
_FIRST = 4  # records that are left out: compiling, and what is allocated once


def step_seconds(folder: pathlib.Path, args: argparse.Namespace, every: int) -> float:
  """Returns the mean wall time of a step."""
  flags = [
    '--fdl.ICI_MESH_SHAPE=[1,2,1]', '--fdl.CHECKPOINT_EVERY_N_STEPS=1000000',
    '--fdl.EVAL_INTERVAL_STEPS=1000000', f'--fdl.PERCORE_BATCH_SIZE={args.batch}',
    f'--fdl.LOCAL_CHECKPOINT_EVERY_N_STEPS={every}', f'--fdl.LOCAL_CHECKPOINT_DIR={folder}/states',
  ]  # fmt: skip
  config = f'benchmarks.local_states.{_SIZES[args.size]}'
  # one device for each process, on half of the cores
  env = {'XLA_FLAGS': '--xla_force_host_platform_device_count=1'}
  started = start_processes(folder, 2, *flags, config=config, env=env)
  path, times = folder / 'metrics.jsonl', list[float]()
  try:
    while len(times) < _FIRST + args.steps + 1:
      time.sleep(0.002)
      for process in started:
        assert process.poll() is None, process.communicate()
      if path.exists():
        new = path.read_bytes().count(b'\n') - len(times)
        times += [time.monotonic()] * new
  finally:
    for process in started:
      process.kill()
      process.communicate()
  return (times[_FIRST + args.steps] - times[_FIRST]) / args.steps


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--size', choices=_SIZES, default='124M')
  parser.add_argument('--every', type=int, default=10)
  parser.add_argument('--steps', type=int, default=30)
  parser.add_argument('--batch', type=int, default=4, help='rows of each process')
  parser.add_argument('--rounds', type=int, default=3)
  parser.add_argument('--json', type=pathlib.Path)
  args = parser.parse_args()
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the processes end, too
  found: dict[int, list[float]] = {0: [], args.every: []}
  for number in range(args.rounds):
    for every, seconds in found.items():
      with tempfile.TemporaryDirectory(dir='/dev/shm') as folder:
        seconds.append(step_seconds(pathlib.Path(folder, 'run'), args, every))
      print(f'round {number + 1}, every {every or "none"}: {seconds[-1]:.3f} s', flush=True)
  without, kept = (statistics.median(v) for v in found.values())
  print(f'a step takes {without:.3f} s; with local states {kept:.3f} s, {kept / without - 1:+.2%}')
  if args.json is not None:
    result = {'benchmark': 'local states', 'seconds': {str(k): v for k, v in found.items()}}
    result |= {'size': args.size, 'batch': args.batch, 'cpus': os.cpu_count()}
    with args.json.open('a') as f:
      f.write(json.dumps(result) + '\n')


if __name__ == '__main__':
  main()
