"""The decoder-only language model, and its loss for each token."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from paxlite.core.templates import Template, template_field
from paxlite.layers.embeddings import TokenEmbedding, cap_logits
from paxlite.layers.norms import LayerNorm
from paxlite.layers.transformer import UnrolledTransformer
from paxlite.parallel.partitioning import shard


class TokenLosses(NamedTuple):
  """The loss of each target token, and whether it was predicted, both [B, T]."""

  xent: jax.Array  # float32, nats
  correct: jax.Array  # bool: the target has the largest logit


class TransformerLm(nn.Module):
  """A language model: embeddings, a stack of blocks, a final norm and logits.

  Attributes:
    embedding_tpl: The token embedding. If head_tpl is None (tied), it also computes the logits.
    position_tpl: An embedding of the position that is added; None if attention is rotary.
    transformer_tpl: The stack of blocks.
    norm_tpl: The final norm.
    head_tpl: A separate projection to the vocabulary, or None.
    logits_bias_tpl: A bias that is added to the logits, or None.
    logit_cap: The logits are capped by cap · tanh(logits / cap); ≤ 0 means no cap.
    embedding_dropout: Dropout rate of the sum of the embeddings.
    num_loss_chunks: The loss is computed in this many chunks along the length. Each chunk is
      recomputed in the backward pass, so that the full logits [B, T, V] never exist.
  """

  embedding_tpl: Template = template_field(TokenEmbedding)
  position_tpl: Template | None = None
  transformer_tpl: Template = template_field(UnrolledTransformer)
  norm_tpl: Template = template_field(LayerNorm)
  head_tpl: Template | None = None
  logits_bias_tpl: Template | None = None
  logit_cap: float = 0.0
  embedding_dropout: float = 0.0
  num_loss_chunks: int = 1

  def setup(self):
    self.embedding = self.embedding_tpl()
    self.position_emb = None if self.position_tpl is None else self.position_tpl()
    self.transformer = self.transformer_tpl()
    self.final_ln = self.norm_tpl()
    self.softmax = None if self.head_tpl is None else self.head_tpl()
    self.logits_bias = None if self.logits_bias_tpl is None else self.logits_bias_tpl()
    self.dropout = nn.Dropout(self.embedding_dropout)

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
    return self.logits(self.hidden(ids_BT, positions_BT, segment_ids_BT))

  def losses(
    self,
    ids_BT: jax.Array,
    labels_BT: jax.Array,
    positions_BT: jax.Array | None = None,
    segment_ids_BT: jax.Array | None = None,
  ) -> TokenLosses:
    """Returns the cross-entropy of each label; the other arguments are those of __call__."""
    x_BTD = self.hidden(ids_BT, positions_BT, segment_ids_BT)
    if self.num_loss_chunks == 1:
      return cross_entropy(self._uncapped_logits(x_BTD), labels_BT, self.logit_cap)
    return self._chunked_losses(x_BTD, labels_BT)

  def hidden(
    self, ids_BT: jax.Array, positions_BT: jax.Array | None, segment_ids_BT: jax.Array | None
  ) -> jax.Array:
    """Returns the output of the final norm, [B, T, D]."""
    if positions_BT is None:
      positions_BT = jnp.arange(ids_BT.shape[1])[None]
    x_BTD = self.embedding(ids_BT)
    if self.position_emb is not None:
      x_BTD = x_BTD + self.position_emb(positions_BT)
    # two constraints in a row, because XLA handles each of the two resharding steps efficiently
    x_BTD = shard(x_BTD, 'batch', 'length', 'act_embed')
    x_BTD = shard(x_BTD, 'batch', 'residual_length', 'act_embed')
    x_BTD = self.dropout(x_BTD, deterministic=not self.has_rng('dropout'))
    x_BTD = self.transformer(x_BTD, positions_BT, segment_ids_BT)
    return self.final_ln(shard(x_BTD, 'outer_batch', 'residual_length', 'act_embed'))

  def logits(self, x_BTD: jax.Array) -> jax.Array:
    """Maps the result of `hidden`, [B, T, D], to float32 logits [B, T, V]."""
    return cap_logits(self._uncapped_logits(x_BTD).astype(jnp.float32), self.logit_cap)

  def _uncapped_logits(self, x_BTD: jax.Array) -> jax.Array:
    logits = self.embedding.attend(x_BTD) if self.softmax is None else self.softmax(x_BTD)
    if self.logits_bias is not None:
      logits = self.logits_bias(logits)
    return shard(logits, 'outer_batch', 'length', 'act_vocab')

  def _chunked_losses(self, x_BTD: jax.Array, labels_BT: jax.Array) -> TokenLosses:
    B, T, D = x_BTD.shape
    I = self.num_loss_chunks
    x_IBtD = x_BTD.reshape(B, I, T // I, D).swapaxes(0, 1)
    labels_IBt = labels_BT.reshape(B, I, T // I).swapaxes(0, 1)

    def chunk(lm: 'TransformerLm', _: None, chunk: tuple[jax.Array, jax.Array]):
      return None, cross_entropy(lm._uncapped_logits(chunk[0]), chunk[1], lm.logit_cap)

    scan = nn.scan(
      nn.remat(chunk, prevent_cse=False), variable_broadcast='params', split_rngs={'params': False}
    )
    _, losses = scan(self, None, (x_IBtD, labels_IBt))
    return jax.tree.map(lambda y_IBt: y_IBt.swapaxes(0, 1).reshape(B, T), losses)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def cross_entropy(logits_BTV: jax.Array, labels_BT: jax.Array, logit_cap: float) -> TokenLosses:
  """Returns −log softmax(cap(logits))[label] in float32, and whether that logit is the largest.

  The label's logit is compared with the maximum that log-sum-exp needs anyway. A separate argmax
  would be one more pass over [B, T, V], 8 % of a 124M model's step on CPU. If two logits are the
  largest, both labels count as correct.

  The gradient is softmax − one-hot, computed in one pass over the logits in their own type. JAX's
  derivative of a gather would first write a float32 array [B, T, V] and scatter into it.

  Args:
    logits_BTV: Logits before the cap, in the type of the model's matrix multiplications.
    labels_BT: Token ids.
    logit_cap: cap · tanh(logits / cap); off if ≤ 0.
  """
  losses, _ = _cross_entropy_forward(logits_BTV, labels_BT, logit_cap)
  return losses


def _cross_entropy_forward(
  logits_BTV: jax.Array, labels_BT: jax.Array, logit_cap: float
) -> tuple[TokenLosses, tuple[jax.Array, ...]]:
  # XLA on TPUs writes what a gather reads: taking from float32 would write [B, T, V] in float32
  label_logits = jnp.take_along_axis(logits_BTV, labels_BT[..., None], axis=-1)[..., 0]
  label_logits = cap_logits(label_logits.astype(jnp.float32), logit_cap)
  capped_BTV = cap_logits(logits_BTV.astype(jnp.float32), logit_cap)
  largest = capped_BTV.max(-1)
  log_z = largest + jnp.log(jnp.exp(capped_BTV - largest[..., None]).sum(-1))
  losses = TokenLosses(log_z - label_logits, label_logits >= largest)
  return losses, (logits_BTV, labels_BT, log_z)


def _cross_entropy_backward(
  logit_cap: float, kept: tuple[jax.Array, ...], gradients: TokenLosses
) -> tuple[jax.Array, None]:
  logits_BTV, labels_BT, log_z_BT = kept
  capped_BTV = cap_logits(logits_BTV.astype(jnp.float32), logit_cap)
  is_label_BTV = labels_BT[..., None] == jnp.arange(logits_BTV.shape[-1], dtype=labels_BT.dtype)
  gradient_BTV = jnp.exp(capped_BTV - log_z_BT[..., None]) - is_label_BTV
  gradient_BTV *= gradients.xent[..., None]
  if logit_cap > 0:
    gradient_BTV *= 1 - (capped_BTV / logit_cap) ** 2
  gradient_BTV = gradient_BTV.astype(logits_BTV.dtype)
  return shard(gradient_BTV, 'outer_batch', 'length', 'act_vocab'), None


cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)
