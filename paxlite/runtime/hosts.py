"""Which processes of a run share a folder, and so a disk."""

import dataclasses
import pathlib
import uuid

import jax
import numpy as np

from paxlite.runtime.exchange import broadcast


@dataclasses.dataclass(frozen=True)
class Hosts:
  """The hosts of a run. A host is a group of processes that see the same folder.

  Attributes:
    index: Number of the host of this process.
    count: Number of hosts.
    leads: Whether this process is the first one of its host.
  """

  index: int = 0
  count: int = 1
  leads: bool = True


def hosts_of(folder: pathlib.Path) -> Hosts:
  """Finds out which processes see the same `folder`; every process must call this.

  The folder is made where it is missing.
  """
  if jax.process_count() == 1:
    return Hosts()
  from jax.experimental import multihost_utils

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
