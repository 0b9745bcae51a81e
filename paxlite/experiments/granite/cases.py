"""Tiny models of the family; see experiments.cases."""

from paxlite.experiments.cases import BLOCK, EXPERTS, YARN

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
