"""Reads and writes Hugging Face folders (config.json and safetensors), tensor by tensor."""

import collections
import json
import logging
import os
import pathlib
import re
from collections.abc import Callable, Mapping

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from paxlite.checkpointing.variables import Variable
from paxlite.core.errors import UserError, located
from paxlite.core.json_text import JsonObject
from paxlite.data.tokenizer_copies import copy_tokenizer
from paxlite.data.tokenizer_files import CHAT_TEMPLATE, TOOL_TEMPLATE
from paxlite.experiments.language_model import LanguageModel
from paxlite.files.json_files import read_object
from paxlite.files.schemes import scheme_of
from paxlite.files.text_files import check_file
from paxlite.weights import model_files
from paxlite.weights.families import config_json, experiment_of, family_of, hugging_face_entries
from paxlite.weights.family_tables import FAMILIES
from paxlite.weights.folder import Tensors
from paxlite.weights.generation_keys import read_generation, written_generation
from paxlite.weights.layout import check_layers, has_modules
from paxlite.weights.prediction_keys import own_prefix, with_present_modules
from paxlite.weights.quantized import Dequantized
from paxlite.weights.safetensors_file import FileTensor, tensors_in
from paxlite.weights.tensor_entries import Entry
from paxlite.weights.tensor_names import HUGGING_FACE
from paxlite.weights.unfinished_folder import unfinished_folder
from paxlite.weights.written_tensors import VariableReader, entries_by_tensor, written_blocks

log = logging.getLogger('paxlite')

# Names of tensors that are not weights of the model: buffers, and copies of a tied embedding.
IGNORED = r'.*\.(rotary_emb\.inv_freq|(attn|attention)\.(masked_)?bias)|lm_head\.weight'

# Prefixes of some files of GPT-2, and of the text model in files of Gemma 3 with images.
_PREFIX = re.compile(r'^transformer\.|^language_model\.|(?<=^model\.)language_model\.')
# Tensors beside the text model, by what they are for.
_BESIDE = {
  'images': re.compile(
    r'(model\.)?(vision_tower|vision_model|embed_vision|multi_modal_projector|mm_projector|visual)\.'
  ),
  'sound': re.compile(r'(model\.)?(audio_tower|embed_audio)\.'),
  'multi-token prediction': re.compile(r'mtp\.|(.*\.)?mtp_'),
}
_HEAD = 'lm_head.weight'
_EMBEDDINGS = (HUGGING_FACE['embedding'], 'wte.weight')
_NAMES = {'float32': 'F32', 'bfloat16': 'BF16', 'float16': 'F16'}
_INTEGERS = {'int64': 'I64'}


class Safetensors:
  """The tensors of a folder of .safetensors files; only one tensor is in memory at a time.

  Raises UserError if a file is missing, truncated or not a safetensors file, or two of them hold
  the same tensor.

  Args:
    address: Where the files are in an object store; `folder` has copies of the other files.
    keeps: How the names of tensors begin that are not left out; '': none.

  Attributes:
    files: The paths or addresses of the files.
    tensors: The tensors of the text model, by the names that they have in one.
    beside: The tensors beside the text model.
    left_out: How many tensors beside the text model there are, by what they are for.
  """

  def __init__(self, folder: pathlib.Path, address: str | None = None, keeps: str = ''):
    self.tensors: dict[str, FileTensor] = {}
    self.beside: list[FileTensor] = []
    self.shapes: dict[str, tuple[int, ...]] = {}
    self.dtypes: dict[str, str] = {}
    self.left_out: collections.Counter[str] = collections.Counter()
    place = str(folder) if address is None else address
    files, stated = model_files.chosen(
      place, names_in(folder, address), lambda: weight_map(folder / model_files.INDEX)
    )
    self.files = [f'{place}/{file}' for file in files]
    for path in self.files:
      check_file(path)
      for tensor in tensors_in(path):
        name = tensor.name
        short = _PREFIX.sub('', name)
        if beside := _beside(name, keeps):
          self.left_out[beside] += 1
          self.beside.append(tensor)
          continue
        if other := self.tensors.get(short):
          raise UserError(
            f'{short} appears twice: {other.name} of {other.path}, and {name} of {path}'
          )
        self.tensors[short] = tensor
        self.dtypes[short], self.shapes[short] = tensor.dtype, tensor.shape
    names = {tensor.name for tensor in self.tensors.values()}
    missing = [n for n in stated if n not in names and not _beside(n, keeps)]
    if missing:
      raise UserError(
        f'{place}/{model_files.INDEX} names {missing[0]}, which is in none of its files'
      )

  def leave_out(self, names: str, what: str) -> None:
    """Leaves out the tensors whose names match a regular expression; `what` says what they are."""
    for name in [name for name in self.shapes if re.fullmatch(names, name)]:
      del self.shapes[name], self.dtypes[name]
      self.beside.append(self.tensors.pop(name))
      self.left_out[what] += 1

  def put_below(self, prefix: str, outside: tuple[str, ...]) -> None:
    """Puts `prefix` before the names of all tensors but those that begin with one of `outside`."""
    new = lambda name: name if name.startswith(outside) else prefix + name
    self.shapes = {new(name): shape for name, shape in self.shapes.items()}
    self.dtypes = {new(name): dtype for name, dtype in self.dtypes.items()}
    self.tensors = {new(name): tensor for name, tensor in self.tensors.items()}

  def read(self, name: str) -> np.ndarray:
    return self.tensors[name].read()


