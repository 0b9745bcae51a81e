"""The keys of config.json of families with latent attention that do not write DeepSeek's own."""

from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.parts.experts import MixtureOfExperts
from paxlite.weights.config_keys import Both, Config, Key, OneOf, Repeated, Same
from paxlite.weights.family_keys import LATENT_ATTENTION, ROUTED_EXPERTS, only
from paxlite.weights.known_keys import shortened
from paxlite.weights.rope_keys import rope


def dense_blocks(missing: int) -> Both:
  """Returns the keys of the blocks without experts, which come first.

  Args:
    missing: How many there are in files that do not say it.
  """
  name, count = 'mlp_layer_types', 'first_k_dense_replace'

  def read(config: Config) -> dict[str, object]:
    layers, given, stated = config['num_hidden_layers'], config.get(name), config.get(count)
    if given is None:
      return {'NUM_DENSE_BLOCKS': min(missing if stated is None else stated, layers)}
    found = given.count('dense')
    if given != types(found, layers):
      raise UserError(
        f'{name}={shortened(given)} is not implemented: it must have {layers} kinds, and dense '
        'blocks first'
      )
    if stated is not None and min(stated, layers) != found:
      raise UserError(f'{count}={stated} and the {found} dense blocks of {name} disagree')
    return {'NUM_DENSE_BLOCKS': found}

  def types(dense: int, layers: int) -> list[str]:
    return ['dense'] * dense + ['sparse'] * (layers - dense)

  def write(e: LanguageModel) -> JsonObject:
    assert isinstance(e, MixtureOfExperts)
    dense = min(e.NUM_DENSE_BLOCKS, e.NUM_LAYERS)
    return {name: types(dense, e.NUM_LAYERS), count: dense}

  return Both((name, count), ('NUM_DENSE_BLOCKS',), read, write)


# Those of DeepSeek, with another key of the dense blocks. The last ones are in published files, and
# transformers does not read them.
LATENT_EXPERTS = (
  *LATENT_ATTENTION,
  *(key for key in ROUTED_EXPERTS if 'first_k_dense_replace' not in key.theirs),
  Repeated('head_dim', 'qk_rope_head_dim'),
  rope(has_mscale=True),
  only('moe_layer_freq', 1),
  only('topk_method', 'noaux_tc'),
  only('scoring_func', 'sigmoid'),
)


def _read_indexers(config: Config) -> dict[str, object]:
  layers = config['num_hidden_layers']
  kinds = {
    'layer_types': ['indexed_attention'] * layers,
    'indexer_types': ['full'] * layers,
  }
  for name, wanted in kinds.items():
    if config.get(name) not in (None, wanted):
      raise UserError(
        f'{name}={shortened(config[name])} is not implemented: each of the {layers} layers must '
        f'have {wanted[0]}'
      )
  pattern = config.get('index_topk_pattern')
  if pattern is not None and set(pattern) - {'F', 'full'}:
    raise UserError(f'index_topk_pattern={shortened(pattern)} is not implemented: only F is')
  if (config.get('index_topk_freq') or 1) > 1 and config.get('indexer_types') is None:
    raise UserError(
      f'index_topk_freq={config["index_topk_freq"]} is not implemented: each layer must have an '
      'indexer of its own'
    )
  return {}


def indexer(interleaved: bool) -> tuple[Key, ...]:
  """Returns the keys of the indexers of sparse attention.

  Args:
    interleaved: Whether rotary pairs of indexers are neighbors, which transformers does not read.
  """
  return (
    Same('index_topk', 'INDEXER_TOP_K'),
    Same('index_head_dim', 'INDEXER_DIMS_PER_HEAD'),
    Same('index_n_heads', 'INDEXER_HEADS'),
    only('indexer_rope_interleave', interleaved),
    Both(
      (
        'layer_types', 'indexer_types', 'index_topk_pattern', 'index_topk_freq',
        'index_skip_topk_offset',
      ),
      (), _read_indexers, lambda e: {},
    ),
  )  # fmt: skip


INTERLEAVED = OneOf('rope_interleave', True)
