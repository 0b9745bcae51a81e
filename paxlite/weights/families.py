"""The published model families: one table for each, which works in both directions.

A family is its experiment class, the keys of its config.json, and the names of its tensors.
docs/adding_a_family.md describes how to add one.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paxlite.core.attribute_kinds import Kind
from paxlite.core.errors import UserError, located
from paxlite.data.tokenizer import open_tokenizer
from paxlite.experiments.base import Experiment
from paxlite.experiments.deepseek import DeepSeekV2, DeepSeekV3
from paxlite.experiments.gemma import Gemma, Gemma2, Gemma3
from paxlite.experiments.gpt import GPT2
from paxlite.experiments.gpt_oss import GptOss
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.llama import LLaMA, SmolLM3
from paxlite.experiments.mixtral import Mixtral
from paxlite.experiments.olmo import OLMo2, OLMo3, OLMoE
from paxlite.experiments.phi import Phi3
from paxlite.experiments.qwen import Qwen2, Qwen3, Qwen3Moe
from paxlite.experiments.registry import experiments
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
  read_keys,
  tied,
)
from paxlite.weights.layout import Entry, decoder_entries, gpt2_entries
from paxlite.weights.rope_keys import rope

# Kinds of attributes that decide the model; ROPE_LAYOUT is an order of elements, which an import
# and an export change.
_MODEL = (Kind.SHAPE, Kind.FUNCTION)
_FREE = {'ROPE_LAYOUT'}


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
  names: Mapping[str, str]
  rotary: str = 'half'
  entries: Callable[[LanguageModel], list[Entry]] | None = None

  @property
  def attributes(self) -> set[str]:
    """The attributes that may differ between models of the family."""
    return {name for key in self.keys for name in key.ours}


_SIZES = (
  Same('num_hidden_layers', 'NUM_LAYERS'),
  Same('intermediate_size', 'HIDDEN_DIMS'),
  Same('vocab_size', 'VOCAB_SIZE'),
  Same('max_position_embeddings', 'MAX_SEQ_LEN'),
  Same('rms_norm_eps', 'LAYERNORM_EPSILON'),
  HEADS,
)
_SILU = activation('hidden_act')
_NO_BIAS = OneOf('attention_bias', False)
_NO_MLP_BIAS = OneOf('mlp_bias', False)
_UNTIED, _TIED = tied(default=False), tied(default=True)
_LLAMA = (*_SIZES, _SILU, _UNTIED, rope(), _NO_BIAS, _NO_MLP_BIAS)
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
  Same('num_hidden_layers', 'NUM_LAYERS'),
  Same('intermediate_size', 'HIDDEN_DIMS'),
  Same('vocab_size', 'VOCAB_SIZE'),
  Same('max_position_embeddings', 'MAX_SEQ_LEN'),
  Same('rms_norm_eps', 'LAYERNORM_EPSILON'),
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
    return OneOf('topk_method', method, grouped).read(config) | OneOf('scoring_func', scores).read(
      config
    )

  def write(e: Any) -> dict[str, Any]:
    return {
      'topk_method': method if e.NUM_EXPERT_GROUPS == 1 else grouped,
      'scoring_func': scores,
      'num_key_value_heads': e.NUM_HEADS,
    }

  names = ('topk_method', 'scoring_func', 'num_key_value_heads', 'head_dim', 'num_local_experts')
  return Both(names, (), read, write)


FAMILIES: dict[str, Family] = {
  'llama': Family('LlamaForCausalLM', LLaMA, _LLAMA, tensor_names.HUGGING_FACE),
  'mistral': Family(
    'MistralForCausalLM',
    LLaMA,
    (*_SIZES, _SILU, _UNTIED, rope(), _WINDOW),
    tensor_names.HUGGING_FACE,
  ),
  'mixtral': Family(
    'MixtralForCausalLM',
    Mixtral,
    (
      *_SIZES, _SILU, _UNTIED, rope(), _WINDOW, _EXPERTS_PER_TOKEN,
      Same('num_local_experts', 'NUM_EXPERTS'),
    ),
    tensor_names.MIXTRAL,
  ),
  'gemma': Family(
    'GemmaForCausalLM',
    Gemma,
    (
      *_GEMMA,
      # old files say gelu, and mean this too
      OneOf('hidden_act', 'gelu_pytorch_tanh', 'gelu'),
      OneOf('hidden_activation', 'gelu_pytorch_tanh'),
      rope(),
    ),
    tensor_names.HUGGING_FACE,
  ),
  'gemma2': Family(
    'Gemma2ForCausalLM',
    Gemma2,
    (
      *_GEMMA2, rope(), layer_types(['sliding', 'full']),
      Same('attn_logit_softcapping', 'ATTEN_LOGIT_CAP', default=-1.0, null=-1.0),
    ),
    tensor_names.GEMMA2,
  ),
  'gemma3_text': Family(
    'Gemma3ForCausalLM',
    Gemma3,
    (
      *_GEMMA2,
      rope('rope_local_base_freq', has_local=True),
      layer_types([*['sliding'] * 5, 'full'], 'sliding_window_pattern'),
      OneOf('attn_logit_softcapping', None),  # which transformers ignores
    ),
    tensor_names.GEMMA2,
  ),
  'qwen2': Family(
    'Qwen2ForCausalLM',
    Qwen2,
    (*_SIZES, _SILU, _UNTIED, rope(), QWEN_WINDOW),
    tensor_names.HUGGING_FACE,
  ),
  'qwen3': Family(
    'Qwen3ForCausalLM',
    Qwen3,
    (*_SIZES, _SILU, _UNTIED, rope(), QWEN_WINDOW, _NO_BIAS),
    tensor_names.HUGGING_FACE,
  ),
  'qwen3_moe': Family(
    'Qwen3MoeForCausalLM',
    Qwen3Moe,
    (
      *_SIZES, _SILU, _UNTIED, rope(), _NO_BIAS, _EXPERTS_PER_TOKEN, _NORM_TOPK,
      OneOf('use_sliding_window', False), OneOf('sliding_window', None),
      OneOf('decoder_sparse_step', 1), OneOf('mlp_only_layers', []),
      Same('moe_intermediate_size', 'EXPERT_HIDDEN_DIMS'),
      _either('NUM_EXPERTS', 'num_experts', 'num_local_experts'),
    ),
    tensor_names.HUGGING_FACE,
  ),
  'olmo2': Family(
    'Olmo2ForCausalLM', OLMo2, (*_SIZES, _SILU, _UNTIED, rope(), _NO_BIAS), tensor_names.OLMO2
  ),
  'olmo3': Family(
    'Olmo3ForCausalLM',
    OLMo3,
    (
      *_SIZES, _SILU, _UNTIED, rope(has_local=True), _NO_BIAS,
      layer_types([*['sliding'] * 3, 'full']),
    ),
    tensor_names.OLMO2,
  ),
  'olmoe': Family(
    'OlmoeForCausalLM',
    OLMoE,
    (
      *_SIZES, _SILU, _UNTIED, rope(), _NO_BIAS, _EXPERTS_PER_TOKEN, _NORM_TOPK,
      OneOf('clip_qkv', None), Same('num_experts', 'NUM_EXPERTS'),
    ),
    tensor_names.HUGGING_FACE,
  ),
  'phi3': Family(
    'Phi3ForCausalLM',
    Phi3,
    (
      *_SIZES, _SILU, _UNTIED, _WINDOW, _NO_BIAS,
      rope('original_max_position_embeddings', fraction=True),
    ),
    tensor_names.PHI3,
  ),
  'smollm3': Family(
    'SmolLM3ForCausalLM',
    SmolLM3,
    (*_SIZES, _SILU, _TIED, rope(), _NO_BIAS, _NO_MLP_BIAS, NO_ROPE_LAYERS),
    tensor_names.HUGGING_FACE,
  ),
  'deepseek_v2': Family(
    'DeepseekV2ForCausalLM',
    DeepSeekV2,
    (*_DEEPSEEK, _routing('greedy', 'group_limited_greedy', 'softmax')),
    tensor_names.DEEPSEEK,
    rotary='interleaved',
  ),
  'deepseek_v3': Family(
    'DeepseekV3ForCausalLM',
    DeepSeekV3,
    (*_DEEPSEEK, OneOf('rope_interleave', True), _routing('noaux_tc', 'noaux_tc', 'sigmoid')),
    tensor_names.DEEPSEEK,
    rotary='interleaved',
  ),
  'gpt_oss': Family(
    'GptOssForCausalLM',
    GptOss,
    (
      *_SIZES, _UNTIED, rope(is_stretched=True), layer_types(['sliding', 'full']),
      _EXPERTS_PER_TOKEN,
      Same('num_local_experts', 'NUM_EXPERTS'), OneOf('attention_bias', True),
      OneOf('hidden_act', 'silu'), OneOf('swiglu_limit', 7.0), OneOf('swiglu_alpha', 1.702),
    ),
    tensor_names.GPT_OSS,
  ),
  'gpt2': Family(
    'GPT2LMHeadModel',
    GPT2,
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


def experiment_of(config: Mapping[str, Any], where: pathlib.Path) -> LanguageModel:
  """Returns the experiment of a Hugging Face config.json.

  Args:
    config: The contents of config.json.
    where: The path of the file, for messages.

  Raises:
    UserError: The architecture or one of its options is not implemented, or a value is missing or
      not valid.
  """
  kind = config.get('model_type')
  if kind == 'gemma3' and isinstance(config.get('text_config'), dict):
    raise UserError(f'{where}: a Gemma 3 with images is not implemented; its text model alone is')
  if not isinstance(kind, str) or kind not in FAMILIES:
    raise UserError(f'{where}: model_type {kind!r} is none of {", ".join(FAMILIES)}')
  family = FAMILIES[kind]
  config = {k: v for k, v in config.items() if k != 'quantization_config'} | _unquantized(config)
  try:
    with located(str(where)):
      values = read_keys(family.keys, config)
    values['EOS_IDS'] = _ids(config.get('eos_token_id'))
  except KeyError as e:
    raise UserError(f'{where} has no {e.args[0]}') from None
  except UserError:
    raise
  except (TypeError, ValueError, ArithmeticError, AttributeError) as e:
    raise UserError(f'{where} has a value that cannot be ({e})') from None
  dtype = config.get('dtype', config.get('torch_dtype'))
  values['FPROP_DTYPE'] = 'float32' if dtype in (None, 'float32') else 'bfloat16'
  with located(str(where)):
    return published(family.experiment, values)


def _unquantized(config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns quantization_config, unless it says what the import can dequantize."""
  found = config.get('quantization_config')
  if found is None:
    return {}
  method = found.get('quant_method') if isinstance(found, dict) else None
  return {} if method in ('mxfp4', 'fp8') else {'quantization_config': found}


