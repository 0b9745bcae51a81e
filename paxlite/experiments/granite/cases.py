"""Tiny models of the family; see experiments.cases."""

from typing import Any

from paxlite.experiments.cases import BLOCK, EXPERTS, YARN, Draw

_MAMBA = dict(
  mamba_n_heads=4, mamba_d_state=12, mamba_d_conv=3, mamba_expand=2,
  layer_types=['linear_attention', 'full_attention', 'linear_attention', 'linear_attention'],
)  # fmt: skip

CASES = {
  'granite': BLOCK
  | dict(
    embedding_multiplier=3.0, residual_multiplier=0.4, attention_multiplier=0.7, logits_scaling=2.5,
    attention_bias=True, mlp_bias=True,
  ),
  'granite tied': BLOCK | dict(logits_scaling=2.5, tie_word_embeddings=True),
  'granitemoehybrid': BLOCK
  | _MAMBA
  | EXPERTS
  | dict(
    embedding_multiplier=3.0, residual_multiplier=0.4, attention_multiplier=0.7, logits_scaling=2.5,
    shared_intermediate_size=20, mamba_n_groups=2, time_step_limit=(0.1, 0.9),
  ),
  'granitemoehybrid dense': BLOCK
  | _MAMBA
  | dict(
    num_local_experts=0, shared_intermediate_size=40, attention_bias=True, mamba_proj_bias=True,
    mamba_conv_bias=False, position_embedding_type='rope', tie_word_embeddings=True,
    rope_parameters=YARN,
  ),
}  # fmt: skip
ON_MESHES: dict[str, dict[str, Any]] = {'granite': {}, 'granitemoehybrid': {}}
# Values that were once read otherwise than transformers does, by the messages that refuse them.
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
  'mamba_n_heads=4 × mamba_d_head=5': ('granitemoehybrid', dict(mamba_d_head=5)),
  'time_step_limit=None': ('granitemoehybrid', dict(time_step_limit=None)),
  'time_step_limit has -1.0': ('granitemoehybrid', dict(time_step_limit=[-1.0, 2.0])),
  "normalization_function='layernorm'": (
    'granitemoehybrid', dict(normalization_function='layernorm'),
  ),
}  # fmt: skip


def drawn(kind: str, seed: int) -> dict[str, Any]:
  """Returns a config.json of a model_type of the family with random options."""
  draw = Draw(kind, seed, spans=kind == 'granite')
  config, pick, chance = draw.block(), draw.pick, draw.chance
  if kind == 'granitemoehybrid':
    inner = pick(1, 2) * draw.hidden
    groups = pick(*(n for n in (1, 2, 3) if inner % n == 0))
    per_group = pick(*(n for n in (1, 2, 4) if inner % (n * groups) == 0))
    config |= dict(
      shared_intermediate_size=pick(8, 20), num_local_experts=pick(0, 4, 6),
      num_experts_per_tok=pick(1, 2, 3), position_embedding_type=pick(None, 'nope', 'rope'),
      mamba_n_groups=groups, mamba_n_heads=groups * per_group, mamba_d_state=pick(4, 6, 16),
      mamba_expand=inner // draw.hidden, mamba_d_conv=pick(2, 3, 4), mamba_chunk_size=pick(4, 32),
      mamba_conv_bias=chance(), mamba_proj_bias=chance(),
      time_step_limit=pick((0.0, float('inf')), (0.2, 0.8), (0.4, float('inf'))),
      layer_types=[pick('linear_attention', 'linear_attention', 'full_attention')
                   for _ in range(draw.layers - 1)] + ['full_attention'],
    )  # fmt: skip
  config |= dict(
    embedding_multiplier=pick(1.0, 3), residual_multiplier=pick(1.0, 0.3),
    attention_multiplier=pick(1.0, 0.2), logits_scaling=pick(1.0, 6), attention_bias=chance(),
  )  # fmt: skip
  if kind == 'granite':
    config['mlp_bias'] = chance()
  return config
