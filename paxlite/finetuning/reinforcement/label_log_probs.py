"""The log-probabilities of labels before the first update of a rollout."""

from collections.abc import Mapping

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from paxlite.core.trees import PyTree
from paxlite.data.base import one_segment
from paxlite.data.device_batches import to_mesh
from paxlite.finetuning.reinforcement.policy_loss import tempered
from paxlite.layers.language_model import TransformerLm
from paxlite.layers.sown import SOWN
from paxlite.losses.outputs import Outputs
from paxlite.parallel import partitioning

_READ = 'ids', 'labels', 'segment_ids', 'segment_pos'


class LabelLogProbs:
  """Computes log-probabilities as the train step does: with the same module, rows and weights.

  Those of the engine come from a cache, and differ by rounding.

  Args:
    model: The model that is trained.
    mesh: The mesh of the run.
    rules: Maps logical axes to mesh axes.
    temperature: See PolicyLoss.
    rows: The number of rows that the train step computes at a time.
  """

  def __init__(
    self, model: TransformerLm, mesh: Mesh, rules: partitioning.Rules, temperature: float, rows: int
  ):
    self._rows = rows
    self._mesh, self._rules = mesh, rules

    def compute(params: PyTree, batch: Mapping[str, jax.Array]) -> jax.Array:
      with partitioning.activate(mesh, rules):
        outputs = Outputs(model.bind({'params': params}, mutable=SOWN), batch)
        return tempered(outputs, batch['labels'], temperature)

    self._compute = jax.jit(compute)

  def __call__(self, params: PyTree, batch: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns log-probabilities of batch['labels'] after batch['ids'], float32 [B, T].

    Args:
      params: The parameters.
      batch: All rows, which every process has. Those without targets have zeros.
    """
    sharding = partitioning.batch_sharding(self._mesh, self._rules)
    mine = partitioning.process_rows(sharding, self._rows)
    is_empty = ~batch['weights'].any(1)
    order = np.argsort(is_empty, kind='stable')  # packed rows may be empty
    found = np.zeros(batch['ids'].shape, np.float32)
    for start in range(0, int((~is_empty).sum()), self._rows):
      here = np.resize(order[start : start + self._rows], self._rows)  # the last may be fewer
      part = {name: x[here[mine]] for name, x in batch.items() if name in _READ}
      if 'segment_ids' not in part:
        part |= one_segment(batch['weights'][here[mine]])
      with partitioning.activate(self._mesh, self._rules):
        on_mesh = self._compute(params, to_mesh(part, sharding, self._rows))
      found[here] = multihost_utils.process_allgather(on_mesh, tiled=True)
    return found
