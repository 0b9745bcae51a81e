"""python -m benchmarks.storage [--gigabytes=0.5] [--latency=0.05] [--silent=60] [--json=FILE]


Starts SeaweedFS on loopback (needs the extra test) and measures

- checkpoints: saving to the local disk, copying to the bucket, copying back and restoring, in MB/s;
- rows of 256 tokens that are read in a shuffled order, without a model, a second;
- data: the share of time that a run waits for its data, as goodput counts it, in a shuffled epoch
  of flat tokens in a folder and in the bucket, whose answers are held back by the latency;
- steps of a run in the bucket, from record to record, while the store answers, and while it does
  not answer for --silent seconds, in which checkpoints are due.

The server, its disk and the run share the machine, so that the figures are lower bounds.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
import numpy as np

from paxlite.config.templates import config
from paxlite.experiments.datasets import FlatTokens
from paxlite.experiments.demo import TinyGPT
from paxlite.losses.loss import Loss

ROOT = pathlib.Path(__file__).parents[1]
TOKENS = 200_000_000


DEVICE_SECONDS = 0.25


def _sleep(_: np.ndarray) -> np.ndarray:
  time.sleep(DEVICE_SECONDS)
  return np.float32(0)


@dataclasses.dataclass(frozen=True)
class BusyDevice(Loss):
  """A loss of 0 that takes DEVICE_SECONDS, and the cores of this machine hardly at all.

  So the cores are free for what reads the data, as they are beside an accelerator.
  """

  def __call__(self, outputs, batch):
    return jax.pure_callback(_sleep, jax.ShapeDtypeStruct((), np.float32), batch['ids'][0, 0])


class Shuffled(FlatTokens, TinyGPT):
  """A small model on flat tokens; 64 rows of 256 tokens in a quarter of a second."""

  NUM_LAYERS = 1
  MODEL_DIMS = 16
  NUM_HEADS = 1
  DIMS_PER_HEAD = 16
  HIDDEN_DIMS = 16
  MAX_SEQ_LEN = 256
  PERCORE_BATCH_SIZE = 64
  VOCAB_SIZE = 64
  EVAL_SPLIT = None
  MAX_STEPS = 100
  CHECKPOINT_EVERY_N_STEPS = 1000

  def losses(self):
    return super().losses() | {'busy': config(BusyDevice)}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--gigabytes', type=float, default=0.5, help='of a checkpoint; 0: none')
  parser.add_argument('--latency', type=float, default=0.05)
  parser.add_argument('--silent', type=float, default=60, help='seconds; 0: not measured')
  parser.add_argument('--tokens', type=int, default=TOKENS, help='of the dataset')
  parser.add_argument('--steps', type=int, default=100, help='of a run whose waiting is measured')
  parser.add_argument('--rounds', type=int, default=3)
  parser.add_argument('--json', type=pathlib.Path)
  args = parser.parse_args()
  from tests.support.proxy import proxy
  from tests.support.s3_server import s3_server

  with tempfile.TemporaryDirectory() as temporary:
    folder = pathlib.Path(temporary)
    with s3_server(folder / 's3') as server:
      server.create_bucket('bkt')
      os.environ |= server.environment()
      speeds = checkpoints(folder, args.gigabytes, args.rounds) if args.gigabytes else {}
      result: dict[str, Any] = {'speeds': speeds}
      write_tokens(folder / 'tokens', args.tokens)
      with proxy(server.endpoint) as between:
        if args.silent:
          result['steps'] = steps(
            folder, server.environment(between.endpoint), between, args.silent
          )
      upload(folder / 'tokens', 'tokens')
      result['waits'] = {'folder': waiting(folder, 'here', folder / 'tokens', args.steps, {})}
      with proxy(server.endpoint, delay=args.latency) as between:
        far = server.environment(between.endpoint)
        what = f'bucket, {1000 * args.latency:.0f} ms'
        result['waits'][what] = waiting(folder, 'there', 's3://bkt/tokens', args.steps, far)
        os.environ |= far | {'XDG_CACHE_HOME': str(folder / 'cache-rows')}
        result['rows'] = {'folder': rows(str(folder / 'tokens')), what: rows('s3://bkt/tokens')}
  result |= {'gigabytes': args.gigabytes, 'cpus': os.cpu_count(), 'machine': platform.machine()}
  result['steps of a wait'] = args.steps
  for what, speed in result['speeds'].items():
    print(f'{what:28} {speed:7,.0f} MB/s')
  for what, share in result['waits'].items():
    print(f'waiting for data, {what:14} {share:.2%} of the time of training')
  for what, (median, longest, count) in result.get('steps', {}).items():
    print(f'steps, store {what:7} median {median:.3f} s, longest {longest:.3f} s, of {count}')
  for what, speed in result['rows'].items():
    print(f'rows read at random, {what:11} {speed:,.0f} a second')
  if args.json is not None:
    with args.json.open('a') as f:
      f.write(json.dumps({'benchmark': 'storage', **result}) + '\n')


def checkpoints(folder: pathlib.Path, gigabytes: float, rounds: int) -> dict[str, float]:
  """Returns the medians of speeds in MB/s."""
  import jax.numpy as jnp

  from paxlite.checkpointing.checkpoints import Checkpoints
  from paxlite.stores.object_store import ObjectStore
  from paxlite.stores.step_copies import StepCopies

  count = max(1, round(gigabytes * 1e9 / (1 << 26)))
  rng = np.random.default_rng(0)
  state = {f'w{i}': jnp.asarray(rng.random((1 << 12, 1 << 12), np.float32)) for i in range(count)}
  size = count * (1 << 26) / 1e6
  store = ObjectStore('s3://bkt/run')
  speeds: dict[str, list[float]] = {}
  for step in range(1, rounds + 1):
    here, there = folder / f'here{step}', folder / f'there{step}'
    copies, back = StepCopies(store, 'checkpoints', here), StepCopies(store, 'checkpoints', there)
    saved, restored = Checkpoints(here), Checkpoints(there)
    steps = {
      'save to the local disk': lambda s=saved, n=step: (s.save(n, state, {'step': n}), s.close()),
      'copy to the bucket': lambda c=copies, n=step: c.upload(n),
      'copy from the bucket': lambda c=back, n=step: c.download(n),
      'restore from the local disk': lambda r=restored, n=step: r.restore_latest(
        lambda _: r.restore(n, state)
      ),
    }
    for what, act in steps.items():
      began = time.perf_counter()
      act()
      speeds.setdefault(what, []).append(size / (time.perf_counter() - began))
    restored.close()
    copies.delete(step)
  return {what: statistics.median(found) for what, found in speeds.items()}


def write_tokens(folder: pathlib.Path, tokens: int) -> None:
  from paxlite.tokenization.flat_tokens_writer import FlatTokensWriter

  rng = np.random.default_rng(0)
  writer = FlatTokensWriter(str(folder), 'train', 64, 'memmap')
  for _ in range(tokens // 1_000_000):
    writer.write(rng.integers(0, 64, 1_000_000).astype(np.uint32), range(1000, 1_000_001, 1000))
  writer.close()


def upload(folder: pathlib.Path, key: str) -> None:
  from paxlite.stores.object_store import ObjectStore

  store = ObjectStore('s3://bkt')
  for path in folder.rglob('*'):
    if path.is_file():
      store.upload(f'{key}/{path.relative_to(folder).as_posix()}', path)


def rows(dataset: str, batches: int = 100) -> float:
  """Returns how many rows a second an input gives in the first epoch, which nothing has cached."""
  from paxlite.data.base import RowInput
  from paxlite.data.flat_tokens import FlatTokenRows

  found = RowInput(FlatTokenRows(dataset, 'train', 256), 64).train_batches(0, slice(0, 64))
  began = time.perf_counter()
  for _ in range(batches):
    next(found)
  return 64 * batches / (time.perf_counter() - began)


def steps(
  folder: pathlib.Path, environment: dict[str, str], between: Any, silent: float
) -> dict[str, tuple[float, float, int]]:
  """Returns the median and the longest step in seconds, and their number, for each phase."""
  process = subprocess.Popen(
    [
      sys.executable, '-m', 'paxlite.main', '--fdl_config=benchmarks.storage.Shuffled',
      '--job_log_dir=s3://bkt/silent', f'--local_dir={folder}/silent',
      f'--fdl.DATASET_PATH={folder}/tokens', '--fdl.MAX_STEPS=1000000',
      '--fdl.SUMMARY_INTERVAL_STEPS=1', '--fdl.CHECKPOINT_EVERY_N_STEPS=20',
    ],
    cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    env={**os.environ, **environment, 'JAX_PLATFORMS': 'cpu'},
  )  # fmt: skip
  found: dict[str, list[float]] = {'answers': [], 'silent': [], 'back': []}
  phases = [('answers', silent / 2, 'forward'), ('silent', silent, 'silent'),
            ('back', silent / 2, 'forward')]  # fmt: skip
  count, last = 0, None
  for phase, seconds, mode in phases:
    between.mode = mode
    until = None
    while until is None or time.monotonic() < until:
      time.sleep(0.002)
      assert process.poll() is None, process.communicate()
      try:
        (path,) = (folder / 'silent').glob('*/metrics.jsonl')
        now = path.read_bytes().count(b'\n')
      except (ValueError, OSError):
        continue
      at = time.monotonic()
      until = until or at + seconds
      if now > count:
        if last is not None and count > 5:  # the first steps compile
          found[phase] += [(at - last) / (now - count)] * (now - count)
        count, last = now, at
  process.send_signal(signal.SIGTERM)
  process.communicate()
  return {k: (statistics.median(v), max(v), len(v)) for k, v in found.items()}


def waiting(
  folder: pathlib.Path,
  name: str,
  dataset: str | pathlib.Path,
  steps: int,
  environment: dict[str, str],
) -> float:
  """Trains on a dataset; returns the time of waiting for data as a share of that and of steps."""
  from paxlite.training import goodput

  run = folder / name
  subprocess.run(
    [
      sys.executable, '-m', 'paxlite.main', '--fdl_config=benchmarks.storage.Shuffled',
      f'--job_log_dir={run}', f'--fdl.DATASET_PATH={dataset}', f'--fdl.MAX_STEPS={steps}',
    ],
    check=True, cwd=ROOT, stdout=subprocess.DEVNULL,
    env={**os.environ, **environment, 'JAX_PLATFORMS': 'cpu',
         'XDG_CACHE_HOME': str(folder / f'cache-{name}')},
  )  # fmt: skip
  seconds = goodput.report(run).seconds
  return seconds['data'] / (seconds['data'] + seconds['step'])


if __name__ == '__main__':
  main()
