"""Multi-head latent attention, which keeps one small vector per token instead of keys and values.

See https://arxiv.org/abs/2405.04434, section 2.1.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from paxlite.config.templates import Template, template_field
from paxlite.core.training_rules import never_trained
from paxlite.layers.attention.attention import DotProductAttention, append_to_cache, is_decoding
from paxlite.layers.norms import RmsNorm
from paxlite.layers.projection import Projection, to_output
from paxlite.layers.rotary import RotaryEmbedding
from paxlite.parallel.partitioning import shard

INDEXER = never_trained('indexer')  # the module whose choice of keys has no gradient


class LatentAttention(nn.Module):
  """Causal self-attention, [B, T, D] to [B, T, D], with keys and values from latents [B, T, R].

  A key is a part that its latent determines, and a rotated part that all heads share. The cache
  holds latents and rotated parts. A single new token attends to the latents themselves: the weights
  that would turn them into keys and values are applied to the query and to the result.
  """

  model_dims: int  # D
  num_heads: int  # N
  latent_dims: int  # R
  query_latent_dims: int  # width of a latent of the queries; 0 means that queries have none
  plain_dims: int  # width of the part of queries and keys that is not rotated
  rotary_dims: int  # width of the rotated part
  value_dims: int  # width of the values
  projection_tpl: Template = template_field(Projection)  # template of all projections
  norm_tpl: Template = template_field(RmsNorm)  # template of the norms of the latents
  # rotates queries and keys by their positions; None means no rotation
  rotary_tpl: Template | None = template_field(RotaryEmbedding)
  # a scale of the queries that depends on their positions; None means no scale
  position_scale_tpl: Template | None = None
  # chooses the keys that a query sees by a bias of the scores, as SparseIndexer does from the
  # latents of the queries; None means that it sees all
  selection_tpl: Template | None = None
  # computes the context from queries, keys and values
  attention_tpl: Template = template_field(DotProductAttention)

  @nn.compact
  def __call__(
    self, x_BTD: jax.Array, positions_BT: jax.Array, segment_ids_BT: jax.Array | None = None
  ) -> jax.Array:
    select = lambda latent_BTQ: self.selected(x_BTD, latent_BTQ, positions_BT, segment_ids_BT)
    return self.attended(x_BTD, positions_BT, segment_ids_BT, select)[0]

  # No methods of their own in a profile: a subclass calls the two as one layer, too.
  @nn.nowrap
  def selected(
    self,
    x_BTD: jax.Array,
    latent_BTQ: jax.Array | None,
    positions_BT: jax.Array,
    segment_ids_BT: jax.Array | None,
  ) -> jax.Array | None:
    """Returns a bias of the scores that chooses keys, [B, 1, T, S], or None for all of them."""
    if self.selection_tpl is None:
      return None
    select = self.selection_tpl(name=INDEXER)
    bias_B1TS: jax.Array | None = select(x_BTD, latent_BTQ, positions_BT, segment_ids_BT)
    return bias_B1TS

  @nn.nowrap
  def attended(
    self,
    x_BTD: jax.Array,
    positions_BT: jax.Array,
    segment_ids_BT: jax.Array | None,
    select: Callable[[jax.Array | None], jax.Array | None],
  ) -> tuple[jax.Array, jax.Array | None]:
    """Returns the output [B, T, D], and the bias that `select` returns for latents of queries."""
    rotary = lambda x, _: x
    if self.rotary_tpl is not None:
      rotary = self.rotary_tpl(name='rotary')
    query_BTNH, query_latent_BTQ = self._query(x_BTD)
    query_BTNH = checkpoint_name(query_BTNH, 'query_proj')
    if self.position_scale_tpl is not None:  # a factor of both parts, rotated or not
      query_BTNH = self.position_scale_tpl(name='position_scale')(query_BTNH, positions_BT)
    plain_BTNH, rotated_BTNH = jnp.split(query_BTNH, [self.plain_dims], axis=-1)
    rotated_BTNH = rotary(rotated_BTNH, positions_BT)
    down = self._project(
      'latent', 'BTD,DR->BTR', (self.model_dims, self.latent_dims + self.rotary_dims)
    )
    latent_BTR, key_BTH = jnp.split(down(x_BTD), [self.latent_dims], axis=-1)
    latent_BTR = self.norm_tpl(name='latent_norm')(latent_BTR)
    key_BT1H = rotary(key_BTH[:, :, None], positions_BT)

    start: jax.Array | int = 0
    if is_decoding(self):
      (latent_BTR, key_BT1H), start = append_to_cache(self, latents=latent_BTR, keys=key_BT1H)
    bias_B1TS = select(query_latent_BTQ)
    width = self.plain_dims + self.value_dims
    up = self._project('key_value', 'BSR,RNH->BSNH', (self.latent_dims, self.num_heads, width))
    attention = self.attention_tpl(name='dot_product')
    if x_BTD.shape[1] == 1 < latent_BTR.shape[1] and type(up) is Projection:
      w_RNH: jax.Array = up.get_variable('params', 'w').astype(latent_BTR.dtype)
      w_key_RNH, w_value_RNH = jnp.split(w_RNH, [self.plain_dims], axis=-1)
      plain_BTNR = jnp.einsum('BTNH,RNH->BTNR', plain_BTNH, w_key_RNH)
      query = jnp.concatenate([plain_BTNR, rotated_BTNH], axis=-1)
      latent_BS1R = latent_BTR[:, :, None]
      key = jnp.concatenate([latent_BS1R, key_BT1H], axis=-1)
      context_BTNR = attention(query, key, latent_BS1R, segment_ids_BT, start, bias_B1TS)
      context = jnp.einsum('BTNR,RNH->BTNH', context_BTNR, w_value_RNH)
    else:
      key_value_BSNH = checkpoint_name(up(latent_BTR), 'key_proj')
      key_value_BSNH = shard(key_value_BSNH, 'batch', 'length', 'act_kv_heads', None)
      plain_BSNH, value = jnp.split(key_value_BSNH, [self.plain_dims], axis=-1)
      shared_BSNH = jnp.broadcast_to(key_BT1H, (*plain_BSNH.shape[:3], self.rotary_dims))
      query = jnp.concatenate([plain_BTNH, rotated_BTNH], axis=-1)
      query = shard(query, 'batch', 'length', 'act_heads', None)
      key = jnp.concatenate([plain_BSNH, shared_BSNH], axis=-1)
      context = attention(query, key, value, segment_ids_BT, start, bias_B1TS)
    context = shard(checkpoint_name(context, 'context'), 'batch', 'length', 'act_heads', None)
    shape = (self.model_dims, self.num_heads, self.value_dims)
    return to_output(self.projection_tpl, context, shape), bias_B1TS

  def _query(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Returns queries [B, T, N, H], whose last dimensions are to be rotated, and their latents."""
    shape = (self.num_heads, self.plain_dims + self.rotary_dims)
    if not self.query_latent_dims:
      return self._project('query', 'BTD,DNH->BTNH', (self.model_dims, *shape))(x_BTD), None
    down = self._project('query_latent', 'BTD,DR->BTR', (self.model_dims, self.query_latent_dims))
    latent_BTR = self.norm_tpl(name='query_latent_norm')(down(x_BTD))
    up = self._project('query', 'BTR,RNH->BTNH', (self.query_latent_dims, *shape))
    return up(latent_BTR), latent_BTR

  def _project(self, name: str, equation: str, shape: tuple[int, ...]) -> nn.Module:
    axes = ('embed', 'heads', 'head_dim') if len(shape) == 3 else ('embed', None)
    return self.projection_tpl(equation=equation, shape=shape, axes=axes, name=name)
