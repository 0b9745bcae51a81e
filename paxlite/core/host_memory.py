"""The memory that is left for this process, by the kernel and by the limits of its cgroups."""

import pathlib

_MEMINFO = pathlib.Path('/proc/meminfo')
_CGROUPS = pathlib.Path('/proc/self/cgroup')
_MOUNT = pathlib.Path('/sys/fs/cgroup')


def available(
  meminfo: pathlib.Path = _MEMINFO, cgroups: pathlib.Path = _CGROUPS, mount: pathlib.Path = _MOUNT
) -> int | None:
  """The bytes that can still be used without swapping or being killed; None where unknown.

  Args:
    meminfo: The kernel's table of memory.
    cgroups: The cgroups that the process is in, of version 1 or 2.
    mount: The folder that cgroups are mounted at.
  """
  free = [_free(meminfo), *(_left(folder) for folder in _folders(cgroups, mount))]
  known = [x for x in free if x is not None]
  return min(known) if known else None


def _free(meminfo: pathlib.Path) -> int | None:
  try:
    lines = meminfo.read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith('MemAvailable:'))
  except (OSError, ValueError, StopIteration, IndexError):
    return None


def _folders(cgroups: pathlib.Path, mount: pathlib.Path) -> list[pathlib.Path]:
  """The folders of the process's cgroups and of all above them. Each may have a limit.

  A container often sees its own cgroup as the root, under whatever name /proc lists it.
  """
  try:
    lines = cgroups.read_text().splitlines()
  except OSError:
    return []
  found = []
  for line in lines:
    _, _, rest = line.partition(':')
    controllers, _, name = rest.partition(':')
    if controllers and 'memory' not in controllers.split(','):
      continue
    root = mount / 'memory' if controllers else mount
    inside = pathlib.PurePosixPath(name.lstrip('/'))
    found += [root / folder for folder in (inside, *inside.parents)]
  return found


def _left(folder: pathlib.Path) -> int | None:
  """The bytes left below the limit of a cgroup; None where it has no limit.

  Memory that caches files counts as left, because the kernel frees it when it is needed.
  """
  for limit, usage, cached in (
    ('memory.max', 'memory.current', 'inactive_file'),
    ('memory.limit_in_bytes', 'memory.usage_in_bytes', 'total_inactive_file'),
  ):
    try:
      most = int((folder / limit).read_text())
      used = int((folder / usage).read_text())
      entries = (line.split() for line in (folder / 'memory.stat').read_text().splitlines())
      reclaimable = sum(int(entry[1]) for entry in entries if entry[0] == cached)
    except (OSError, ValueError, IndexError):  # there is no such file, or it holds 'max'
      continue
    return max(most - used + reclaimable, 0)
  return None
