"""Starts runs as one or several processes, which a test can stop, kill or disturb with a fault."""

import pathlib
import socket
import subprocess
import time
from collections.abc import Sequence

import zarr

from tests.support import runs

MESH = [
  '--fdl.ICI_MESH_SHAPE=[2,2,1]', '--fdl.PERCORE_BATCH_SIZE=1', '--fdl.SUMMARY_INTERVAL_STEPS=1',
  '--fdl.CHECKPOINT_EVERY_N_STEPS=3', '--fdl.EVAL_INTERVAL_STEPS=3', '--fdl.PACKED_INPUT=False',
]  # fmt: skip


def start_processes(
  folder,
  count: int,
  *flags: str,
  config: str,
  module: str = 'paxlite.main',
  env: dict[str, str] | None = None,
  each: Sequence[str] = (),
) -> list[subprocess.Popen]:
  """Starts main on `count` processes of 4 / count devices, or those that `env` says.

  `each` has one more flag for each.
  """
  return [
    runs.started(
      runs.command(folder, *MESH, *flags, *each[i : i + 1], *own, config=config, module=module),
      runs.environment(4 // count) | (env or {}), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )
    for i, own in enumerate(process_flags(count))
  ]  # fmt: skip


def process_flags(count: int) -> list[list[str]]:
  """Returns the flags by which `count` processes on this machine find each other, for each."""
  with socket.socket() as s:
    s.bind(('127.0.0.1', 0))
    address = f'127.0.0.1:{s.getsockname()[1]}'
  shared = ['--multiprocess_gpu', f'--server_addr={address}', f'--num_hosts={count}']
  return [[*shared, f'--host_idx={i}'] for i in range(count)]


def on_processes(
  folder,
  count: int,
  *flags: str,
  config: str,
  env: dict[str, str] | None = None,
  each: Sequence[str] = (),
) -> list[str]:
  """Runs main on `count` processes to the end; returns the output of each."""
  started = start_processes(folder, count, *flags, config=config, env=env, each=each)
  ended = [p.communicate(timeout=300) for p in started]
  for process, (_, stderr) in zip(started, ended, strict=True):
    assert process.returncode == 0, stderr
  return [stdout for stdout, _ in ended]


# A short run with two checkpoints.
SHORT = (
  '--fdl.DROPOUT_PROB=0.1', '--fdl.CHECKPOINT_EVERY_N_STEPS=3', '--fdl.MAX_STEPS=10',
  '--fdl.NUM_MICROBATCHES=2', '--fdl.NUM_LAYERS=1',
)  # fmt: skip


def faulty(folder, fault: str, *flags: str, code: int = 0, **kwargs):
  env = {'FAULT': fault}
  return runs.run(folder, *flags, module='tests.support.faulty_main', env=env, code=code, **kwargs)


def start(folder, fault: str, *flags: str, config: str = 'TinyGPT') -> subprocess.Popen:
  return runs.started(
    runs.command(folder, *flags, config=config, module='tests.support.faulty_main'),
    runs.environment() | {'FAULT': fault},
    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
  )  # fmt: skip


def wait_for(path: pathlib.Path, seconds: float = 60) -> None:
  end = time.monotonic() + seconds
  while not path.exists():
    assert time.monotonic() < end, f'{path} did not appear'
    time.sleep(0.02)


def final_state(folder):
  state = folder / 'checkpoints' / 'checkpoint_00000010' / 'state'
  return {
    p.name: zarr.open(str(p), mode='r')[...] for p in state.iterdir() if (p / '.zarray').exists()
  }
