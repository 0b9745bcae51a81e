"""Tiny models of the family; see experiments.cases."""

from paxlite.experiments.cases import BLOCK

_LLAMA4 = dict(
  head_dim=10, intermediate_size_mlp=40, num_local_experts=8, attention_chunk_size=7,
  floor_scale=5, attn_scale=0.7, rope_parameters=dict(rope_type='default', rope_theta=1e2),
)  # fmt: skip

CASES = {
  'llama4_text': BLOCK
  | _LLAMA4
  | dict(num_hidden_layers=6, num_experts_per_tok=2, interleave_moe_layer_step=2),
  'llama4_text experts': BLOCK
  | _LLAMA4
  | dict(
    num_experts_per_tok=1, use_qk_norm=False, attention_bias=True, no_rope_layers=[1] * 4,
    rope_parameters=dict(
      rope_type='llama3', rope_theta=1e4, factor=4.0, original_max_position_embeddings=16,
      low_freq_factor=1.0, high_freq_factor=1.0,
    ),
  ),
}  # fmt: skip
