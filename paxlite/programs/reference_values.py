"""Computes once what a frozen reference model makes of the rows of a run: REFERENCE_ONCE.

The values are kept in the folder of the run, so that a restart reads them.
"""

import dataclasses
import functools
import json
import pathlib
import zlib
from collections.abc import Callable, Mapping

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
from paxlite.core.trees import PyTree
from paxlite.core.variable_names import path_name
from paxlite.data.base import Input, RowInput
from paxlite.data.device_batches import DeviceBatches
from paxlite.data.sft import SftRows
from paxlite.experiments.parts.preferences import Preferences
from paxlite.files.json_files import read_object
from paxlite.layers.sown import SOWN
from paxlite.losses.outputs import Outputs
from paxlite.parallel import partitioning
from paxlite.parallel.encoded_weights import encodings
from paxlite.programs.run import Run
from paxlite.training.reference import LOG_PROBS, Reference
from paxlite.training.sharded_task import ShardedTask

TRAINING = 'training'  # the name of the training data


def fill(run: Run, inputs: Mapping[str, Input], beat: Callable[[], None]) -> None:
  """Puts the log-probabilities of the reference model into rows that ask for them.

  Every process calls this. A run that goes on reads what its folder has. Values that are missing
  there are computed with the weights that the others are of.

  Args:
    run: The run.
    inputs: The training data and those of evaluations, by name.
    beat: Called after each batch.

  Raises:
    UserError: The weights of the reference do not fit, or an input has other rows.
  """
  e = run.experiment
  if not isinstance(e, Preferences) or not e.REFERENCE_ONCE or e.reference() is None:
    return
  whole = dataclasses.replace(run, experiment=e.computing_reference)
  files = {name: run.folder / 'reference' / f'{name}.npy' for name in inputs}
  begun = bool(run.checkpoints().steps())
  noted = [w for f in files.values() if begun and (w := _weights_of(f)) is not None]
  model = functools.cache(lambda: _Model(whole, noted[0] if noted else None))
  for name, data in inputs.items():
    if not isinstance(data, RowInput) or not isinstance(data.source, SftRows):
      raise UserError(f'REFERENCE_ONCE: {data.name} has no rows that can hold its values')
    reference = config_text(whole.experiment.build_task().reference)
    identity = {
      'tokens': data.source.tokens_fingerprint,
      'packing': data.source.rows_fingerprint,
      'model': zlib.crc32(f'{reference} {e.FROZEN_DTYPE}'.encode()),
    }
    found = _read(files[name], identity)
    if found is not None and not begun and _weights_of(files[name]) != _source(whole).fingerprint:
      found = None
    if not _all_agree(found is not None):
      parts = e.NUM_MICROBATCHES if name == TRAINING and e.num_stages == 1 else 1
      found = model().log_probs(data, data.batch_size // parts, beat)
      if (jax.process_index() == 0 or run.own_disks) and not run.read_only:
        _write(files[name], identity | {'weights': model().fingerprint}, found)
    assert found is not None
    data.source.row_values[LOG_PROBS] = found


def _source(run: Run, frozen: int | None = None) -> Source:
  """Returns the weights of the reference; those with the fingerprint `frozen`, if it is given."""
  return find_source(_restore(run).path, frozen=frozen)


def _restore(run: Run) -> Restore:
  restore = run.reference or run.restore
  assert restore is not None, 'which train_input has refused'
  return restore


class _Model:
  """The reference model with its weights, on the mesh of a run."""

  def __init__(self, run: Run, frozen: int | None):
    self._e = run.experiment
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
    encoded = encodings(boxed, mesh, rules)

    def like(path: jax.tree_util.KeyPath, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
      is_kept = x.dtype != jnp.float32 or path_name(path[:-1]) in encoded
      return x if is_kept else x.update(dtype=jnp.dtype(task.frozen_dtype))

    shapes = partitioning.sharded_shapes(boxed, mesh, rules)
    abstract = jax.tree_util.tree_map_with_path(like, shapes)
    plan = RestorePlan(dataclasses.replace(restore, whole_state=False), abstract, source, encoded)
    load = lambda path, x: plan.load(path_name(path), x)
    params: PyTree = jax.tree_util.tree_map_with_path(load, abstract)['params']
    return params

  def log_probs(self, data: RowInput, batch_size: int, beat: Callable[[], None]) -> np.ndarray:
    """Returns the log-probability of each label of all rows, float32 [rows, T]."""
    count = len(data.source)
    if jax.process_index() == 0:
      say(f'Computing the log-probabilities of the reference for {count:,} rows, once')
    whole = dataclasses.replace(data, batch_size=batch_size, max_eval_batches=None)
    batches = DeviceBatches(whole, self._task.batch_sharding, None, self._e.max_segments_per_seq)
    compute = jax.jit(self._of_batch)
    found = []
    with self._task.compiling():
      for batch in batches:
        batch.pop(LOG_PROBS)
        found.append(multihost_utils.process_allgather(compute(self._params, batch), tiled=True))
        beat()
    return np.concatenate(found)[:count]

  def _of_batch(self, params: PyTree, batch: Mapping[str, jax.Array]) -> jax.Array:
    with partitioning.activate(self._task.mesh, self._task.rules):
      return Outputs(self._model.bind({'params': params}, mutable=SOWN), batch).log_probs


def _read(file: pathlib.Path, identity: JsonObject) -> np.ndarray | None:
  """Returns the values of a file that is whole and of this identity."""
  about = _about(file)
  if any(about.get(key) != value for key, value in identity.items()):
    return None
  try:
    values: np.ndarray = np.load(file)
  except (OSError, ValueError, EOFError):
    return None
  return values if about.get('checksum') == zlib.crc32(values.tobytes()) else None


def _weights_of(file: pathlib.Path) -> int | None:
  """Returns the fingerprint of the weights that the values of a file are of."""
  found = _about(file).get('weights')
  return found if isinstance(found, int) else None


def _about(file: pathlib.Path) -> JsonObject:
  about = file.with_suffix('.json')
  try:
    return read_object(about) if about.is_file() else {}
  except UserError:  # damaged
    return {}


def _write(file: pathlib.Path, about: JsonObject, values: np.ndarray) -> None:
  file.parent.mkdir(exist_ok=True)
  file.with_suffix('.json').unlink(missing_ok=True)  # which says that the other is whole
  np.save(file, values)
  about = about | {'checksum': zlib.crc32(values.tobytes())}
  file.with_suffix('.json').write_text(json.dumps(about) + '\n')


def _all_agree(is_there: bool) -> bool:
  return bool(np.all(multihost_utils.process_allgather(np.int32(is_there))))
