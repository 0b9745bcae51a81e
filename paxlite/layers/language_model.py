"""The decoder-only language model, and its loss for each token."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from paxlite.config.templates import Template, template_field
from paxlite.layers.cross_entropy import (
  TokenLosses,
  cap_logits,
  chunked_cross_entropy,
  cross_entropy,
)
from paxlite.layers.dropout import MicrobatchDropout
from paxlite.layers.embeddings import LmHead, LmHeadBias, TokenEmbedding
from paxlite.layers.multi_token_prediction import following
from paxlite.layers.norms import LayerNorm
from paxlite.layers.transformer import UnrolledTransformer
from paxlite.parallel.partitioning import shard


class LogitFactors(NamedTuple):
  """The inputs of logits, so that a loss need not hold all logits at once."""

  x_BTD: jax.Array  # activations
  w_VD: jax.Array  # the weight of the logits, in the dtype of x
  b_V: jax.Array | None  # a bias of the logits, or None
  cap: float  # the logits are capped by cap · tanh(logits / cap); ≤ 0 means no cap

  @property
  def vocab_size(self) -> int:
    return self.w_VD.shape[0]

  def of_first(self, size: int) -> 'LogitFactors':
    """Returns what the logits of the first ids of the vocabulary are computed from."""
    if size == self.vocab_size:
      return self
    return self._replace(w_VD=self.w_VD[:size], b_V=None if self.b_V is None else self.b_V[:size])

  def logits(self) -> jax.Array:
    """Returns the float32 logits [B, T, V] of these activations."""
    logits = jnp.einsum('BTD,VD->BTV', self.x_BTD, self.w_VD)
    logits = logits if self.b_V is None else logits + self.b_V
    logits = shard(logits, 'outer_batch', 'length', 'act_vocab')
    return cap_logits(logits.astype(jnp.float32), self.cap)


class TransformerLm(nn.Module):
  """A language model: embeddings, a stack of blocks, a final norm and logits."""

  # The token embedding. If head_tpl is None (tied), it also computes the logits.
  embedding_tpl: Template = template_field(TokenEmbedding)
  # an embedding of the position that is added; None if attention is rotary
  position_tpl: Template | None = None
  transformer_tpl: Template = template_field(UnrolledTransformer)  # the stack of blocks
  norm_tpl: Template = template_field(LayerNorm)  # the final norm
  head_tpl: Template | None = None  # a separate projection to the vocabulary, or None
  logits_bias_tpl: Template | None = None  # a bias that is added to the logits, or None
  logit_cap: float = 0.0  # the logits are capped by cap · tanh(logits / cap); ≤ 0 means no cap
  embedding_dropout: float = 0.0  # dropout rate of the sum of the embeddings
  # the loss is computed in this many chunks, so that all logits [B, T, V] never exist
  num_loss_chunks: int = 1
  # Modules that predict the tokens after the next one, each one token further than the one before;
  # see multi_token_prediction. The logits do not depend on them.
  prediction_tpls: Sequence[Template] = ()

  def setup(self) -> None:
    self.embedding = self.embedding_tpl()
    self.position_emb = None if self.position_tpl is None else self.position_tpl()
    self.transformer = self.transformer_tpl()
    self.final_ln = self.norm_tpl()
    self.softmax = None if self.head_tpl is None else self.head_tpl()
    self.logits_bias: LmHeadBias | None = (
      None if self.logits_bias_tpl is None else self.logits_bias_tpl()
    )
    self.dropout = MicrobatchDropout(self.embedding_dropout)
    self.predictions = [prediction_tpl() for prediction_tpl in self.prediction_tpls]

  def __call__(
    self,
    ids_BT: jax.Array,
    positions_BT: jax.Array | None = None,
    segment_ids_BT: jax.Array | None = None,
  ) -> jax.Array:
    """Maps token ids [B, T] to float32 logits [B, T, V].

    Args:
      ids_BT: Token ids.
      positions_BT: Position of each token in its segment; None means 0, 1, 2 …
      segment_ids_BT: Segment of each token; 0 is padding. A token sees only its own segment. None
        means one segment per row.
    """
    x_BTD = self.hidden(ids_BT, positions_BT, segment_ids_BT)
    if self.is_initializing():  # for the parameters of the modules
      self.predicted(x_BTD, ids_BT, positions_BT, segment_ids_BT)
    return self.logits(x_BTD)

  def token_losses(self, x_BTD: jax.Array, labels_BT: jax.Array) -> TokenLosses:
    """Maps the result of `hidden`, [B, T, D], to the cross-entropy of each label [B, T]."""
    if self.num_loss_chunks == 1:
      return cross_entropy(self._uncapped_logits(x_BTD), labels_BT, self.logit_cap)
    x_BTD, w_VD, b_V, cap = self.logit_factors(x_BTD)
    return chunked_cross_entropy(x_BTD, w_VD, b_V, labels_BT, cap, self.num_loss_chunks)

  def logit_factors(self, x_BTD: jax.Array) -> LogitFactors:
    """Maps the result of `hidden`, [B, T, D], to what the logits are computed from."""
    x_BTD, w_VD = self._head.factors(x_BTD)
    b_V = None if self.logits_bias is None else self.logits_bias.b.astype(x_BTD.dtype)
    return LogitFactors(x_BTD, w_VD, b_V, self.logit_cap)

  def hidden(
    self,
    ids_BT: jax.Array,
    positions_BT: jax.Array | None = None,
    segment_ids_BT: jax.Array | None = None,
  ) -> jax.Array:
    """Returns the output of the final norm, [B, T, D]; the arguments are those of __call__."""
    if positions_BT is None:
      positions_BT = jnp.arange(ids_BT.shape[1])[None]
    x_BTD = self.embedding(ids_BT)
    if self.position_emb is not None:
      x_BTD = x_BTD + self.position_emb(positions_BT)
    x_BTD = _sharded_embedding(x_BTD)
    inputs = self.stack_inputs(ids_BT, x_BTD)
    if self.has_rng('dropout'):
      x_BTD = self.dropout(x_BTD, self.transformer.microbatches)
    x_BTD = self.transformer(x_BTD, positions_BT, segment_ids_BT, *inputs)
    return self.final_ln(shard(x_BTD, 'outer_batch', 'residual_length', 'act_embed'))

  @nn.nowrap
  def stack_inputs(self, ids_BT: jax.Array, x_BTD: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the stack's further arguments, besides activations, positions and segments.

    Args:
      ids_BT: Token ids.
      x_BTD: Their embeddings, [B, T, D], before dropout.
    """
    return ()

  def predicted(
    self,
    x_BTD: jax.Array,
    ids_BT: jax.Array,
    positions_BT: jax.Array | None = None,
    segment_ids_BT: jax.Array | None = None,
  ) -> list[jax.Array]:
    """Returns the output of each prediction module, [B, T, D], of which `logits` makes logits.

    The first module predicts the token after the next one. What it predicts behind the end of a
    segment has no meaning: its input there is no token, but zeros.

    Args:
      x_BTD: The result of `hidden`.
      ids_BT, positions_BT, segment_ids_BT: The arguments of `hidden`.
    """
    if positions_BT is None:
      positions_BT = jnp.arange(ids_BT.shape[1])[None]
    found = []
    for distance, module in enumerate(self.predictions, 1):
      later_BT, exists_BT = following(ids_BT, distance, segment_ids_BT)
      embedding_BTD = jnp.where(exists_BT[..., None], self.embedding(later_BT), 0)
      x_BTD = module(x_BTD, _sharded_embedding(embedding_BTD), positions_BT, segment_ids_BT)
      found.append(x_BTD)
    return found

  def predicted_after(
    self, x_BTD: jax.Array, next_BT: jax.Array, positions_BT: jax.Array
  ) -> jax.Array:
    """Returns what the first prediction module makes of given next tokens, [B, T, D].

    Args:
      x_BTD: The result of `hidden`.
      next_BT: The token after each token.
      positions_BT: The position of each token.
    """
    embedding_BTD = _sharded_embedding(self.embedding(next_BT))
    found: jax.Array = self.predictions[0](x_BTD, embedding_BTD, positions_BT, None)
    return found

  def logits(self, x_BTD: jax.Array) -> jax.Array:
    """Maps the result of `hidden`, [B, T, D], to float32 logits [B, T, V]."""
    return cap_logits(self._uncapped_logits(x_BTD).astype(jnp.float32), self.logit_cap)

  def _uncapped_logits(self, x_BTD: jax.Array) -> jax.Array:
    logits = self._head.attend(x_BTD)
    if self.logits_bias is not None:
      logits = self.logits_bias(logits)
    return shard(logits, 'outer_batch', 'length', 'act_vocab')

  @property
  def _head(self) -> TokenEmbedding | LmHead:
    return self.embedding if self.softmax is None else self.softmax


def _sharded_embedding(x_BTD: jax.Array) -> jax.Array:
  # two constraints in a row, because XLA handles each of the two resharding steps efficiently
  x_BTD = shard(x_BTD, 'outer_batch', 'length', 'act_embed')
  return shard(x_BTD, 'outer_batch', 'residual_length', 'act_embed')
