"""DeepSeek-V4's indexer, which chooses the windows that a query sees."""

import math

import jax
import jax.numpy as jnp
from flax import linen as nn

from paxlite.config.templates import Template, template_field
from paxlite.layers.attention.attention import is_decoding
from paxlite.layers.attention.compressed_keys import OverlappingKeyCompressor, Windows
from paxlite.layers.projection import Projection
from paxlite.layers.rotary import RotaryEmbedding
from paxlite.parallel.partitioning import shard


class WindowIndexer(nn.Module):
  """Chooses the windows that score highest for a query, of those that it may see.

  The score is that of SparseIndexer, Σ_n w_n · relu(q_n · k) / √(H · N), with a key for each window
  and without a norm of queries. Of equal scores, the earlier window comes first. A choice has no
  gradient: nothing here learns from the loss of the model.

  Attributes:
    model_dims: D.
    query_latent_dims: Q, the width of a latent of attention's queries.
    num_heads: N.
    head_dim: H.
    top_k: How many windows a query sees; with at most so many, it sees all.
    keys_tpl: Computes the keys of windows.
    projection_tpl: Template of the other projections.
    rotary_tpl: Rotates queries by their positions.
  """

  model_dims: int
  query_latent_dims: int
  num_heads: int
  head_dim: int
  top_k: int
  keys_tpl: Template = template_field(OverlappingKeyCompressor)
  projection_tpl: Template = template_field(Projection)
  rotary_tpl: Template = template_field(RotaryEmbedding)

  @nn.compact
  def __call__(
    self,
    x_BTD: jax.Array,
    latent_BTQ: jax.Array,
    positions_BT: jax.Array,
    of: Windows,
    visible_BTW: jax.Array,
  ) -> jax.Array:
    """Returns whether a query sees a window, [B, T, W].

    Args:
      x_BTD: The activations.
      latent_BTQ: The latents of attention's queries.
      positions_BT: The positions of the tokens.
      of: The windows.
      visible_BTW: Whether a query may see a window.
    """
    W, N, H = visible_BTW.shape[-1], self.num_heads, self.head_dim
    has_all = self.top_k >= W and not self.is_initializing()
    if has_all and not is_decoding(self):
      return visible_BTW
    x_BTD, latent_BTQ = jax.lax.stop_gradient((x_BTD, latent_BTQ))
    keys = self.keys_tpl(model_dims=self.model_dims, head_dim=H, name='keys')
    key_BWH = keys(x_BTD, of)  # into the cache in any case
    if has_all:
      return visible_BTW
    query_BTNH = self.projection_tpl(
      equation='BTQ,QNH->BTNH',
      shape=(self.query_latent_dims, N, H),
      axes=('embed', 'heads', 'head_dim'),
      name='query',
    )(latent_BTQ)
    query_BTNH = self.rotary_tpl(name='rotary')(query_BTNH, positions_BT)
    weight_BTN = self.projection_tpl(
      equation='BTD,DN->BTN', shape=(self.model_dims, N), axes=('embed', None), name='weights'
    )(x_BTD)
    query_BTNH, weight_BTN, key_BWH = jax.lax.stop_gradient((
      query_BTNH.astype(jnp.float32), weight_BTN.astype(jnp.float32), key_BWH.astype(jnp.float32)
    ))  # fmt: skip
    query_BTNH = shard(query_BTNH, 'batch', 'length', None, None)
    relu_BTNW = jax.nn.relu(jnp.einsum('BTNH,BWH->BTNW', query_BTNH, key_BWH) / math.sqrt(H))
    score_BTW = jnp.einsum('BTN,BTNW->BTW', weight_BTN / math.sqrt(N), relu_BTNW)
    _, best_BTk = jax.lax.top_k(jnp.where(visible_BTW, score_BTW, -jnp.inf), min(self.top_k, W))
    chosen_BTW = jnp.zeros(score_BTW.shape, bool)
    chosen_BTW = jnp.put_along_axis(chosen_BTW, best_BTk, True, axis=-1, inplace=False)
    return shard(chosen_BTW & visible_BTW, 'batch', 'length', None)
