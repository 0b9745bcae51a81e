"""Tiny models of the family; see experiments.cases."""

from typing import Any

from paxlite.experiments.cases import BLOCK, YARN, Draw

_FALCON = dict(
  head_dim=10, mamba_d_ssm=48, mamba_n_heads=4, mamba_d_state=12, mamba_d_conv=3,
  embedding_multiplier=3.0, lm_head_multiplier=0.4, key_multiplier=1.7, attention_in_multiplier=0.8,
  attention_out_multiplier=1.3, ssm_in_multiplier=1.4, ssm_out_multiplier=0.6,
  mlp_multipliers=[1.6, 0.7], ssm_multipliers=[0.5, 1.5, 0.7, 1.3, 1.2],
)  # fmt: skip

CASES = {
  'falcon_h1': BLOCK
  | _FALCON
  | dict(mamba_n_groups=2, mamba_rms_norm=True, time_step_limit=(0.1, 0.9), attention_bias=True),
  'falcon_h1 gate': BLOCK
  | _FALCON
  | dict(
    mamba_conv_bias=False, mamba_proj_bias=True, projectors_bias=True, mlp_bias=True,
    tie_word_embeddings=True, rope_parameters=YARN,
  ),
}  # fmt: skip
ON_MESHES: dict[str, dict[str, Any]] = {'falcon_h1': {}}
# Values that were once read otherwise than transformers does, by the messages that refuse them.
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
  'mamba_n_heads=4 × mamba_d_head=5 must be 48': ('falcon_h1', dict(mamba_d_head=5)),
  'projectors_bias=True with mamba_proj_bias=False': ('falcon_h1', dict(projectors_bias=True)),
  'ssm_multipliers=.1.0. must be 5 numbers': ('falcon_h1', dict(ssm_multipliers=[1.0])),
  'lm_head_multiplier=0.0 must be': ('falcon_h1', dict(lm_head_multiplier=0.0)),
  'mamba_use_mlp=False': ('falcon_h1', dict(mamba_use_mlp=False)),
  "mamba_rms_norm='false' must be": ('falcon_h1', dict(mamba_rms_norm='false')),
  "mamba_norm_before_gate='no' must be": ('falcon_h1', dict(mamba_norm_before_gate='no')),
  "mamba_proj_bias='false' must be": ('falcon_h1', dict(mamba_proj_bias='false')),
}  # fmt: skip


def drawn(kind: str, seed: int) -> dict[str, Any]:
  """Returns a config.json of a model_type of the family with random options."""
  draw = Draw(kind, seed)
  config, pick, chance = draw.block(), draw.pick, draw.chance
  groups = pick(1, 2, 3)
  mamba_heads, mamba_width = groups * pick(1, 2, 4), pick(4, 6)
  has_bias = chance()
  factors = lambda count: [pick(1.0, 0.3, 1.7, 0.39062499999999994) for _ in range(count)]
  config |= dict(
    mamba_d_ssm=mamba_heads * mamba_width, mamba_n_heads=mamba_heads, mamba_n_groups=groups,
    mamba_d_head=pick('auto', mamba_width), mamba_d_state=pick(4, 6, 16),
    mamba_d_conv=pick(2, 3, 4), mamba_chunk_size=pick(4, 32), mamba_conv_bias=chance(),
    mamba_proj_bias=has_bias, projectors_bias=has_bias, mamba_norm_before_gate=chance(),
    mamba_rms_norm=chance(), attention_bias=chance(), mlp_bias=chance(),
    time_step_limit=pick((0.0, float('inf')), (0.2, 0.8), (0.4, float('inf'))),
    embedding_multiplier=pick(1.0, 3.0), lm_head_multiplier=pick(1.0, 0.0390625, 0.011048543456),
    key_multiplier=pick(1.0, 1.7), attention_in_multiplier=pick(1.0, 0.7),
    attention_out_multiplier=pick(1.0, 0.9), ssm_in_multiplier=pick(1.0, 1.25),
    ssm_out_multiplier=pick(1.0, 0.4), ssm_multipliers=pick(None, factors(5)),
    mlp_multipliers=pick(None, factors(2)),
  )  # fmt: skip
  if chance():
    config |= dict(mamba_d_ssm=None, mamba_expand=2, mamba_d_head='auto', mamba_n_groups=1)
    config['mamba_n_heads'] = pick(1, 2) * draw.heads
  return config
