"""A model with images or sound, in which text weights are written back to where they came from.

An import takes the text model out of such a folder, and remembers the folder in origin.json. An
export goes through the folder's safetensors files in their order, and replaces the tensors of the
text model. It copies everything else byte for byte: other tensors, headers, and other files.
"""

import logging
import os
import pathlib
import re
import shutil
import zlib
from collections.abc import Callable, Mapping
from typing import IO, NamedTuple

import numpy as np

from paxlite.checkpointing.source import lineage
from paxlite.checkpointing.variables import Variable
from paxlite.core.errors import AbsentError, UserError, listed, located
from paxlite.core.json_text import JsonObject
from paxlite.data.tokenizer_copies import link_out_of, tokenizer_files
from paxlite.data.tokenizer_files import CHAT_TEMPLATE
from paxlite.experiments import options
from paxlite.experiments.language_model import LanguageModel
from paxlite.files.json_files import read_object
from paxlite.files.text_files import check_file
from paxlite.weights import huggingface, model_files
from paxlite.weights.families import config_json, family_of
from paxlite.weights.family_tables import FAMILIES
from paxlite.weights.folder import ORIGIN
from paxlite.weights.known_keys import HARMLESS
from paxlite.weights.quantized import Dequantized
from paxlite.weights.safetensors_file import DTYPES, FileTensor, tensors_in
from paxlite.weights.tensor_entries import Entry
from paxlite.weights.unfinished_folder import unfinished_folder
from paxlite.weights.written_tensors import VariableReader, entries_by_tensor, written_blocks

log = logging.getLogger('paxlite')

_HEAD = 'lm_head.weight'
_QUANTIZED = 'F8_E4M3'
# Files that are of the weights as they were; those that were read are written with new ones.
_WEIGHTS = re.compile(
  r'.*\.(safetensors|bin|pth?|gguf|h5|msgpack|onnx|ckpt)(\.index\.json)?|proof\.json'
)
_WAY = '--into=FOLDER names the folder, and --text_only writes the text model alone'


class Original(NamedTuple):
  """The folder of a whole model, and what the import of its text model remembers; None: nothing."""

  folder: pathlib.Path
  remembered: JsonObject | None


def origin_of(folder: pathlib.Path, tensors: Dequantized) -> JsonObject | None:
  """Returns what imported weights remember of a model with images or sound; None: it has neither.

  These are the folder, the size of each of its files with weights, and checksums of config.json
  and of all tensors that an import leaves out.
  """
  stored = _stored(tensors)
  if not {'images', 'sound'} & stored.left_out.keys():
    return None
  crc32 = 0
  for tensor in sorted(stored.beside, key=lambda t: t.name):
    crc32 = zlib.crc32(tensor.data(), crc32)
  return {
    'folder': str(folder.absolute()),
    'bytes': {pathlib.Path(path).name: os.path.getsize(path) for path in stored.files},
    'config': zlib.crc32((folder / 'config.json').read_bytes()),
    'left_out': crc32,
  }


def original_of(checkpoint: str, base: str, given: str) -> Original | None:
  """Returns the folder that a checkpoint's weights go back into; None: they are of a text model.

  Raises UserError if the folder is not there.

  Args:
    checkpoint: A run or imported weights.
    base: The weights that the run started from, if they were moved.
    given: The folder, if it is named; ''.
  """
  remembered = _remembered(checkpoint) or (_remembered(base) if base else None)
  if not given and remembered is None:
    return None
  folder = pathlib.Path(given or str((remembered or {}).get('folder')))
  if not (folder / 'config.json').is_file():
    raise UserError(f'{folder}, the model with images to write into, does not exist: {_WAY}')
  return Original(folder, None if given else remembered)


def _remembered(checkpoint: str) -> JsonObject | None:
  try:
    for source in lineage(checkpoint):
      if (source.folder / ORIGIN).is_file():
        return read_object(source.folder / ORIGIN)
  except AbsentError as e:
    log.warning('%s. If they came from a model with images, --into=FOLDER names its folder', e)
  return None


