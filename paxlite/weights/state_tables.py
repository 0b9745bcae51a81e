"""The published families with states, but those with gated delta nets; see family_tables."""

from paxlite.experiments.falcon import FalconH1
from paxlite.experiments.granite import GraniteHybrid
from paxlite.experiments.kimi import KimiLinear
from paxlite.experiments.lfm import LFM2
from paxlite.experiments.nemotron import NemotronH
from paxlite.weights import tensor_names
from paxlite.weights.config_keys import OneOf, Repeated, Same, activation, heads, positions
from paxlite.weights.falcon_keys import (
  FALCON_BIAS,
  FALCON_FACTORS,
  FALCON_HEADS,
  FALCON_NORM,
  LM_HEAD_FACTOR,
)
from paxlite.weights.family import Family
from paxlite.weights.family_keys import (
  NO_BIAS,
  NO_MLP_BIAS,
  NORMALIZED,
  UNTIED,
  number,
  only,
  unread,
)
from paxlite.weights.kimi_keys import (
  DENSE_LAYERS,
  KDA_LAYERS,
  MODEL_LENGTH,
  SHARED_EXPERTS,
  default_of,
)
from paxlite.weights.rope_keys import rope
from paxlite.weights.state_keys import (
  GRANITE_EXPERTS,
  GRANITE_TYPES,
  LFM2_BIAS,
  LFM2_TIED,
  LFM2_TYPES,
  LFM2_WIDTH,
  MAMBA_HEADS,
  SINGLE_BLOCKS,
  STEP_LIMITS,
)
from paxlite.weights.state_layout import side_by_side_entries, single_block_entries

_COUNTS = (
  Same('num_hidden_layers', 'NUM_LAYERS'),
  Same('vocab_size', 'VOCAB_SIZE'),
  positions('max_position_embeddings'),
)
_FACTORS = (
  number('embedding_multiplier', 'EMBEDDING_FACTOR'),
  number('residual_multiplier', 'RESIDUAL_FACTOR'),
  number('attention_multiplier', 'ATTENTION_FACTOR'),
  number('logits_scaling', 'LOGITS_DIVISOR'),
)

_BOTH_ACTIVATIONS = ('ACTIVATION_CLS', 'EXPERT_ACTIVATION_CLS')

