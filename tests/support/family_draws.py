"""python -m tests.support.family_draws [FAMILY…] [--draws=200] [--first=0]

Draws configurations of each family at random, sizes and options, and compares the logits of the
imported model with those of transformers, and these with those of its exported config.json. Prints
the largest difference of a family, as a share of its largest logit, and every draw that is above
1e-5.
"""

import pathlib
import sys
import tempfile
import zlib
from typing import Any

import fiddle as fdl
import jax
import numpy as np

from paxlite.experiments.parts.linked_stack import LinkedStack
from paxlite.weights import folder, huggingface
from paxlite.weights.families import config_json
from paxlite.weights.family_tables import FAMILIES
from tests.support.families import draw_tables, register_mistral4
from tests.support.imported import nested, repeated, variables_of

LENGTH = 20
# Families whose heads span the model.
SPANS = (
  'qwen2', 'olmo2', 'olmoe', 'phi3', 'smollm3', 'gpt2', 'granite', 'phi', 'gpt_neox',
)  # fmt: skip
TOLERANCE = 1e-5
BUFFERS = ('e_score_correction_bias', 'layer_scalar')  # which a file has beside the parameters


def draw(kind: str, seed: int) -> dict[str, Any]:
  """Returns the arguments of a random config of a family."""
  rng = np.random.default_rng([seed, zlib.crc32(kind.encode())])  # whatever families there are
  pick = lambda *options: options[rng.integers(len(options))]
  chance = lambda: bool(rng.integers(2))
  heads = pick(2, 4, 6)
  kv_heads = pick(*(n for n in (1, 2, 3, 4, 6) if heads % n == 0))
  # transformers' product of experts needs multiples of 4
  width, layers = pick(4, 8, 16) if kind == 'olmoe' else pick(4, 6, 10, 16), pick(1, 2, 3, 4)
  spans = kind in SPANS
  hidden = heads * (width if spans else pick(4, 8, 12))
  if kind == 'gpt2':
    return dict(vocab_size=60, n_embd=hidden, n_head=heads, n_layer=layers, n_positions=40,
                n_inner=pick(None, 24), activation_function=pick('gelu_new', 'relu'))  # fmt: skip
  config: dict[str, Any] = dict(
    vocab_size=pick(50, 61, 96), hidden_size=hidden, intermediate_size=pick(12, 24, 56),
    num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
    max_position_embeddings=64, tie_word_embeddings=chance(), rms_norm_eps=pick(1e-6, 1e-5, 1e-3),
    bos_token_id=1, eos_token_id=2, pad_token_id=0,
  )  # fmt: skip
  if not spans:
    config['head_dim'] = width
  if not kind.startswith('gemma') and kind != 'gpt_oss':
    config['hidden_act'] = pick('silu', 'silu', 'gelu', 'gelu_pytorch_tanh', 'relu')
  theta = pick(100.0, 1e4, 5e5)
  stretched = dict(rope_theta=theta, factor=pick(2.0, 8.0), original_max_position_embeddings=8)
  rope = pick(
    dict(rope_type='default', rope_theta=theta),
    dict(rope_type='linear', rope_theta=theta, factor=pick(2.0, 4.0)),
    dict(rope_type='llama3', low_freq_factor=1.0, high_freq_factor=4.0, **stretched),
    dict(rope_type='yarn', beta_fast=pick(32.0, 2.0), truncate=chance(), **stretched),
    dict(rope_type='yarn', attention_factor=pick(0.7, 1.0), **stretched | dict(factor=1.0)),
  )  # fmt: skip
  config['rope_parameters'] = rope
  window = pick(3, 7, 30)
  types = [pick('sliding_attention', 'full_attention') for _ in range(layers)]
  if kind in ('mistral', 'mixtral', 'phi3'):
    config['sliding_window'] = pick(None, window)
  if kind in ('gemma2', 'gemma3_text', 'olmo3', 'gpt_oss'):
    config |= dict(sliding_window=window, layer_types=types)
  if kind in ('qwen2', 'qwen3'):
    config |= dict(use_sliding_window=chance(), sliding_window=window, layer_types=types)
    if not config['use_sliding_window']:
      config |= dict(sliding_window=None, layer_types=['full_attention'] * layers)
  if kind in ('gemma2', 'gemma3_text'):
    config |= dict(
      query_pre_attn_scalar=pick(4, 9, 256), final_logit_softcapping=pick(None, 2.0, 30.0)
    )  # fmt: skip
  if kind == 'gemma4_text':
    _draw_gemma4(config, pick, chance, types, window)
  if kind == 'llama4_text':
    every = pick(1, 2, 3)
    config |= dict(
      intermediate_size_mlp=pick(12, 40), num_local_experts=pick(4, 6),
      num_experts_per_tok=pick(1, 1, 3), interleave_moe_layer_step=every,
      no_rope_layers=[int(chance()) for _ in range(layers)], use_qk_norm=chance(),
      attention_chunk_size=pick(3, 8, 30), attn_temperature_tuning=chance(), floor_scale=pick(3, 8),
      attn_scale=pick(0.1, 0.9), attention_bias=chance(),
    )  # fmt: skip
  if kind == 'gemma2':
    config['attn_logit_softcapping'] = pick(None, 1.5, 50.0)
  if kind in ('gemma3_text', 'olmo3'):
    local = dict(rope_type='default', rope_theta=pick(100.0, 1e4))
    config['rope_parameters'] = {'full_attention': rope, 'sliding_attention': local}
  if kind == 'phi3':
    config |= dict(original_max_position_embeddings=pick(16, 40))
    share = pick(1.0, 0.5) if width in (4, 16) else 1.0
    pairs = int(width * share) // 2
    factors = dict(
      short_factor=list(rng.uniform(1, 3, pairs)), long_factor=list(rng.uniform(1, 9, pairs))
    )
    plain = dict(rope_type='default', rope_theta=theta)
    long = dict(rope_type='longrope', rope_theta=theta, **factors)
    config['rope_parameters'] = pick(plain, long) | dict(partial_rotary_factor=share)
  if kind == 'smollm3':
    config['no_rope_layers'] = [int(chance()) for _ in range(layers)]
    config |= pick({}, dict(use_sliding_window=True, sliding_window=window))
    config |= pick({}, dict(sliding_window=window, layer_types=types))
  if kind in ('mixtral', 'qwen3_moe', 'olmoe', 'gpt_oss'):
    config |= dict(num_experts_per_tok=pick(1, 2, 3))
    config['num_experts' if kind == 'olmoe' else 'num_local_experts'] = pick(4, 6)
  if kind == 'qwen3_moe':
    config |= dict(moe_intermediate_size=pick(8, 20), norm_topk_prob=chance())
  if kind == 'olmoe':
    config |= dict(norm_topk_prob=chance())
  if kind == 'olmo_hybrid':
    del config['head_dim']
    config['rope_parameters'] = pick(rope, dict(rope_type='default', rope_theta=None))
  if kind.startswith(('qwen3_5', 'qwen3_next', 'olmo_hybrid')):
    key_heads = pick(1, 2, 3)
    config |= dict(
      linear_num_key_heads=key_heads,
      linear_num_value_heads=key_heads * pick(1, 2, 3), linear_key_head_dim=pick(4, 6, 16),
      linear_value_head_dim=pick(4, 10, 16), linear_conv_kernel_dim=pick(2, 3, 4),
      layer_types=[pick('linear_attention', 'linear_attention', 'full_attention')
                   for _ in range(layers - 1)] + ['full_attention'],
    )  # fmt: skip
  if kind == 'olmo_hybrid':
    config['layer_types'] = ['linear_attention', *config['layer_types']]
    config |= dict(num_hidden_layers=layers + 1, linear_allow_neg_eigval=chance())
    # transformers saves convolutions in three parts of one size, whatever their sizes are
    shares = config['linear_num_value_heads'] // key_heads
    config['linear_key_head_dim'] = config['linear_value_head_dim'] * shares
  if kind.startswith(('qwen3_5', 'qwen3_next')):
    config['head_dim'] = pick(8, 16)
    config['rope_parameters'] |= dict(partial_rotary_factor=pick(0.25, 0.5, 1.0))
  if kind in ('qwen3_5_moe_text', 'qwen3_next'):
    config |= dict(
      num_experts_per_tok=pick(1, 2, 3),
      num_experts=pick(4, 6),
      moe_intermediate_size=pick(8, 20),
      shared_expert_intermediate_size=pick(8, 12),
    )
  if kind == 'qwen3_next':
    config |= dict(norm_topk_prob=chance())
  if kind == 'lfm2':
    del config['head_dim'], config['hidden_act']
    config |= dict(
      hidden_size=heads * width, norm_eps=config.pop('rms_norm_eps'), conv_bias=chance(),
      conv_L_cache=pick(1, 2, 3, 5), block_auto_adjust_ff_dim=chance(),
      block_ffn_dim_multiplier=pick(1, 0.7, 1.5), block_multiple_of=pick(4, 10),
      layer_types=[pick('conv', 'conv', 'full_attention') for _ in range(layers - 1)]
      + ['full_attention'],  # transformers computes none without
    )  # fmt: skip
  if kind == 'granitemoehybrid':
    inner = pick(1, 2) * hidden
    groups = pick(*(n for n in (1, 2, 3) if inner % n == 0))
    per_group = pick(*(n for n in (1, 2, 4) if inner % (n * groups) == 0))
    config |= dict(
      shared_intermediate_size=pick(8, 20), num_local_experts=pick(0, 4, 6),
      num_experts_per_tok=pick(1, 2, 3), position_embedding_type=pick(None, 'nope', 'rope'),
      mamba_n_groups=groups, mamba_n_heads=groups * per_group, mamba_d_state=pick(4, 6, 16),
      mamba_expand=inner // hidden, mamba_d_conv=pick(2, 3, 4), mamba_chunk_size=pick(4, 32),
      mamba_conv_bias=chance(), mamba_proj_bias=chance(),
      time_step_limit=pick((0.0, float('inf')), (0.2, 0.8), (0.4, float('inf'))),
      layer_types=[pick('linear_attention', 'linear_attention', 'full_attention')
                   for _ in range(layers - 1)] + ['full_attention'],
    )  # fmt: skip
  if kind == 'nemotron_h':
    del config['hidden_act'], config['rope_parameters'], config['num_hidden_layers']
    groups, expert_groups = pick(1, 2, 3), pick(1, 2, 4)
    kinds = ('linear_attention', 'full_attention', 'mlp', 'moe')
    config |= dict(
      tie_word_embeddings=False, layer_norm_epsilon=config.pop('rms_norm_eps'),
      layers_block_type=[pick(*kinds) for _ in range(layers)] + ['full_attention'],
      mlp_hidden_act=pick('relu2', 'silu'), mamba_hidden_act=pick('silu', 'gelu'),
      mlp_bias=chance(), use_bias=chance(), use_conv_bias=chance(), n_groups=groups,
      mamba_num_heads=groups * pick(1, 2, 3), mamba_head_dim=pick(4, 6), ssm_state_size=pick(4, 10),
      conv_kernel=pick(2, 4), chunk_size=pick(8, 32), time_step_min=pick(0.001, 0.5),
      n_routed_experts=8, num_experts_per_tok=pick(1, 2), moe_intermediate_size=pick(8, 20),
      moe_shared_expert_intermediate_size=pick(8, 12), routed_scaling_factor=pick(1.0, 2.5),
      n_group=expert_groups, topk_group=pick(1, expert_groups), norm_topk_prob=chance(),
    )  # fmt: skip
  if kind == 'falcon_h1':
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
      config['mamba_n_heads'] = pick(1, 2) * heads
  if kind == 'kimi_linear':
    groups, dense = pick(1, 2, 4), pick(*range(layers + 1))
    del config['head_dim'], config['rope_parameters']
    config |= dict(
      num_key_value_heads=heads, q_lora_rank=pick(None, 12), kv_lora_rank=pick(8, 20),
      qk_nope_head_dim=pick(4, 10), qk_rope_head_dim=pick(4, 6), v_head_dim=pick(4, 10),
      num_experts=8, num_experts_per_token=pick(1, 2), moe_intermediate_size=pick(8, 20),
      num_shared_experts=pick(1, 2), routed_scaling_factor=pick(1.0, 2.5), num_expert_group=groups,
      topk_group=pick(1, groups), moe_renormalize=chance(), tie_word_embeddings=False,
      # of 4 numbers, a norm may be almost 0, and what transformers rounds is then seen
      linear_head_dim=pick(8, 12, 16), linear_num_heads=pick(1, 2, 3),
      linear_conv_kernel_dim=pick(2, 3, 4),
      num_hidden_layers=layers + 1,
      mlp_layer_types=['dense'] * dense + ['sparse'] * (layers + 1 - dense),
      layer_types=['linear_attention', *(pick('linear_attention', 'full_attention')
                   for _ in range(layers - 1)), 'full_attention'],  # transformers needs both
    )  # fmt: skip
  if kind in ('granite', 'granitemoehybrid'):
    config |= dict(
      embedding_multiplier=pick(1.0, 3), residual_multiplier=pick(1.0, 0.3),
      attention_multiplier=pick(1.0, 0.2), logits_scaling=pick(1.0, 6),
      attention_bias=chance(),
    )  # fmt: skip
  if kind == 'granite':
    config['mlp_bias'] = chance()
  if kind == 'seed_oss':
    config |= dict(attention_bias=chance(), attention_out_bias=chance(), mlp_bias=chance())
  if kind == 'ministral3':
    config['sliding_window'] = pick(None, window)
    if rope['rope_type'] not in ('llama3', 'yarn'):
      rope = dict(rope_type='yarn', **stretched)
    config['rope_parameters'] = rope | dict(llama_4_scaling_beta=pick(0.0, 0.1, 0.9))
    config['rope_parameters'].setdefault('original_max_position_embeddings', 8)
  if kind in ('glm4', 'glm4_moe', 'phi', 'gpt_neox'):
    share = pick(*(share for share in (1.0, 0.5, 0.25) if width * share % 2 == 0))
    config['rope_parameters'] = rope | dict(partial_rotary_factor=share)
  if kind in ('glm4', 'glm4_moe', 'hunyuan_v1_dense', 'gpt_neox'):
    config['attention_bias'] = chance()
  if kind == 'glm4_moe':
    groups = pick(1, 2, 4)
    config |= dict(
      n_routed_experts=8, num_experts_per_tok=pick(1, 2), moe_intermediate_size=pick(8, 20),
      n_shared_experts=pick(1, 2), first_k_dense_replace=pick(0, 1, layers),
      routed_scaling_factor=pick(1.0, 2.5), n_group=groups, topk_group=pick(1, groups),
      norm_topk_prob=chance(), use_qk_norm=chance(),
    )  # fmt: skip
  if kind == 'minimax_m2':
    share = pick(*(share for share in (1.0, 0.5, 0.25) if width * share % 2 == 0))
    config |= dict(
      num_local_experts=pick(4, 6), num_experts_per_tok=pick(1, 2, 3),
      rope_parameters=rope | dict(partial_rotary_factor=share),
    )  # fmt: skip
  if kind == 'exaone4':
    config |= dict(sliding_window=window, layer_types=types)
    if chance():
      full = ['full_attention'] * layers
      config |= dict(sliding_window=None, sliding_window_pattern=None, layer_types=full)
  if kind == 'ernie4_5':
    config['use_bias'] = chance()
  if kind == 'ernie4_5_moe':
    config |= dict(
      use_bias=chance(), moe_num_experts=pick(4, 8), moe_k=pick(1, 3),
      moe_layer_interval=pick(1, 2),
      moe_num_shared_experts=pick(0, 1, 2), moe_intermediate_size=pick(8, 20),
      moe_layer_start_index=pick(0, 1, layers), moe_layer_end_index=-1,
    )  # fmt: skip
  if kind == 'hunyuan_v1_dense' and chance():
    config['rope_parameters'] = dict(rope_type='dynamic', rope_theta=theta, factor=1.0, alpha=9.0)
  if kind in ('phi', 'gpt_neox'):
    config['layer_norm_eps'] = config.pop('rms_norm_eps')
  if kind == 'phi':
    config['qk_layernorm'] = chance()
  if kind == 'gpt_neox':
    del config['num_key_value_heads']
    config['use_parallel_residual'] = chance()
  if kind == 'deepseek_v4':
    _draw_v4(config, pick, chance)
  elif kind.startswith('deepseek') or kind in ('mistral4', 'glm4_moe_lite', 'glm_moe_dsa'):
    groups = pick(1, 2, 4)
    del config['head_dim']
    config |= dict(
      num_key_value_heads=heads, q_lora_rank=pick(None, 12), kv_lora_rank=pick(8, 20),
      qk_nope_head_dim=pick(4, 10), qk_rope_head_dim=pick(4, 6), v_head_dim=pick(4, 10),
      n_routed_experts=8, num_experts_per_tok=pick(1, 2), moe_intermediate_size=pick(8, 20),
      n_shared_experts=pick(1, 2), first_k_dense_replace=pick(0, 1, layers),
      routed_scaling_factor=pick(1.0, 2.5), n_group=groups, topk_group=pick(1, groups),
      norm_topk_prob=chance() if kind != 'deepseek_v2' else False,
    )  # fmt: skip
    if kind == 'mistral4' and rope['rope_type'] != 'yarn':
      rope = dict(rope_type='yarn', **stretched)
    if rope['rope_type'] not in ('default', 'yarn'):
      config['rope_parameters'] = dict(rope_type='default', rope_theta=theta)
    elif rope['rope_type'] == 'yarn':
      scales = dict(mscale=pick(1.0, 0.7), mscale_all_dim=pick(0.0, 1.0, 0.7))
      config['rope_parameters'] = rope | scales
      config['rope_parameters'].pop('attention_factor', None)
    if kind == 'mistral4':
      config['rope_parameters']['llama_4_scaling_beta'] = pick(0.0, 0.1, 0.9)
    if kind in ('deepseek_v32', 'glm_moe_dsa'):
      config |= dict(
        q_lora_rank=12, index_topk=pick(3, 8, 30), index_head_dim=pick(6, 12), index_n_heads=24
      )
    if kind == 'glm_moe_dsa':
      config['indexer_types'] = ['full', *(pick('full', 'shared') for _ in range(layers - 1))]
    if kind == 'glm4_moe_lite':
      dense = config.pop('first_k_dense_replace')
      config['mlp_layer_types'] = ['dense'] * dense + ['sparse'] * (layers - dense)
    if kind == 'deepseek_v2':
      config['topk_method'] = pick('greedy', 'group_limited_greedy')
  return config