class WholeModel:
  """A folder with an experiment's weights in its text model.

  Raises UserError if it is not the folder that was imported, its text model is another one than the
  experiment's, or weights were trained that it has in a quantized form.

  Attributes:
    summary: What was written, once it was.
  """

  def __init__(
    self,
    original: Original,
    experiment: LanguageModel,
    variables: Mapping[str, Variable],
    tokenizer: pathlib.Path | None,
  ):
    self._folder, self.summary = original.folder, ''
    before, _, self._tensors = huggingface.read_folder(self._folder, is_whole=True)
    self._stored = _stored(self._tensors)
    if original.remembered is not None:
      self._check_origin(original.remembered)
    self._check_model(before, experiment)
    self._read, self._template = VariableReader(variables), experiment.CHAT_TEMPLATE
    self._entries = self._entries_of(experiment)
    self._check_quantized()
    self._others, self._unwritten = self._other_files()
    self._tokenizer = {
      name: path
      for name, path in tokenizer_files(tokenizer).items()
      if not _is_same(path, self._folder / name)
    }

  def write(self, to: pathlib.Path, report: Callable[[int, int], None]) -> int:
    """Writes the folder; a failure leaves none behind.

    Args:
      to: The folder to write, which must not exist.
      report: Called with the number of tensors done and the number of all tensors.

    Returns:
      Bytes of the tensors.
    """
    names = {(t.path, t.name): short for short, t in self._stored.tensors.items()}
    files = {path: sorted(tensors_in(path), key=lambda t: t.offset) for path in self._stored.files}
    total, done, changed = sum(map(len, files.values())), 0, 0
    with unfinished_folder(to) as folder:
      for path in self._others:
        target = folder / path.relative_to(self._folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
      for name, path in self._tokenizer.items():
        shutil.copyfile(path, folder / name)
      if self._template:
        (folder / CHAT_TEMPLATE).write_text(self._template, encoding='utf-8')
      for name, tensors in files.items():
        with open(name, 'rb') as old, (folder / pathlib.Path(name).name).open('wb') as new:
          # the sizes of tensors do not change, so that the header is right as it is
          new.write(old.read(tensors[0].offset if tensors else -1))
          for tensor in tensors:
            entries = self._entries.get(names.get((tensor.path, tensor.name), ''))
            changed += self._write_tensor(new, tensor, entries)
            done += 1
            report(done, total)
    text = sum((t.path, t.name) in names for tensors in files.values() for t in tensors)
    self.summary = (
      f'The whole model of {self._folder}: {changed:,} of the {text:,} tensors of its text model '
      f'are new, and {total - changed:,} tensors and {len(self._others) - len(self._tokenizer)} '
      'other files are unchanged'
    )
    if self._tokenizer:
      self.summary += f"\nThe tokenizer is the run's: {', '.join(self._tokenizer)}"
    if self._template:
      self.summary += f'\n{CHAT_TEMPLATE} has the CHAT_TEMPLATE of the run'
    if self._unwritten:
      self.summary += (
        f'\nLeft out, because they describe the weights before training: {self._unwritten}'
      )
    return sum(t.size for tensors in files.values() for t in tensors)

  def _write_tensor(self, new: IO[bytes], tensor: FileTensor, entries: list[Entry] | None) -> bool:
    """Writes a tensor; returns whether its bytes are others than before.

    Args:
      new: The open file.
      tensor: The tensor as it was.
      entries: The entries of its weights; None: it is copied.
    """
    old = np.frombuffer(tensor.data(), np.uint8)
    if entries is None or self._is_quantized(entries[0].theirs):
      new.write(old.data)
      return False
    at, is_new = 0, False
    for block in written_blocks(entries, self._read, np.dtype(DTYPES[tensor.dtype])):
      was = old[at : at + len(block)]
      is_new = is_new or not np.array_equal(np.frombuffer(block, np.uint8), was)
      at += new.write(block)
    assert at == tensor.size, tensor.name
    return is_new

  def _check_origin(self, remembered: JsonObject) -> None:
    """Raises UserError if the folder is not what it was when its text model was imported."""
    found = origin_of(self._folder, self._tensors) or {}
    differing = {
      'bytes': 'files of other sizes',
      'config': 'another config.json',
      'left_out': 'different tensors outside the text model',
    }
    what = next((w for k, w in differing.items() if found.get(k) != remembered.get(k)), '')
    if what:
      raise UserError(
        f'{self._folder} has changed since its text model was imported ({what}): '
        f'--into={self._folder} uses it as it is, and --text_only writes the text model alone'
      )

  def _check_model(self, before: LanguageModel, experiment: LanguageModel) -> None:
    """Raises UserError if config.json of the folder would not be right for an experiment."""
    if experiment.gives_rewards:
      raise UserError(
        f'a reward model cannot be written into {self._folder}: --text_only writes it'
      )
    theirs, ours = _decisive(before), _decisive(experiment)
    for key in sorted({**theirs, **ours}):
      if theirs.get(key) != ours.get(key):
        raise UserError(
          f'{self._folder} has {key}={theirs.get(key)!r}, but here it is {ours.get(key)!r}. Its '
          f'config.json cannot change, so --into={self._folder} is not possible: --text_only '
          'writes the text model with its own config.json'
        )

  def _entries_of(self, experiment: LanguageModel) -> dict[str, list[Entry]]:
    """Returns the entries of all tensors that the experiment's variables make up, by name."""
    with located(str(self._folder)):
      entries = huggingface.entries_in(experiment, self._tensors)
      shapes = self._tensors.shapes
      # modules that predict further tokens may be new
      absent = [e for e in entries if e.ours.startswith('predictions') and e.theirs not in shapes]
      if absent:
        log.warning('%s has no prediction modules: left out', self._folder)
      found = entries_by_tensor(e for e in entries if e not in absent)
      wrong = [
        name for name, parts in found.items() if tuple(shapes.get(name, ())) != parts[0].shape
      ]
      if wrong:
        raise UserError(f'it has no tensors {listed(wrong)} of this shape: {_WAY}')
    embedding = FAMILIES[family_of(experiment)].names.get('embedding', '')
    if _HEAD in shapes and _HEAD not in found and embedding in found:
      found[_HEAD] = found[embedding]  # a copy, though config.json ties it
    return found

  def _is_quantized(self, name: str) -> bool:
    return self._stored.dtypes.get(name, _QUANTIZED) == _QUANTIZED

  def _check_quantized(self) -> None:
    """Raises UserError if a quantized tensor would have other values than it has."""
    for name, entries in self._entries.items():
      if not self._is_quantized(name):
        continue
      theirs = self._tensors.read(name)
      if b''.join(written_blocks(entries, self._read, theirs.dtype)) != theirs.tobytes():
        raise UserError(
          f'{name} was trained but is quantized in {self._folder}, which export does not support: '
          '--text_only writes the text model in bfloat16'
        )

  def _other_files(self) -> tuple[list[pathlib.Path], str]:
    """Returns the files without tensors, and the names of those left out."""
    index = self._folder / model_files.INDEX
    read = {pathlib.Path(path).name for path in self._stored.files}
    found, unwritten = [], []
    for place, folders, names in os.walk(self._folder):
      folders[:] = sorted(name for name in folders if not name.startswith('.'))
      for path in (pathlib.Path(place, name) for name in sorted(names)):
        if path.parent == self._folder and path.name in read:
          continue
        if path.name.startswith('.') and path.name != '.gitattributes':
          continue  # settings of programs, and maybe secrets
        is_index = path == index and model_files.SINGLE not in read
        if not is_index and _WEIGHTS.fullmatch(path.name):
          unwritten.append(str(path.relative_to(self._folder)))
          continue
        check_file(path)
        if target := link_out_of(self._folder, path):
          raise UserError(
            f'{path} is a link out of its folder, to {target}: put a copy there, or remove it'
          )
        found.append(path)
    return found, ', '.join(unwritten)


def _is_same(one: pathlib.Path, other: pathlib.Path) -> bool:
  return other.is_file() and one.read_bytes() == other.read_bytes()


def _stored(tensors: Dequantized) -> huggingface.Safetensors:
  stored = tensors.stored
  assert isinstance(stored, huggingface.Safetensors)
  return stored


def _decisive(e: LanguageModel) -> JsonObject:
  """Returns the keys of config.json that decide the logits of an experiment's model."""
  if options.value(e, 'NUM_PREDICTION_MODULES'):
    e = e.replaced(NUM_PREDICTION_MODULES=0)
  return {k: v for k, v in config_json(e, 'float32', None).items() if k not in HARMLESS}
