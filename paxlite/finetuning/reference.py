"""A frozen model next to the trained one, such as a teacher or a reference for preferences."""

import dataclasses

import jax

from paxlite.core.trees import PyTree
from paxlite.core.variable_names import REFERENCE
from paxlite.layers.language_model import TransformerLm
from paxlite.layers.sown import SOWN
from paxlite.losses.metrics import Batch
from paxlite.losses.outputs import Outputs


@dataclasses.dataclass(frozen=True)
class Reference:
  """A frozen model with outputs that losses read.

  Attributes:
    model: The model.
    is_base: Whether it reads the parameters of the trained model, which LoRA has frozen. If not, it
      has parameters of its own, below the name REFERENCE.
  """

  model: TransformerLm
  is_base: bool = False

  def outputs(self, params: PyTree, batch: Batch) -> Outputs:
    """Returns what the reference makes of a batch, without a gradient.

    Args:
      params: The parameters of the task.
      batch: The batch.
    """
    return Outputs(self.model.bind({'params': self.params_of(params)}, mutable=SOWN), batch)

  def params_of(self, params: PyTree) -> PyTree:
    """Returns the parameters of the model, without a gradient, of those of the task."""
    return jax.lax.stop_gradient(params if self.is_base else params[REFERENCE])


LOG_PROBS = 'reference_log_probs'  # the array of a batch that StoredReference reads


@dataclasses.dataclass(frozen=True)
class StoredReference:
  """A reference model with log-probabilities from before training, stored in batches.

  Attributes:
    is_base: That it has no parameters of its own.
  """

  is_base: bool = True

  @property
  def model(self) -> None:
    """None: its outputs are in batches."""

  def outputs(self, params: PyTree, batch: Batch) -> 'StoredOutputs':
    """Returns what the reference has made of a batch."""
    return StoredOutputs(batch[LOG_PROBS])


@dataclasses.dataclass(frozen=True)
class StoredOutputs:
  """The part of Outputs that is stored.

  Attributes:
    log_probs: The logarithm of the probability of each label, float32 [B, T], in nats.
  """

  log_probs: jax.Array
