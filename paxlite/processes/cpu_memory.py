"""Settings of malloc that make runs on CPUs faster.

In every step XLA allocates the memory of the temporaries with malloc and frees it again. The kernel
then clears and maps this memory each time: 240,000 pages of 4 KiB for a step of 124M parameters. A
malloc that keeps freed memory, in pages of 2 MiB, soon asks the kernel for almost nothing
(benchmarks/README.md). The price is memory: freed blocks do not always have a size that is needed
again, and the memory that compiling or restoring used once stays with the process. Fine-tuning
restores, and its models fill a machine sooner than those of pretraining on CPUs: there, blocks of
32 MiB or more go back to the kernel if it has large pages, and mapping them again costs some time.
"""

import contextlib
import os
import pathlib
import re
import sys

_VARIABLE = 'GLIBC_TUNABLES'
_LARGE_PAGES = 'glibc.malloc.hugetlb'
# Blocks with their own mapping go back to the kernel: none of them, or the largest ones.
_WITHOUT_MAPPINGS = {'glibc.malloc.mmap_max': 0}
_LARGEST_MAPPED = {'glibc.malloc.mmap_threshold': 32 << 20}  # glibc accepts no higher threshold
_KEPT = {
  'glibc.malloc.trim_threshold': 1 << 40,
  'glibc.malloc.arena_max': 1,  # Arenas of other threads map blocks above 64 MB separately.
}
_OURS = _KEPT | _WITHOUT_MAPPINGS | _LARGEST_MAPPED | {_LARGE_PAGES: 1}
_OTHERS = ('glibc.malloc.top_pad',)  # with which users limit memory, too
_OLD_NAMES = 'ARENA_MAX', 'TRIM_THRESHOLD_', 'MMAP_MAX_', 'MMAP_THRESHOLD_', 'TOP_PAD_'
_SETTING = pathlib.Path('/sys/kernel/mm/transparent_hugepage/enabled')
_ACCELERATORS = '/dev/nvidiactl', '/dev/kfd', '/dev/dxg', '/dev/accel0', '/dev/vfio'
_MARK = 'paxlite_restarted'  # an option -X of Python, which nothing in between removes


def environment(frees_blocks: bool = False) -> dict[str, str]:
  """Returns the environment variables that make malloc keep memory; empty if it cannot or must not.

  The C library must be glibc 2.35 or newer. The machine must have no accelerator, unless
  JAX_PLATFORMS is cpu. If GLIBC_TUNABLES or a variable MALLOC_… already has one of these settings,
  nothing is changed. Large pages are requested if the kernel leaves the choice to programs
  ([madvise]).

  Args:
    frees_blocks: Blocks of 32 MiB or more go back to the kernel if it has large pages.
  """
  tunables = os.environ.get(_VARIABLE, '')
  on_cpu = os.environ.get('JAX_PLATFORMS') == 'cpu' or not any(map(os.path.exists, _ACCELERATORS))
  named = any(name in tunables for name in (*_OURS, *_OTHERS))
  named |= any(f'MALLOC_{name}' in os.environ for name in _OLD_NAMES)
  if named or not on_cpu or _glibc() < (2, 35):
    return {}
  setting = ''
  with contextlib.suppress(OSError):
    setting = _SETTING.read_text()
  asked, always = '[madvise]' in setting, '[always]' in setting
  frees = frees_blocks and (asked or always)
  chosen = _KEPT | (_LARGEST_MAPPED if frees else _WITHOUT_MAPPINGS)
  if asked:
    chosen[_LARGE_PAGES] = 1
  added = [f'{name}={value}' for name, value in chosen.items()]
  return {_VARIABLE: ':'.join([tunables, *added]).lstrip(':')}


def restart_with_them() -> None:
  """Replaces the process by one that runs the same command with the variables of environment().

  This is needed because glibc reads its tunables when a program starts. It does nothing if there
  are no variables to set. Only a plain `paxlite …` or `python -m paxlite.main …` is restarted: a
  debugger, a profiler or a notebook that runs this module has state that would be lost.
  """
  if _MARK in sys._xoptions:
    _leave_to_children_what_was_there()
    return
  changes = environment(frees_blocks=sys.argv[1:2] == ['finetune'])
  plain = plain_command(sys.orig_argv, sys.argv[1:])
  if not changes or plain is None or not sys.executable or sys.gettrace():
    return
  # -P: a file of the current folder must not be taken for a module that runpy imports
  safe = ['-P'] if any(finder.find_spec('paxlite', None) for finder in sys.meta_path) else []
  command = [sys.executable, '-X', _MARK, *safe, *plain]
  with contextlib.suppress(OSError):  # If this fails, the run continues without them.
    os.execve(sys.executable, command, {**os.environ, **changes})


def _leave_to_children_what_was_there() -> None:
  """Removes our tunables, which glibc has read, from the environment."""
  ours = {f'{name}={value}' for name, value in _OURS.items()}
  left = [t for t in os.environ.get(_VARIABLE, '').split(':') if t and t not in ours]
  if left:
    os.environ[_VARIABLE] = ':'.join(left)
  else:
    os.environ.pop(_VARIABLE, None)


def plain_command(command: list[str], arguments: list[str]) -> list[str] | None:
  """Returns what follows `python` in a command that runs paxlite; None if it runs something else.

  It is Python's options, -m paxlite or -m paxlite.main, and the arguments.

  Args:
    command: The whole command, as in sys.orig_argv.
    arguments: The arguments of the program, as in sys.argv[1:].
  """
  first = len(command) - len(arguments)
  before, after = command[:first], command[first:]
  if after != arguments:
    return None
  if before[-2:] in (['-m', 'paxlite'], ['-m', 'paxlite.main']):
    options, module = before[1:-2], before[-1]
  elif len(before) > 1 and os.path.basename(before[-1]) == 'paxlite':  # the installed script
    options, module = before[1:-1], 'paxlite'
  else:
    return None
  are_options = all(
    previous in ('-X', '-W') or (option.startswith('-') and option not in ('-m', '-c', '-'))
    for previous, option in zip(['', *options], options, strict=False)
  )
  return [*options, '-m', module, *arguments] if are_options else None


def _glibc() -> tuple[int, ...]:
  try:
    version = os.confstr('CS_GNU_LIBC_VERSION') or ''
  except (AttributeError, ValueError, OSError):  # not a system with glibc
    return (0,)
  found = re.fullmatch(r'glibc (\d+)\.(\d+).*', version)
  return tuple(map(int, found.groups())) if found else (0,)
