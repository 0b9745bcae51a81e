"""Tiny models of the family; see experiments.cases."""

from paxlite.experiments.cases import BLOCK, YARN

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
