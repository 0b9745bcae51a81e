"""Transformer Engine's fused block, which replaces a TransformerBlock.

It fuses norms with the products that follow them, and uses cuDNN's attention. Under te.autocast its
products are in FP8. It has other parameters than a TransformerBlock; conversion.py converts them.
"""

import jax
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from paxlite.layers.projection import Initializer
from paxlite.parallel.partitioning import shard

# Transformer Engine's names of the layouts of RotaryEmbedding
_ROTARY = {'interleaved': 'consecutive', 'half': 'alternate'}


class TeTransformerLayer(nn.Module):
  """transformer_engine.jax.flax.TransformerLayer as a TransformerBlock, [B, T, D] to [B, T, D].

  It computes in the dtype of its input, with float32 parameters. Each row must be one segment that
  starts at position 0; padding may follow it.
  """

  model_dims: int  # D
  hidden_dims: int  # F
  num_heads: int  # N; a head has D / N dimensions
  num_kv_heads: int  # K
  activation: str = 'gelu'  # 'gelu' (the tanh approximation), 'relu' or 'silu'
  gated: bool = False  # whether the feed-forward layer has a gate
  use_bias: bool = True  # whether all projections have a bias
  norm: str = 'LayerNorm'  # kind of both norms
  epsilon: float = 1e-5  # epsilon of both norms
  # number that is added to the stored scale of a norm: 0, or 1 for 'LayerNorm'
  norm_offset: float = 1.0
  rotary_layout: str | None = None  # layout of RotaryEmbedding; None means no rotary embedding
  rotary_theta: float = 10_000.0  # theta of RotaryEmbedding
  # dropout rate of attention weights, hidden units and the output of both sublayers
  dropout: float = 0.0
  w_init: Initializer = nn.initializers.normal(0.02)  # initializer of each matrix [in, out]

  @nn.compact
  def __call__(
    self, x_BTD: jax.Array, positions_BT: jax.Array, segment_ids_BT: jax.Array | None
  ) -> jax.Array:
    del positions_BT, segment_ids_BT  # each row is one segment that starts at position 0
    from transformer_engine.jax.flax import TransformerLayer

    layer = TransformerLayer(
      hidden_size=self.model_dims, mlp_hidden_size=self.hidden_dims,
      num_attention_heads=self.num_heads, num_gqa_groups=self.num_kv_heads,
      self_attn_mask_type='causal', scale_attn_logits=True, float32_attention_logits=True,
      enable_relative_embedding=False, enable_rotary_pos_emb=self.rotary_layout is not None,
      rotary_pos_emb_windows=(1, self.rotary_theta),
      rotary_pos_emb_group_method=_ROTARY[self.rotary_layout or 'interleaved'],
      layernorm_type=self.norm.lower(), layernorm_epsilon=self.epsilon,
      zero_centered_gamma=self.norm_offset == 1,
      mlp_activations=(self.activation, 'linear') if self.gated else (self.activation,),
      use_bias=self.use_bias, hidden_dropout=self.dropout, attention_dropout=self.dropout,
      intermediate_dropout=self.dropout, mha_kernel_init=self.w_init, mlp_kernel_init=self.w_init,
      scaled_query_init=False, name='te',
    )  # fmt: skip
    # only if this is False, cuDNN's attention keeps the values that its backward pass needs
    deterministic = self.dropout > 0 and not self.has_rng('dropout')
    x_BTD = layer(x_BTD, deterministic=deterministic)
    x_BTD = shard(x_BTD, 'batch', 'residual_length', 'act_embed')
    return checkpoint_name(x_BTD, 'transformer_layer_out')
