"""The published model families, and the conversion of their configurations to experiments."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from paxlite.core.attribute_kinds import Kind
from paxlite.core.errors import UserError, located
from paxlite.data.tokenizer import open_tokenizer
from paxlite.experiments.base import Experiment
from paxlite.experiments.gemma import Gemma
from paxlite.experiments.gpt import GPT2
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.llama import LLaMA
from paxlite.experiments.registry import experiments
from paxlite.weights.layout import HUGGING_FACE, Entry, gpt2_entries, llama_entries

# Names of activations in transformers, and in experiments.
_ACTIVATIONS = {'silu': 'silu', 'gelu_pytorch_tanh': 'gelu', 'gelu_new': 'gelu'}

# Options that must be numbers, because they are calculated with.
_NUMBERS = (
  'head_dim',
  'hidden_size',
  'n_embd',
  'n_inner',
  'num_attention_heads',
  'num_key_value_heads',
  'sliding_window',
)

# Options of transformers' configs that change what a model computes. paxlite implements only the
# given value of each.
_NEUTRAL: dict[str, Any] = {
  'quantization_config': None,
  'partial_rotary_factor': 1.0,
  'attention_bias': False,
  'mlp_bias': False,
  'scale_attn_weights': True,
  'scale_attn_by_inverse_layer_idx': False,
  'add_cross_attention': False,
}


def experiment_of(config: Mapping[str, Any], where: pathlib.Path) -> LanguageModel:
  """Returns the experiment of a Hugging Face config.json.

  Args:
    config: The contents of config.json.
    where: The path of the file, for messages.

  Raises:
    UserError: The architecture or one of its options is not implemented, or a value is missing or
      not valid.
  """
  families = {'llama': LLaMA, 'mistral': LLaMA, 'gemma': Gemma, 'gpt2': GPT2}
  kind = config.get('model_type')
  if not isinstance(kind, str) or kind not in families:
    raise UserError(f'{where}: model_type {kind!r} is none of {", ".join(families)}')
  for name, neutral in _NEUTRAL.items():
    if config.get(name) not in (None, neutral):
      raise UserError(f'{where}: {name}={config[name]!r} is not implemented')
  for name in _NUMBERS:
    value = config.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
      raise UserError(f'{where}: {name} must be a number, not {value!r}')
  try:
    values = _gpt2_values(config, where) if kind == 'gpt2' else _llama_values(config, kind, where)
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
    return published(families[kind], values)


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
  return gpt2_entries(e) if family_of(e) == 'gpt2' else llama_entries(e, HUGGING_FACE, 'half')


def family_of(e: LanguageModel) -> str:
  """Returns transformers' model_type for an experiment.

  Raises:
    UserError: There is none; the message names the attribute that does not fit.
  """
  gemma = dict(SCALE_EMBEDDING=True, NORM_SCALE_OFFSET=1.0, SEPARATE_EMBEDDING=False)
  llama = dict(SCALE_EMBEDDING=False, NORM_SCALE_OFFSET=0.0)
  rotary = dict(
    USE_ROTARY_POSITION_EMB=True,
    NORM_CLS='RmsNorm',
    USE_GATED_ACTIVATION=True,
    USE_BIAS=False,
    USE_FFN_BIAS=False,
  )
  gpt2 = dict(
    USE_ROTARY_POSITION_EMB=False,
    TRAINABLE_POSITION_EMB=True,
    NORM_CLS='LayerNorm',
    USE_GATED_ACTIVATION=False,
    USE_BIAS=True,
    USE_FFN_BIAS=True,
    SEPARATE_EMBEDDING=False,
    SCALE_EMBEDDING=False,
    ACTIVATION_CLS='gelu',
    NUM_KV_HEADS=e.NUM_HEADS,
    DIMS_PER_HEAD=e.MODEL_DIMS // e.NUM_HEADS,
    NORM_SCALE_OFFSET=0.0,
  )
  common = dict(USE_PER_DIM_SCALE=False, USE_SOFTMAX_BIAS=False)
  if e.USE_ROTARY_POSITION_EMB and e.SCALE_EMBEDDING:
    kind, wanted = 'gemma', rotary | gemma | dict(ACTIVATION_CLS='gelu')
  elif e.USE_ROTARY_POSITION_EMB:
    kind = 'mistral' if e.SLIDING_WINDOW > 0 else 'llama'
    wanted = rotary | llama | dict(ACTIVATION_CLS='silu')
  else:
    kind, wanted = 'gpt2', gpt2
  for name, value in (wanted | common).items():
    if getattr(e, name) != value:
      raise UserError(
        f'Hugging Face has no {kind} with {name}={getattr(e, name)!r}, as {type(e).__name__} has '
        f'it: there it is {value!r}'
      )
  for name in ('SOFTMAX_CAP_LOGITS', 'ATTEN_LOGIT_CAP'):
    if getattr(e, name) > 0:
      raise UserError(
        f'Hugging Face has no {kind} with {name}={getattr(e, name):g}, as {type(e).__name__} has '
        'it: there it is off'
      )
  plain = LanguageModel(**{name: getattr(e, name) for name in LanguageModel().values()})
  if plain.model() != e.model():
    raise UserError(
      f'{type(e).__name__} changes its layers beyond what attributes say (its methods model, layer '
      f'or attention): Hugging Face has no {kind} like that'
    )
  return kind


def config_json(e: LanguageModel, dtype: str, tokenizer: pathlib.Path | None) -> dict[str, Any]:
  """Returns the contents of config.json with which transformers reads an experiment's model."""
  kind = family_of(e)
  bos, eos = _special_ids(tokenizer)
  end = list(e.EOS_IDS) or eos
  common: dict[str, Any] = {
    'model_type': kind,
    'vocab_size': e.VOCAB_SIZE,
    'torch_dtype': dtype,
    'tie_word_embeddings': not e.SEPARATE_EMBEDDING,
    'bos_token_id': bos,
    'eos_token_id': end[0] if len(end) == 1 else end or None,
  }
  if kind == 'gpt2':
    return common | {
      'architectures': ['GPT2LMHeadModel'],
      'activation_function': 'gelu_new',
      'n_embd': e.MODEL_DIMS,
      'n_head': e.NUM_HEADS,
      'n_inner': e.HIDDEN_DIMS,
      'n_layer': e.NUM_LAYERS,
      'n_positions': e.MAX_SEQ_LEN,
      'layer_norm_epsilon': e.LAYERNORM_EPSILON,
    }
  names = {'llama': 'LlamaForCausalLM', 'mistral': 'MistralForCausalLM'}
  config = common | {
    'architectures': [names.get(kind, 'GemmaForCausalLM')],
    'hidden_size': e.MODEL_DIMS,
    'intermediate_size': e.HIDDEN_DIMS,
    'num_hidden_layers': e.NUM_LAYERS,
    'num_attention_heads': e.NUM_HEADS,
    'num_key_value_heads': e.NUM_KV_HEADS,
    'head_dim': e.DIMS_PER_HEAD,
    'hidden_act': 'gelu_pytorch_tanh' if kind == 'gemma' else 'silu',
    'rms_norm_eps': e.LAYERNORM_EPSILON,
    'rope_theta': e.ROPE_THETA,
    'max_position_embeddings': e.MAX_SEQ_LEN,
  }
  if kind == 'gemma':
    config['hidden_activation'] = 'gelu_pytorch_tanh'
  if kind == 'mistral':
    config['sliding_window'] = e.SLIDING_WINDOW
  if e.ROPE_FACTOR > 1:
    config['rope_scaling'] = {
      'rope_type': 'llama3',
      'factor': e.ROPE_FACTOR,
      'low_freq_factor': e.ROPE_LOW_FREQUENCY_FACTOR,
      'high_freq_factor': e.ROPE_HIGH_FREQUENCY_FACTOR,
      'original_max_position_embeddings': e.ROPE_ORIGINAL_LENGTH,
    }
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


