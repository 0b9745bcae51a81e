"""Files of rollouts, with which a run that ended in the middle of one goes on."""

import json
import math
import pathlib
import zlib
from collections.abc import Mapping

import numpy as np

from paxlite.core.json_text import parsed
from paxlite.core.run_files import make_folder, write_file
from paxlite.finetuning.reinforcement.rollouts import RunFiles

Arrays = Mapping[str, np.ndarray]


def write(files: RunFiles, number: int, arrays: Arrays, steps: int, kind: str = 'rollout') -> None:
  """Writes a rollout, and deletes those before the oldest checkpoint.

  Args:
    files: Where it is written.
    number: The number of the rollout.
    arrays: Its arrays.
    steps: The number of batches of each rollout.
    kind: The end of the name of the file.
  """
  if not files.writes:
    return
  make_folder(files.folder)
  write_file(_path(files, number, kind), _packed(arrays))
  oldest = files.oldest_step()  # batches have at least the number of their step
  for path in files.folder.glob(f'*.{kind}'):
    # the one before may hold what goes on after it
    if path.stem.isdigit() and (int(path.stem) + 2) * steps <= oldest:
      path.unlink(missing_ok=True)


def read(files: RunFiles, number: int, kind: str = 'rollout') -> dict[str, np.ndarray] | None:
  """Returns the arrays of a rollout; None if there is no whole file of it."""
  try:
    return _unpacked(_path(files, number, kind).read_bytes())
  except (OSError, ValueError, KeyError, TypeError):
    return None


def _path(files: RunFiles, number: int, kind: str) -> pathlib.Path:
  return files.folder / f'{number}.{kind}'


def _packed(arrays: Arrays) -> bytes:
  """Returns a line of JSON that describes the arrays, and their bytes."""
  values = b''.join(x.tobytes() for x in arrays.values())
  about = {name: [x.dtype.name, *x.shape] for name, x in arrays.items()}
  head = {'arrays': about, 'crc32': zlib.crc32(values)}
  return json.dumps(head).encode() + b'\n' + values


def _unpacked(content: bytes) -> dict[str, np.ndarray]:
  """Returns what was packed; raises ValueError if it is not whole."""
  line, _, values = content.partition(b'\n')
  head, found, start = parsed(line), {}, 0
  if zlib.crc32(values) != head['crc32']:
    raise ValueError('the checksum differs')
  for name, (dtype, *shape) in head['arrays'].items():
    count = math.prod(shape)
    found[name] = np.frombuffer(values, dtype, count, start).reshape(shape)
    start += count * np.dtype(dtype).itemsize
  return found
