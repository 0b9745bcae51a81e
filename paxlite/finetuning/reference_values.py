"""Computes once what a frozen model makes of a run's rows: PRECOMPUTE_REFERENCE, TEACHER_TOP_K.

The values are kept in the folder of the run, so that a restart reads them.
"""

import dataclasses
import functools
import io
import json
import pathlib
import zlib
from collections.abc import Callable, Mapping, Sequence

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from paxlite.checkpointing.restore import Restore, RestorePlan
from paxlite.checkpointing.source import Source, find_source
from paxlite.cli.terminal import say
from paxlite.config.templates import config_text
from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject
from paxlite.core.run_files import write_file
from paxlite.core.trees import PyTree
from paxlite.core.variable_names import path_name
from paxlite.core.wording import amount
from paxlite.data.base import Input, RowInput
from paxlite.data.device_batches import DeviceBatches
from paxlite.files.json_files import read_object
from paxlite.finetuning.chats.sft import SftRows
from paxlite.finetuning.reference import Reference
from paxlite.finetuning.stored_values import StoredValues
from paxlite.layers.sown import SOWN
from paxlite.losses.outputs import Outputs
from paxlite.parallel import partitioning
from paxlite.parallel.quantized_weights import quantizations
from paxlite.programs.run import Run
from paxlite.programs.run_checks import TRAINING, check_reference_tokenizer
from paxlite.programs.weights_model import reference_of, restore_of
from paxlite.training.callbacks import Callback
from paxlite.training.sharded_task import ShardedTask
from paxlite.training.trainer import Trainer

ABOUT = 'about.json'


def callbacks(run: Run, trainer: Trainer) -> list[Callback]:
  """Returns no callbacks; raises UserError if the frozen model has other tokens than the run."""
  e = run.experiment
  if isinstance(e, StoredValues) and e.stored_arrays:
    check_reference_tokenizer(e.with_reference)
  return []


