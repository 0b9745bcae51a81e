"""Runs paxlite.main as users do, in its own process."""

import atexit
import contextlib
import functools
import json
import os
import pathlib
import subprocess
import sys

from tests.support.fork_server import ForkServer, serves

ROOT = pathlib.Path(__file__).parents[2]
IMPORT = '--import=tests.support.experiments'  # for tools that read checkpoints of tests
LEVEL = '--xla_backend_optimization_level'  # of LLVM; tests/conftest.py chooses it


def command(
  folder, *flags: str, config: str = 'TinyGPT', module: str = 'paxlite.main'
) -> list[str]:
  return [sys.executable, '-m', module, f'--fdl_config={config}', f'--job_log_dir={folder}', *flags]


def run(
  folder,
  *flags: str,
  config: str = 'TinyGPT',
  devices: int = 1,
  module: str = 'paxlite.main',
  code: int | None = 0,
  env: dict[str, str] | None = None,
  imported: str = '',
) -> subprocess.CompletedProcess:
  """Runs on `devices` CPU devices to the end and checks the exit code.

  `imported` names packages whose import takes long, apart by commas: processes share it.
  """
  return _finished(
    command(folder, *flags, config=config, module=module), environment(devices) | (env or {}), 300,
    code, imported,
  )  # fmt: skip


def module(
  name: str, *arguments: str, devices: int = 1, code: int | None = 0, imported: str = ''
) -> subprocess.CompletedProcess:
  """Runs `python -m name` to the end and checks the exit code."""
  command = [sys.executable, '-m', name, *arguments]
  return _finished(command, environment(devices), 600, code, imported)


def _finished(
  command: list[str], environment: dict[str, str], timeout: float, code: int | None, imported: str
) -> subprocess.CompletedProcess:
  result = ended(command, environment, timeout, imported=imported)
  assert code is None or result.returncode == code, (
    f'{result.returncode}\n{result.stdout}\n{result.stderr}'
  )
  return result


def ended(
  command: list[str],
  environment: dict[str, str],
  timeout: float = 300,
  cwd: str | pathlib.Path = ROOT,
  imported: str = '',
) -> subprocess.CompletedProcess:
  """Runs [python, '-m', module, …] to its end, in a fork if that gives the same result."""
  process = started(
    command, environment, cwd, subprocess.DEVNULL, subprocess.PIPE, subprocess.PIPE, imported
  )
  try:
    stdout, stderr = process.communicate(timeout=timeout)
  except subprocess.TimeoutExpired:
    process.kill()
    process.communicate()
    raise
  return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def started(
  command: list[str],
  environment: dict[str, str],
  cwd: str | pathlib.Path = ROOT,
  stdin: int | None = None,
  stdout: int | None = None,
  stderr: int | None = None,
  imported: str = '',
) -> subprocess.Popen:
  """Starts [python, '-m', module, …], as a fork if that gives the same result.

  stdin, stdout and stderr are as subprocess.Popen takes them.
  """
  server = _fork_server(imported)
  if sys.platform == 'linux' and serves(command, environment, server.environment):
    return server.start(command, environment, str(cwd), stdin, stdout, stderr)
  return subprocess.Popen(
    command, cwd=cwd, env=environment, text=True, stdin=stdin, stdout=stdout, stderr=stderr
  )


@functools.cache
def _fork_server(imported: str) -> ForkServer:
  server = ForkServer(environment(), imported)
  atexit.register(server.close)
  return server


def environment(devices: int = 1, as_users: bool = False) -> dict[str, str]:
  """Returns variables of a process with CPU devices, which may compile as users do."""
  given = [] if as_users else os.environ.get('XLA_FLAGS', '').split()
  level = [flag for flag in given if flag.startswith(LEVEL)]
  flags = ' '.join([f'--xla_force_host_platform_device_count={devices}', *level])
  width = ('COLUMNS', 'LINES')  # those of a terminal are not those of a file
  kept = {k: v for k, v in os.environ.items() if k not in width}
  return {**kept, 'XLA_FLAGS': flags, 'JAX_PLATFORMS': 'cpu'}


def records(folder, name: str = 'metrics.jsonl') -> list[dict]:
  return [json.loads(line) for line in (pathlib.Path(folder) / name).read_text().splitlines()]


def losses(folder) -> dict[int, float]:
  """Returns the loss by step."""
  return {r['step']: r['loss'] for r in records(folder)}


def shown_on(leader: int, follower: int, process: subprocess.Popen) -> bytes:
  """Returns what a process prints on a terminal; checks that it ends well."""
  os.close(follower)
  shown = b''
  with contextlib.suppress(OSError):  # end of file on a terminal
    while chunk := os.read(leader, 65536):
      shown += chunk
  assert process.wait(timeout=60) == 0
  return shown
