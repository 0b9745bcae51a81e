"""DeepSeek's sparse attention: an indexer chooses the keys that each query sees."""

import math

import jax
import jax.numpy as jnp
from flax import linen as nn

from paxlite.config.templates import Template, template_field
from paxlite.layers.attention.attention import append_to_cache, is_decoding
from paxlite.layers.attention.softmax_attention import AttentionMask
from paxlite.layers.norms import LayerNorm
from paxlite.layers.projection import Projection
from paxlite.layers.rotary import RotaryEmbedding
from paxlite.parallel.partitioning import shard

_HIDDEN = -1e30  # as where a mask hides a key


def index_scores(query_BTNH: jax.Array, weight_BTN: jax.Array, key_BSH: jax.Array) -> jax.Array:
  """Returns Σ_n w_n · relu(q_n · k) / √(H · N), [B, T, S] in float32, without a gradient."""
  N, H = query_BTNH.shape[2:]
  query_BTNH, weight_BTN, key_BSH = jax.lax.stop_gradient((
    query_BTNH.astype(jnp.float32), weight_BTN.astype(jnp.float32), key_BSH.astype(jnp.float32)
  ))  # fmt: skip
  query_BTNH = shard(query_BTNH, 'batch', 'length', None, None)
  relu_BTNS = jax.nn.relu(jnp.einsum('BTNH,BSH->BTNS', query_BTNH, key_BSH) / math.sqrt(H))
  return jnp.einsum('BTN,BTNS->BTS', weight_BTN / math.sqrt(N), relu_BTNS)


class SparseIndexer(nn.Module):
  """Chooses the keys of each query whose `index_scores` are highest, of those that it may see.

  See https://arxiv.org/abs/2512.02556, section 2.1. The queries q [B, T, N, H] come from the
  latents of attention's queries, the keys k [B, S, H] and the weights w [B, T, N] from the
  activations. The first dimensions of queries and keys are rotated. Of equal scores, that of the
  earlier key comes first.

  A choice has no gradient: nothing here learns from the loss of the model.
  """

  model_dims: int  # D
  query_latent_dims: int  # Q, the width of a latent of attention's queries
  num_heads: int  # N
  head_dim: int  # H
  rotary_dims: int  # how many of the H dimensions are rotated
  top_k: int  # how many keys a query sees; with at most so many, it sees all
  projection_tpl: Template = template_field(Projection)  # template of all projections
  norm_tpl: Template = template_field(LayerNorm)  # the norm of the keys
  # rotates queries and keys by their positions
  rotary_tpl: Template = template_field(RotaryEmbedding)

  @nn.compact
  def __call__(
    self,
    x_BTD: jax.Array,
    latent_BTQ: jax.Array,
    positions_BT: jax.Array,
    segment_ids_BT: jax.Array | None = None,
  ) -> jax.Array | None:
    """Returns a bias of the scores, [B, 1, T, S]: 0 for chosen keys; None if all keys are chosen.

    Args:
      x_BTD: The activations.
      latent_BTQ: The latents of attention's queries.
      positions_BT: The positions of the tokens.
      segment_ids_BT: Their segments; a query sees only keys of its own segment.
    """
    x_BTD, latent_BTQ = jax.lax.stop_gradient((x_BTD, latent_BTQ))
    T, N, H = x_BTD.shape[1], self.num_heads, self.head_dim
    keeps = is_decoding(self)
    if self.top_k >= T and not keeps and not self.is_initializing():
      return None
    rotary = self.rotary_tpl(name='rotary')

    def rotated(x: jax.Array) -> jax.Array:
      turned, plain = jnp.split(x, [self.rotary_dims], axis=-1)
      return jnp.concatenate([rotary(turned, positions_BT), plain], axis=-1)

    key_BTH = self._project('key', 'BTD,DH->BTH', (self.model_dims, H))(x_BTD)
    key_BTH = rotated(self.norm_tpl(name='key_norm')(key_BTH)[:, :, None])[:, :, 0]
    start: jax.Array | int = 0
    key_BSH = key_BTH
    if keeps:
      (key_BSH,), start = append_to_cache(self, keys=key_BTH)
    S = key_BSH.shape[1]
    if self.top_k >= S and not self.is_initializing():
      return None
    query_BTNH = rotated(
      self._project('query', 'BTQ,QNH->BTNH', (self.query_latent_dims, N, H))(latent_BTQ)
    )
    weight_BTN = self._project('weights', 'BTD,DN->BTN', (self.model_dims, N))(x_BTD)
    score_BTS = index_scores(query_BTNH, weight_BTN, key_BSH)
    segments = None if segment_ids_BT is None else (segment_ids_BT, segment_ids_BT)
    mask = AttentionMask(start, 0, segments).mask(T, S)
    mask = mask if mask.ndim == 2 else mask[:, 0]
    _, chosen_BTk = jax.lax.top_k(jnp.where(mask, score_BTS, -jnp.inf), min(self.top_k, S))
    hidden_BTS = jnp.full(score_BTS.shape, _HIDDEN)
    bias_BTS = jnp.put_along_axis(hidden_BTS, chosen_BTk, 0.0, axis=-1, inplace=False)
    return shard(bias_BTS, 'batch', 'length', None)[:, None]

  def _project(self, name: str, equation: str, shape: tuple[int, ...]) -> nn.Module:
    axes = ('embed', 'heads', 'head_dim') if len(shape) == 3 else ('embed', None)
    return self.projection_tpl(equation=equation, shape=shape, axes=axes, name=name)
