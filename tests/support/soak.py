"""python -m tests.support.soak [--kills=200] [--seed=0] [--store=s3] [--steps=1000] [--minutes=5]
    [--json=FILE]

Kills a small run with SIGKILL at random moments, and starts it again after each kill, until there
were enough kills. The moments fall into start, compilation, training, evaluation and saving. When a
run reaches its end, its losses, evaluations and final state must equal those of an undisturbed run
bit for bit, and a new run begins. The exit code is 1 if they differ.

With --store=s3 the run is in a bucket of SeaweedFS, with --store=gs in one of
tests/support/gcs_server.py. Each start is on one of two machines, which are two folders for
--local_dir. The lease is short, so that a start on the other machine waits 3 seconds. After
--minutes there are no more kills, so that a long soak can be done in pieces with other seeds.
"""

import argparse
import collections
import contextlib
import hashlib
import json
import os
import pathlib
import platform
import random
import subprocess
import sys
import tempfile
import time

from paxlite.checkpointing.step_copies import StepCopies
from paxlite.stores.addresses import Address
from paxlite.stores.object_store import ObjectStore
from paxlite.stores.runs.stored_run import twin
from tests.support.gcs_server import gcs_server
from tests.support.s3_server import s3_server

ROOT = pathlib.Path(__file__).parents[2]
FLAGS = [
  '--fdl_config=DemoGPT', '--fdl.NUM_LAYERS=1', '--fdl.MODEL_DIMS=32',
  '--fdl.NUM_HEADS=2', '--fdl.DIMS_PER_HEAD=16', '--fdl.HIDDEN_DIMS=64', '--fdl.MAX_SEQ_LEN=32',
  '--fdl.PERCORE_BATCH_SIZE=4', '--fdl.DROPOUT_PROB=0.1', '--fdl.SAMPLE_PROMPT=None',
  '--fdl.CHECKPOINT_EVERY_N_STEPS=10', '--fdl.CHECKPOINT_MAX_TO_KEEP=3',
  '--fdl.EVAL_INTERVAL_STEPS=25', '--fdl.MAX_EVAL_BATCHES=1', '--fdl.SUMMARY_INTERVAL_STEPS=1',
]  # fmt: skip