def _draw_gemma4(config: dict[str, Any], pick, chance, types: list[str], window: int) -> None:
  """Adds the options of Gemma 4, whose last block has full attention."""
  heads, rope = config['num_attention_heads'], config['rope_parameters']
  local = dict(rope_type='default', rope_theta=pick(100.0, 1e4))
  share = pick(1.0, 0.5, 0.25)
  proportional = dict(rope_type='proportional', rope_theta=1e3, partial_rotary_factor=share)
  config |= dict(
    sliding_window=window, layer_types=[*types[:-1], 'full_attention'],
    global_head_dim=pick(8, 12, 20), attention_k_eq_v=chance(), hidden_size_per_layer_input=0,
    num_global_key_value_heads=pick(None, *(n for n in (1, 2, 3) if heads % n == 0)),
    hidden_activation=pick('gelu_pytorch_tanh', 'silu'),
    final_logit_softcapping=pick(None, 2.0, 30.0), use_bidirectional_attention=pick(None, 'vision'),
    rope_parameters={
      'full_attention': pick(proportional, proportional, rope), 'sliding_attention': local,
    },
  )  # fmt: skip
  if chance():
    config |= dict(
      enable_moe_block=True, num_experts=8, top_k_experts=pick(1, 3),
      moe_intermediate_size=pick(8, 20),
    )  # fmt: skip
  if chance():  # transformers cannot compute layers that share keys without inputs of layers
    given = config['layer_types']
    # the layers that have keys have all kinds of attention
    most = max(n for n in range(len(given)) if {*given[: len(given) - n]} == {*given})
    config |= dict(
      hidden_size_per_layer_input=pick(10, 16), num_kv_shared_layers=pick(0, min(most, 1), most),
      vocab_size_per_layer_input=config['vocab_size'] + pick(0, 5), use_double_wide_mlp=chance(),
    )  # fmt: skip


