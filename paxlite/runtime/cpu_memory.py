"""How malloc gives a run on CPUs its memory.

XLA takes the memory of a step's temporaries from malloc for each step and gives it back, and the
kernel clears and maps it each time, 240,000 pages of 4 KiB for a step of 124M parameters. A malloc
that keeps what it is given back, in pages of 2 MiB, soon asks the kernel for next to nothing
(benchmarks/README.md). Its price is memory: what was freed is not always of a size that is asked
for again, and what compiling or restoring took once stays with the process.
"""

import contextlib
import os
import pathlib
import re
import sys

_VARIABLE = 'GLIBC_TUNABLES'
_LARGE_PAGES = 'glibc.malloc.hugetlb'
_KEPT = {
  'glibc.malloc.mmap_max': 0,  # what is mapped for itself goes back to the kernel
  'glibc.malloc.trim_threshold': 1 << 40,
  'glibc.malloc.arena_max': 1,  # those of other threads map what is above 64 MB
}
# what users bound memory with
_OTHERS = 'glibc.malloc.mmap_threshold', 'glibc.malloc.top_pad'
_OLD_NAMES = 'ARENA_MAX', 'TRIM_THRESHOLD_', 'MMAP_MAX_', 'MMAP_THRESHOLD_', 'TOP_PAD_'
_SETTING = pathlib.Path('/sys/kernel/mm/transparent_hugepage/enabled')
_ACCELERATORS = '/dev/nvidiactl', '/dev/kfd', '/dev/dxg', '/dev/accel0', '/dev/vfio'
_MARK = 'paxlite_restarted'  # an option -X of Python, which nothing on the way takes away


def environment() -> dict[str, str]:
  """The variables that make malloc keep its memory; empty where it cannot or must not.

  The C library has to be glibc 2.35 or newer, and the machine to have no accelerator that the run
  is for. Where GLIBC_TUNABLES or a variable MALLOC_… names one of these, nothing is changed.
  Large pages are asked for where the kernel leaves the choice to programs ([madvise]).
  """
  tunables = os.environ.get(_VARIABLE, '')
  on_cpu = os.environ.get('JAX_PLATFORMS') == 'cpu' or not any(map(os.path.exists, _ACCELERATORS))
  named = any(name in tunables for name in (_LARGE_PAGES, *_KEPT, *_OTHERS))
  named |= any(f'MALLOC_{name}' in os.environ for name in _OLD_NAMES)
  if named or not on_cpu or _glibc() < (2, 35):
    return {}
  chosen = dict(_KEPT)
  with contextlib.suppress(OSError):
    if '[madvise]' in _SETTING.read_text():
      chosen[_LARGE_PAGES] = 1
  added = [f'{name}={value}' for name, value in chosen.items()]
  return {_VARIABLE: ':'.join([tunables, *added]).lstrip(':')}


def restart_with_them() -> None:
  """Replaces the process by one that runs the same command with environment(), where that differs.

  glibc reads its tunables when a program starts. Only a plain `python -m paxlite.main …` is started
  again: what else runs this module (a debugger, a profiler, a notebook) has a state of its own.
  """
  if _MARK in sys._xoptions:
    _leave_to_children_what_was_there()
    return
  changes, command = environment(), sys.orig_argv
  if not changes or not is_plain(command, sys.argv[1:]) or not sys.executable:
    return
  if sys.gettrace():
    return
  with contextlib.suppress(OSError):  # then it runs without them
    os.execve(
      sys.executable, [sys.executable, '-X', _MARK, *command[1:]], {**os.environ, **changes}
    )


def _leave_to_children_what_was_there() -> None:
  """Takes our tunables, which glibc has read, out of the environment."""
  ours = {f'{name}={value}' for name, value in (_KEPT | {_LARGE_PAGES: 1}).items()}
  left = [t for t in os.environ.get(_VARIABLE, '').split(':') if t and t not in ours]
  if left:
    os.environ[_VARIABLE] = ':'.join(left)
  else:
    os.environ.pop(_VARIABLE, None)


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
