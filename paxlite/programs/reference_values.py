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
from paxlite.checkpointing.source import find_source
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


def fill(run: Run, inputs: Mapping[str, Input], beat: Callable[[], None]) -> None:
  """Puts the log-probabilities of the reference model into rows that ask for them.

  Every process calls this. What the folder has is read, if it is of the same rows and weights.

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
  whole = dataclasses.replace(run, experiment=e.replaced(REFERENCE_ONCE=False))
  restore = whole.reference or whole.restore
  assert restore is not None, 'which validate and train_input have refused'
  model = functools.cache(lambda: _Model(whole, restore))
  for name, data in inputs.items():
    if not isinstance(data, RowInput) or not isinstance(data.source, SftRows):
      raise UserError(f'REFERENCE_ONCE: {data.name} has no rows that can hold its values')
    file = run.folder / 'reference' / f'{name}.npy'
    identity = {
      'rows': len(data.source),
      'tokens': data.source.tokens_fingerprint,
      'model': zlib.crc32(config_text(whole.experiment.build_task()).encode()),
      'weights': find_source(restore.path).fingerprint,
    }
    found = _read(file, identity)
    if not _all_agree(found is not None):
      found = model().log_probs(data, beat)
      if jax.process_index() == 0 and not run.read_only:
        _write(file, identity, found)
    assert found is not None
    data.source.row_values[LOG_PROBS] = found


class _Model:
  """The reference model with its weights, on the mesh of a run."""

  def __init__(self, run: Run, restore: Restore):
    self._e = run.experiment
    self._task = ShardedTask(
      fdl.build(self._e.build_task()), self._e.mesh(), self._e.rules, self._e.SEED
    )
    reference = self._task.task.reference
    assert isinstance(reference, Reference)
    self._model = reference.model
    self._params = self._restored(restore)

  def _restored(self, restore: Restore) -> PyTree:
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
    plan = RestorePlan(dataclasses.replace(restore, whole_state=False), abstract, None, encoded)
    load = lambda path, x: plan.load(path_name(path), x)
    params: PyTree = jax.tree_util.tree_map_with_path(load, abstract)['params']
    return params

  def log_probs(self, data: RowInput, beat: Callable[[], None]) -> np.ndarray:
    """Returns the log-probability of each label of all rows, float32 [rows, T]."""
    count = len(data.source)
    if jax.process_index() == 0:
      say(f'Computing the log-probabilities of the reference for {count:,} rows, once')
    parts = 1 if self._e.num_stages > 1 else self._e.NUM_MICROBATCHES
    whole = dataclasses.replace(data, batch_size=data.batch_size // parts, max_eval_batches=None)
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
  """Returns the values of a file that is complete and of this identity."""
  about = file.with_suffix('.json')
  if not file.is_file() or not about.is_file():
    return None
  stated = read_object(about)
  values = np.load(file)
  is_same = stated.pop('checksum', None) == zlib.crc32(values.tobytes()) and stated == identity
  return values if is_same else None


def _write(file: pathlib.Path, identity: JsonObject, values: np.ndarray) -> None:
  file.parent.mkdir(exist_ok=True)
  about = identity | {'checksum': zlib.crc32(values.tobytes())}
  file.with_suffix('.json').unlink(missing_ok=True)  # which says that the other is complete
  np.save(file, values)
  file.with_suffix('.json').write_text(json.dumps(about) + '\n')


def _all_agree(is_there: bool) -> bool:
  return bool(np.all(multihost_utils.process_allgather(np.int32(is_there))))
