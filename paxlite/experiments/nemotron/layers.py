"""Blocks with one layer each, as in Nemotron-H (https://arxiv.org/abs/2504.03624)."""

import jax
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from paxlite.config.templates import Template, template_field
from paxlite.layers.attention.attention import Attention
from paxlite.layers.feedforward import FeedForward
from paxlite.layers.norms import LayerNorm
from paxlite.parallel.partitioning import shard


class AttentionBlock(nn.Module):
  """x += attention(norm(x)), [B, T, D] to [B, T, D]."""

  norm_tpl: Template = template_field(LayerNorm)  # template of the norm
  # attention, which is called with (x, positions, segment_ids)
  attention_tpl: Template = template_field(Attention)
  dropout: float = 0.0  # dropout rate of the output of the layer

  @nn.compact
  def __call__(
    self, x_BTD: jax.Array, positions_BT: jax.Array, segment_ids_BT: jax.Array | None
  ) -> jax.Array:
    h_BTD = self.norm_tpl(name='layer_norm')(x_BTD)
    h_BTD = self.attention_tpl(name='self_attention')(h_BTD, positions_BT, segment_ids_BT)
    return _sum(self, x_BTD, h_BTD)


class FeedForwardBlock(nn.Module):
  """x += ffn(norm(x)), [B, T, D] to [B, T, D]."""

  norm_tpl: Template = template_field(LayerNorm)  # template of the norm
  # feed-forward layer, which is called with (x, paddings)
  ffn_tpl: Template = template_field(FeedForward)
  dropout: float = 0.0  # dropout rate of the output of the layer

  @nn.compact
  def __call__(
    self, x_BTD: jax.Array, positions_BT: jax.Array, segment_ids_BT: jax.Array | None
  ) -> jax.Array:
    paddings_BT = None if segment_ids_BT is None else segment_ids_BT == 0
    h_BTD = self.norm_tpl(name='ff_layer_norm')(x_BTD)
    return _sum(self, x_BTD, self.ffn_tpl(name='ff_layer')(h_BTD, paddings_BT))


def _sum(block: AttentionBlock | FeedForwardBlock, x: jax.Array, h: jax.Array) -> jax.Array:
  """Returns x + dropout(h), as a block returns it."""
  x = x + nn.Dropout(block.dropout, deterministic=not block.has_rng('dropout'))(h)
  x = shard(x, 'batch', 'residual_length', 'act_embed')
  return checkpoint_name(x, 'transformer_layer_out')