def _draw_v4(config: dict[str, Any], pick, chance) -> None:
  """Adds the options of DeepSeek-V4, which has 1 to 6 blocks of any kinds."""
  heads, layers, width = config['num_attention_heads'], pick(1, 2, 3, 4, 6), pick(8, 12, 16)
  kinds = 'sliding_attention', 'compressed_sparse_attention', 'heavily_compressed_attention'
  rope = config['rope_parameters']
  del config['intermediate_size']
  config |= dict(
    num_hidden_layers=layers, num_key_value_heads=1, head_dim=width, q_lora_rank=pick(8, 12),
    moe_intermediate_size=pick(8, 20), n_routed_experts=8, num_experts_per_tok=pick(1, 2, 3),
    routed_scaling_factor=pick(1.0, 2.5), partial_rotary_factor=pick(0.5, 1.0),
    layer_types=pick(None, [pick(*kinds) for _ in range(layers)]),
    compress_rates=pick(None, dict(zip(kinds[1:], (pick(2, 3, 4), pick(1, 5, 7)), strict=True))),
    num_hash_layers=pick(0, 1, 3), hc_mult=pick(1, 2, 4), hc_sinkhorn_iters=pick(1, 3, 20),
    hc_eps=pick(1e-6, 1e-2), sliding_window=pick(3, 7, 30), swiglu_limit=pick(0.3, 10.0),
    o_groups=pick(*(n for n in (1, 2, 3) if heads % n == 0)), o_lora_rank=pick(4, 10),
    index_n_heads=24, index_head_dim=pick(16, 20), index_topk=pick(1, 2, 4, 30),
    rope_theta=rope['rope_theta'], compress_rope_theta=pick(100.0, 1e4),
  )  # fmt: skip
  if config['num_hash_layers'] == 0:
    config['mlp_layer_types'] = ['moe'] * layers
  if chance():
    share = dict(partial_rotary_factor=config['partial_rotary_factor'])
    main = dict(rope_type='default', rope_theta=pick(50.0, 1e4), **share)
    config['rope_parameters'] = dict(main=main, compress=rope | share)
  else:
    del rope['rope_theta']


