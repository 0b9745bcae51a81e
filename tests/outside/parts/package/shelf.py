"""shelf://NAME: the files of the folder that SHELF names."""

import os
import pathlib

from paxlite.files.schemes import Scheme


class Shelf(Scheme):
  def open(self, address):
    return self._path(address).open('rb')

  def names(self, address):
    folder = self._path(address)
    return [path.relative_to(folder).as_posix() for path in folder.rglob('*') if path.is_file()]

  def _path(self, address):
    return pathlib.Path(os.environ['SHELF'], address.removeprefix('shelf://'))


SHELF = Shelf()
