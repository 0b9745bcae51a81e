"""python benchmarks/start.py: CPU seconds of `--help`, and wall seconds from start to first step.

Runs whole processes in turn: paxlite.main on a synthetic run of one step, with and without the
compiled programs of an earlier run, and plain JAX's train step of the same size.
"""

import argparse
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parents[1]


def timed(command: list[str], cache: str = '') -> tuple[float, float]:
  """Returns (wall seconds, CPU seconds) of a command; `cache` is its folder of programs, if any."""
  before = resource.getrusage(resource.RUSAGE_CHILDREN)
  started = time.perf_counter()
  env = {**os.environ, 'PYTHONPATH': f'{ROOT}:{ROOT / "benchmarks"}'}
  kept = {'XDG_CACHE_HOME': cache} if cache else {'JAX_ENABLE_COMPILATION_CACHE': 'false'}
  for name in ('JAX_COMPILATION_CACHE_DIR', 'JAX_ENABLE_COMPILATION_CACHE'):
    env.pop(name, None)
  env |= kept
  subprocess.run(command, check=True, capture_output=True, env=env, cwd=ROOT)
  wall = time.perf_counter() - started
  after = resource.getrusage(resource.RUSAGE_CHILDREN)
  return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def seconds_of(paxlite: list[str], cache: str = '') -> float:
  """Returns the wall seconds of a run of paxlite in an empty folder."""
  with tempfile.TemporaryDirectory() as folder:
    return timed([*paxlite, f'--job_log_dir={folder}'], cache)[0]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--size', default='11M')
  parser.add_argument('--rounds', type=int, default=5)
  args = parser.parse_args()
  from peers import SIZES

  size = SIZES[args.size]
  paxlite = [
    *(sys.executable, '-m', 'paxlite.main', '--fdl_config=Synthetic126M'),
    *('--noenable_checkpoint_saving', '--fdl.MAX_STEPS=1', '--fdl.FPROP_DTYPE=float32'),
    *('--fdl.ICI_MESH_SHAPE=[1,1,1]', '--fdl.DCN_MESH_SHAPE=[1,1,1]', '--fdl.PACKED_INPUT=False'),
    *(f'--fdl.NUM_LAYERS={size.layers}', f'--fdl.MODEL_DIMS={size.model}'),
    *(f'--fdl.NUM_HEADS={size.heads}', f'--fdl.VOCAB_SIZE={size.vocab}'),
    *(f'--fdl.MAX_SEQ_LEN={size.length}', f'--fdl.PERCORE_BATCH_SIZE={size.batch}'),
  ]
  code = f'from peers import *; plain_jax(SIZES[{args.size!r}])()'
  plain = [sys.executable, '-c', code]
  walls: dict[str, list[float]] = {'plain JAX': [], 'paxlite': [], 'paxlite, warm': []}
  with tempfile.TemporaryDirectory() as cache:
    seconds_of(paxlite, cache)  # fills the cache
    for _ in range(args.rounds):
      walls['plain JAX'].append(timed(plain)[0])
      walls['paxlite'].append(seconds_of(paxlite))
      walls['paxlite, warm'].append(seconds_of(paxlite, cache))
  medians = {side: statistics.median(w) for side, w in walls.items()}
  for side, m in medians.items():
    ratio = m / medians['plain JAX']
    print(f'{args.size} {side:14} {m:6.2f} s from start to the end of the first step, {ratio:.2f}')
  cpu = [timed([sys.executable, '-m', 'paxlite.main', '--help'])[1] for _ in range(args.rounds)]
  print(f'--help: {statistics.median(cpu):.2f} s of CPU')


if __name__ == '__main__':
  main()