def _beside(name: str, keeps: str) -> str:
  """Returns what a tensor beside the text model is for; '' if it belongs to the text model.

  Args:
    name: The name of the tensor.
    keeps: How the names of tensors begin that belong to it all the same; '': none.
  """
  if keeps and name.startswith(keeps):
    return ''
  return next((what for what, pattern in _BESIDE.items() if pattern.match(name)), '')


def names_in(folder: pathlib.Path, address: str | None) -> set[str]:
  """Returns the names of the files in a folder, or at an address."""
  if address is None:
    return {path.name for path in folder.iterdir()}
  return {name for name in scheme_of(address).names(address) if '/' not in name}


def weight_map(index: pathlib.Path) -> dict[str, str]:
  """Returns the file name of each tensor; empty if there is no index."""
  if not index.is_file():
    return {}
  found = read_object(index).get('weight_map')
  if not isinstance(found, dict) or not all(isinstance(f, str) for f in found.values()):
    raise UserError(f'{index} is damaged: it has no weight_map')
  return found


def read_folder(
  folder: pathlib.Path, address: str | None = None, is_whole: bool = False
) -> tuple[LanguageModel, list[Entry], Dequantized]:
  """Returns a folder's experiment, the entries of the tensors it needs, and its tensors.

  Args:
    address: Where the tensors are in an object store; `folder` has copies of the other files.
    is_whole: Whether tensors beside the text model are read, too, so that they are not named.
  """
  names = names_in(folder, address)
  base = lambda: str(read_object(folder / model_files.ADAPTER).get('base_model_name_or_path'))
  model_files.check_no_adapter(address or folder, names, base)
  config = folder / 'config.json'
  if not os.path.lexists(config):
    raise UserError(f'{config} is missing: --path must be a Hugging Face folder')
  contents = read_object(config)
  generation = folder / 'generation_config.json'
  of_generation = read_object(generation) if os.path.lexists(generation) else {}
  ends = of_generation.get('eos_token_id')
  experiment = experiment_of(contents, config, ends)
  family = FAMILIES[family_of(experiment)]
  of_family = family.names
  stored = Safetensors(folder, address, own_prefix(of_family))
  embedding = of_family.get('embedding', '')
  root, _, bare = embedding.partition('.')
  if embedding not in stored.shapes and bare in stored.shapes:
    # the model was saved without its head, by AutoModel of transformers
    head = of_family.get('head', _HEAD).partition('.')[0]
    stored.put_below(f'{root}.', (f'{head}.', *filter(None, [own_prefix(of_family)])))
  if family.unread is not None:
    stored.leave_out(family.unread(experiment), 'what the model does not read')
  if stored.left_out and not is_whole:
    found = ' and '.join(f'{n:,} tensors for {what}' for what, n in stored.left_out.items())
    log.warning('%s: left out: %s', address or folder, found)
  if has_modules(of_family):
    contents = with_present_modules(
      contents, of_family, experiment.NUM_LAYERS, stored.shapes, folder
    )
    experiment = experiment_of(contents, config, ends)
  text = contents.get('text_config')
  sources = contents, text if isinstance(text, dict) else {}
  quantization = [x['quantization_config'] for x in sources if x.get('quantization_config')]
  with located(str(folder)):
    tensors = Dequantized(stored, quantization[0] if quantization else {})
  with located(str(config)):
    check_layers(experiment, tensors.shapes, of_family)
  if not experiment.SEPARATE_EMBEDDING and _HEAD in tensors.shapes and not _is_tied(tensors):
    log.warning('%s: %s is not the embedding, though config.json ties them', folder, _HEAD)
    log.warning('%s: both are read, as by transformers', folder)
    experiment = experiment_of(contents | {'tie_word_embeddings': False}, config, ends)
  experiment = read_generation(of_generation, experiment, generation)
  with located(str(folder)):
    return experiment, entries_in(experiment, tensors), tensors


def entries_in(e: LanguageModel, tensors: Tensors) -> list[Entry]:
  """Returns the entries of an experiment's model with the names of tensors that a folder has.

  Raises UserError if a copy of a tensor has other values than what it should repeat.
  """
  entries = _without_missing_copies(hugging_face_entries(e), tensors)
  return FAMILIES[family_of(e)].found(entries, tensors.shapes)


def _without_missing_copies(entries: list[Entry], tensors: Tensors) -> list[Entry]:
  """Returns the entries without missing copies.

  Raises UserError if a copy has other values than what it should repeat.
  """
  originals = {entry.ours: entry.theirs for entry in entries if not entry.is_copy}
  for entry in entries:
    first = originals[entry.ours]
    is_there = entry.theirs in tensors.shapes and first in tensors.shapes
    if not entry.is_copy or not is_there or tensors.shapes[first] != tensors.shapes[entry.theirs]:
      continue
    if not np.array_equal(tensors.read(entry.theirs), tensors.read(first)):
      raise UserError(f'{entry.theirs} differs from {first}, but paxlite has one variable for both')
  return [entry for entry in entries if not entry.is_copy or entry.theirs in tensors.shapes]


