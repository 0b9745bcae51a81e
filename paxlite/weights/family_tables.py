"""The published model families: one table for each, which works in both directions.

A family is its experiment class, the keys of its config.json, and the names of its tensors.
docs/adding_a_family.md describes how to add one.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from paxlite.core.json_text import JsonObject
from paxlite.experiments.deepseek import DeepSeekV2, DeepSeekV3
from paxlite.experiments.gemma import Gemma, Gemma2, Gemma3
from paxlite.experiments.gpt import GPT2
from paxlite.experiments.gpt_oss import GptOss
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.llama import LLaMA, SmolLM3
from paxlite.experiments.mixtral import Mixtral
from paxlite.experiments.olmo import OLMo2, OLMo3, OLMoE
from paxlite.experiments.parts.experts import MixtureOfExperts
from paxlite.experiments.phi import Phi3
from paxlite.experiments.qwen import Qwen2, Qwen3, Qwen3Moe
from paxlite.weights import tensor_names
from paxlite.weights.config_keys import (
  NO_ROPE_LAYERS,
  PREDICTION_MODULES,
  QWEN_WINDOW,
  Both,
  Cap,
  Config,
  Key,
  OneOf,
  Repeated,
  Same,
  activation,
  heads,
  layer_types,
  positions,
  tied,
  window,
)
from paxlite.weights.layout import Entry, gpt2_entries
from paxlite.weights.rope_keys import rope


@dataclasses.dataclass(frozen=True)
class Family:
  """How a family is published on Hugging Face.

  Attributes:
    architecture: The class in transformers.
    experiment: The class whose attributes are those of all models of the family.
    keys: The keys of config.json that differ between models of the family.
    names: Names of the tensors by role; see tensor_names.
    rotary: Layout of the rotary pairs in queries and keys; see RotaryEmbedding.
    entries: Returns the entries of the tensors, where decoder_entries does not.
  """

  architecture: str
  experiment: type[LanguageModel]
  keys: Sequence[Key]
  names: Mapping[str, str] = dataclasses.field(default_factory=lambda: tensor_names.HUGGING_FACE)
  rotary: str = 'half'
  entries: Callable[[LanguageModel], list[Entry]] | None = None

  @property
  def attributes(self) -> set[str]:
    """The attributes that may differ between models of the family."""
    return {name for key in self.keys for name in key.ours}


_LENGTHS = (
  Same('num_hidden_layers', 'NUM_LAYERS'),
  Same('intermediate_size', 'HIDDEN_DIMS'),
  Same('vocab_size', 'VOCAB_SIZE'),
  positions('max_position_embeddings'),
  Same('rms_norm_eps', 'LAYERNORM_EPSILON'),
)
_SIZES = (*_LENGTHS, heads())
_GIVEN_KV = (*_LENGTHS, heads('num_key_value_heads'))  # where transformers has another default
_GIVEN_HEADS = (*_LENGTHS, heads('num_key_value_heads', 'head_dim'))
_EXPERT_SILU = activation('hidden_act', ours=('EXPERT_ACTIVATION_CLS',))
_SILU = activation('hidden_act')
_NO_BIAS = OneOf('attention_bias', False)
_NO_MLP_BIAS = OneOf('mlp_bias', False)
_UNTIED, _TIED = tied(default=False), tied(default=True)
_COMMON = (_SILU, _UNTIED, rope())
_PLAIN = (*_SIZES, *_COMMON)
_WINDOW = window()
_GEMMA = (*_GIVEN_HEADS, _TIED, _NO_BIAS, OneOf('use_bidirectional_attention', False))
_GELU = activation('hidden_activation', 'hidden_act', default='gelu_pytorch_tanh')
_GEMMA2 = (*_GEMMA, _GELU, Same('query_pre_attn_scalar', 'QUERY_PRE_ATTN_SCALAR'))
_EXPERTS_PER_TOKEN = Same('num_experts_per_tok', 'NUM_EXPERTS_PER_TOKEN')
_NORM_TOPK = Same('norm_topk_prob', 'NORMALIZE_EXPERT_WEIGHTS', default=False)


def _either(attribute: str, *keys: str) -> Both:
  """Returns one attribute that versions of transformers write under different keys."""

  def read(config: Config) -> dict[str, object]:
    return {attribute: config[next((k for k in keys if k in config), keys[0])]}

  return Both(keys, (attribute,), read, lambda e: {keys[0]: getattr(e, attribute)})


def _counted(key: str, attribute: str, null: int) -> Both:
  """Returns a number that some files have as null, which transformers can compute with no more."""
  same = Same(key, attribute, null=null)
  return Both((key,), (attribute,), same.read, lambda e: {key: getattr(e, attribute)})


_DEEPSEEK = (
  *_LENGTHS,
  Same('num_attention_heads', 'NUM_HEADS'),
  Same('hidden_size', 'MODEL_DIMS'),
  Same('kv_lora_rank', 'LATENT_DIMS'),
  Same('q_lora_rank', 'QUERY_LATENT_DIMS', null=0),
  Same('qk_nope_head_dim', 'DIMS_PER_HEAD'),
  Same('qk_rope_head_dim', 'ROTARY_DIMS_PER_HEAD'),
  Same('v_head_dim', 'VALUE_DIMS_PER_HEAD'),
  Same('moe_intermediate_size', 'EXPERT_HIDDEN_DIMS'),
  _either('NUM_EXPERTS', 'n_routed_experts', 'num_local_experts'),
  _counted('n_shared_experts', 'NUM_SHARED_EXPERTS', 0),
  Same('first_k_dense_replace', 'NUM_DENSE_BLOCKS'),
  Same('routed_scaling_factor', 'EXPERT_WEIGHT_SCALE'),
  OneOf('moe_layer_freq', 1),
  Repeated('num_key_value_heads', 'num_attention_heads', written='NUM_HEADS'),
  Repeated('head_dim', 'qk_rope_head_dim'),
  _EXPERTS_PER_TOKEN,
  activation('hidden_act', ours=('ACTIVATION_CLS', 'EXPERT_ACTIVATION_CLS')),
  _UNTIED,
  rope(has_mscale=True),
  _NO_BIAS,
  _NO_MLP_BIAS,
)
_GROUPS = (
  _counted('n_group', 'NUM_EXPERT_GROUPS', 1),
  _counted('topk_group', 'NUM_EXPERT_GROUPS_PER_TOKEN', 1),
)


def _routing(methods: tuple[str, str], scores: str) -> Both:
  """Returns the keys that say how DeepSeek chooses experts, and keys that repeat other sizes.

  Args:
    methods: The values of topk_method for one group and for several.
    scores: The value of scoring_func.
  """
  plain, grouped = methods
  names = ('n_group', 'topk_group', 'topk_method', 'scoring_func')

  def read(config: Config) -> dict[str, object]:
    OneOf('topk_method', plain, grouped).read(config)
    OneOf('scoring_func', scores).read(config)
    if config.get('topk_method', plain) != grouped:
      return {'NUM_EXPERT_GROUPS': 1, 'NUM_EXPERT_GROUPS_PER_TOKEN': 1}
    return _GROUPS[0].read(config) | _GROUPS[1].read(config)

  def write(e: LanguageModel) -> JsonObject:
    assert isinstance(e, MixtureOfExperts)
    method = plain if e.NUM_EXPERT_GROUPS == 1 else grouped
    groups = _GROUPS[0].write(e) | _GROUPS[1].write(e)
    return groups | {'topk_method': method, 'scoring_func': scores}

  ours = tuple(name for key in _GROUPS for name in key.ours)
  return Both(names, ours, read, write)


# What text_config of models with images leaves out, because these are transformers' defaults.
TEXT_DEFAULTS: dict[str, JsonObject] = {
  'gemma3': dict(
    model_type='gemma3_text', vocab_size=262_208, hidden_size=2304, intermediate_size=9216,
    num_hidden_layers=26, num_attention_heads=8, num_key_value_heads=4, head_dim=256,
    max_position_embeddings=131_072, rms_norm_eps=1e-6, rope_theta=1e6, rope_local_base_freq=1e4,
    query_pre_attn_scalar=256, sliding_window=4096,
  ),
  'mistral3': dict(model_type='mistral'),
}  # fmt: skip

FAMILIES: dict[str, Family] = {
  'llama': Family(
    'LlamaForCausalLM', LLaMA,
    (*_PLAIN, _NO_BIAS, _NO_MLP_BIAS, OneOf('rope_interleaved', False)),
  ),
  'mistral': Family(
    'MistralForCausalLM', LLaMA,
    (*_GIVEN_KV, *_COMMON, window(missing=4096)),
  ),
  'mixtral': Family(
    'MixtralForCausalLM', Mixtral,
    (
      *_GIVEN_KV, _EXPERT_SILU, _UNTIED, rope(theta=1e6), _WINDOW, _EXPERTS_PER_TOKEN,
      Same('num_local_experts', 'NUM_EXPERTS'),
    ),
    tensor_names.MIXTRAL,
  ),
  'gemma': Family(
    'GemmaForCausalLM', Gemma,
    (
      *_GEMMA, rope(),
      # old files say gelu, and mean this too
      OneOf('hidden_act', 'gelu_pytorch_tanh', 'gelu'),
      OneOf('hidden_activation', 'gelu_pytorch_tanh', None),
    ),
  ),
  'gemma2': Family(
    'Gemma2ForCausalLM', Gemma2,
    (
      *_GEMMA2, rope(), layer_types(['sliding', 'full'], 'sliding_window_size'),
      Cap('attn_logit_softcapping', 'ATTEN_LOGIT_CAP'),
      Cap('final_logit_softcapping', 'SOFTMAX_CAP_LOGITS'),
    ),
    tensor_names.GEMMA2,
  ),
  'gemma3_text': Family(
    'Gemma3ForCausalLM', Gemma3,
    (
      *_GEMMA2, rope('rope_local_base_freq', theta=1e6, local_theta=1e4),
      Cap('final_logit_softcapping', 'SOFTMAX_CAP_LOGITS', is_required=False),
      layer_types([*['sliding'] * 5, 'full'], 'sliding_window_pattern'),
      OneOf('attn_logit_softcapping', None),  # which transformers ignores
    ),
    tensor_names.GEMMA2,
  ),
  'qwen2': Family(
    'Qwen2ForCausalLM', Qwen2, (*_GIVEN_KV, *_COMMON, QWEN_WINDOW, OneOf('use_mrope', False))
  ),
  'qwen3': Family(
    'Qwen3ForCausalLM', Qwen3, (*_GIVEN_HEADS, *_COMMON, QWEN_WINDOW, _NO_BIAS)
  ),
  'qwen3_moe': Family(
    'Qwen3MoeForCausalLM', Qwen3Moe,
    (
      *_GIVEN_KV, _EXPERT_SILU, _UNTIED, rope(), _NO_BIAS, _EXPERTS_PER_TOKEN, _NORM_TOPK,
      OneOf('use_sliding_window', False), OneOf('sliding_window', None),
      OneOf('decoder_sparse_step', 1), OneOf('mlp_only_layers', []),
      Same('moe_intermediate_size', 'EXPERT_HIDDEN_DIMS'),
      _either('NUM_EXPERTS', 'num_experts', 'num_local_experts'),
    ),
  ),
  'olmo2': Family('Olmo2ForCausalLM', OLMo2, (*_PLAIN, _NO_BIAS), tensor_names.OLMO2),
  'olmo3': Family(
    'Olmo3ForCausalLM', OLMo3,
    (
      *_SIZES, _SILU, _UNTIED, rope(theta=5e5, local_theta=5e5), _NO_BIAS,
      layer_types([*['sliding'] * 3, 'full']),
    ),
    tensor_names.OLMO2,
  ),
  'olmoe': Family(
    'OlmoeForCausalLM', OLMoE,
    (
      *_SIZES, _EXPERT_SILU, _UNTIED, rope(), _NO_BIAS, _EXPERTS_PER_TOKEN, _NORM_TOPK,
      OneOf('clip_qkv', None), Same('num_experts', 'NUM_EXPERTS'),
    ),
  ),
  'phi3': Family(
    'Phi3ForCausalLM', Phi3,
    (
      *_SIZES, _SILU, _UNTIED, _WINDOW, _NO_BIAS, _NO_MLP_BIAS, OneOf('lm_head_bias', False),
      OneOf('full_attn_mod', 1), OneOf('interpolate_factor', 1),
      rope('original_max_position_embeddings', fraction=True),
    ),
    tensor_names.PHI3,
  ),
  'smollm3': Family(
    'SmolLM3ForCausalLM', SmolLM3,
    (*_GIVEN_KV, _SILU, _TIED, rope(theta=2e6), _NO_BIAS, _NO_MLP_BIAS, NO_ROPE_LAYERS),
  ),
  'deepseek_v2': Family(
    'DeepseekV2ForCausalLM', DeepSeekV2,
    (
      *_DEEPSEEK, OneOf('norm_topk_prob', False),
      _routing(('greedy', 'group_limited_greedy'), 'softmax'),
    ),
    tensor_names.DEEPSEEK, rotary='interleaved',
  ),
  'deepseek_v3': Family(
    'DeepseekV3ForCausalLM', DeepSeekV3,
    (
      *_DEEPSEEK, OneOf('rope_interleave', True), _routing(('noaux_tc', 'noaux_tc'), 'sigmoid'),
      Same('norm_topk_prob', 'NORMALIZE_EXPERT_WEIGHTS', default=True), PREDICTION_MODULES,
    ),
    tensor_names.DEEPSEEK_V3, rotary='interleaved',
  ),
  'gpt_oss': Family(
    'GptOssForCausalLM', GptOss,
    (
      *_GIVEN_HEADS, _UNTIED, rope(theta=150_000.0, is_stretched=True),
      layer_types(['sliding', 'full']),
      _EXPERTS_PER_TOKEN,
      Same('num_local_experts', 'NUM_EXPERTS'), OneOf('attention_bias', True),
      OneOf('hidden_act', 'silu'), OneOf('swiglu_limit', 7.0), OneOf('swiglu_alpha', 1.702),
    ),
    tensor_names.GPT_OSS,
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
      OneOf('reorder_and_upcast_attn', False),
    ),
    {},
    entries=gpt2_entries,
  ),
}  # fmt: skip