def _llama_values(config: Mapping[str, Any], kind: str, where: pathlib.Path) -> dict[str, Any]:
  if kind == 'gemma' and not config.get('tie_word_embeddings', True):
    raise UserError(f'{where}: tie_word_embeddings=False is not implemented for gemma')
  activation = config.get('hidden_activation') or config['hidden_act']
  if kind == 'gemma' and not config.get('hidden_activation'):
    activation = 'gelu_pytorch_tanh'  # old files say "gelu" but mean this, as in transformers
  heads = config['num_attention_heads']
  head_dim = config.get('head_dim') or config['hidden_size'] // heads
  return {
    'NUM_LAYERS': config['num_hidden_layers'],
    'NUM_HEADS': heads,
    'NUM_KV_HEADS': config.get('num_key_value_heads') or heads,
    'MODEL_DIMS': config['hidden_size'],
    'HIDDEN_DIMS': config['intermediate_size'],
    'DIMS_PER_HEAD': head_dim,
    'HEADS_SPAN_MODEL': heads * head_dim == config['hidden_size'],
    'VOCAB_SIZE': config['vocab_size'],
    'MAX_SEQ_LEN': config['max_position_embeddings'],
    'ACTIVATION_CLS': _activation(activation, where),
    'LAYERNORM_EPSILON': config['rms_norm_eps'],
    'SEPARATE_EMBEDDING': not config.get('tie_word_embeddings', kind == 'gemma'),
    'SLIDING_WINDOW': (config.get('sliding_window') or 0) if kind == 'mistral' else 0,
    **_rope_values(config, where),
  }


