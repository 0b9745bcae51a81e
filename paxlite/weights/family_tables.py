"""The published model families: one table for each, which works in both directions.

A family is its experiment class, the keys of its config.json, and the names of its tensors.
docs/adding_a_family.md describes how to add one.
"""

from paxlite.core.json_text import JsonObject
from paxlite.experiments.deepseek import DeepSeekV2, DeepSeekV3, Mistral4
from paxlite.experiments.ernie import Ernie4_5, Ernie4_5Moe
from paxlite.experiments.exaone import Exaone4
from paxlite.experiments.gemma import Gemma, Gemma2, Gemma3
from paxlite.experiments.glm import GLM4, GLM4Moe
from paxlite.experiments.gpt import GPT2
from paxlite.experiments.gpt_neox import GPTNeoX
from paxlite.experiments.gpt_oss import GptOss
from paxlite.experiments.granite import Granite
from paxlite.experiments.hunyuan import HunyuanDense
from paxlite.experiments.llama import LLaMA, SmolLM3
from paxlite.experiments.minimax_m2 import MiniMaxM2
from paxlite.experiments.ministral import Ministral3
from paxlite.experiments.mixtral import Mixtral
from paxlite.experiments.olmo import OLMo2, OLMo3, OLMoE
from paxlite.experiments.phi import Phi, Phi3
from paxlite.experiments.qwen import Qwen2, Qwen3, Qwen3Moe
from paxlite.experiments.seed_oss import SeedOss
from paxlite.weights import tensor_names
from paxlite.weights.config_keys import (
  QWEN_WINDOW,
  Both,
  Cap,
  OneOf,
  Repeated,
  Same,
  activation,
  heads,
  layer_types,
  positions,
  window,
)
from paxlite.weights.family import Family
from paxlite.weights.family_keys import (
  COMMON,
  DEEPSEEK,
  ERNIE_EXPERTS,
  EXAONE_LAYERS,
  EXPERT_SILU,
  EXPERTS_PER_TOKEN,
  GEMMA,
  GEMMA2,
  GIVEN_HEADS,
  GIVEN_KV,
  GROUPS,
  LATENT_ATTENTION,
  LAYER_NORM_LENGTHS,
  LENGTHS,
  NO_BIAS,
  NO_MLP_BIAS,
  NORM_TOPK,
  NORMALIZED,
  PLAIN,
  ROUTED_EXPERTS,
  SILU,
  SIZES,
  TIED,
  UNTIED,
  WINDOW,
  choice,
  either,
  latent_rope,
  number,
  routing,
  unread,
)
from paxlite.weights.gemma4_table import GEMMA4_DEFAULTS, GEMMA4_FAMILIES
from paxlite.weights.gpt2_layout import gpt2_entries
from paxlite.weights.hybrid_tables import HYBRID_FAMILIES, QWEN3_5_DEFAULTS, QWEN3_5_MOE_DEFAULTS
from paxlite.weights.latent_tables import LATENT_FAMILIES
from paxlite.weights.llama4_table import LLAMA4_DEFAULTS, LLAMA4_FAMILIES
from paxlite.weights.minimax_m2_keys import MINIMAX_M2
from paxlite.weights.prediction_keys import PREDICTION_MODULES
from paxlite.weights.rope_keys import rope, with_alpha
from paxlite.weights.smollm3_keys import SMOLLM3_LAYERS
from paxlite.weights.state_tables import STATE_FAMILIES

# What text_config of models with images leaves out, because these are transformers' defaults.
TEXT_DEFAULTS: dict[str, JsonObject] = {
  'gemma3': dict(
    model_type='gemma3_text', vocab_size=262_208, hidden_size=2304, intermediate_size=9216,
    num_hidden_layers=26, num_attention_heads=8, num_key_value_heads=4, head_dim=256,
    max_position_embeddings=131_072, rms_norm_eps=1e-6, rope_theta=1e6, rope_local_base_freq=1e4,
    query_pre_attn_scalar=256, sliding_window=4096,
  ),
  'gemma4': GEMMA4_DEFAULTS,
  'llama4': LLAMA4_DEFAULTS,
  'kimi_k25': dict(model_type='deepseek_v3'),
  'mistral3': dict(model_type='mistral'),
  'qwen3_5': QWEN3_5_DEFAULTS,
  'qwen3_5_moe': QWEN3_5_MOE_DEFAULTS,
}  # fmt: skip

