"""Tiny models of the family; see experiments.cases."""

from typing import Any

from paxlite.experiments.cases import BLOCK, EXPERTS, YARN, Draw

CASES = {
  'gpt_oss': BLOCK
  | EXPERTS
  | dict(head_dim=10, sliding_window=5, rope_parameters=YARN | dict(truncate=False)),
}  # fmt: skip
ON_MESHES: dict[str, dict[str, Any]] = {'gpt_oss': {}}
# What published files say, apart from keys that every file has, by the names of their classes.
PUBLISHED: dict[str, dict[str, Any]] = {
  'GptOss20B': dict(
    model_type='gpt_oss', hidden_size=2880, intermediate_size=2880, num_hidden_layers=24,
    num_attention_heads=64, num_key_value_heads=8, head_dim=64, num_local_experts=32,
    num_experts_per_tok=4, experts_per_token=4, vocab_size=201088, attention_bias=True,
    sliding_window=128, layer_types=['sliding_attention', 'full_attention'] * 12,
    rope_theta=150000, initial_context_length=4096, swiglu_limit=7.0, hidden_act='silu',
    rope_scaling=dict(
      rope_type='yarn', factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
      original_max_position_embeddings=4096,
    ),
    quantization_config=dict(quant_method='mxfp4'), max_position_embeddings=131072,
    rms_norm_eps=1e-5, router_aux_loss_coef=0.9, output_router_logits=False,
  ),
}  # fmt: skip


def drawn(kind: str, seed: int) -> dict[str, Any]:
  """Returns a config.json of a model_type of the family with random options."""
  draw = Draw(kind, seed)
  config, pick = draw.block(chooses_activation=False), draw.pick
  config |= dict(sliding_window=draw.window, layer_types=draw.types)
  config |= dict(num_experts_per_tok=pick(1, 2, 3), num_local_experts=pick(4, 6))
  return config
