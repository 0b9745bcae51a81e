"""Writes a model as a GGUF file, tensor by tensor."""

import logging
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from paxlite.checkpointing.variables import Variable
from paxlite.core import shell
from paxlite.core.errors import UserError
from paxlite.experiments.language_model import LanguageModel
from paxlite.weights import gguf_types
from paxlite.weights.gguf_families import architecture_of, model_fields
from paxlite.weights.gguf_tokenizer_writer import tokenizer_fields
from paxlite.weights.tensor_entries import Entry
from paxlite.weights.unfinished_folder import unfinished_folder
from paxlite.weights.written_tensors import VariableReader, entries_by_tensor, written_tensor

log = logging.getLogger('paxlite')


class Written(NamedTuple):
  """The contents of a file."""

  name: str  # the name of the file
  size: int  # bytes of the tensors
  kinds: str  # how many tensors have each type, as a message shows it


def write_folder(
  to: pathlib.Path,
  experiment: LanguageModel,
  variables: Mapping[str, Variable],
  kind: str | None,
  tokenizer: pathlib.Path | None,
  report: Callable[[int, int], None],
  model: str = '',
) -> Written:
  """Writes a folder with one GGUF file, which holds the tokenizer and the chat template, too.

  Args:
    to: The folder to write, which must not exist.
    experiment: The experiment of the variables.
    variables: The variables by name, with unrolled layers.
    kind: The type of the tensors, one of gguf_types.TYPES; None: that of the stored dtype.
    tokenizer: The tokenizer's file or folder; None: the file has none.
    report: Called with the number of tensors done and the number of all tensors.
    model: The name of the model; '': that of the folder.

  Raises:
    UserError: llama.cpp has no such model or tokenizer. Nothing is written then.
  """
  try:
    from gguf import GGUFWriter
    from gguf.constants import GGML_QUANT_VERSION, LlamaFileType
  except ImportError:
    raise UserError(f'GGUF files need the package gguf: {shell.install("weights")}') from None

  architecture, config = architecture_of(experiment)
  if (config.get('rope_scaling') or {}).get('truncate') is False:
    log.warning('llama.cpp rounds the range of dimensions that YaRN blends; this model does not')
  by_tensor = entries_by_tensor(architecture.entries(experiment))
  kind = kind or _stored_kind(by_tensor, variables)
  fields: dict[str, object] = {
    'general.type': 'model',
    'general.name': model or to.name,
    'general.file_type': int(LlamaFileType[gguf_types.TYPES[kind][1]]),
    'general.quantization_version': GGML_QUANT_VERSION,
    **model_fields(architecture, config),
    **tokenizer_fields(experiment, tokenizer, architecture.shown),
  }
  constants = architecture.constants(config)
  shapes = {name: entries[0].shape for name, entries in by_tensor.items()}
  shapes |= {name: value.shape for name, value in constants.items()}
  kinds = {name: gguf_types.chosen(name, shape, kind) for name, shape in shapes.items()}
  name = f'model-{kind}.gguf'
  read = VariableReader(variables)
  with unfinished_folder(to) as folder:
    writer = GGUFWriter(folder / name, architecture.name)
    try:
      _add_fields(writer, fields)
      size = _add_tensors(writer, shapes, kinds)
      writer.write_header_to_file()
      writer.write_kv_data_to_file()
      writer.write_ti_data_to_file()
      for done, (tensor, shape) in enumerate(shapes.items()):
        value = constants.get(tensor)
        if value is None:
          value = written_tensor(by_tensor[tensor], read).astype(np.float32).reshape(shape)
        if offset := architecture.offset(tensor):
          value = value + np.float32(offset)
        writer.write_tensor_data(gguf_types.encoded(value, kinds[tensor]))
        report(done + 1, len(shapes))
    finally:
      writer.close()
  return Written(name, size, gguf_types.counted(kinds.values()))


def _stored_kind(by_tensor: Mapping[str, list[Entry]], variables: Mapping[str, Variable]) -> str:
  """Returns the type of the dtype that matrices are stored in."""
  rounded = lambda entry: gguf_types.chosen(entry.theirs, entry.shape, 'f16') != 'f32'
  matrices = [entries[0] for entries in by_tensor.values() if rounded(entries[0])]
  dtypes = {variables[entry.ours].dtype.name for entry in matrices}
  name = dtypes.pop() if len(dtypes) == 1 else 'float32'
  if name not in gguf_types.OF_DTYPES:
    raise UserError(f'variables of dtype {name} cannot be written as they are: choose a --type')
  return gguf_types.OF_DTYPES[name]


def _add_fields(writer: Any, fields: Mapping[str, object]) -> None:
  """Adds fields to gguf's GGUFWriter, which has a method for each type."""
  by_type = {bool: 'bool', int: 'uint32', float: 'float32', str: 'string'}
  for name, value in fields.items():
    getattr(writer, f'add_{by_type.get(type(value), "array")}')(name, value)


def _add_tensors(
  writer: Any, shapes: Mapping[str, tuple[int, ...]], kinds: Mapping[str, str]
) -> int:
  """Tells gguf's GGUFWriter of tensors that are written later; returns their bytes."""
  size = 0
  for name, shape in shapes.items():
    stored = gguf_types.byte_shape(shape, kinds[name])
    nbytes = int(np.prod(stored, dtype=np.int64))
    kind = gguf_types.quantization(kinds[name])
    writer.add_tensor_info(name, stored, np.dtype(np.uint8), nbytes, kind)
    size += nbytes
  return size
