"""Tiny models of the family; see experiments.cases."""

from typing import Any

from paxlite.experiments.cases import BLOCK, DELTA, Draw, drawn_delta

_SHARED = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24,
              shared_expert_intermediate_size=20)  # fmt: skip

CASES = {
  'qwen3_5_text': BLOCK | DELTA,
  'qwen3_5_moe_text': BLOCK | DELTA | _SHARED,
  'qwen3_next': BLOCK | DELTA | _SHARED | dict(norm_topk_prob=False),
}  # fmt: skip
ON_MESHES: dict[str, dict[str, Any]] = {'qwen3_5_text': {}, 'qwen3_next': {}}
# What published files say, apart from keys that every file has, by the names of their classes.
PUBLISHED: dict[str, dict[str, Any]] = {
  'Qwen3_5_9B': dict(
    model_type='qwen3_5', image_token_id=248056, vision_config=dict(model_type='qwen3_5'),
    text_config=dict(
      model_type='qwen3_5_text', attn_output_gate=True, attention_bias=False, head_dim=256,
      full_attention_interval=4, hidden_size=4096, intermediate_size=12288, num_hidden_layers=32,
      num_attention_heads=16, num_key_value_heads=4, linear_conv_kernel_dim=4, hidden_act='silu',
      linear_key_head_dim=128, linear_num_key_heads=16, linear_num_value_heads=32,
      linear_value_head_dim=128, mamba_ssm_dtype='float32', mlp_only_layers=None,
      mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False, vocab_size=248320,
      max_position_embeddings=262144, rms_norm_eps=1e-6,
      rope_parameters=dict(
        mrope_interleaved=True, mrope_section=[11, 11, 10], rope_type='default',
        rope_theta=10000000, partial_rotary_factor=0.25,
      ),
    ),
  ),
}  # fmt: skip
# Values that were once read otherwise than transformers does, by the messages that refuse them.
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
  "full_attention_interval='x' must be an integer of at least 1": (
    'qwen3_5_text', dict(layer_types=None, full_attention_interval='x'),
  ),
}  # fmt: skip


def drawn(kind: str, seed: int) -> dict[str, Any]:
  """Returns a config.json of a model_type of the family with random options."""
  draw = Draw(kind, seed)
  config, pick, chance = draw.block(), draw.pick, draw.chance
  config |= drawn_delta(draw)
  config['head_dim'] = pick(8, 16)
  config['rope_parameters'] |= dict(partial_rotary_factor=pick(0.25, 0.5, 1.0))
  if kind != 'qwen3_5_text':
    config |= dict(
      num_experts_per_tok=pick(1, 2, 3), num_experts=pick(4, 6), moe_intermediate_size=pick(8, 20),
      shared_expert_intermediate_size=pick(8, 12),
    )  # fmt: skip
  if kind == 'qwen3_next':
    config |= dict(norm_topk_prob=chance())
  return config
