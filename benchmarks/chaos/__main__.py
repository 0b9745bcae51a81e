"""python -m benchmarks.chaos [--minutes=10] [--seed=0] [--json=FILE] [--kills=N] [--steps=200]
    [--places folder s3 …] [--kinds SIGKILL 'full disk' …]

Trains small runs while faults happen to them at random moments, often several at once: signals,
lost processes, full disks, object stores that are slow or broken, bits that are flipped in memory,
in checkpoints and in their copies. After each end a run is started again, as a supervisor does. At
its last step its losses, evaluations and state must be those of an undisturbed run, bit for bit.

After --minutes there are no more faults, once each kind but flipped bits of files has happened, and
the last run is brought to its end. With --kills there is only SIGKILL, until there were so many.
The exit code is 1 if anything was lost: then the files are kept. The seed determines the faults
and their moments; what they hit depends on the speed of the machine. Needs gcc, and the extra test
for --places=s3.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import pathlib
import platform
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator

from benchmarks.chaos.faults import AT_REST, KINDS, Draws
from benchmarks.chaos.outcomes import Outcome
from benchmarks.chaos.places import PLACES, SAVE_EVERY, Place, Run, opened
from benchmarks.chaos.supervisor import Supervisor, Timing
from benchmarks.chaos.table import Table, markdown
from tests.support import failing_calls

_PACKAGES = 'paxlite', 'jax', 'jaxlib', 'flax', 'orbax-checkpoint', 'tensorstore', 'obstore'


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--minutes', type=float, help='10; with --kills: no limit')
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--steps', type=int, default=200, help='of a run')
  parser.add_argument('--kills', type=int)
  parser.add_argument('--places', nargs='+', choices=PLACES, default=list(PLACES))
  parser.add_argument('--kinds', nargs='+', choices=KINDS, default=list(KINDS))
  parser.add_argument('--json', type=pathlib.Path)
  args = parser.parse_args()
  if args.kills is not None:
    if args.kills < 1:
      parser.error(f'--kills={args.kills} is below 1')
    args.kinds = ['SIGKILL']
  possible = {kind for kind in args.kinds if {*KINDS[kind]} & {*args.places}}
  if not possible:
    parser.error('none of --kinds happens in any of --places')
  if args.minutes is not None and args.minutes <= 0 and possible <= {*AT_REST}:
    parser.error(f'--minutes={args.minutes:g}: flipped bits of files alone need some minutes')
  if args.minutes is None:
    args.minutes = 10 if args.kills is None else float('inf')
  folder = pathlib.Path(tempfile.mkdtemp(prefix='chaos-'))
  for name in ('JAX_COMPILATION_CACHE_DIR', 'XDG_CACHE_HOME'):
    os.environ.setdefault(name, str(folder / 'cache'))
  os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.3')
  began, table = time.monotonic(), Table()
  for _ in chaos(args, folder, table):  # the file has what there was when this is interrupted
    result = table.result() | {
      'benchmark': 'chaos',
      'seed': args.seed,
      'steps_of_a_run': args.steps,
      'steps_between_checkpoints': SAVE_EVERY,
      'minutes': round((time.monotonic() - began) / 60, 1),
      'machine': {'processor': processor(), 'cores': os.cpu_count(), 'system': platform.system()},
      'versions': {'python': platform.python_version(), **versions()},
    }
    if args.json is not None:
      args.json.write_text(json.dumps(result, indent=1) + '\n')
  print(markdown(result))
  if table.lost:
    print(f'something was lost with --seed={args.seed}: see {folder}')
    return 1
  shutil.rmtree(folder)
  return 0


def chaos(args: argparse.Namespace, folder: pathlib.Path, table: Table) -> Iterator[int]:
  """Lets runs and faults happen, and counts them; yields the number of runs after each."""
  rng = random.Random(args.seed)
  draws = Draws(rng, args.kinds)
  library = failing_calls.library(folder)
  until = time.monotonic() + 60 * args.minutes
  possible = {kind: set(KINDS[kind]) & set(args.places) for kind in args.kinds}
  # not waited for, as they need a run that another fault has ended after two checkpoints
  waited = {kind: where for kind, where in possible.items() if where and kind not in AT_REST}

  def missing() -> list[str] | None:
    """The kinds that are still to be drawn; None: all, as there is time."""
    if args.kills is not None and table.count('SIGKILL') >= args.kills:
      return []
    if time.monotonic() < until or not (waited or number):  # there is one run at least
      return None
    return [kind for kind in waited if not table.count(kind)]

  with contextlib.ExitStack() as stack:
    places = [stack.enter_context(opened(name, folder / name)) for name in args.places]
    expected: dict[tuple[str, ...], tuple[Outcome, Timing]] = {}
    number = 0
    deck: list[Place] = []
    while (left := missing()) != []:
      wanted = set(args.places) if left is None else set().union(*(possible[k] for k in left))
      deck = [place for place in deck if place.name in wanted]
      if not deck:
        deck = [place for place in places if place.name in wanted]
        rng.shuffle(deck)
      place = deck.pop()
      same = place.flags  # a bucket changes nothing
      if same not in expected:
        expected[same] = undisturbed(
          place, folder / f'undisturbed-{len(expected)}', args.steps, library
        )
      run = Run(place, folder / f'run-{number}', args.steps, library)
      number += 1
      before = table.lost
      outcome, timing = expected[same]
      Supervisor(run, rng, draws, timing, missing, table).bring_to_end(outcome)
      if table.lost == before:
        shutil.rmtree(run.parent)
      yield number


def undisturbed(
  place: Place, folder: pathlib.Path, steps: int, library: str
) -> tuple[Outcome, Timing]:
  """Runs without faults; returns the results, and how long that took."""
  alone = Place(place.name, place.flags, devices=place.devices, processes=place.processes)
  run = Run(alone, folder, steps, library)
  began = time.monotonic()
  started = run.start('a')
  first = 0.0
  while started.is_running:
    if not first and run.local('a'):
      first = time.monotonic() - began
    time.sleep(0.05)
  if any(p.returncode for p in started.processes):
    sys.exit(started.printed)
  whole = time.monotonic() - began
  print(f'{place.name}: {steps} steps without faults in {whole:.1f} s', flush=True)
  return Outcome.of(run.folder('a'), steps), Timing(whole, first / whole)


def processor() -> str:
  """Returns the model of the processor."""
  with contextlib.suppress(OSError):
    for line in pathlib.Path('/proc/cpuinfo').read_text().splitlines():
      if line.startswith('model name'):
        return line.partition(':')[2].strip()
  return platform.processor()


def versions() -> dict[str, str]:
  """Returns the versions of what matters here and is installed."""
  found = {}
  for name in _PACKAGES:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      found[name] = importlib.metadata.version(name)
  return found


if __name__ == '__main__':
  sys.exit(main())
