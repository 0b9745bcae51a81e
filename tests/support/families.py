"""Tiny models of every family in transformers, with all options of the family in use."""

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
LATENT = dict(
  num_key_value_heads=4, kv_lora_rank=16, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=10,
  n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, first_k_dense_replace=1,
  rope_parameters=YARN | dict(mscale=1.0, mscale_all_dim=0.8),
)  # fmt: skip
# with few heads, many scores would be 0, and transformers may take any of them
INDEXER = dict(index_topk=5, index_head_dim=6, index_n_heads=24)
V4 = dict(
  num_hidden_layers=6, num_key_value_heads=1, head_dim=16, q_lora_rank=12, moe_intermediate_size=24,
  num_experts_per_tok=3, n_routed_experts=8, partial_rotary_factor=0.5, num_hash_layers=2,
  hc_mult=3,
  compress_rates=dict(compressed_sparse_attention=2, heavily_compressed_attention=5),
  layer_types=['sliding_attention', *(
    ['heavily_compressed_attention', 'compressed_sparse_attention'] * 3
  )[:5]],
  sliding_window=6, o_groups=2, o_lora_rank=10, index_n_heads=24, index_head_dim=12, index_topk=3,
  swiglu_limit=0.7, rope_theta=1e2, compress_rope_theta=1e3,
  rope_parameters=dict(
    rope_type='yarn', factor=4.0, original_max_position_embeddings=16, beta_fast=4.0, beta_slow=1.0,
  ),
)  # fmt: skip
DELTA = dict(
  head_dim=16, linear_key_head_dim=12, linear_value_head_dim=10, linear_num_key_heads=2,
  linear_num_value_heads=4, linear_conv_kernel_dim=3,
  layer_types=['linear_attention', 'full_attention', 'linear_attention', 'linear_attention'],
)  # fmt: skip
# transformers saves convolutions in three parts of one size, whatever their sizes are
OLMO_DELTA = {k: v for k, v in DELTA.items() if k != 'head_dim'} | dict(linear_key_head_dim=20)
SHARED = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24,
              shared_expert_intermediate_size=20)  # fmt: skip
NEOX = {k: v for k, v in BLOCK.items() if k != 'num_key_value_heads'} | dict(
  layer_norm_eps=1e-3, rotary_pct=0.5
)
MAMBA = dict(
  mamba_n_heads=4, mamba_d_state=12, mamba_d_conv=3, mamba_expand=2,
  layer_types=['linear_attention', 'full_attention', 'linear_attention', 'linear_attention'],
)  # fmt: skip
NEMOTRON = {k: v for k, v in BLOCK.items() if k != 'num_hidden_layers'} | dict(
  head_dim=10, mamba_num_heads=4, mamba_head_dim=6, n_groups=2, ssm_state_size=12, conv_kernel=3,
  time_step_min=0.4, n_routed_experts=8, moe_intermediate_size=24,
  moe_shared_expert_intermediate_size=20,
)  # fmt: skip
FALCON = dict(
  head_dim=10, mamba_d_ssm=48, mamba_n_heads=4, mamba_d_state=12, mamba_d_conv=3,
  embedding_multiplier=3.0, lm_head_multiplier=0.4, key_multiplier=1.7, attention_in_multiplier=0.8,
  attention_out_multiplier=1.3, ssm_in_multiplier=1.4, ssm_out_multiplier=0.6,
  mlp_multipliers=[1.6, 0.7], ssm_multipliers=[0.5, 1.5, 0.7, 1.3, 1.2],
)  # fmt: skip
KIMI = {k: v for k, v in LATENT.items() if k not in (
  'n_routed_experts', 'first_k_dense_replace', 'rope_parameters'
)} | dict(
  num_experts=8, linear_head_dim=6, linear_num_heads=3, linear_conv_kernel_dim=3,
  layer_types=['linear_attention', 'full_attention', 'linear_attention', 'linear_attention'],
)  # fmt: skip
GEMMA4 = dict(
  head_dim=10, global_head_dim=12, sliding_window=5, hidden_size_per_layer_input=0,
  rope_parameters={
    'full_attention': dict(rope_type='proportional', rope_theta=1e3, partial_rotary_factor=0.5),
    'sliding_attention': dict(rope_type='default', rope_theta=1e2),
  },
)  # fmt: skip
LLAMA4 = dict(
  head_dim=10, intermediate_size_mlp=40, num_local_experts=8, attention_chunk_size=7,
  floor_scale=5, attn_scale=0.7, rope_parameters=dict(rope_type='default', rope_theta=1e2),
)  # fmt: skip
WINDOW = ['sliding_attention', 'full_attention'] * 2

