"""The keys of config.json that several families share, and the functions that make some of them."""

from typing import Any

from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject
from paxlite.experiments import options
from paxlite.experiments.language_model import LanguageModel
from paxlite.weights.config_keys import (
  Both,
  Config,
  OneOf,
  Same,
  activation,
  heads,
  positions,
  tied,
  window,
)
from paxlite.weights.key_values import is_on
from paxlite.weights.rope_keys import rope

MODEL_COUNTS = (
  Same('num_hidden_layers', 'NUM_LAYERS'),
  Same('vocab_size', 'VOCAB_SIZE'),
  positions('max_position_embeddings'),
)
_COUNTS = (
  Same('num_hidden_layers', 'NUM_LAYERS'), Same('intermediate_size', 'HIDDEN_DIMS'),
  Same('vocab_size', 'VOCAB_SIZE'), positions('max_position_embeddings'),
)  # fmt: skip
LENGTHS = (*_COUNTS, Same('rms_norm_eps', 'LAYERNORM_EPSILON'))
LAYER_NORM_LENGTHS = (*_COUNTS, Same('layer_norm_eps', 'LAYERNORM_EPSILON'))
SIZES = (*LENGTHS, heads())
GIVEN_KV = (*LENGTHS, heads('num_key_value_heads'))  # where transformers has another default
GIVEN_HEADS = (*LENGTHS, heads('num_key_value_heads', 'head_dim'))
EXPERT_SILU = activation('hidden_act', ours=('EXPERT_ACTIVATION_CLS',))
SILU = activation('hidden_act')
NO_BIAS = OneOf('attention_bias', False)
NO_MLP_BIAS = OneOf('mlp_bias', False)
UNTIED, TIED = tied(default=False), tied(default=True)
COMMON = (SILU, UNTIED, rope())
PLAIN = (*SIZES, *COMMON)
WINDOW = window()
EXPERTS_PER_TOKEN = Same('num_experts_per_tok', 'NUM_EXPERTS_PER_TOKEN')
NORM_TOPK = Same('norm_topk_prob', 'NORMALIZE_EXPERT_WEIGHTS', default=False)


def either(attribute: str, *keys: str) -> Both:
  """Returns one attribute that versions of transformers write under different keys."""

  def read(config: Config) -> dict[str, object]:
    return {attribute: config[next((k for k in keys if k in config), keys[0])]}

  return Both(keys, (attribute,), read, lambda e: {keys[0]: options.value(e, attribute)})


def number(key: str, attribute: str, default: float = 1.0) -> Both:
  """Returns a number that some files have as an integer."""

  def read(config: Config) -> dict[str, object]:
    value = Same(key, attribute, default).read(config)[attribute]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
      raise UserError(f'{key}={value!r} must be a number')
    return {attribute: float(value)}

  return Both((key,), (attribute,), read, lambda e: {key: options.value(e, attribute)})


def choice(key: str, attribute: str, off: object, on: object, default: bool) -> Both:
  """Returns a key that is true or false, for one of two values of an attribute.

  Args:
    off: The attribute's value where the key is false.
    on: The attribute's value where the key is true.
    default: The key of files that do not have it.
  """

  def write(e: LanguageModel) -> JsonObject:
    value = options.value(e, attribute)
    if value not in (off, on):
      raise UserError(f'Hugging Face has no {attribute}={value} in this family')
    return {key: value == on}

  return Both(
    (key,), (attribute,), lambda c: {attribute: on if is_on(c, key, default) else off}, write
  )


def only(key: str, *values: object) -> Both:
  """Returns a key that older or published files have, with its implemented values; see OneOf.

  It is not written: transformers does not read it.
  """
  one_of: Any = OneOf
  return Both((key,), (), one_of(key, *values).read, lambda e: {})


def unread(*keys: str) -> Both:
  """Returns keys that change no logit here, whatever they say; they are not written."""
  return Both(keys, (), lambda config: {}, lambda e: {})


def counted(key: str, attribute: str, null: int) -> Both:
  """Returns a number that some files have as null, which transformers can compute with no more."""
  same = Same(key, attribute, null=null)
  return Both((key,), (attribute,), same.read, lambda e: {key: options.value(e, attribute)})


# Experts of which some see every token, after a few dense blocks.
ROUTED_EXPERTS = (
  EXPERTS_PER_TOKEN,
  Same('moe_intermediate_size', 'EXPERT_HIDDEN_DIMS'),
  either('NUM_EXPERTS', 'n_routed_experts', 'num_local_experts'),
  counted('n_shared_experts', 'NUM_SHARED_EXPERTS', 0),
  Same('first_k_dense_replace', 'NUM_DENSE_BLOCKS'),
  Same('routed_scaling_factor', 'EXPERT_WEIGHT_SCALE'),
  activation('hidden_act', ours=('ACTIVATION_CLS', 'EXPERT_ACTIVATION_CLS')),
)
NORMALIZED = Same('norm_topk_prob', 'NORMALIZE_EXPERT_WEIGHTS', default=True)
GROUPS = (
  counted('n_group', 'NUM_EXPERT_GROUPS', 1),
  counted('topk_group', 'NUM_EXPERT_GROUPS_PER_TOKEN', 1),
)
