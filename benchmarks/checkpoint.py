"""python benchmarks/checkpoint.py [--gigabytes=1.5] [--folder=/where/checkpoints/go] [--rounds=3]

Saves and restores a training state as training does. In turn, writes and reads the same number of
bytes in plain files of 64 MB on the same disk. Each write is followed by a sync, and before each
read the files are dropped from the page cache. A restore includes the check of the checksums. As
in training on CPUs, malloc keeps its memory (processes/cpu_memory.py). An extra first round,
which does not count, takes that memory from the kernel.
"""

import argparse
import os
import pathlib
import shutil
import statistics
import sys
import tempfile
import time

BLOCK = 1 << 26


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--gigabytes', type=float, default=1.5)
  parser.add_argument('--folder', default=tempfile.gettempdir())
  parser.add_argument('--rounds', type=int, default=3)
  args = parser.parse_args()
  from paxlite.processes import cpu_memory

  if memory := cpu_memory.environment():
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **memory})
  import jax

  state = make_state(args.gigabytes)
  size = sum(x.nbytes for x in jax.tree.leaves(state)) / 1e9
  seconds: dict[str, list[float]] = {}
  with tempfile.TemporaryDirectory(dir=args.folder, prefix='paxlite-checkpoint-') as temporary:
    one_round(pathlib.Path(temporary), state, int(size * 1e9))  # warms up
    for _ in range(args.rounds):
      for what, value in one_round(pathlib.Path(temporary), state, int(size * 1e9)).items():
        seconds.setdefault(what, []).append(value)
  medians = {what: statistics.median(s) for what, s in seconds.items()}
  print(f'{size:.2f} GB of float32 in {len(jax.tree.leaves(state))} arrays, {args.rounds} rounds')
  for what, m in medians.items():
    print(f'{what:22} {m:7.3f} s  {1000 * size / m:8,.0f} MB/s')
  print(f'save against plain write   {medians["plain write"] / medians["save"]:.2f}')
  print(f'restore against plain read {medians["plain read"] / medians["restore"]:.2f}')
  print(f'training waits {medians["save, training waits"] / size:.3f} s a GB')


def one_round(folder: pathlib.Path, state: dict, size: int) -> dict[str, float]:
  """Returns the seconds of each kind of work, done in turn."""
  from paxlite.checkpointing.checkpoints import Checkpoints

  plain, saved = folder / 'plain', folder / 'saved'
  seconds = {'plain write': timed(lambda: write_plain(plain, size))}
  checkpoints = Checkpoints(saved)
  blocked = timed(lambda: checkpoints.save(1, state, {}))
  seconds['save'] = blocked + timed(lambda: (checkpoints.close(), os.sync()))
  seconds['save, training waits'] = blocked
  forget(plain)
  seconds['plain read'] = timed(lambda: read_plain(plain))
  forget(saved)
  seconds['restore'] = timed(lambda: restore(saved, state))
  shutil.rmtree(plain)
  shutil.rmtree(saved)
  return seconds


def make_state(gigabytes: float) -> dict:
  """Returns arrays like those of a 768-wide GPT with AdamW: mostly of 9 MB, one of 154 MB."""
  import jax
  import jax.numpy as jnp

  layer = [(3, 768, 12, 64), (768, 12, 64), (768, 3072), (3072, 768)]
  shapes, left = [], gigabytes * 1e9 / 4 / 3
  for shape in [(50304, 768)] + layer * 1000:
    count = 1
    for n in shape:
      count *= n
    if count > left and not shapes:  # omits the embedding table if the state is small
      continue
    if count > left:
      break
    shapes.append(shape)
    left -= count
  make = lambda part: {
    f'{i:03}': jax.random.normal(jax.random.fold_in(jax.random.key(part), i), s, jnp.float32)
    for i, s in enumerate(shapes)
  }
  names = ('params', 'mu', 'nu')
  return jax.block_until_ready({name: make(part) for part, name in enumerate(names)})


def restore(folder: pathlib.Path, state: dict) -> None:
  """Restores as training does at its start."""
  import jax

  from paxlite.checkpointing.checkpoints import Checkpoints

  describe = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
  checkpoints = Checkpoints(folder)
  wanted = jax.tree.map(describe, state)
  found = checkpoints.restore_latest(lambda step: checkpoints.restore(step, wanted))
  assert found is not None
  jax.block_until_ready(found)
  checkpoints.close()


def write_plain(folder: pathlib.Path, size: int) -> None:
  folder.mkdir()
  block = os.urandom(BLOCK)
  for i in range(-(-size // BLOCK)):
    (folder / f'{i:05}').write_bytes(block[: min(BLOCK, size - i * BLOCK)])
  os.sync()


def read_plain(folder: pathlib.Path) -> None:
  for path in sorted(folder.iterdir()):
    path.read_bytes()


def forget(folder: pathlib.Path) -> None:
  """Drops files from the page cache, after writing them to disk."""
  os.sync()
  for path in folder.rglob('*'):
    if path.is_file():
      with path.open('rb') as f:
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(work) -> float:
  before = time.perf_counter()
  work()
  return time.perf_counter() - before


if __name__ == '__main__':
  main()
