"""Blocks whose layers are connected to several streams of activations; see hyper_connections."""

import jax
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from paxlite.config.templates import Template, template_field
from paxlite.layers.attention.attention import Attention
from paxlite.layers.feedforward import FeedForward
from paxlite.layers.hyper_connections import HyperConnection
from paxlite.layers.norms import RmsNorm


class HyperBlock(nn.Module):
  """Attention and a feed-forward layer, each with a connection, [B, T, N, D] to [B, T, N, D].

  Attributes:
    norm_tpl: Template of the norms of what both layers read.
    connection_tpl: Template of their connections to the streams.
    attention_tpl: Attention, which is called with (x, positions, segment_ids).
    ffn_tpl: Feed-forward layer, which is called with (x, paddings).
    dropout: Dropout rate of the output of both layers.
  """

  norm_tpl: Template = template_field(RmsNorm)
  connection_tpl: Template = template_field(HyperConnection)
  attention_tpl: Template = template_field(Attention)
  ffn_tpl: Template = template_field(FeedForward)
  dropout: float = 0.0

  @nn.compact
  def __call__(
    self,
    x_BTND: jax.Array,
    positions_BT: jax.Array,
    segment_ids_BT: jax.Array | None,
    *inputs: jax.Array,
  ) -> jax.Array:
    dropout = nn.Dropout(self.dropout, deterministic=not self.has_rng('dropout'))
    paddings_BT = None if segment_ids_BT is None else segment_ids_BT == 0
    connection = self.connection_tpl(name='connection')(x_BTND)
    h_BTD = self.norm_tpl(name='layer_norm')(connection.read_BTD)
    h_BTD = self.attention_tpl(name='self_attention')(h_BTD, positions_BT, segment_ids_BT)
    x_BTND = checkpoint_name(connection.joined(x_BTND, dropout(h_BTD)), 'residual')
    connection = self.connection_tpl(name='ff_connection')(x_BTND)
    h_BTD = self.norm_tpl(name='ff_layer_norm')(connection.read_BTD)
    h_BTD = self.fed_forward(h_BTD, paddings_BT, *inputs)
    return checkpoint_name(connection.joined(x_BTND, dropout(h_BTD)), 'transformer_layer_out')

  def fed_forward(
    self, h_BTD: jax.Array, paddings_BT: jax.Array | None, *inputs: jax.Array
  ) -> jax.Array:
    """Returns what the feed-forward layer makes of its input, [B, T, D]."""
    del inputs
    out_BTD: jax.Array = self.ffn_tpl(name='ff_layer')(h_BTD, paddings_BT)
    return out_BTD


class TokenHyperBlock(HyperBlock):
  """A HyperBlock whose feed-forward layer is called with (x, paddings, token ids)."""

  def fed_forward(
    self, h_BTD: jax.Array, paddings_BT: jax.Array | None, *inputs: jax.Array
  ) -> jax.Array:
    out_BTD: jax.Array = self.ffn_tpl(name='ff_layer')(h_BTD, paddings_BT, *inputs)
    return out_BTD