# The first word is the model_type.
CASES = {
  'llama yarn': BLOCK | dict(head_dim=10, rope_parameters=YARN),
  'llama4_text': BLOCK
  | LLAMA4
  | dict(num_hidden_layers=6, num_experts_per_tok=2, interleave_moe_layer_step=2),
  'llama4_text experts': BLOCK
  | LLAMA4
  | dict(
    num_experts_per_tok=1, use_qk_norm=False, attention_bias=True, no_rope_layers=[1] * 4,
    rope_parameters=dict(
      rope_type='llama3', rope_theta=1e4, factor=4.0, original_max_position_embeddings=16,
      low_freq_factor=1.0, high_freq_factor=1.0,
    ),
  ),
  'mistral wide heads': BLOCK | dict(head_dim=18, sliding_window=7),
  'mixtral': BLOCK | EXPERTS | dict(sliding_window=9),
  'gemma2': BLOCK
  | dict(
    head_dim=10, sliding_window=5, query_pre_attn_scalar=7, attn_logit_softcapping=2.0,
    final_logit_softcapping=3.0,
  ),
  'gemma3_text': BLOCK
  | dict(
    num_hidden_layers=8, head_dim=10, sliding_window=5, query_pre_attn_scalar=7,
    rope_parameters={
      'full_attention': dict(rope_type='linear', rope_theta=1e6, factor=4.0),
      'sliding_attention': dict(rope_type='default', rope_theta=1e4),
    },
  ),
  'gemma4_text': BLOCK
  | GEMMA4
  | dict(
    num_hidden_layers=6, num_global_key_value_heads=1, attention_k_eq_v=True,
    final_logit_softcapping=3.0, layer_types=['sliding_attention', 'full_attention'] * 3,
  ),
  'gemma4_text experts': BLOCK
  | GEMMA4
  | dict(
    layer_types=['sliding_attention'] * 3 + ['full_attention'], enable_moe_block=True,
    num_experts=8, top_k_experts=3, moe_intermediate_size=24, tie_word_embeddings=False,
  ),
  'gemma4_text linked': BLOCK
  | GEMMA4
  | dict(
    num_hidden_layers=6, num_kv_shared_layers=3, use_double_wide_mlp=True,
    # of 6 numbers, a norm may be almost 0, and what is rounded is then seen in the logits
    hidden_size_per_layer_input=16, vocab_size_per_layer_input=96,
    layer_types=['sliding_attention', 'full_attention'] * 3,
  ),
  'qwen2': BLOCK,
  'qwen2 window': BLOCK
  | dict(use_sliding_window=True, sliding_window=6, max_window_layers=2, tie_word_embeddings=True),
  'qwen3': BLOCK | dict(head_dim=10),
  'qwen3_moe': BLOCK | EXPERTS | dict(head_dim=10, moe_intermediate_size=24, norm_topk_prob=True),
  'olmo2': BLOCK,
  'olmo3': BLOCK
  | dict(
    sliding_window=5, num_hidden_layers=5,
    rope_parameters={
      'full_attention': YARN,
      'sliding_attention': dict(rope_type='default', rope_theta=1e4),
    },
  ),
  'olmoe': BLOCK | dict(num_experts=8, num_experts_per_tok=3),
  'phi3': BLOCK | dict(sliding_window=9),
  'phi3 longrope': BLOCK
  | dict(
    original_max_position_embeddings=64, tie_word_embeddings=True,
    rope_parameters=dict(
      rope_type='longrope', rope_theta=1e4, partial_rotary_factor=0.75,
      short_factor=[1.0, 1.5, 2.0], long_factor=[2.0, 3.0, 5.0],
    ),
  ),
  'smollm3': BLOCK | dict(num_hidden_layers=5, no_rope_layer_interval=2),
  'smollm3 windows': BLOCK
  | dict(num_hidden_layers=5, no_rope_layer_interval=2, use_sliding_window=True, sliding_window=7),
  'deepseek_v2': BLOCK
  | LATENT
  | dict(q_lora_rank=None, n_shared_experts=2, n_group=1, topk_group=1),
  'deepseek_v2 groups': BLOCK
  | LATENT
  | dict(
    q_lora_rank=12, n_shared_experts=1, n_group=4, topk_group=2, topk_method='group_limited_greedy',
    routed_scaling_factor=1.5,
  ),
  'deepseek_v3': BLOCK | LATENT | dict(q_lora_rank=12, n_group=4, topk_group=2),
  # YaRN of Kimi K2, whose two bounds are one
  'deepseek_v3 one bound': BLOCK
  | LATENT
  | dict(q_lora_rank=12, n_group=1, topk_group=1,
         rope_parameters=YARN | dict(beta_fast=1.0, mscale=1.0, mscale_all_dim=1.0)),
  'glm4_moe_lite': BLOCK
  | {k: v for k, v in LATENT.items() if k != 'first_k_dense_replace'}
  | dict(
    q_lora_rank=12, n_shared_experts=2, n_group=4, topk_group=2, routed_scaling_factor=1.5,
    mlp_layer_types=['dense', 'dense', 'sparse', 'sparse'],
  ),
  'deepseek_v32': BLOCK
  | LATENT
  | INDEXER
  | dict(q_lora_rank=12, n_group=4, topk_group=2),
  'glm_moe_dsa': BLOCK
  | LATENT
  | INDEXER
  | dict(q_lora_rank=12, n_group=1, topk_group=1, index_topk=9),
  'glm_moe_dsa linked': BLOCK
  | LATENT
  | INDEXER
  | dict(
    q_lora_rank=12, n_group=1, topk_group=1, index_topk=9,
    indexer_types=['full', 'shared', 'full', 'shared'],
  ),
  'deepseek_v4': BLOCK | V4,
  'deepseek_v4 plain': BLOCK
  | V4
  | dict(
    num_hash_layers=0, tie_word_embeddings=True, rope_parameters=None, hc_mult=2,
    layer_types=['compressed_sparse_attention', 'sliding_attention'] * 3, index_topk=50,
  ),
  'minimax_m2': BLOCK
  | EXPERTS
  | dict(head_dim=12, rope_parameters=YARN | dict(partial_rotary_factor=0.5)),
  'qwen3_5_text': BLOCK | DELTA,
  'qwen3_5_moe_text': BLOCK | DELTA | SHARED,
  'qwen3_next': BLOCK | DELTA | SHARED | dict(norm_topk_prob=False),
  'olmo_hybrid': BLOCK
  | OLMO_DELTA
  | dict(rope_parameters=dict(rope_type='default', rope_theta=None)),
  'olmo_hybrid positions': BLOCK
  | OLMO_DELTA
  | dict(rope_parameters=YARN, linear_allow_neg_eigval=False),
  'granite': BLOCK
  | dict(
    embedding_multiplier=3.0, residual_multiplier=0.4, attention_multiplier=0.7, logits_scaling=2.5,
    attention_bias=True, mlp_bias=True,
  ),
  'granite tied': BLOCK | dict(logits_scaling=2.5, tie_word_embeddings=True),
  'seed_oss': BLOCK
  | dict(head_dim=10, attention_bias=True, attention_out_bias=True, mlp_bias=True),
  'ministral3': BLOCK
  | dict(head_dim=10, sliding_window=19, rope_parameters=YARN | dict(llama_4_scaling_beta=0.7)),
  'glm4': BLOCK | dict(head_dim=12, rope_parameters=YARN | dict(partial_rotary_factor=0.5)),
  'glm4_moe': BLOCK
  | dict(
    head_dim=12, attention_bias=True, use_qk_norm=True, n_routed_experts=8, n_shared_experts=2,
    num_experts_per_tok=3, moe_intermediate_size=24, n_group=4, topk_group=2,
    routed_scaling_factor=1.5,
  ),
  'exaone4': BLOCK
  | dict(
    head_dim=10, num_hidden_layers=5, sliding_window=5, sliding_window_pattern=2,
    rope_parameters=dict(rope_type='linear', rope_theta=1e4, factor=4.0),
  ),
  'exaone4 full': BLOCK
  | dict(sliding_window=None, sliding_window_pattern=None, layer_types=['full_attention'] * 4),
  'ernie4_5': BLOCK | dict(head_dim=10, use_bias=True, tie_word_embeddings=False),
  'ernie4_5_moe': BLOCK
  | dict(
    num_hidden_layers=6, use_bias=True, tie_word_embeddings=False, moe_num_experts=8, moe_k=3,
    moe_num_shared_experts=2, moe_intermediate_size=24, moe_layer_start_index=2,
    moe_layer_interval=2,
  ),
  'mistral4': BLOCK
  | LATENT
  | dict(
    q_lora_rank=12, n_group=4, topk_group=2, routed_scaling_factor=1.5,
    rope_parameters=YARN | dict(mscale=1.0, mscale_all_dim=0.8, llama_4_scaling_beta=0.7),
  ),
  'hunyuan_v1_dense': BLOCK
  | dict(
    head_dim=10, attention_bias=True,
    rope_parameters=dict(rope_type='dynamic', rope_theta=1e4, alpha=1000.0, factor=1.0),
  ),
  'phi': BLOCK
  | dict(
    layer_norm_eps=1e-3, qk_layernorm=True,
    rope_parameters=YARN | dict(partial_rotary_factor=0.5),
  ),
  'gpt_neox': NEOX,
  'gpt_neox in turn': NEOX | dict(use_parallel_residual=False, attention_bias=False),
  'lfm2': BLOCK
  | dict(
    conv_bias=True, conv_L_cache=3, block_multiple_of=12, block_ffn_dim_multiplier=1.5,
    layer_types=['conv', 'full_attention', 'conv', 'conv'],
  ),
  'lfm2 untied': BLOCK
  | dict(
    conv_L_cache=4, block_auto_adjust_ff_dim=False, tie_word_embeddings=False, full_attn_idxs=[1, 3]
  ),
  'granitemoehybrid': BLOCK
  | MAMBA
  | EXPERTS
  | dict(
    embedding_multiplier=3.0, residual_multiplier=0.4, attention_multiplier=0.7, logits_scaling=2.5,
    shared_intermediate_size=20, mamba_n_groups=2, time_step_limit=(0.1, 0.9),
  ),
  'granitemoehybrid dense': BLOCK
  | MAMBA
  | dict(
    num_local_experts=0, shared_intermediate_size=40, attention_bias=True, mamba_proj_bias=True,
    mamba_conv_bias=False, position_embedding_type='rope', tie_word_embeddings=True,
    rope_parameters=YARN,
  ),
  'nemotron_h': NEMOTRON
  | dict(
    layers_block_type=['linear_attention', 'moe', 'full_attention', 'mlp', 'linear_attention'],
    use_bias=True, mlp_bias=True, num_experts_per_tok=3, n_group=4, topk_group=2,
    routed_scaling_factor=1.5,
  ),
  'nemotron_h dense': NEMOTRON
  | dict(layers_block_type=['linear_attention', 'mlp', 'full_attention', 'mlp'] * 2),
  'falcon_h1': BLOCK
  | FALCON
  | dict(mamba_n_groups=2, mamba_rms_norm=True, time_step_limit=(0.1, 0.9), attention_bias=True),
  'falcon_h1 gate': BLOCK
  | FALCON
  | dict(
    mamba_conv_bias=False, mamba_proj_bias=True, projectors_bias=True, mlp_bias=True,
    tie_word_embeddings=True, rope_parameters=YARN,
  ),
  'kimi_linear': BLOCK | KIMI | dict(n_group=4, topk_group=2, q_lora_rank=12),
  'kimi_linear dense': BLOCK
  | KIMI
  | dict(
    num_shared_experts=2, moe_renormalize=False,
    mlp_layer_types=['dense', 'dense', 'sparse', 'sparse'],
  ),
  'gpt_oss': BLOCK
  | EXPERTS
  | dict(head_dim=10, sliding_window=5, rope_parameters=YARN | dict(truncate=False)),
}  # fmt: skip