def published(family: type[LanguageModel], values: Mapping[str, Any]) -> LanguageModel:
  """Returns the registered experiment with these values, validated.

  If there is none, returns the family's base class with these values.
  """
  wanted = family(**values)
  wanted.validate()
  model = {*wanted.values_of(Kind.SHAPE, Kind.FUNCTION), 'HEADS_SPAN_MODEL'}
  others = {k: v for k, v in values.items() if k not in model}
  for cls in experiments().values():
    if issubclass(cls, family) and cls.train_input is Experiment.train_input:  # no dataset
      experiment = cls(**others)
      if experiment.model_values == wanted.model_values:
        return experiment
  return wanted


def hugging_face_entries(e: LanguageModel) -> list[Entry]:
  """Returns the entries of the tensors of an experiment's model in a Hugging Face folder.

  Raises:
    UserError: The experiment belongs to no family that Hugging Face has.
  """
  family = FAMILIES[family_of(e)]
  if family.entries is not None:
    return family.entries(e)
  return decoder_entries(e, family.names, family.rotary)


def family_of(e: LanguageModel) -> str:
  """Returns transformers' model_type for an experiment.

  It is the first family whose class has the values of the experiment, apart from those that
  its config.json can state. Families whose class the experiment is derived from come first.

  Raises:
    UserError: There is none; the message names an attribute that does not fit.
  """
  derived = [name for name, f in FAMILIES.items() if isinstance(e, f.experiment)]
  derived.sort(key=lambda name: -len(FAMILIES[name].experiment.__mro__))
  problems: dict[str, list[str]] = {}
  for name in dict.fromkeys([*derived, *FAMILIES]):
    problems[name] = _differences(e, FAMILIES[name])
    if not problems[name]:
      return name
  nearest = min(problems, key=lambda name: len(problems[name]))
  raise UserError(f'Hugging Face has no {nearest} with {problems[nearest][0]}')


