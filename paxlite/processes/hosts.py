"""Which processes of a run see the same folder, and so share a disk."""

import dataclasses
import json
import pathlib
import time
import uuid
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

from paxlite.core.errors import UserError
from paxlite.core.json_text import Json, parsed
from paxlite.processes.process_messages import broadcast, gathered

_LATE_SECONDS = 60.0  # for which a client of NFS may show what a folder held before
_LOOK_SECONDS = 0.2


@dataclasses.dataclass(frozen=True)
class Hosts:
  """The hosts of a run. A host is a group of processes that see the same folder."""

  index: int = 0  # number of the host of this process
  count: int = 1  # number of hosts
  leads: bool = True  # whether this process is the first one of its host


def hosts_of(folder: pathlib.Path) -> Hosts:
  """Finds out which processes see the same `folder`; every process must call this.

  The folder is made where it is missing.
  """
  if jax.process_count() == 1:
    return Hosts()
  folder.mkdir(parents=True, exist_ok=True)
  token = broadcast(uuid.uuid4().hex.encode()).decode()
  own = jax.process_index()
  mine = folder / f'.process-{own:05d}-{token}'
  mine.touch()
  multihost_utils.sync_global_devices('paxlite hosts written')
  seen = sorted(int(p.name.split('-')[1]) for p in folder.glob(f'.process-*-{token}'))
  firsts = np.asarray(multihost_utils.process_allgather(np.int32(seen[0])))
  mine.unlink()
  leaders = sorted(set(firsts.tolist()))
  return Hosts(leaders.index(seen[0]), len(leaders), own == seen[0])


def check_shared(folder: pathlib.Path) -> None:
  """Raises UserError unless all processes see the same `folder`, which exists in process 0.

  Every process must call this.
  """
  if jax.process_count() == 1:
    return
  mark = folder / f'.shared-{broadcast(uuid.uuid4().hex.encode()).decode()}'
  if jax.process_index() == 0:
    mark.touch()
  try:
    check_alike(folder, mark.exists)
  finally:
    if jax.process_index() == 0:
      mark.unlink(missing_ok=True)


def check_alike(folder: pathlib.Path, look: Callable[[], Json]) -> None:
  """Raises UserError unless all processes see the same in a folder. Every process must call this.

  Args:
    folder: For the message.
    look: Returns what a process sees. Others than process 0 look again for a minute, because a file
      server may show them what was there before.
  """
  if jax.process_count() == 1:
    return
  # collectives come after the wait, in which process 0 waits for the others
  expected = parsed(broadcast(json.dumps(look() if jax.process_index() == 0 else None).encode()))
  until = time.monotonic() + _LATE_SECONDS
  while not (same := look() == expected) and time.monotonic() < until:
    time.sleep(_LOOK_SECONDS)
  unlike = np.flatnonzero(gathered(np.array([not same], np.int32))().ravel())
  if len(unlike):
    raise UserError(
      f'process {unlike[0]} sees other files than process 0 in --job_log_dir={folder}: use a disk '
      'that all processes share, or an object store'
    )