def _activation(name: str, where: pathlib.Path) -> str:
  if name not in _ACTIVATIONS:
    raise UserError(f'{where}: activation {name!r} is none of {", ".join(_ACTIVATIONS)}')
  return _ACTIVATIONS[name]


def _rope_values(config: Mapping[str, Any], where: pathlib.Path) -> dict[str, Any]:
  rope = dict(config.get('rope_parameters') or config.get('rope_scaling') or {})
  values = {'ROPE_THETA': float(rope.get('rope_theta') or config.get('rope_theta') or 10_000.0)}
  kind = rope.get('rope_type', rope.get('type', 'default'))
  if kind == 'llama3':
    values |= {
      'ROPE_FACTOR': float(rope['factor']),
      'ROPE_LOW_FREQUENCY_FACTOR': float(rope['low_freq_factor']),
      'ROPE_HIGH_FREQUENCY_FACTOR': float(rope['high_freq_factor']),
      'ROPE_ORIGINAL_LENGTH': int(rope['original_max_position_embeddings']),
    }
  elif kind != 'default':
    raise UserError(f'{where}: rope_type {kind!r} is not implemented; default and llama3 are')
  return values


def _gpt2_values(config: Mapping[str, Any], where: pathlib.Path) -> dict[str, Any]:
  if not config.get('tie_word_embeddings', True):
    raise UserError(f'{where}: tie_word_embeddings=False is not implemented for gpt2')
  return {
    'NUM_LAYERS': config['n_layer'],
    'NUM_HEADS': config['n_head'],
    'MODEL_DIMS': config['n_embd'],
    'HIDDEN_DIMS': config.get('n_inner') or 4 * config['n_embd'],
    'VOCAB_SIZE': config['vocab_size'],
    'MAX_SEQ_LEN': config['n_positions'],
    'LAYERNORM_EPSILON': config['layer_norm_epsilon'],
    'ACTIVATION_CLS': _activation(config['activation_function'], where),
  }


def _ids(value: int | Sequence[int] | None) -> list[int]:
  return [] if value is None else [value] if isinstance(value, int) else list(value)
