"""What the test cases of families have in common: parts of config.json of tiny models.

A family's module `cases` has CASES, in which every option of the family is used and can be seen in
the result. The first word of a case is its model_type.
"""

BLOCK = dict(
  vocab_size=96, hidden_size=32, intermediate_size=56, num_hidden_layers=4, num_attention_heads=4,
  num_key_value_heads=2, max_position_embeddings=128, bos_token_id=1, eos_token_id=2,
  pad_token_id=0,
)  # fmt: skip
YARN = dict(
  rope_type='yarn', rope_theta=1e4, factor=4.0, original_max_position_embeddings=16,
  beta_fast=4.0, beta_slow=1.0,
)  # fmt: skip
EXPERTS = dict(num_experts_per_tok=2, num_local_experts=8)
DELTA = dict(
  head_dim=16, linear_key_head_dim=12, linear_value_head_dim=10, linear_num_key_heads=2,
  linear_num_value_heads=4, linear_conv_kernel_dim=3,
  layer_types=['linear_attention', 'full_attention', 'linear_attention', 'linear_attention'],
)  # fmt: skip
