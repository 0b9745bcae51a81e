"""The communicator of all processes, by the variables of Open MPI."""

import os
import pathlib
import time


class _World:
  def Get_rank(self):
    return int(os.environ['OMPI_COMM_WORLD_RANK'])

  def Get_size(self):
    return int(os.environ['OMPI_COMM_WORLD_SIZE'])

  def bcast(self, value, root):
    path = pathlib.Path(os.environ['FAKE_MPI'])
    if self.Get_rank() == root:
      path.with_suffix('.new').write_text(value)
      path.with_suffix('.new').rename(path)
    while not path.exists():
      time.sleep(0.01)
    return path.read_text()


COMM_WORLD = _World()
