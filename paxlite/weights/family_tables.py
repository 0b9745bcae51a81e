"""The published model families: one table for each, which works in both directions.

A family is its experiment class, the keys of its config.json, and the names of its tensors.
docs/adding_a_family.md describes how to add one.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paxlite.experiments.deepseek import DeepSeekV2, DeepSeekV3
from paxlite.experiments.experts import MixtureOfExperts
from paxlite.experiments.gemma import Gemma, Gemma2, Gemma3
from paxlite.experiments.gpt import GPT2
from paxlite.experiments.gpt_oss import GptOss
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.llama import LLaMA, SmolLM3
from paxlite.experiments.mixtral import Mixtral
from paxlite.experiments.olmo import OLMo2, OLMo3, OLMoE
from paxlite.experiments.phi import Phi3
from paxlite.experiments.qwen import Qwen2, Qwen3, Qwen3Moe
from paxlite.weights import tensor_names
from paxlite.weights.config_keys import (
  HEADS,
  NO_ROPE_LAYERS,
  QWEN_WINDOW,
  Both,
  Key,
  OneOf,
  Same,
  activation,
  layer_types,
  tied,
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
  Same('max_position_embeddings', 'MAX_SEQ_LEN'),
  Same('rms_norm_eps', 'LAYERNORM_EPSILON'),
)
_SIZES = (*_LENGTHS, HEADS)
_SILU = activation('hidden_act')
_NO_BIAS = OneOf('attention_bias', False)
_NO_MLP_BIAS = OneOf('mlp_bias', False)
_UNTIED, _TIED = tied(default=False), tied(default=True)
_PLAIN = (*_SIZES, _SILU, _UNTIED, rope())
_WINDOW = Same('sliding_window', 'SLIDING_WINDOW', default=0, null=0)
_GEMMA = (*_SIZES, _TIED, _NO_BIAS, OneOf('use_bidirectional_attention', False))
_GELU = activation('hidden_activation', 'hidden_act', default='gelu_pytorch_tanh')
_GEMMA2 = (
  *_GEMMA,
  _GELU,
  Same('query_pre_attn_scalar', 'QUERY_PRE_ATTN_SCALAR'),
  Same('final_logit_softcapping', 'SOFTMAX_CAP_LOGITS', default=-1.0, null=-1.0),
)
_EXPERTS_PER_TOKEN = Same('num_experts_per_tok', 'NUM_EXPERTS_PER_TOKEN')
_NORM_TOPK = Same('norm_topk_prob', 'NORMALIZE_EXPERT_WEIGHTS', default=False)


def _either(attribute: str, *keys: str) -> Both:
  """Returns one attribute that versions of transformers write under different keys."""

  def read(config: Mapping[str, Any]) -> dict[str, Any]:
    return {attribute: config[next((k for k in keys if k in config), keys[0])]}

  return Both(keys, (attribute,), read, lambda e: {keys[0]: getattr(e, attribute)})


_DEEPSEEK = (
  *_LENGTHS,
  Same('num_attention_heads', 'NUM_HEADS'),
  Same('hidden_size', 'MODEL_DIMS'),
  Same('kv_lora_rank', 'LATENT_DIMS'),
  Same('q_lora_rank', 'QUERY_LATENT_DIMS', default=0, null=0),
  Same('qk_nope_head_dim', 'DIMS_PER_HEAD'),
  Same('qk_rope_head_dim', 'ROTARY_DIMS_PER_HEAD'),
  Same('v_head_dim', 'VALUE_DIMS_PER_HEAD'),
  Same('moe_intermediate_size', 'EXPERT_HIDDEN_DIMS'),
  _either('NUM_EXPERTS', 'n_routed_experts', 'num_local_experts'),
  Same('n_shared_experts', 'NUM_SHARED_EXPERTS', default=0, null=0),
  Same('first_k_dense_replace', 'NUM_DENSE_BLOCKS'),
  Same('n_group', 'NUM_EXPERT_GROUPS', default=1, null=1),
  Same('topk_group', 'NUM_EXPERT_GROUPS_PER_TOKEN', default=1, null=1),
  Same('routed_scaling_factor', 'EXPERT_WEIGHT_SCALE'),
  OneOf('moe_layer_freq', 1),
  _EXPERTS_PER_TOKEN,
  _NORM_TOPK,
  _SILU,
  _UNTIED,
  rope(has_mscale=True),
  _NO_BIAS,
  _NO_MLP_BIAS,
)


def _routing(method: str, grouped: str, scores: str) -> Both:
  """Returns the keys that say how DeepSeek chooses experts, and keys that repeat other sizes.

  Args:
    method: The value of topk_method for one group.
    grouped: The same for several groups.
    scores: The value of scoring_func.
  """

  def read(config: Mapping[str, Any]) -> dict[str, Any]:
    OneOf('topk_method', method, grouped).read(config)
    return OneOf('scoring_func', scores).read(config)

  def write(e: LanguageModel) -> dict[str, Any]:
    assert isinstance(e, MixtureOfExperts)
    return {
      'topk_method': method if e.NUM_EXPERT_GROUPS == 1 else grouped,
      'scoring_func': scores,
      'num_key_value_heads': e.NUM_HEADS,
    }

  names = ('topk_method', 'scoring_func', 'num_key_value_heads', 'head_dim', 'num_local_experts')
  return Both(names, (), read, write)


# What text_config of a Gemma 3 with images leaves out, because these are transformers' defaults.
GEMMA3_DEFAULTS: dict[str, Any] = dict(
  model_type='gemma3_text', vocab_size=262_208, hidden_size=2304, intermediate_size=9216,
  num_hidden_layers=26, num_attention_heads=8, num_key_value_heads=4, head_dim=256,
  max_position_embeddings=131_072, rms_norm_eps=1e-6, rope_theta=1e6, rope_local_base_freq=1e4,
  query_pre_attn_scalar=256, sliding_window=4096,
)  # fmt: skip

FAMILIES: dict[str, Family] = {
  'llama': Family(
    'LlamaForCausalLM', LLaMA,
    (*_PLAIN, _NO_BIAS, _NO_MLP_BIAS, OneOf('rope_interleaved', False)),
  ),
  'mistral': Family('MistralForCausalLM', LLaMA, (*_PLAIN, _WINDOW)),
  'mixtral': Family(
    'MixtralForCausalLM', Mixtral,
    (*_PLAIN, _WINDOW, _EXPERTS_PER_TOKEN, Same('num_local_experts', 'NUM_EXPERTS')),
    tensor_names.MIXTRAL,
  ),
  'gemma': Family(
    'GemmaForCausalLM', Gemma,
    (
      *_GEMMA, rope(),
      # old files say gelu, and mean this too
      OneOf('hidden_act', 'gelu_pytorch_tanh', 'gelu'),
      OneOf('hidden_activation', 'gelu_pytorch_tanh'),
    ),
  ),
  'gemma2': Family(
    'Gemma2ForCausalLM', Gemma2,
    (
      *_GEMMA2, rope(), layer_types(['sliding', 'full'], 'sliding_window_size'),
      Same('attn_logit_softcapping', 'ATTEN_LOGIT_CAP', default=-1.0, null=-1.0),
    ),
    tensor_names.GEMMA2,
  ),
  'gemma3_text': Family(
    'Gemma3ForCausalLM', Gemma3,
    (
      *_GEMMA2, rope('rope_local_base_freq', has_local=True),
      layer_types([*['sliding'] * 5, 'full'], 'sliding_window_pattern'),
      OneOf('attn_logit_softcapping', None),  # which transformers ignores
    ),
    tensor_names.GEMMA2,
  ),
  'qwen2': Family(
    'Qwen2ForCausalLM', Qwen2, (*_PLAIN, QWEN_WINDOW, OneOf('use_mrope', False))
  ),
  'qwen3': Family('Qwen3ForCausalLM', Qwen3, (*_PLAIN, QWEN_WINDOW, _NO_BIAS)),
  'qwen3_moe': Family(
    'Qwen3MoeForCausalLM', Qwen3Moe,
    (
      *_PLAIN, _NO_BIAS, _EXPERTS_PER_TOKEN, _NORM_TOPK,
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
      *_SIZES, _SILU, _UNTIED, rope(has_local=True), _NO_BIAS,
      layer_types([*['sliding'] * 3, 'full']),
    ),
    tensor_names.OLMO2,
  ),
  'olmoe': Family(
    'OlmoeForCausalLM', OLMoE,
    (
      *_PLAIN, _NO_BIAS, _EXPERTS_PER_TOKEN, _NORM_TOPK,
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
    (*_SIZES, _SILU, _TIED, rope(), _NO_BIAS, _NO_MLP_BIAS, NO_ROPE_LAYERS),
  ),
  'deepseek_v2': Family(
    'DeepseekV2ForCausalLM', DeepSeekV2,
    (*_DEEPSEEK, _routing('greedy', 'group_limited_greedy', 'softmax')),
    tensor_names.DEEPSEEK, rotary='interleaved',
  ),
  'deepseek_v3': Family(
    'DeepseekV3ForCausalLM', DeepSeekV3,
    (*_DEEPSEEK, OneOf('rope_interleave', True), _routing('noaux_tc', 'noaux_tc', 'sigmoid')),
    tensor_names.DEEPSEEK, rotary='interleaved',
  ),
  'gpt_oss': Family(
    'GptOssForCausalLM', GptOss,
    (
      *_SIZES, _UNTIED, rope(is_stretched=True), layer_types(['sliding', 'full']),
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
      Same('vocab_size', 'VOCAB_SIZE'), Same('n_positions', 'MAX_SEQ_LEN'),
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
