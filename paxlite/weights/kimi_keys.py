"""The keys of config.json of Kimi Linear: kinds of layers, their sizes, and experts."""

from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject
from paxlite.experiments.kimi import KimiLinear
from paxlite.experiments.language_model import LanguageModel
from paxlite.weights.config_keys import Both, Config, read_types, write_types

_KINDS = {'linear_attention': 'kimi_delta', 'full_attention': 'full_nope'}
_PARTS = 'linear_attn_config'
_LISTS = {'kda_layers': 'linear_attention', 'full_attn_layers': 'full_attention'}
# the keys of the dictionary of published files, those of transformers, and the attributes
_SIZES = {
  'head_dim': ('linear_head_dim', 'KDA_HEAD_DIMS', 128),
  'num_heads': ('linear_num_heads', 'KDA_HEADS', 32),
  'short_conv_kernel_size': ('linear_conv_kernel_dim', 'CONVOLUTION_WIDTH', 4),
}


def _parts(config: Config) -> Config:
  """Returns the dictionary that published files have for layers with a state."""
  parts = config.get(_PARTS) or {}
  if not isinstance(parts, dict):
    raise UserError(f'{_PARTS}={parts!r} must be an object')
  if unknown := parts.keys() - {*_SIZES, *_LISTS}:
    raise UserError(f'{_PARTS} has {min(unknown)}, which is not implemented')
  return parts


def _read_layers(config: Config) -> dict[str, object]:
  parts, layers, types = _parts(config), config['num_hidden_layers'], config.get('layer_types')
  if types is None and all(name in parts for name in _LISTS):
    at = {number: kind for name, kind in _LISTS.items() for number in parts[name]}
    if sorted(at) != list(range(1, layers + 1)):
      raise UserError(f'{_PARTS} must have each of the numbers 1 to {layers} in one list')
    types = [at[i + 1] for i in range(layers)]
  given = config if types is None else {**config, 'layer_types': types}
  default = lambda i: 'full_nope' if i and i % 4 == 0 else 'kimi_delta'
  values: dict[str, object] = {'ATTENTION_PATTERN': read_types(given, default, _KINDS)}
  for name, (theirs, ours, default_size) in _SIZES.items():
    values[ours] = parts.get(name, config.get(theirs, default_size))
  return values


def _write_layers(e: LanguageModel) -> JsonObject:
  sizes = {theirs: getattr(e, ours) for theirs, ours, _ in _SIZES.values()}
  types: JsonObject = {'layer_types': write_types(e, None, _KINDS)}
  return types | sizes


KDA_LAYERS = Both(
  (_PARTS, 'layer_types', *(theirs for theirs, _, _ in _SIZES.values())),
  ('ATTENTION_PATTERN', *(ours for _, ours, _ in _SIZES.values())),
  _read_layers,
  _write_layers,
)


def _read_dense(config: Config) -> dict[str, object]:
  types, layers = config.get('mlp_layer_types'), config['num_hidden_layers']
  if types is None:
    return {'NUM_DENSE_BLOCKS': config.get('first_k_dense_replace', 1)}
  dense = sum(kind == 'dense' for kind in types)
  if [*types] != ['dense'] * dense + ['sparse'] * (layers - dense):
    raise UserError(
      f'mlp_layer_types must have {layers} of dense and sparse, first those that are dense'
    )
  return {'NUM_DENSE_BLOCKS': dense}


def _write_dense(e: LanguageModel) -> JsonObject:
  types = ['sparse' if kind.has_experts else 'dense' for kind in e.block_kinds]
  return {'mlp_layer_types': types}


DENSE_LAYERS = Both(
  ('mlp_layer_types', 'first_k_dense_replace'), ('NUM_DENSE_BLOCKS',), _read_dense, _write_dense
)


def _read_shared(config: Config) -> dict[str, object]:
  count = config.get('num_shared_experts', config.get('n_shared_experts'))
  if count is None:
    raise KeyError('num_shared_experts')
  if not count > 0:
    raise UserError(f'num_shared_experts={count!r} must be above 0')
  return {'NUM_SHARED_EXPERTS': count}


def _write_shared(e: LanguageModel) -> JsonObject:
  assert isinstance(e, KimiLinear)
  if not e.NUM_SHARED_EXPERTS:
    raise UserError('Hugging Face has no NUM_SHARED_EXPERTS=0 in this family')
  return {'num_shared_experts': e.NUM_SHARED_EXPERTS}


SHARED_EXPERTS = Both(
  ('num_shared_experts', 'n_shared_experts'), ('NUM_SHARED_EXPERTS',), _read_shared, _write_shared
)


def default_of(attribute: str, default: object, *keys: str) -> Both:
  """Returns an attribute with several keys, of which the first one is written.

  Args:
    attribute: The attribute.
    default: Its value in files with none of the keys.
    *keys: The keys.
  """

  def read(config: Config) -> dict[str, object]:
    found = (config[key] for key in keys if config.get(key) is not None)
    return {attribute: next(found, default)}

  return Both(keys, (attribute,), read, lambda e: {keys[0]: getattr(e, attribute)})


def _read_length(config: Config) -> dict[str, object]:
  length = config.get('model_max_length', config.get('max_position_embeddings'))
  if length is None:
    raise KeyError('model_max_length')
  return dict.fromkeys(('MAX_POSITION_EMBEDDINGS', 'MAX_SEQ_LEN'), length)


MODEL_LENGTH = Both(
  ('model_max_length', 'max_position_embeddings'),
  ('MAX_POSITION_EMBEDDINGS', 'MAX_SEQ_LEN'),
  _read_length,
  lambda e: {'model_max_length': max(e.MAX_POSITION_EMBEDDINGS, e.MAX_SEQ_LEN)},
)
