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
# A folder with one of these is a run of paxlite, a checkpoint of one, or weights that it imported.
_OWN = ('checkpoints', 'checksums.json', 'experiment.json')


def is_own(path: str) -> bool:
  """Returns whether a folder is of a format that paxlite writes, and that needs no import."""
  return any(os.path.exists(os.path.join(path, name)) for name in _OWN)


def formats_at(path: str) -> list[Format]:
  """Returns the formats of which `path`, a file or a folder, has files; none where nothing is."""
  if os.path.isdir(path):
    names = os.listdir(path)
    if is_own(path):
      return []
    if re.fullmatch(_PAX_CHECKPOINT, os.path.basename(os.path.abspath(path))):
      return [f for f in FORMATS if f.source == 'pax']
  else:
    names = [path] if os.path.isfile(path) else []
  found = [f for f in FORMATS if f.endings and any(name.endswith(f.endings) for name in names)]
  if not found and names and os.path.isdir(path):  # packages of PyPI have it in a folder below
    return [f for f in FORMATS if f.source == 'gguf' and any(pathlib.Path(path).rglob('*.gguf'))]
  return found