def start(
  place: pathlib.Path | Address, steps: int, local_dir: pathlib.Path | None = None
) -> subprocess.Popen:
  """Starts the run in a folder, or in a bucket, with its folder on a machine in `local_dir`."""
  flags = [f'--job_log_dir={place}']
  if local_dir is not None:
    flags.append(f'--local_dir={local_dir}')
  module = 'paxlite.main' if local_dir is None else 'tests.support.stored_main'
  return subprocess.Popen(
    [sys.executable, '-m', module, *flags, f'--fdl.MAX_STEPS={steps}', *FLAGS],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


def outcome(folder: pathlib.Path, steps: int) -> dict[str, str]:
  """Returns digests of the results of a run."""
  losses = [
    (r['step'], r['loss'], r['grad_norm'])
    for r in map(json.loads, (folder / 'metrics.jsonl').read_text().splitlines())
  ]
  assert [step for step, *_ in losses] == list(range(1, steps + 1)), 'a record of each step, once'
  evaluations = [
    (r['step'], r['avg_xent'])
    for r in map(json.loads, (folder / 'eval_metrics.jsonl').read_text().splitlines())
  ]
  state = folder / 'checkpoints' / f'checkpoint_{steps:08d}' / 'state'
  chunks = sorted(p for p in state.glob('*/*') if not p.name.startswith('.'))
  assert len(chunks) > 20
  digest = hashlib.sha256()
  for chunk in chunks:
    digest.update(chunk.relative_to(state).as_posix().encode() + chunk.read_bytes())
  return {'losses': repr(losses), 'evaluations': repr(evaluations), 'state': digest.hexdigest()}


def phase(printed: str, folder: pathlib.Path) -> str:
  """Returns the phase in which a run was killed."""
  if list((folder / 'checkpoints').glob('*tmp*')):
    return 'saving'
  for text, name in (
    ('First step', 'training'),
    ('Continuing', 'restored, compiling'),
    ('Backend', 'initializing or restoring'),
  ):
    if text in printed:
      return name
  return 'starting'


def is_being_copied(address: Address, folder: pathlib.Path) -> bool:
  """Returns whether a run was killed while it copied a checkpoint to the bucket."""
  copies = StepCopies(ObjectStore.opened(address), address / 'checkpoints', folder / 'checkpoints')
  return bool(copies.unfinished())


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--kills', type=int, default=200)
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--steps', type=int, default=1000)
  parser.add_argument('--store', choices=('s3', 'gs'))
  parser.add_argument('--minutes', type=float, default=float('inf'))
  parser.add_argument('--json', type=pathlib.Path)
  args = parser.parse_args()
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')
  rng = random.Random(args.seed)
  until = time.monotonic() + 60 * args.minutes
  kills, ends, copied, phases = 0, 0, 0, collections.Counter()
  with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
    if args.store == 's3':
      server = stack.enter_context(s3_server(pathlib.Path(temporary, 's3')))
      server.create_bucket('soak')
      os.environ |= server.environment()
    elif args.store == 'gs':
      os.environ |= stack.enter_context(gcs_server('soak')).environment()
    os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', f'{temporary}/cache')
    os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.3')
    whole = pathlib.Path(temporary, 'whole')
    for folder in (pathlib.Path(temporary, 'warm'), whole):  # the second uses the cache
      began = time.monotonic()
      process = start(folder, args.steps)
      while not list(folder.glob('checkpoints/checkpoint_00000010')) and process.poll() is None:
        time.sleep(0.05)
      within = 2 * (time.monotonic() - began)  # so that half of the runs are killed before a save
      printed, _ = process.communicate()
      assert process.returncode == 0, printed
    expected = outcome(whole, args.steps)
    seconds = time.monotonic() - began
    if args.store:  # No longer than a run; a start on the other machine may wait for the lease.
      within = min(within, seconds) + 3
    print(
      f'{args.steps} steps, not killed: {seconds:.1f} s; kills within {within:.1f} s', flush=True
    )
    folder = pathlib.Path(temporary, 'run-0')
    machines = [pathlib.Path(temporary, name) for name in 'ab'] if args.store else [None]
    begun = False
    while kills < args.kills or ends == 0 or begun:
      if time.monotonic() > until:
        args.kills = kills
        if ends and not begun:
          break
      machine = rng.choice(machines)
      address = Address.parsed(f'{args.store or "s3"}://soak/{folder.name}')
      process = start(folder if machine is None else address, args.steps, machine)
      begun = True
      # The last run is not killed once there were enough kills.
      moment = rng.uniform(0, within) if kills < args.kills else None
      try:
        printed, _ = process.communicate(timeout=moment)
      except subprocess.TimeoutExpired:
        process.kill()
        printed, _ = process.communicate()
      at = folder if machine is None else twin(address, str(machine))
      if process.returncode == 0:
        found = outcome(at, args.steps)
        if args.store:
          copies = address / 'checkpoints', at / 'checkpoints'
          assert StepCopies(ObjectStore.opened(address), *copies).is_same(args.steps)
        different = [k for k in expected if found[k] != expected[k]]
        ends += 1
        starts = len(list((at / 'goodput').glob('attempt_*.json')))
        print(
          f'end {ends} after {kills} kills, {starts} starts: {different or "the same"}', flush=True
        )
        if different:
          return 1
        folder, begun = pathlib.Path(temporary, f'run-{ends}'), False
        continue
      if process.returncode != -9:
        print(f'ended by itself with {process.returncode}:\n{printed}')
        return 1
      kills += 1
      print(f'kill {kills}: {phase(printed, at)}', flush=True)
      phases[phase(printed, at)] += 1
      copied += bool(args.store) and is_being_copied(address, at)
  result = {
    'kills': kills,
    'runs_to_the_end': ends,
    'store': args.store,
    'killed_while': dict(phases.most_common()),
    'during_a_copy_to_the_bucket': copied,
    'python': platform.python_version(),
    'seed': args.seed,
  }
  print(json.dumps(result))
  if args.json is not None:
    args.json.write_text(json.dumps(result, indent=1) + '\n')
  return 0


if __name__ == '__main__':
  sys.exit(main())
