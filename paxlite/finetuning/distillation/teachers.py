"""Several teachers, each for the answers to the prompts that name it.

Only the teacher of an answer computes it, before the step that trains on it. The batch has its
values, so that the step knows no teacher.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from paxlite.checkpointing.restore import Restore, RestorePlan
from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject
from paxlite.core.trees import PyTree
from paxlite.core.variable_names import REFERENCE, path_name
from paxlite.data.record_files import Record
from paxlite.finetuning.distillation.distillation_losses import (
  TEACHER_IDS,
  TEACHER_LOG_PROBS,
  most_likely,
)
from paxlite.finetuning.distillation.sampled_divergence import TEACHER_LABEL, label_log_probs
from paxlite.finetuning.reference import Reference
from paxlite.finetuning.reinforcement.row_parts import of_rows
from paxlite.layers.language_model import LogitFactors
from paxlite.losses.metrics import Batch
from paxlite.parallel import partitioning
from paxlite.parallel.quantized_weights import quantizations
from paxlite.programs.run_checks import check_tokenizer

if TYPE_CHECKING:
  from paxlite.programs.run import Run
  from paxlite.training.callbacks import Callback
  from paxlite.training.trainer import Trainer


class Teachers:
  """The teachers of a run.

  Their weights are read when the first answer needs them, and stay in memory.

  Args:
    paths: The folder of each teacher's weights, by its name.
    references: Their models, in the same order.
    key: The key of a record that names its teacher.
    mesh: The mesh of the run.
    rules: Maps logical axes to mesh axes.
    dtype: The dtype that their weights are kept in.
    rows: The number of rows that are computed at a time.
    vocab_size: The ids that all models have.
    temperature: Divides the logits.
    top_k: The most likely tokens that the batch has, with the rest as one; 0: it has the
      log-probability of each label.

  Raises:
    UserError: The weights are not there, or do not fit.
  """

  def __init__(
    self,
    paths: Mapping[str, str],
    references: Sequence[Reference],
    key: str,
    mesh: Mesh,
    rules: partitioning.Rules,
    dtype: str,
    rows: int,
    vocab_size: int,
    temperature: float,
    top_k: int = 0,
  ):
    self._mesh, self._rules, self._rows = mesh, rules, rows
    self._names, self._key = list(paths), key
    self._vocab_size, self._temperature, self._top_k = vocab_size, temperature, top_k
    self._abstract = [self._shapes(reference, dtype) for reference in references]
    self._plans = [
      RestorePlan(Restore(path), like, None, quantized)
      for path, (like, quantized) in zip(paths.values(), self._abstract, strict=True)
    ]
    self._computes = [jax.jit(self._traced(reference)) for reference in references]
    self._params: list[PyTree] = [None] * len(references)

  def number(self, record: Record) -> int:
    """Returns the number of the teacher of a record; raises UserError if it names none."""
    name = record.get(self._key)
    if name not in self._names:
      known = ', '.join(self._names)
      raise UserError(f'its {self._key!r} is {name!r} and names no teacher; TEACHERS has {known}')
    return self._names.index(name)

  @property
  def fingerprints(self) -> JsonObject:
    """A number of the weights of each teacher, by its name."""
    found = zip(self._names, self._plans, strict=True)
    return {name: plan.source.fingerprint for name, plan in found}

  def shapes(self, like: jax.ShapeDtypeStruct) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of the arrays of a batch, of which others are as `like`."""
    of = lambda dtype, *last: jax.ShapeDtypeStruct((*like.shape, *last), dtype)
    ids = {TEACHER_IDS: of('int32', max(1, self._top_k))}
    if self._top_k:
      return ids | {TEACHER_LOG_PROBS: of('float32', self._top_k + 1)}
    return ids | {TEACHER_LABEL: of('float32')}

  def __call__(
    self, number_BT: np.ndarray, arrays: Mapping[str, np.ndarray]
  ) -> dict[str, np.ndarray]:
    """Returns what the teachers say of rows, which every process has.

    Args:
      number_BT: The number of the teacher of each token.
      arrays: The rows.
    """
    like = jax.ShapeDtypeStruct(number_BT.shape, 'int32')
    found = {name: np.zeros(x.shape, x.dtype) for name, x in self.shapes(like).items()}
    for teacher, compute in enumerate(self._computes):
      is_its_BT = (number_BT == teacher) & (arrays['weights'] > 0)
      rows = np.flatnonzero(is_its_BT.any(1))
      if not len(rows):
        continue
      its = {name: x[rows] for name, x in arrays.items()}
      size = (self._rows, self._mesh, self._rules)
      for name, x in of_rows(compute, self._loaded(teacher), its, *size).items():
        found[name][is_its_BT] = x[is_its_BT[rows]]
    return found

  def _shapes(self, reference: Reference, dtype: str) -> tuple[PyTree, Mapping]:
    init = lambda: {
      'params': reference.model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))['params']
    }
    with partitioning.declared_by(self._rules):
      boxed = jax.eval_shape(init)
    quantized = quantizations(boxed, self._mesh, self._rules)

    def like(path: jax.tree_util.KeyPath, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
      is_kept = x.dtype != jnp.float32 or path_name(path[:-1]) in quantized
      return x if is_kept else x.update(dtype=jnp.dtype(dtype))

    shapes = partitioning.sharded_shapes(boxed, self._mesh, self._rules)
    return jax.tree_util.tree_map_with_path(like, shapes), quantized

  def _loaded(self, teacher: int) -> PyTree:
    if self._params[teacher] is None:
      load = lambda path, like: self._plans[teacher].load(path_name(path), like)
      whole = jax.tree_util.tree_map_with_path(load, self._abstract[teacher][0])
      self._params[teacher] = whole['params']
    return self._params[teacher]

  def _traced(self, reference: Reference) -> Callable[[PyTree, Batch], dict[str, jax.Array]]:
    def compute(params: PyTree, batch: Batch) -> dict[str, jax.Array]:
      with partitioning.activate(self._mesh, self._rules):
        outputs = reference.outputs({REFERENCE: params}, batch)
        return self._of(outputs.logit_factors.of_first(self._vocab_size), batch)

    return compute

  def _of(self, factors: LogitFactors, batch: Batch) -> dict[str, jax.Array]:
    if self._top_k:
      ids_BTK, log_probs = most_likely(factors, self._top_k, self._temperature)
      return {TEACHER_IDS: ids_BTK, TEACHER_LOG_PROBS: log_probs}
    log_probs_BT, ids_BT = label_log_probs(factors, batch['labels'], self._temperature)
    return {TEACHER_IDS: ids_BT[..., None].astype(jnp.int32), TEACHER_LABEL: log_probs_BT}


def callbacks(run: 'Run', trainer: 'Trainer') -> 'list[Callback]':
  """Returns no callbacks; raises UserError if a teacher has other tokens than the run."""
  for path in getattr(run.experiment, 'teachers', {}).values():
    check_tokenizer(run.experiment, path)
  return []