# Other names of a family in published files, which transformers may not know.
OTHER_TYPES = {'kimi_k2': 'deepseek_v3'}

FAMILIES: dict[str, Family] = {
  'llama': Family(
    'LlamaForCausalLM', LLaMA,
    (*PLAIN, NO_BIAS, NO_MLP_BIAS, OneOf('rope_interleaved', False)),
  ),
  'mistral': Family(
    'MistralForCausalLM', LLaMA,
    (*GIVEN_KV, *COMMON, window(missing=4096)),
  ),
  'mixtral': Family(
    'MixtralForCausalLM', Mixtral,
    (
      *GIVEN_KV, EXPERT_SILU, UNTIED, rope(theta=1e6), WINDOW, EXPERTS_PER_TOKEN,
      Same('num_local_experts', 'NUM_EXPERTS'),
    ),
    tensor_names.MIXTRAL,
  ),
  'gemma': Family(
    'GemmaForCausalLM', Gemma,
    (
      *GEMMA, rope(),
      # old files say gelu, and mean this too
      OneOf('hidden_act', 'gelu_pytorch_tanh', 'gelu'),
      OneOf('hidden_activation', 'gelu_pytorch_tanh', None),
    ),
  ),
  'gemma2': Family(
    'Gemma2ForCausalLM', Gemma2,
    (
      *GEMMA2, rope(), layer_types(['sliding', 'full'], 'sliding_window_size'),
      Cap('attn_logit_softcapping', 'ATTEN_LOGIT_CAP'),
      Cap('final_logit_softcapping', 'SOFTMAX_CAP_LOGITS'),
    ),
    tensor_names.GEMMA2,
  ),
  'gemma3_text': Family(
    'Gemma3ForCausalLM', Gemma3,
    (
      *GEMMA2, rope('rope_local_base_freq', theta=1e6, local_theta=1e4),
      Cap('final_logit_softcapping', 'SOFTMAX_CAP_LOGITS', is_required=False),
      layer_types([*['sliding'] * 5, 'full'], 'sliding_window_pattern'),
      OneOf('attn_logit_softcapping', None),  # which transformers ignores
    ),
    tensor_names.GEMMA2,
  ),
  'qwen2': Family(
    'Qwen2ForCausalLM', Qwen2, (*GIVEN_KV, *COMMON, QWEN_WINDOW, OneOf('use_mrope', False))
  ),
  'qwen3': Family(
    'Qwen3ForCausalLM', Qwen3, (*GIVEN_HEADS, *COMMON, QWEN_WINDOW, NO_BIAS)
  ),
  'qwen3_moe': Family(
    'Qwen3MoeForCausalLM', Qwen3Moe,
    (
      *GIVEN_KV, EXPERT_SILU, UNTIED, rope(), NO_BIAS, EXPERTS_PER_TOKEN, NORM_TOPK,
      OneOf('use_sliding_window', False), OneOf('sliding_window', None),
      OneOf('decoder_sparse_step', 1), OneOf('mlp_only_layers', []),
      Same('moe_intermediate_size', 'EXPERT_HIDDEN_DIMS'),
      either('NUM_EXPERTS', 'num_experts', 'num_local_experts'),
    ),
  ),
  'olmo2': Family('Olmo2ForCausalLM', OLMo2, (*PLAIN, NO_BIAS), tensor_names.OLMO2),
  'olmo3': Family(
    'Olmo3ForCausalLM', OLMo3,
    (
      *SIZES, SILU, UNTIED, rope(theta=5e5, local_theta=5e5), NO_BIAS,
      layer_types([*['sliding'] * 3, 'full']),
    ),
    tensor_names.OLMO2,
  ),
  'olmoe': Family(
    'OlmoeForCausalLM', OLMoE,
    (
      *SIZES, EXPERT_SILU, UNTIED, rope(), NO_BIAS, EXPERTS_PER_TOKEN, NORM_TOPK,
      OneOf('clip_qkv', None), Same('num_experts', 'NUM_EXPERTS'),
    ),
  ),
  'phi3': Family(
    'Phi3ForCausalLM', Phi3,
    (
      *SIZES, SILU, UNTIED, WINDOW, NO_BIAS, NO_MLP_BIAS, OneOf('lm_head_bias', False),
      OneOf('full_attn_mod', 1), OneOf('interpolate_factor', 1),
      rope('original_max_position_embeddings', fraction=1.0, is_phi3=True),
    ),
    tensor_names.PHI3,
  ),
  'smollm3': Family(
    'SmolLM3ForCausalLM', SmolLM3,
    (*GIVEN_KV, SILU, TIED, rope(theta=2e6), NO_BIAS, NO_MLP_BIAS, SMOLLM3_LAYERS),
  ),
  'deepseek_v2': Family(
    'DeepseekV2ForCausalLM', DeepSeekV2,
    (
      *DEEPSEEK, OneOf('norm_topk_prob', False),
      routing(('greedy', 'group_limited_greedy'), 'softmax'),
    ),
    tensor_names.DEEPSEEK, rotary='interleaved',
  ),
  'deepseek_v3': Family(
    'DeepseekV3ForCausalLM', DeepSeekV3,
    (
      *DEEPSEEK, OneOf('rope_interleave', True), routing(('noaux_tc', 'noaux_tc'), 'sigmoid'),
      NORMALIZED, PREDICTION_MODULES,
    ),
    tensor_names.DEEPSEEK_V3, rotary='interleaved',
  ),
  'mistral4': Family(
    'Mistral4ForCausalLM', Mistral4,
    (
      *LATENT_ATTENTION, *ROUTED_EXPERTS, *GROUPS, NORMALIZED, latent_rope(),
      OneOf('rope_interleave', True),
    ),
    tensor_names.MISTRAL4, rotary='interleaved',
  ),
  'gpt_oss': Family(
    'GptOssForCausalLM', GptOss,
    (
      *GIVEN_HEADS, UNTIED, rope(theta=150_000.0, is_stretched=True),
      layer_types(['sliding', 'full']),
      EXPERTS_PER_TOKEN,
      Same('num_local_experts', 'NUM_EXPERTS'), OneOf('attention_bias', True),
      OneOf('hidden_act', 'silu'), OneOf('swiglu_limit', 7.0), OneOf('swiglu_alpha', 1.702),
    ),
    tensor_names.GPT_OSS,
  ),
  'granite': Family(
    'GraniteForCausalLM', Granite,
    (
      *PLAIN, Same('attention_bias', 'USE_BIAS', default=False),
      Same('mlp_bias', 'USE_FFN_BIAS', default=False),
      number('embedding_multiplier', 'EMBEDDING_FACTOR'),
      number('residual_multiplier', 'RESIDUAL_FACTOR'),
      number('attention_multiplier', 'ATTENTION_FACTOR'),
      number('logits_scaling', 'LOGITS_DIVISOR'),
    ),
  ),
  'seed_oss': Family(
    'SeedOssForCausalLM', SeedOss,
    (
      *GIVEN_HEADS, *COMMON, Same('attention_bias', 'USE_QKV_BIAS', default=True),
      Same('attention_out_bias', 'USE_BIAS', default=False),
      Same('mlp_bias', 'USE_FFN_BIAS', default=False),
    ),
  ),
  'ministral3': Family(
    'Ministral3ForCausalLM', Ministral3,
    (*GIVEN_HEADS, SILU, UNTIED, WINDOW, rope(is_stretched=True, has_growth=True)),
  ),
  'glm4': Family(
    'Glm4ForCausalLM', GLM4,
    (
      *GIVEN_HEADS, SILU, UNTIED, rope(fraction=0.5),
      Same('attention_bias', 'USE_QKV_BIAS', default=True),
    ),
    tensor_names.GLM4, rotary='interleaved',
  ),
  'glm4_moe': Family(
    'Glm4MoeForCausalLM', GLM4Moe,
    (
      *GIVEN_KV, *ROUTED_EXPERTS, *GROUPS, NORMALIZED, UNTIED, rope(fraction=0.5),
      Same('attention_bias', 'USE_QKV_BIAS', default=False),
      choice('use_qk_norm', 'QK_NORM', 'none', 'per_head', default=False), PREDICTION_MODULES,
    ),
    tensor_names.GLM4_MOE,
  ),
  'exaone4': Family(
    'Exaone4ForCausalLM', Exaone4, (*GIVEN_KV, *COMMON, EXAONE_LAYERS), tensor_names.OLMO2
  ),
  'ernie4_5': Family(
    'Ernie4_5ForCausalLM', Ernie4_5,
    (*GIVEN_HEADS, SILU, TIED, rope(theta=5e5), Same('use_bias', 'USE_BIAS', default=False)),
    rotary='interleaved',
  ),
  'ernie4_5_moe': Family(
    'Ernie4_5_MoeForCausalLM', Ernie4_5Moe,
    (*GIVEN_KV, TIED, rope(theta=5e5), *ERNIE_EXPERTS),
    tensor_names.ERNIE_MOE, rotary='interleaved',
  ),
  'hunyuan_v1_dense': Family(
    'HunYuanDenseV1ForCausalLM', HunyuanDense,
    (
      *LENGTHS, heads('head_dim'), SILU, UNTIED, with_alpha(rope()),
      Same('attention_bias', 'USE_BIAS', default=False),
      OneOf('use_qk_norm', True), OneOf('use_cla', False), NO_MLP_BIAS,
      Repeated('attention_head_dim', 'head_dim'), unread('org_vocab_size', 'pad_id'),
    ),
    tensor_names.HUNYUAN,
  ),
  'phi': Family(
    'PhiForCausalLM', Phi,
    (
      *LAYER_NORM_LENGTHS, heads(), activation('hidden_act', written='gelu_new'), UNTIED,
      rope(fraction=0.5), choice('qk_layernorm', 'QK_NORM', 'none', 'per_head', default=False),
    ),
    tensor_names.PHI,
  ),
  'gpt_neox': Family(
    'GPTNeoXForCausalLM', GPTNeoX,
    (
      *LAYER_NORM_LENGTHS, Same('num_attention_heads', 'NUM_HEADS'),
      Same('hidden_size', 'MODEL_DIMS'), activation('hidden_act'), UNTIED,
      rope(fraction=0.25, names=('rotary_emb_base', 'rotary_pct')),
      Same('attention_bias', 'USE_BIAS', default=True),
      choice('use_parallel_residual', 'BLOCK_ORDER', 'sequential', 'parallel', default=True),
    ),
    tensor_names.GPT_NEOX,
  ),
  'gpt2': Family(
    'GPT2LMHeadModel', GPT2,
    (
      Same('n_layer', 'NUM_LAYERS'), Same('n_head', 'NUM_HEADS'), Same('n_embd', 'MODEL_DIMS'),
      Same('vocab_size', 'VOCAB_SIZE'), positions('n_positions'),
      Same('layer_norm_epsilon', 'LAYERNORM_EPSILON'),
      activation('activation_function', written='gelu_new'),
      Both(
        ('n_inner', 'n_ctx'),
        ('HIDDEN_DIMS',),
        lambda c: {'HIDDEN_DIMS': c.get('n_inner') or 4 * c['n_embd']},
        lambda e: {'n_inner': e.HIDDEN_DIMS},
      ),
      OneOf('tie_word_embeddings', True), OneOf('scale_attn_weights', True),
      OneOf('scale_attn_by_inverse_layer_idx', False), OneOf('add_cross_attention', False),
      # the softmax is in float32 whatever this says
      OneOf('reorder_and_upcast_attn', False, True),
    ),
    {},
    entries=gpt2_entries,
  ),
  **GEMMA4_FAMILIES,
  **LLAMA4_FAMILIES,
  'minimax_m2': Family(
    'MiniMaxM2ForCausalLM', MiniMaxM2, (*GIVEN_HEADS, UNTIED, *MINIMAX_M2), tensor_names.MINIMAX_M2
  ),
  **LATENT_FAMILIES,
  **HYBRID_FAMILIES,
  **STATE_FAMILIES,
}  # fmt: skip
