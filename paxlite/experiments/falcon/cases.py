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
# What published files say, apart from keys that every file has, by the names of their classes.
PUBLISHED: dict[str, dict[str, Any]] = {
  'FalconH1_0_5B': dict(
    model_type='falcon_h1', hidden_size=1024, intermediate_size=2048, num_hidden_layers=36,
    num_attention_heads=8, num_key_value_heads=2, head_dim=64, vocab_size=32784,
    attention_bias=False,
    attention_in_multiplier=1.0, attention_out_multiplier=0.9375, attn_layer_indices=None,
    embedding_multiplier=5.656854249492381, key_multiplier=0.39062499999999994,
    lm_head_multiplier=0.0390625, hidden_act='silu', mamba_chunk_size=128, mamba_conv_bias=True,
    mamba_d_conv=4, mamba_d_head=64, mamba_d_ssm=1536, mamba_d_state=128, mamba_expand=2,
    mamba_n_groups=1, mamba_n_heads=24, mamba_norm_before_gate=False, mamba_proj_bias=False,
    mamba_rms_norm=False, mamba_use_mlp=True, mlp_bias=False, mlp_expansion_factor=8,
    mlp_multipliers=[0.8838834764831844, 0.5859375], num_logits_to_keep=1, projectors_bias=False,
    rope_scaling=None, rope_theta=100000000000.0, ssm_in_multiplier=1.25,
    ssm_multipliers=[0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
    ssm_out_multiplier=0.23570226039551587, max_position_embeddings=16384, rms_norm_eps=1e-5,
    tie_word_embeddings=False,
  ),
}  # fmt: skip
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