def fill(run: Run, inputs: Mapping[str, Input], beat: Callable[[], None]) -> None:
  """Puts what the frozen model makes of rows into rows that ask for it.

  Every process calls this. A run that goes on reads what its folder has. Values that are missing
  there are computed with the weights that the others are of.

  Args:
    run: The run.
    inputs: The training data and those of evaluations, by name.
    beat: Called after each batch.

  Raises:
    UserError: The weights of the frozen model do not fit, or an input has other rows.
  """
  e = run.experiment
  if not isinstance(e, StoredValues) or not e.stored_arrays:
    return
  whole = dataclasses.replace(run, experiment=e.with_reference)
  folders = {name: run.folder / 'reference' / name for name in inputs}
  begun = bool(run.checkpoints().steps())
  noted = [w for f in folders.values() if begun and (w := _weights_of(f)) is not None]
  model = functools.cache(lambda: _Model(whole, e, noted[0] if noted else None))
  for name, data in inputs.items():
    if not isinstance(data, RowInput) or not isinstance(data.source, SftRows):
      raise UserError(
        f'{data.name} cannot store outputs of the frozen model before training: use prompts and '
        'answers in TRAIN_FILES'
      )
    reference = config_text(whole.experiment.build_task().reference)
    arrays = sorted((name, *array) for name, array in e.stored_arrays.items())
    identity = {
      'tokens': data.source.tokens_fingerprint,
      'packing': data.source.rows_fingerprint,
      'model': zlib.crc32(f'{reference} {e.FROZEN_DTYPE} {arrays} {e.made_with}'.encode()),
    }
    found = _read(folders[name], identity, list(e.stored_arrays))
    if found is not None and not begun and _weights_of(folders[name]) != _source(whole).fingerprint:
      found = None
    if not _all_agree(found is not None):
      parts = e.NUM_MICROBATCHES if name == TRAINING and e.num_stages == 1 else 1
      found = model().values(data, data.batch_size // parts, beat)
      if (jax.process_index() == 0 or run.own_disks) and not run.read_only:
        _write(folders[name], identity | {'weights': model().fingerprint}, found)
    assert found is not None
    data.source.row_values |= found


def _source(run: Run, frozen: int | None = None) -> Source:
  """Returns the weights of the reference; those with the fingerprint `frozen`, if it is given."""
  return find_source(_restore(run).path, frozen=frozen)


def _restore(run: Run) -> Restore:
  restore = reference_of(run.experiment) or restore_of(run.experiment)
  assert restore is not None, 'which train_input has refused'
  return restore


class _Model:
  """The frozen model with its weights, on the mesh of a run."""

  def __init__(self, run: Run, stores: StoredValues, frozen: int | None):
    self._e, self._stores = run.experiment, stores
    source = _source(run, frozen)
    self.fingerprint = source.fingerprint
    self._task = ShardedTask(
      fdl.build(self._e.build_task()), self._e.mesh(), self._e.rules, self._e.SEED
    )
    reference = self._task.task.reference
    assert isinstance(reference, Reference)
    self._model = reference.model
    self._params = self._restored(_restore(run), source)

  def _restored(self, restore: Restore, source: Source) -> PyTree:
    task, mesh, rules = self._task.task, self._task.mesh, self._task.rules
    with partitioning.declared_by(rules), task.context():
      tokens = jnp.zeros((1, 1), jnp.int32)
      init = lambda: {'params': self._model.init(jax.random.key(0), tokens)['params']}
      boxed = jax.eval_shape(init)
    quantized = quantizations(boxed, mesh, rules)

    def like(path: jax.tree_util.KeyPath, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
      is_kept = x.dtype != jnp.float32 or path_name(path[:-1]) in quantized
      return x if is_kept else x.update(dtype=jnp.dtype(task.frozen_dtype))

    shapes = partitioning.sharded_shapes(boxed, mesh, rules)
    abstract = jax.tree_util.tree_map_with_path(like, shapes)
    plan = RestorePlan(dataclasses.replace(restore, whole_state=False), abstract, source, quantized)
    load = lambda path, x: plan.load(path_name(path), x)
    params: PyTree = jax.tree_util.tree_map_with_path(load, abstract)['params']
    return params

  def values(
    self, data: RowInput, batch_size: int, beat: Callable[[], None]
  ) -> dict[str, np.ndarray]:
    """Returns the arrays [rows, T, …] of all rows, by their names."""
    count = len(data.source)
    if jax.process_index() == 0:
      say(f"Computing the frozen model's outputs for {amount(count, 'row')}, once")
    whole = dataclasses.replace(data, batch_size=batch_size, max_eval_batches=None)
    batches = DeviceBatches(whole, self._task.batch_sharding, None, self._e.max_segments_per_seq)
    compute = jax.jit(self._of_batch)
    found = []
    with self._task.compiling():
      for batch in batches:
        for name in self._stores.stored_arrays:
          batch.pop(name)
        found.append(multihost_utils.process_allgather(compute(self._params, batch), tiled=True))
        beat()
    names = self._stores.stored_arrays
    return {name: np.concatenate([each[name] for each in found])[:count] for name in names}

  def _of_batch(self, params: PyTree, batch: Mapping[str, jax.Array]) -> Mapping[str, jax.Array]:
    with partitioning.activate(self._task.mesh, self._task.rules):
      return self._stores.made_of(
        Outputs(self._model.bind({'params': params}, mutable=SOWN), batch)
      )


def _read(
  folder: pathlib.Path, identity: JsonObject, names: Sequence[str]
) -> dict[str, np.ndarray] | None:
  """Returns the arrays of a folder that are whole and of this identity; None if there are none."""
  about = _about(folder)
  if any(about.get(key) != value for key, value in identity.items()):
    return None
  try:
    arrays = {name: np.load(folder / f'{name}.npy') for name in names}
  except (OSError, ValueError, EOFError):
    return None
  return arrays if about.get('checksum') == _checksum(arrays) else None


def _weights_of(folder: pathlib.Path) -> int | None:
  """Returns the fingerprint of the weights that the arrays of a folder are of."""
  found = _about(folder).get('weights')
  return found if isinstance(found, int) else None


def _about(folder: pathlib.Path) -> JsonObject:
  about = folder / ABOUT
  try:
    return read_object(about) if about.is_file() else {}
  except UserError:  # damaged
    return {}


def _write(folder: pathlib.Path, about: JsonObject, arrays: Mapping[str, np.ndarray]) -> None:
  folder.mkdir(parents=True, exist_ok=True)
  (folder / ABOUT).unlink(missing_ok=True)  # which says that the others are whole
  for name, array in arrays.items():
    write_array(folder / f'{name}.npy', array)
  write_file(folder / ABOUT, (json.dumps(about | {'checksum': _checksum(arrays)}) + '\n').encode())


def _checksum(arrays: Mapping[str, np.ndarray]) -> int:
  found = 0
  for _, array in sorted(arrays.items()):
    found = zlib.crc32(np.ascontiguousarray(array), found)
  return found


def _all_agree(is_there: bool) -> bool:
  return bool(np.all(multihost_utils.process_allgather(np.int32(is_there))))


def write_array(path: pathlib.Path, array: np.ndarray) -> None:
  """Writes the file of np.save, whole or not at all.

  np.save itself says of a full disk how many values are missing, and not why.

  Raises:
    OSError: The file cannot be written; it is named, and the error has its number.
  """
  array = np.asarray(array, order='C')  # np.ascontiguousarray makes a scalar an array [1]
  head = io.BytesIO()
  np.lib.format.write_array_header_1_0(head, np.lib.format.header_data_from_array_1_0(array))
  write_file(path, head.getvalue(), array.reshape(-1).view(np.uint8).data)
