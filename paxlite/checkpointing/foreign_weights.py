"""The formats of weights that paxlite imports, told by the names of files."""

import os
import pathlib
import re
from typing import NamedTuple


class Format(NamedTuple):
  """A format of weights.

  Attributes:
    source: The value of --from of `paxlite import`.
    what: Whose weights these are, for messages.
    endings: Endings of the names of its files.
  """

  source: str
  what: str
  endings: tuple[str, ...]


FORMATS = (
  Format('gguf', 'a GGUF file', ('.gguf',)),
  Format('meta', 'Meta', ('.pth',)),
  Format(
    'hf',
    'Hugging Face',
    ('.safetensors', '.safetensors.index.json', 'pytorch_model.bin', '.bin.index.json'),
  ),
  Format('pax', 'Pax', ()),
)
_PAX_CHECKPOINT = r'checkpoint_\d{8}'


def is_own(path: str) -> bool:
  """Returns whether a folder is of a format that paxlite writes, and that needs no import.

  It is a run or weights that were imported (experiment.json), or a checkpoint of a run.
  """
  has = lambda name: os.path.exists(os.path.join(path, name))
  return has('experiment.json') or (has('checksums.json') and has('state'))


def formats_at(path: str) -> list[Format]:
  """Returns the formats of which `path`, a file or a folder, has files; none where nothing is."""
  if os.path.isdir(path):
    names = os.listdir(path)
    name = os.path.basename(os.path.abspath(path))
    if re.fullmatch(_PAX_CHECKPOINT, name) and not is_own(path):
      return [f for f in FORMATS if f.source == 'pax']
  else:
    names = [path] if os.path.isfile(path) else []
  found = [f for f in FORMATS if f.endings and any(name.endswith(f.endings) for name in names)]
  if not found and names and os.path.isdir(path):  # packages of PyPI have it in a folder below
    return [f for f in FORMATS if f.source == 'gguf' and any(pathlib.Path(path).rglob('*.gguf'))]
  return found
