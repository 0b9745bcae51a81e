"""Tiny models of the family; see experiments.cases."""

from typing import Any

from paxlite.experiments.cases import BLOCK, EXPERTS, YARN, Draw

CASES = {
  'minimax_m2': BLOCK
  | EXPERTS
  | dict(head_dim=12, rope_parameters=YARN | dict(partial_rotary_factor=0.5)),
}  # fmt: skip
ON_MESHES: dict[str, dict[str, Any]] = {'minimax_m2': {}}
# What published files say, apart from keys that every file has, by the names of their classes.
PUBLISHED: dict[str, dict[str, Any]] = {
  'MiniMaxM2_230B': dict(
    model_type='minimax_m2', hidden_size=3072, intermediate_size=1536, num_hidden_layers=62,
    num_attention_heads=48, num_key_value_heads=8, head_dim=128, vocab_size=200064, rotary_dim=64,
    num_local_experts=256, num_experts_per_tok=8, shared_intermediate_size=0, hidden_act='silu',
    scoring_func='sigmoid', use_routing_bias=True, use_qk_norm=True, qk_norm_type='per_layer',
    use_mtp=True, num_mtp_modules=3, mtp_transformer_layers=1, attn_type_list=[1] * 62,
    rope_theta=5000000, router_jitter_noise=0.0, max_position_embeddings=196608,
    quantization_config=dict(
      activation_scheme='dynamic', fmt='float8_e4m3fn', quant_method='fp8',
      weight_block_size=[128, 128],
      modules_to_not_convert=['gate', 'e_score_correction_bias', 'lm_head'],
    ),
    rms_norm_eps=1e-6, tie_word_embeddings=False,
  ),
}  # fmt: skip
# Values that were once read otherwise than transformers does, by the messages that refuse them.
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
  'attn_type_list=': ('minimax_m2', dict(attn_type_list=[1, 0, 1, 1])),
  'use_routing_bias=False': ('minimax_m2', dict(use_routing_bias=False)),
}  # fmt: skip


def drawn(kind: str, seed: int) -> dict[str, Any]:
  """Returns a config.json of a model_type of the family with random options."""
  draw = Draw(kind, seed)
  config, pick = draw.block(), draw.pick
  rope = draw.partial_rope()
  config |= dict(
    num_local_experts=pick(4, 6), num_experts_per_tok=pick(1, 2, 3), rope_parameters=rope
  )
  return config