def _is_tied(tensors: Tensors) -> bool:
  """Returns whether the head is a copy of the embedding."""
  name = next((n for n in _EMBEDDINGS if n in tensors.shapes), None)
  return name is None or np.array_equal(tensors.read(_HEAD), tensors.read(name))


def write_folder(
  to: pathlib.Path,
  experiment: LanguageModel,
  variables: Mapping[str, Variable],
  dtype: str | None,
  tokenizer: pathlib.Path | None,
  report: Callable[[int, int], None],
  shard_bytes: int = 5_000_000_000,
) -> int:
  """Writes config.json, safetensors and the tokenizer; returns the bytes of the tensors.

  Args:
    to: The folder to write, which must not exist.
    experiment: The experiment of the variables.
    variables: The variables by name, with unrolled layers.
    dtype: Dtype of the written tensors; None keeps the stored dtypes.
    tokenizer: The tokenizer's file or folder; None: no tokenizer is written.
    report: Called with the number of tensors done and the number of all tensors.
    shard_bytes: Largest size of a file in bytes, unless it has only one tensor.
  """
  by_tensor = entries_by_tensor(hugging_face_entries(experiment))
  prefix = 'transformer.' if 'wte.weight' in by_tensor else ''
  as_stored = {
    name: np.dtype(entries[0].dtype or _dtype(dtype or variables[entries[0].ours].dtype.name))
    for name, entries in by_tensor.items()
  }
  shards = _shards(
    {name: entries[0].shape for name, entries in by_tensor.items()}, as_stored, shard_bytes
  )
  read = VariableReader(variables)
  done = size = 0
  weight_map: dict[str, str] = {}
  with unfinished_folder(to) as folder:
    for i, shard in enumerate(shards):
      many = f'model-{i + 1:05d}-of-{len(shards):05d}.safetensors'
      name = many if len(shards) > 1 else 'model.safetensors'
      tensors = {prefix + t: (by_tensor[t][0].shape, as_stored[t]) for t in shard}
      weight_map |= dict.fromkeys(tensors, name)
      with (folder / name).open('wb') as f:
        f.write(header(tensors))
        for tensor in shard:
          for block in written_blocks(by_tensor[tensor], read, as_stored[tensor]):
            size += f.write(block)
          done += 1
          report(done, len(by_tensor))
    if len(shards) > 1:
      index = {'metadata': {'total_size': size}, 'weight_map': weight_map}
      (folder / model_files.INDEX).write_text(json.dumps(index, indent=2))
    kinds = {d.name for d in as_stored.values()} - {*_INTEGERS}
    config = config_json(experiment, kinds.pop() if len(kinds) == 1 else 'float32', tokenizer)
    generation = written_generation(experiment, config)
    for name, contents in {'config.json': config, 'generation_config.json': generation}.items():
      (folder / name).write_text(json.dumps(contents, indent=2) + '\n')
    copy_tokenizer(tokenizer, folder)
    if experiment.CHAT_TEMPLATE:  # of several templates, transformers takes this one
      (folder / CHAT_TEMPLATE).write_text(experiment.CHAT_TEMPLATE, encoding='utf-8')
      (folder / TOOL_TEMPLATE).unlink(missing_ok=True)
  return size


def header(tensors: Mapping[str, tuple[tuple[int, ...], np.dtype]]) -> bytes:
  """Returns the start of a safetensors file: the length of a JSON table of contents, and the table.

  The format is that of https://huggingface.co/docs/safetensors. The package can only write tensors
  that are all in memory. After this header, they can be written one by one.
  """
  table: JsonObject = {'__metadata__': {'format': 'pt'}}
  offset = 0
  for name, (shape, dtype) in tensors.items():
    end = offset + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    named = (_NAMES | _INTEGERS)[dtype.name]
    table[name] = {'dtype': named, 'shape': list(shape), 'data_offsets': [offset, end]}
    offset = end
  text = json.dumps(table, separators=(',', ':')).encode()
  text += b' ' * (-len(text) % 8)
  return len(text).to_bytes(8, 'little') + text


def _shards(
  shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, np.dtype], shard_bytes: int
) -> list[list[str]]:
  """Returns the names of the tensors of each file."""
  shards: list[list[str]] = [[]]
  size = 0
  for name, shape in shapes.items():
    needed = int(np.prod(shape, dtype=np.int64)) * dtypes[name].itemsize
    if shards[-1] and size + needed > shard_bytes:
      shards.append([])
      size = 0
    shards[-1].append(name)
    size += needed
  return shards


def _dtype(name: str) -> DTypeLike:
  if name not in _NAMES:
    raise UserError(f'variables of dtype {name} cannot be written; --dtype chooses another')
  return ml_dtypes.bfloat16 if name == 'bfloat16' else name
