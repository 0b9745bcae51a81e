"""Writes a folder of imported weights: the contents of a checkpoint, without a run.

TO/state/params.embedding.emb_var/…   every variable, in the dtype of its source
TO/experiment.json                    the experiment of the model
TO/checksums.json
TO/origin.json                        the folder of a model with images that the weights are of
TO/tokenizer.json …                   the tokenizer, where there is one
"""

import json
import logging
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from paxlite.checkpointing.checksums import Sum, write_checksums
from paxlite.checkpointing.variables import write_variable
from paxlite.core.errors import UserError, listed
from paxlite.core.json_text import JsonObject
from paxlite.data.tokenizer_copies import copy_tokenizer
from paxlite.experiments.language_model import LanguageModel
from paxlite.weights.tensor_entries import Entry
from paxlite.weights.unfinished_folder import unfinished_folder

log = logging.getLogger('paxlite')

ORIGIN = 'origin.json'
IMPORTED_FROM = 'imported_from'  # in experiment.json


class Tensors(Protocol):
  """The tensors of a published model, read one at a time."""

  @property
  def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

  def read(self, name: str) -> np.ndarray: ...


def write_weights(
  to: pathlib.Path,
  experiment: LanguageModel,
  entries: Sequence[Entry],
  tensors: Tensors,
  tokenizer_from: pathlib.Path | None,
  report: Callable[[int, int], None],
  origin: JsonObject | None = None,
  named: str = '',
) -> int:
  """Writes the folder, tensor by tensor; a failure leaves no folder behind.

  Args:
    to: The folder to write, which must not exist.
    entries: Entries of all tensors that the model needs.
    tensors: The tensors of the source, which check_tensors must have accepted.
    tokenizer_from: A folder whose tokenizer files are copied, or one such file.
    report: Called with the number of tensors done and the number of all tensors.
    origin: What is remembered of a model with images; see whole_model.origin_of.
    named: Where the weights come from: a folder, an address, or a name of the Hub; ''.

  Returns:
    Bytes of the variables.
  """
  by_variable: dict[str, list[Entry]] = {}
  for entry in entries:
    by_variable.setdefault(entry.ours, []).append(entry)
  size = done = 0
  sums: dict[str, Sum] = {}
  with unfinished_folder(to) as folder:
    for ours, parts in by_variable.items():
      value, shape = _variable(parts, tensors)
      name = f'params.{ours.replace("/", ".")}'
      if has_nan(value):
        theirs = ', '.join(part.theirs for part in parts)
        log.warning('%s: has NaN values, so all that the model computes is NaN', theirs)
      chunk, sums[chunk] = write_variable(folder / 'state', name, value, shape)
      size += value.nbytes
      done += len(parts)
      del value
      report(done, len(entries))
    copy_tokenizer(tokenizer_from, folder)
    write_identity(folder, experiment, named)
    if origin is not None:
      (folder / ORIGIN).write_text(json.dumps(origin, indent=2) + '\n')
    write_checksums(folder, sums)
  return size


def has_nan(value: np.ndarray) -> bool:
  """Returns whether an array of floating-point numbers has one that is NaN."""
  # NumPy is slow with numbers of 16 bits, so their bits are compared as integers
  largest = {'bfloat16': 0x7F80, 'float16': 0x7C00}.get(value.dtype.name)  # bits of infinity
  if largest is None:
    return value.dtype.kind == 'f' and bool(np.isnan(np.max(value, initial=0)))
  signed, unsigned = (int(np.max(value.view(x), initial=0)) for x in (np.int16, np.uint16))
  return signed > largest or unsigned > 0x8000 + largest


def write_identity(folder: pathlib.Path, experiment: LanguageModel, named: str = '') -> None:
  """Writes experiment.json, which names the experiment of the weights as in a run.

  `named` is where they were imported from.
  """
  cls = type(experiment)
  values = experiment.values()
  # All backends but USE_TE=layer have the same weights, whichever backend the environment chose.
  if values['USE_TE'] != 'layer':
    values |= experiment.plain_backend
  identity = {'experiment': f'{cls.__module__}.{cls.__qualname__}', 'values': values}
  identity |= {IMPORTED_FROM: named} if named else {}
  (folder / 'experiment.json').write_text(json.dumps(identity, indent=2) + '\n')


def check_tensors(
  entries: Sequence[Entry], shapes: Mapping[str, tuple[int, ...]], ignored: str
) -> None:
  """Raises UserError unless `shapes` are exactly the shapes of the entries' tensors.

  The message names tensors that are missing, left over or of another shape. `ignored` is a regular
  expression for the names of tensors that are not weights (buffers, tied copies).
  """
  wanted = {e.theirs: e.shape for e in entries}
  problems = [f'{name} is missing' for name in wanted.keys() - shapes.keys()]
  problems += [
    f'{name} {list(shape)} is not in the model'
    for name, shape in shapes.items()
    if name not in wanted and not re.fullmatch(ignored, name)
  ]
  problems += [
    f'{name} is {list(shapes[name])} and the model has {list(shape)}'
    for name, shape in wanted.items()
    if name in shapes and tuple(shapes[name]) != tuple(shape)
  ]
  if problems:
    raise UserError(f'the tensors do not match the model: {listed(problems)}')


def _variable(parts: Sequence[Entry], tensors: Tensors) -> tuple[np.ndarray, tuple[int, ...]]:
  """Returns the elements of a variable in its order, and the variable's shape."""
  first = parts[0]
  if first.part is None:
    return first.to_ours(first.view(tensors.read(first.theirs))), first.our_shape
  whole: np.ndarray | None = None
  for entry in parts:
    tensor = tensors.read(entry.theirs)
    if whole is None:
      whole = np.empty(entry.our_shape, tensor.dtype)
    if tensor.dtype != whole.dtype:
      raise UserError(f'{entry.theirs} is {tensor.dtype} and {first.theirs} {whole.dtype}')
    view = entry.to_ours(entry.view(tensor))
    whole[entry.part].reshape(view.shape)[...] = view
  assert whole is not None
  return whole, first.our_shape