def difference(kind: str, seed: int) -> float:
  """Returns the largest difference of the logits of a draw, as a share of the largest logit.

  The logits are those of the imported model, and those of transformers with the config.json of an
  export.
  """
  import torch
  import transformers

  torch.manual_seed(seed)
  register_mistral4()
  config = transformers.AutoConfig.for_model(kind, **draw(kind, seed))
  model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation='eager').eval()
  with torch.no_grad():
    biases = [b for name, b in model.named_buffers() if name.endswith(BUFFERS)]
    for tensor in [*model.parameters(), *biases]:
      tensor.add_(torch.randn_like(tensor) * 0.1)
    draw_tables(model)
    for name, tensor in model.named_parameters():
      if name.endswith('A_log'):  # states that last
        tensor.uniform_(-3, 0)
    ids = np.random.default_rng(seed).integers(3, 50, (2, LENGTH))
    expected = model(torch.tensor(ids)).logits.numpy()
  largest = np.abs(expected).max()
  with tempfile.TemporaryDirectory() as made:
    path = pathlib.Path(made)
    model.save_pretrained(path)
    experiment, entries, tensors = huggingface.read_folder(path)
    folder.check_tensors(entries, tensors.shapes, huggingface.IGNORED)
    variables = variables_of(entries, tensors.read)
  written = config_json(experiment, 'float32', None)
  config = transformers.AutoConfig.for_model(written.pop('model_type'), **written)
  back = transformers.AutoModelForCausalLM.from_config(config, attn_implementation='eager').eval()
  back.load_state_dict(model.state_dict())
  with torch.no_grad():
    exported = np.abs(back(torch.tensor(ids)).logits.numpy() - expected).max()
  if experiment.ROPE_SCALING == 'longrope' and experiment.ROPE_ORIGINAL_LENGTH < LENGTH:
    experiment = experiment.replaced(MAX_SEQ_LEN=64)  # the factors for long rows
  is_linked = isinstance(experiment, LinkedStack) and experiment.has_links  # no layer is repeated
  ours = fdl.build(experiment.replaced(USE_REPEATED_LAYER=not is_linked).build_task()).model
  params = nested(variables if is_linked else repeated(variables))
  with jax.default_matmul_precision('highest'):
    logits = jax.jit(ours.apply)({'params': params}, ids)
  return float(max(np.abs(logits - expected).max(), exported) / largest)


def main(arguments: list[str]) -> None:
  flags = dict(a.removeprefix('--').split('=') for a in arguments if a.startswith('--'))
  kinds = [a for a in arguments if not a.startswith('--')] or list(FAMILIES)
  first, draws = int(flags.get('first', 0)), int(flags.get('draws', 200))
  for kind in kinds:
    worst = 0.0
    for seed in range(first, first + draws):
      try:
        found = difference(kind, seed)
      except Exception as e:
        print(f'{kind} {seed}: {type(e).__name__}: {str(e)[:300]}', flush=True)
        continue
      worst = max(worst, found)
      if seed % 50 == 49:
        jax.clear_caches()
      if found > TOLERANCE:
        print(f'{kind} {seed}: {found:.2g} {draw(kind, seed)}', flush=True)
    print(f'{kind}: {draws} draws, {worst:.2g}', flush=True)


if __name__ == '__main__':
  main(sys.argv[1:])
