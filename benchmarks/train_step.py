"""python benchmarks/train_step.py [--size=11M] [--sides='paxlite,plain JAX'] [--rounds=10]

Times the train steps of several sides, each in its own process. In each round every side runs one
step while the others sleep, so a change of the machine's speed affects all sides alike. Prints
medians, their ratios to the first side, and the share of a large matmul's speed.
"""

import argparse
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).parent


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--size', default='11M')
  parser.add_argument('--sides', default='paxlite,plain JAX,torch eager')
  parser.add_argument('--rounds', type=int, default=10)
  parser.add_argument('--json', help='append the result to this file')
  parser.add_argument('--serve', help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.serve:
    serve(args.serve, args.size)
    return
  sides = args.sides.split(',')
  check(sides, args.size)
  workers = {side: Worker(side, args.size) for side in sides}
  times: dict[str, list[float]] = {side: [] for side in sides}
  for _ in range(args.rounds):
    for side in sides:
      times[side].append(workers[side].step())
  peak = statistics.median(workers[sides[0]].matmul() for _ in range(5))
  for worker in workers.values():
    worker.close()

  from peers import SIZES

  size = SIZES[args.size]
  medians = {side: statistics.median(t) for side, t in times.items()}
  result = {
    'size': args.size,
    'tokens': size.tokens,
    'rounds': args.rounds,
    'date': time.strftime('%Y-%m-%d'),
    'machine': f'{os.cpu_count()} × {cpu_name()}',
    'python': platform.python_version(),
    'matmul_gflops': round(peak / 1e9),
    'sides': {
      side: {
        'median_seconds': round(m, 4),
        'min_seconds': round(min(times[side]), 4),
        'ratio': round(m / medians[sides[0]], 3),
        'share_of_matmul': round(size.flops / m / peak, 3),
        'start_to_first_step_seconds': round(workers[side].first_step, 2),
        **workers[side].versions,
      }
      for side, m in medians.items()
    },
  }
  print(f'{args.size}: {size.tokens} tokens a step, {args.rounds} rounds, {result["machine"]}')
  print(f'2048³ float32 matmul: {result["matmul_gflops"]} GFLOP/s')
  print(
    f'{"side":18} {"median s":>9} {"min s":>8} {"ratio":>6} {"of matmul":>10} {"first step s":>13}'
  )
  for side, r in result['sides'].items():
    print(
      f'{side:18} {r["median_seconds"]:9.3f} {r["min_seconds"]:8.3f} {r["ratio"]:6.3f} '
      f'{r["share_of_matmul"]:10.1%} {r["start_to_first_step_seconds"]:13.1f}'
    )
  if args.json:
    with open(args.json, 'a') as f:
      f.write(json.dumps(result) + '\n')


def check(sides: list[str], size: str) -> None:
  """Ends the program if there is no such side or size."""
  from peers import SIDES, SIZES

  for what, given, known in (('--size', [size], SIZES), ('--sides', sides, SIDES)):
    for name in given:
      if name.removesuffix('+memory') not in known:
        raise SystemExit(f'error: {what}: {name!r} is none of {", ".join(known)}')


class Worker:
  """A process of one side that runs a step on request."""

  def __init__(self, side: str, size: str):
    started = time.perf_counter()
    self._process = subprocess.Popen(
      [sys.executable, __file__, f'--serve={side}', f'--size={size}'],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
      cwd=HERE.parent,
      env={**os.environ, **environment(side)},
    )
    self.versions = json.loads(self._read())
    self.first_step = time.perf_counter() - started  # imports, set-up, compilation, one step
    for _ in range(2):
      self.step()

  def _read(self) -> str:
    line = self._process.stdout.readline()
    while line and not line.startswith('@'):
      line = self._process.stdout.readline()
    if not line:
      raise SystemExit('a side ended early')
    return line[1:]

  def _ask(self, what: str) -> float:
    self._process.stdin.write(what + '\n')
    self._process.stdin.flush()
    return float(self._read())

  def step(self) -> float:
    return self._ask('step')

  def matmul(self) -> float:
    return self._ask('matmul')

  def close(self) -> None:
    self._process.stdin.close()
    self._process.wait()


def environment(side: str) -> dict[str, str]:
  """Returns the environment of a side's process; paxlite's has the variables of paxlite.main."""
  sys.path.insert(0, str(HERE.parent))
  from paxlite.processes import cpu_memory

  memory = cpu_memory.environment() if side.startswith('paxlite') or '+memory' in side else {}
  return {'PYTHONPATH': str(HERE.parent), **memory}


def serve(side: str, size: str) -> None:
  from peers import SIDES, SIZES

  step = SIDES[side.removesuffix('+memory')](SIZES[size])
  step()
  print('@' + json.dumps(versions()), flush=True)
  for line in sys.stdin:
    before = time.perf_counter()
    if line.strip() == 'matmul':
      print(f'@{matmul_flops()}', flush=True)
      continue
    step()
    print(f'@{time.perf_counter() - before}', flush=True)


def matmul_flops() -> float:
  """Returns the FLOP/s of a 2048³ float32 matrix product in JAX."""
  import jax
  import jax.numpy as jnp

  a = jnp.ones((2048, 2048))
  product = jax.jit(jnp.dot)
  product(a, a).block_until_ready()
  before = time.perf_counter()
  for _ in range(5):
    product(a, a).block_until_ready()
  return 5 * 2 * 2048**3 / (time.perf_counter() - before)


def versions() -> dict[str, str]:
  names = ('jax', 'flax', 'optax', 'torch', 'transformers')
  return {n: sys.modules[n].__version__ for n in names if n in sys.modules}


def cpu_name() -> str:
  for line in pathlib.Path('/proc/cpuinfo').read_text().splitlines():
    if line.startswith('model name'):
      return line.partition(':')[2].strip()
  return platform.processor()


if __name__ == '__main__':
  main()
