"""Model outputs for a batch, as losses read them."""

import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import jax

from paxlite.core.errors import UserError
from paxlite.core.trees import PyTree
from paxlite.layers.cross_entropy import TokenLosses
from paxlite.layers.language_model import LogitFactors, TransformerLm
from paxlite.layers.multi_token_prediction import following
from paxlite.layers.sown import SOWN
from paxlite.losses.metrics import Batch

T = TypeVar('T')


class Outputs:
  """Model outputs for a batch, each computed when a loss first reads it.

  Args:
    model: The model, bound to its variables, with the collections of SOWN mutable.
    params: The parameters, for losses that read them; None if no loss has said that it does.
    reference: Makes the outputs of a frozen reference model; None if there is none.
  """

  def __init__(
    self,
    model: TransformerLm,
    batch: Batch,
    params: PyTree | None = None,
    reference: Callable[[], Any] | None = None,
  ):
    # bound once: all readers of a parameter share its gradient probe, which gets the sum of theirs
    self._model = model
    self._batch = batch
    self._params = params
    self._reference = reference
    self._computed: dict[Hashable, Any] = {}

  @functools.cached_property
  def hidden(self) -> jax.Array:
    """The output of the final norm, [B, T, D]."""
    batch = self._batch
    return self._model.hidden(batch['ids'], batch.get('segment_pos'), batch.get('segment_ids'))

  @property
  def sown(self) -> Mapping[str, PyTree]:
    """Loss terms and summaries of the layers: see layers/sown.py."""
    _ = self.hidden  # computing it is what sows them
    return {kind: self._model.variables.get(kind, {}) for kind in SOWN}

  @functools.cached_property
  def tokens(self) -> TokenLosses:
    """The cross-entropy of each label [B, T], and what belongs to it, without all logits."""
    return self._model.token_losses(self.hidden, self._batch['labels'])

  @functools.cached_property
  def predicted(self) -> list[jax.Array]:
    """The output of each prediction module, [B, T, D]."""
    batch = self._batch
    return self._model.predicted(
      self.hidden, batch['ids'], batch.get('segment_pos'), batch.get('segment_ids')
    )

  def tokens_after(self, distance: int) -> TokenLosses:
    """Returns `tokens` of the labels `distance` tokens later, which a prediction module predicts.

    Args:
      distance: 1 stands for the first module. Where its segment ends before, a token has no label.
    """

    def compute() -> TokenLosses:
      batch = self._batch
      labels_BT, _ = following(batch['labels'], distance, batch.get('segment_ids'))
      return self._model.token_losses(self.predicted[distance - 1], labels_BT)

    return self.once(('tokens_after', distance), compute)

  @property
  def log_probs(self) -> jax.Array:
    """The logarithm of the probability of each label, float32 [B, T], in nats."""
    return -self.tokens.xent

  @functools.cached_property
  def logits(self) -> jax.Array:
    """All logits, float32 [B, T, V]."""
    return self._model.logits(self.hidden)

  @property
  def logit_factors(self) -> LogitFactors:
    """The inputs of the logits, for losses that never hold all of them."""
    return self._model.logit_factors(self.hidden)

  def once(self, key: Hashable, compute: Callable[[], T]) -> T:
    """Returns compute(), which is called once for all calls with an equal key.

    A loss whose metrics need what its sum needs computes it once this way.
    """
    if key not in self._computed:
      self._computed[key] = compute()
    found: T = self._computed[key]
    return found

  @property
  def params(self) -> PyTree:
    """The parameters; raises UserError if the class of no loss states reads_params."""
    if self._params is None:
      raise UserError(
        'a loss reads outputs.params: its class must state `reads_params = True`, so that the '
        'parameters get its gradient for any GRADIENT_DTYPE'
      )
    return self._params

  @property
  def has_reference(self) -> bool:
    """Whether there is a reference model."""
    return self._reference is not None

  @functools.cached_property
  def reference(self) -> Any:
    """The Outputs of the reference model for the same batch, without dropout and gradients.

    If they were stored before training, they are log-probabilities alone. Raises UserError if the
    task has no reference.
    """
    if self._reference is None:
      raise UserError(
        'a loss reads outputs.reference, but the experiment has no reference: override its method '
        'reference(), as docs/library.md shows'
      )
    return self._reference()
