"""Tiny models of the family; see experiments.cases."""

from paxlite.experiments.cases import BLOCK

_GEMMA4 = dict(
  head_dim=10, global_head_dim=12, sliding_window=5, hidden_size_per_layer_input=0,
  rope_parameters={
    'full_attention': dict(rope_type='proportional', rope_theta=1e3, partial_rotary_factor=0.5),
    'sliding_attention': dict(rope_type='default', rope_theta=1e2),
  },
)  # fmt: skip

CASES = {
  'gemma4_text': BLOCK
  | _GEMMA4
  | dict(
    num_hidden_layers=6, num_global_key_value_heads=1, attention_k_eq_v=True,
    final_logit_softcapping=3.0, layer_types=['sliding_attention', 'full_attention'] * 3,
  ),
  'gemma4_text experts': BLOCK
  | _GEMMA4
  | dict(
    layer_types=['sliding_attention'] * 3 + ['full_attention'], enable_moe_block=True,
    num_experts=8, top_k_experts=3, moe_intermediate_size=24, tie_word_embeddings=False,
  ),
  'gemma4_text linked': BLOCK
  | _GEMMA4
  | dict(
    num_hidden_layers=6, num_kv_shared_layers=3, use_double_wide_mlp=True,
    # of 6 numbers, a norm may be almost 0, and what is rounded is then seen in the logits
    hidden_size_per_layer_input=16, vocab_size_per_layer_input=96,
    layer_types=['sliding_attention', 'full_attention'] * 3,
  ),
}  # fmt: skip
