"""Files of one array, in NumPy's format."""

import io
import pathlib

import numpy as np

from paxlite.core.run_files import write_file


def write_array(path: pathlib.Path, array: np.ndarray) -> None:
  """Writes the file of np.save, whole or not at all.

  np.save itself says of a full disk how many values are missing, and not why.

  Raises:
    OSError: The file cannot be written; it is named, and the error has its number.
  """
  array = np.ascontiguousarray(array)
  head = io.BytesIO()
  np.lib.format.write_array_header_1_0(head, np.lib.format.header_data_from_array_1_0(array))
  write_file(path, head.getvalue(), array.reshape(-1).view(np.uint8).data)
