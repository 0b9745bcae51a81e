"""The formats of weights that paxlite imports, told by the names of files."""

import contextlib
import os
import pathlib
import re
from typing import NamedTuple


class WeightsFormat(NamedTuple):
  """A format of weights."""

  source: str  # the value of --from of `paxlite import`
  what: str  # whose weights these are, for messages
  endings: tuple[str, ...]  # endings of the names of its files


FORMATS = (
  WeightsFormat('meta', 'Meta', ('.pth',)),
  WeightsFormat(
    'hf',
    'Hugging Face',
    ('.safetensors', '.safetensors.index.json', 'pytorch_model.bin', '.bin.index.json'),
  ),
  WeightsFormat('pax', 'Pax', ()),
)
_PAX_CHECKPOINT = r'checkpoint_\d{8}'


def is_own(path: str) -> bool:
  """Returns whether a folder is of a format that paxlite writes, and that needs no import.

  It is a run or weights that were imported (experiment.json), or a checkpoint of a run.
  """
  has = lambda name: os.path.exists(os.path.join(path, name))
  return has('experiment.json') or (has('checksums.json') and has('state'))


def formats_at(path: str) -> list[WeightsFormat]:
  """Returns the formats of which `path`, a file or a folder, has files; none where nothing is."""
  if os.path.isdir(path):
    names = os.listdir(path)
    name = os.path.basename(os.path.abspath(path))
    if re.fullmatch(_PAX_CHECKPOINT, name) and not is_own(path):
      return [f for f in FORMATS if f.source == 'pax']
  else:
    names = [path] if os.path.isfile(path) else []
  return [f for f in FORMATS if f.endings and any(name.endswith(f.endings) for name in names)]


def way_of_gguf(path: str) -> str:
  """Returns how a GGUF file is imported by way of transformers; '' if `path` holds none."""
  files = []
  with contextlib.suppress(OSError):  # a folder in it may be somebody else's
    # no deeper: `path` may be the root of a disk
    files = sorted(f for depth in ('', '*/') for f in pathlib.Path(path).glob(f'{depth}*.gguf'))
  if not files and not (path.endswith('.gguf') and os.path.isfile(path)):
    return ''
  file = files[0] if files else pathlib.Path(path)
  place = f'from_pretrained({str(file.parent)!r}, gguf_file={file.name!r}'
  return (
    f'{file} is GGUF, which paxlite does not import. transformers writes it as a folder TO, for '
    f'paxlite import TO: AutoModelForCausalLM.{place}, quantization_config='
    'GgufConfig(dequantize=True)).save_pretrained(TO), and '
    f'AutoTokenizer.{place}).save_pretrained(TO)'
  )
