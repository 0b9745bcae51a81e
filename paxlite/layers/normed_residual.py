"""Blocks whose residual branch is normed too, as in MiniMax-Text-01 (https://arxiv.org/abs/2501.08313)."""

import jax
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from paxlite.config.templates import Template, template_field
from paxlite.layers.attention.attention import Attention
from paxlite.layers.feedforward import FeedForward
from paxlite.layers.norms import RmsNorm
from paxlite.layers.scales import scaled
from paxlite.parallel.partitioning import shard


class NormedResidualBlock(nn.Module):
  """x = norm(x), x = α · x + β · attention(x), and the same with the feed-forward layer.

  It maps [B, T, D] to [B, T, D]. The sums are those of DeepNorm (https://arxiv.org/abs/2203.00555),
  where each norm is that of the sum before it.

  Attributes:
    norm_tpl: Template of both norms.
    attention_tpl: Attention, which is called with (x, positions, segment_ids).
    ffn_tpl: Feed-forward layer, which is called with (x, paddings).
    attention_factors: α and β of attention.
    ffn_factors: α and β of the feed-forward layer.
    dropout: Dropout rate of the output of both layers.
  """

  norm_tpl: Template = template_field(RmsNorm)
  attention_tpl: Template = template_field(Attention)
  ffn_tpl: Template = template_field(FeedForward)
  attention_factors: tuple[float, float] = (1.0, 1.0)
  ffn_factors: tuple[float, float] = (1.0, 1.0)
  dropout: float = 0.0

  @nn.compact
  def __call__(
    self, x_BTD: jax.Array, positions_BT: jax.Array, segment_ids_BT: jax.Array | None
  ) -> jax.Array:
    dropout = nn.Dropout(self.dropout, deterministic=not self.has_rng('dropout'))
    paddings_BT = None if segment_ids_BT is None else segment_ids_BT == 0

    def total(x: jax.Array, h: jax.Array, factors: tuple[float, float]) -> jax.Array:
      return scaled(x, factors[0]) + dropout(scaled(h, factors[1]))

    x_BTD = self.norm_tpl(name='layer_norm')(x_BTD)
    h_BTD = self.attention_tpl(name='self_attention')(x_BTD, positions_BT, segment_ids_BT)
    x_BTD = checkpoint_name(total(x_BTD, h_BTD, self.attention_factors), 'residual')
    x_BTD = self.norm_tpl(name='ff_layer_norm')(x_BTD)
    h_BTD = self.ffn_tpl(name='ff_layer')(x_BTD, paddings_BT)
    x_BTD = total(x_BTD, h_BTD, self.ffn_factors)
    x_BTD = shard(x_BTD, 'batch', 'residual_length', 'act_embed')
    return checkpoint_name(x_BTD, 'transformer_layer_out')