STATE_FAMILIES: dict[str, Family] = {
  'lfm2': Family(
    'Lfm2ForCausalLM', LFM2,
    (
      *_COUNTS, heads('num_key_value_heads'), Same('norm_eps', 'LAYERNORM_EPSILON', default=1e-5),
      Same('conv_L_cache', 'CONVOLUTION_WIDTH', default=3), rope(theta=1e6),
      LFM2_WIDTH, LFM2_TYPES, LFM2_BIAS, LFM2_TIED,
      # transformers does not read these
      Repeated('num_layers', 'num_hidden_layers'), Repeated('num_heads', 'num_attention_heads'),
      Repeated('block_dim', 'hidden_size'), Repeated('conv_dim', 'hidden_size'),
      Repeated('conv_dim_out', 'hidden_size'), Repeated('block_norm_eps', 'norm_eps'),
      Repeated('theta', 'rope_theta'), OneOf('use_pos_enc', True), OneOf('block_use_swiglu', True),
    ),
    tensor_names.LFM2,
  ),
  'granitemoehybrid': Family(
    'GraniteMoeHybridForCausalLM', GraniteHybrid,
    (
      *_COUNTS, heads(), Same('rms_norm_eps', 'LAYERNORM_EPSILON'), UNTIED, rope(),
      activation('hidden_act', ours=('ACTIVATION_CLS', 'EXPERT_ACTIVATION_CLS')),
      Same('attention_bias', 'USE_BIAS', default=False), NO_MLP_BIAS,
      OneOf('normalization_function', 'rmsnorm'), *_FACTORS,
      GRANITE_TYPES, GRANITE_EXPERTS, MAMBA_HEADS, STEP_LIMITS,
      Same('mamba_n_groups', 'MAMBA_GROUPS', default=1),
      Same('mamba_d_state', 'MAMBA_STATE_DIMS', default=256),
      Same('mamba_d_conv', 'CONVOLUTION_WIDTH', default=4),
      Same('mamba_conv_bias', 'USE_CONVOLUTION_BIAS', default=True),
      Same('mamba_proj_bias', 'USE_STATE_BIAS', default=False),
    ),
    tensor_names.GRANITE_HYBRID,
  ),
  'nemotron_h': Family(
    'NemotronHForCausalLM', NemotronH,
    (
      *_COUNTS[1:], SINGLE_BLOCKS, heads('num_key_value_heads', 'head_dim'),
      Same('layer_norm_epsilon', 'LAYERNORM_EPSILON', default=1e-5),
      Same('intermediate_size', 'HIDDEN_DIMS', default=21_504),
      activation(
        'mlp_hidden_act', default='relu2', ours=('ACTIVATION_CLS', 'EXPERT_ACTIVATION_CLS')
      ),
      Same('mlp_bias', 'USE_FFN_BIAS', default=False), NO_BIAS,
      OneOf('tie_word_embeddings', False), OneOf('sliding_window', None),
      OneOf('residual_in_fp32', False), OneOf('mamba_proj_bias', False),
      Same('mamba_num_heads', 'MAMBA_HEADS', default=128),
      Same('mamba_head_dim', 'MAMBA_HEAD_DIMS', default=64),
      Same('n_groups', 'MAMBA_GROUPS', default=8),
      Same('ssm_state_size', 'MAMBA_STATE_DIMS', default=128),
      Same('conv_kernel', 'CONVOLUTION_WIDTH', default=4),
      Same('use_conv_bias', 'USE_CONVOLUTION_BIAS', default=True),
      Same('use_bias', 'USE_STATE_BIAS', default=False),
      Same('time_step_min', 'MAMBA_LEAST_STEP', default=0.001),
      activation('mamba_hidden_act', default='silu', ours=('MAMBA_ACTIVATION_CLS',)),
      Same('n_routed_experts', 'NUM_EXPERTS', default=8),
      Same('num_experts_per_tok', 'NUM_EXPERTS_PER_TOKEN', default=2),
      Same('moe_intermediate_size', 'EXPERT_HIDDEN_DIMS', default=7688),
      Same('moe_shared_expert_intermediate_size', 'SHARED_EXPERT_HIDDEN_DIMS', default=7688),
      number('routed_scaling_factor', 'EXPERT_WEIGHT_SCALE'), NORMALIZED,
      Same('n_group', 'NUM_EXPERT_GROUPS', default=1),
      Same('topk_group', 'NUM_EXPERT_GROUPS_PER_TOKEN', default=1),
      OneOf('n_shared_experts', 1), OneOf('moe_latent_size', None),
      # how weights begin and how transformers computes, and what it does not read
      unread(
        'expand', 'chunk_size', 'time_step_max', 'time_step_floor', 'time_step_limit',
        'rescale_prenorm_residual', 'use_mamba_kernels', 'mamba_ssm_cache_dtype',
        'num_logits_to_keep', 'moe_shared_expert_overlap', 'mtp_layers_block_type',
        'mtp_hybrid_override_pattern', 'rope_theta', 'partial_rotary_factor',
      ),
    ),
    tensor_names.NEMOTRON_H,
    entries=lambda e: single_block_entries(e, tensor_names.NEMOTRON_H),
  ),
  'falcon_h1': Family(
    'FalconH1ForCausalLM', FalconH1,
    (
      *_COUNTS, heads('num_key_value_heads'), Same('intermediate_size', 'HIDDEN_DIMS'),
      Same('rms_norm_eps', 'LAYERNORM_EPSILON', default=1e-5), UNTIED, rope(),
      activation('hidden_act', ours=('ACTIVATION_CLS', 'MAMBA_ACTIVATION_CLS')),
      Same('attention_bias', 'USE_BIAS', default=False),
      Same('mlp_bias', 'USE_FFN_BIAS', default=False),
      number('embedding_multiplier', 'EMBEDDING_FACTOR'), LM_HEAD_FACTOR,
      number('key_multiplier', 'KEY_FACTOR'),
      number('attention_in_multiplier', 'ATTENTION_IN_FACTOR'),
      number('attention_out_multiplier', 'ATTENTION_OUT_FACTOR'),
      number('ssm_in_multiplier', 'MAMBA_IN_FACTOR'),
      number('ssm_out_multiplier', 'MAMBA_OUT_FACTOR'), *FALCON_FACTORS,
      FALCON_HEADS, FALCON_NORM, FALCON_BIAS, STEP_LIMITS,
      Same('mamba_n_groups', 'MAMBA_GROUPS', default=1),
      Same('mamba_d_state', 'MAMBA_STATE_DIMS', default=256),
      Same('mamba_d_conv', 'CONVOLUTION_WIDTH', default=4),
      Same('mamba_conv_bias', 'USE_CONVOLUTION_BIAS', default=True),
      # in published files, which transformers does not read
      only('mamba_use_mlp', True), only('attn_layer_indices', None),
      unread('num_logits_to_keep', 'mlp_expansion_factor'),
    ),
    tensor_names.FALCON_H1,
    entries=lambda e: side_by_side_entries(e, tensor_names.FALCON_H1),
  ),
  'kimi_linear': Family(
    'KimiLinearForCausalLM', KimiLinear,
    (
      Same('num_hidden_layers', 'NUM_LAYERS'), Same('vocab_size', 'VOCAB_SIZE'), MODEL_LENGTH,
      Same('intermediate_size', 'HIDDEN_DIMS'), Same('hidden_size', 'MODEL_DIMS'),
      Same('rms_norm_eps', 'LAYERNORM_EPSILON', default=1e-5),
      Same('num_attention_heads', 'NUM_HEADS'),
      Repeated('num_key_value_heads', 'num_attention_heads', written='NUM_HEADS'),
      Same('kv_lora_rank', 'LATENT_DIMS', default=512),
      Same('q_lora_rank', 'QUERY_LATENT_DIMS', default=0, null=0),
      Same('qk_nope_head_dim', 'DIMS_PER_HEAD', default=128),
      Same('qk_rope_head_dim', 'ROTARY_DIMS_PER_HEAD', default=64),
      Same('v_head_dim', 'VALUE_DIMS_PER_HEAD', default=128),
      OneOf('tie_word_embeddings', False), NO_BIAS, KDA_LAYERS, DENSE_LAYERS, SHARED_EXPERTS,
      activation('hidden_act', default='silu', ours=_BOTH_ACTIVATIONS),
      Same('moe_intermediate_size', 'EXPERT_HIDDEN_DIMS'),
      default_of('NUM_EXPERTS', 256, 'num_experts', 'num_local_experts', 'n_routed_experts'),
      default_of('NUM_EXPERTS_PER_TOKEN', 8, 'num_experts_per_token', 'num_experts_per_tok'),
      default_of('NORMALIZE_EXPERT_WEIGHTS', True, 'moe_renormalize', 'norm_topk_prob'),
      default_of('NUM_EXPERT_GROUPS', 1, 'num_expert_group', 'n_group'),
      Same('topk_group', 'NUM_EXPERT_GROUPS_PER_TOKEN', default=1),
      number('routed_scaling_factor', 'EXPERT_WEIGHT_SCALE', default=2.446),
      # in published files, which transformers does not read
      only('mla_use_nope', True), only('moe_router_activation_func', 'sigmoid'),
      only('moe_layer_freq', 1), only('use_grouped_topk', True), only('topk_method', 'noaux_tc'),
      unread('head_dim', 'rope_theta', 'rope_scaling', 'rope_parameters', 'rope_interleave'),
    ),
    tensor_names.KIMI_LINEAR,
    other_names={'.block_sparse_moe.': '.mlp.'},  # dense blocks in transformers' files
  ),
}  # fmt: skip