def _differences(e: LanguageModel, family: Family) -> list[str]:
  """Returns what a family's config.json cannot say about an experiment."""
  cls, stated = family.experiment, family.attributes
  ours = e.values_of(*_MODEL)
  plain = cls(**{name: getattr(e, name) for name in stated if hasattr(e, name)})
  theirs = plain.values_of(*_MODEL)
  missing = object()
  found = [
    f'{name}={ours.get(name)!r}, as {type(e).__name__} has it: there it is {theirs.get(name)!r}'
    for name in {**theirs, **ours}
    if name not in _FREE
    and ours.get(name, missing) != theirs.get(name, missing)
    and not _is_off(name, ours.get(name), theirs.get(name))
  ]
  if found:
    return found
  same = cls(**{name: getattr(e, name) for name in cls().values() if hasattr(e, name)})
  if same.model() != e.model():
    return [
      f'the layers of {type(e).__name__}: it changes them beyond what attributes say (its methods '
      'model, layer or attention)'
    ]
  return []


def _is_off(name: str, ours: Any, theirs: Any) -> bool:
  """Returns whether two values both turn a cap off."""
  return name in ('ATTEN_LOGIT_CAP', 'SOFTMAX_CAP_LOGITS') and max(ours, theirs) <= 0


def config_json(e: LanguageModel, dtype: str, tokenizer: pathlib.Path | None) -> dict[str, Any]:
  """Returns the contents of config.json with which transformers reads an experiment's model."""
  kind = family_of(e)
  family = FAMILIES[kind]
  bos, eos = _special_ids(tokenizer)
  end = list(e.EOS_IDS) or eos
  config: dict[str, Any] = {
    'architectures': [family.architecture],
    'model_type': kind,
    'torch_dtype': dtype,
    'bos_token_id': bos,
    'eos_token_id': end[0] if len(end) == 1 else end or None,
    'pad_token_id': None,
  }
  for key in family.keys:
    config |= key.write(e)
  return config


def _special_ids(tokenizer: pathlib.Path | None) -> tuple[int | None, list[int]]:
  """Returns the ids of bos_token and eos_token; None and [] if the tokenizer has none."""
  if tokenizer is None:
    return None, []
  try:
    opened = open_tokenizer(str(tokenizer))
  except UserError:
    return None, []
  bos, eos = opened.special_id('bos_token'), opened.special_id('eos_token')
  return None if bos < 0 else bos, [] if eos < 0 else [eos]


def _ids(value: int | Sequence[int] | None) -> list[int]:
  return [] if value is None else [value] if isinstance(value, int) else list(value)