def register_mistral4() -> None:
  """Lets AutoModelForCausalLM find Mistral 4, whose class transformers 5.24 has, but not there."""
  import transformers

  config, model = transformers.Mistral4Config, transformers.Mistral4ForCausalLM
  transformers.AutoModelForCausalLM.register(config, model, exist_ok=True)


def theirs(case: str, seed: int = 0, **changes):
  """Returns transformers' model of a case in float32, with random values everywhere."""
  import torch
  import transformers

  torch.manual_seed(seed)
  register_mistral4()
  config = transformers.AutoConfig.for_model(case.partition(' ')[0], **CASES[case] | changes)
  config._attn_implementation = 'eager'
  model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation='eager').eval()
  with torch.no_grad():
    for tensor in [
      *model.parameters(),
      *(b for n, b in model.named_buffers() if 'correction' in n or 'layer_scalar' in n),
    ]:
      tensor.add_(torch.randn_like(tensor) * 0.1)
    draw_tables(model)
    for name, tensor in model.named_parameters():
      if name.endswith('A_log'):  # states that last: otherwise a token sees little but itself
        tensor.uniform_(-3, 0)
  return model


def draw_tables(model) -> None:
  """Gives each token id different experts at random, where a table has them."""
  import torch

  for name, table in model.named_buffers():
    if name.endswith('tid2eid'):
      experts = model.config.n_routed_experts
      table.copy_(torch.rand(len(table), experts).topk(table.shape[1]).indices)


def experiment(case: str, **changes):
  """Returns the experiment of a case."""
  import pathlib

  import transformers

  from paxlite.weights.families import experiment_of

  config = transformers.AutoConfig.for_model(case.partition(' ')[0], **CASES[case] | changes)
  return experiment_of(config.to_dict(), pathlib.Path('config.json'))
