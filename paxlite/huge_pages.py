"""Large pages for the memory of a run on CPUs.

XLA takes the memory of a step's temporaries from malloc for each step and gives it back, and the
kernel then clears and maps it page by page, 100,000 pages of 4 KiB for 400 MB. With pages of 2 MiB
a step of a GPT of 11M parameters took about a fifth less time (benchmarks/README.md).
"""

import contextlib
import os
import pathlib
import re
import sys

_VARIABLE = 'GLIBC_TUNABLES'
_TUNABLE = 'glibc.malloc.hugetlb'
_SETTING = pathlib.Path('/sys/kernel/mm/transparent_hugepage/enabled')
_ACCELERATORS = '/dev/nvidiactl', '/dev/kfd', '/dev/dxg', '/dev/accel0', '/dev/vfio'
_MARK = 'paxlite_restarted'  # an option -X of Python, which nothing on the way takes away


def environment() -> dict[str, str]:
  """What makes malloc ask for large pages; empty where it cannot, need not or must not.

  The kernel has to leave the choice to programs ([madvise]), the C library to be glibc 2.35 or
  newer, and the machine to have no accelerator that the run is for. A GLIBC_TUNABLES that says
  something about it is left as it is.
  """
  tunables = os.environ.get(_VARIABLE, '')
  on_cpu = os.environ.get('JAX_PLATFORMS') == 'cpu' or not any(map(os.path.exists, _ACCELERATORS))
  if _TUNABLE in tunables or not on_cpu or _glibc() < (2, 35):
    return {}
  try:
    if '[madvise]' not in _SETTING.read_text():
      return {}
  except OSError:
    return {}
  return {_VARIABLE: f'{tunables}:{_TUNABLE}=1'.lstrip(':')}


def restart_with_them() -> None:
  """Replaces the process by one that runs the same command with environment(), where that differs.

  glibc reads its tunables when a program starts. Only a plain `python -m paxlite.main …` is started
  again: what else runs this module (a debugger, a profiler, a notebook) has a state of its own.
  """
  changes, command = environment(), sys.orig_argv
  if not changes or not is_plain(command, sys.argv[1:]) or not sys.executable:
    return
  if _MARK in sys._xoptions or sys.gettrace():
    return
  with contextlib.suppress(OSError):  # then it runs as it is
    os.execve(
      sys.executable, [sys.executable, '-X', _MARK, *command[1:]], {**os.environ, **changes}
    )


def is_plain(command: list[str], arguments: list[str]) -> bool:
  """Whether a command is python, options of Python's own, -m paxlite.main and the arguments."""
  first = len(command) - len(arguments) - 2
  if first < 1 or command[first:] != ['-m', 'paxlite.main', *arguments]:
    return False
  options = command[1:first]
  return all(
    previous in ('-X', '-W') or (option.startswith('-') and option not in ('-m', '-c', '-'))
    for previous, option in zip(['', *options], options, strict=False)
  )


def _glibc() -> tuple[int, ...]:
  try:
    version = os.confstr('CS_GNU_LIBC_VERSION') or ''
  except (AttributeError, ValueError, OSError):  # another system
    return (0,)
  found = re.fullmatch(r'glibc (\d+)\.(\d+).*', version)
  return tuple(map(int, found.groups())) if found else (0,)
