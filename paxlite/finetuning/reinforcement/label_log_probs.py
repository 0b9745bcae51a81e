"""The log-probabilities of labels before the first update of a rollout."""

from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import Mesh

from paxlite.core.trees import PyTree
from paxlite.finetuning.reinforcement.policy_loss import tempered
from paxlite.finetuning.reinforcement.row_parts import of_rows
from paxlite.layers.language_model import TransformerLm
from paxlite.layers.sown import SOWN
from paxlite.losses.outputs import Outputs
from paxlite.parallel import partitioning

_READ = 'ids', 'labels', 'weights', 'segment_ids', 'segment_pos'


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
    read = {name: batch[name] for name in _READ if name in batch}
    found: np.ndarray = of_rows(self._compute, params, read, self._rows, self._mesh, self._rules)
    return found
