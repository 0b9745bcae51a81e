"""How the published models of DeepSeek-V3.2 are stored; see weights.family."""

from collections.abc import Mapping

from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject
from paxlite.experiments.deepseek.weights import (
  DEEPSEEK_V3,
  LATENT_ATTENTION,
  latent_attention_entries,
)
from paxlite.experiments.deepseek_sparse import DeepSeekV3_2
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.parts.experts import MixtureOfExperts
from paxlite.weights.config_keys import Both, Config, Key, OneOf, Repeated, Same
from paxlite.weights.family import Family
from paxlite.weights.family_keys import GROUPS, NO_MLP_BIAS, NORMALIZED, ROUTED_EXPERTS, only
from paxlite.weights.known_keys import shortened
from paxlite.weights.layout import decoder_entries
from paxlite.weights.prediction_keys import PREDICTION_MODULES
from paxlite.weights.rope_keys import rope
from paxlite.weights.tensor_entries import Entry, bias_of, head_transforms, same, transposed

DEEPSEEK_V32 = DEEPSEEK_V3 | {
  'index_query': 'model.layers.{i}.self_attn.indexer.wq_b.weight',
  'index_key': 'model.layers.{i}.self_attn.indexer.wk.weight',
  'index_norm': 'model.layers.{i}.self_attn.indexer.k_norm.weight',
  'index_weights': 'model.layers.{i}.self_attn.indexer.weights_proj.weight',
}


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
        f'{name}={shortened(given)} is not supported: it must have {layers} kinds, and dense '
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
  *LATENT_ATTENTION, *(key for key in ROUTED_EXPERTS if 'first_k_dense_replace' not in key.theirs),
  Repeated('head_dim', 'qk_rope_head_dim'), rope(has_mscale=True), only('moe_layer_freq', 1),
  only('topk_method', 'noaux_tc'), only('scoring_func', 'sigmoid'),
)  # fmt: skip
_SCHEDULE = (
  'layer_types', 'indexer_types', 'index_topk_pattern', 'index_topk_freq', 'index_skip_topk_offset',
)  # fmt: skip


def _check_layers(config: Config) -> None:
  wanted = ['indexed_attention'] * config['num_hidden_layers']
  if config.get('layer_types') not in (None, wanted):
    raise UserError(
      f'layer_types={shortened(config["layer_types"])} is not supported: each of the '
      f'{len(wanted)} layers must have indexed_attention'
    )


def _read_indexers(config: Config) -> dict[str, object]:
  """Checks that each layer has an indexer of its own."""
  _check_layers(config)
  if 'shared' in (types := indexer_types(config)):
    raise UserError(
      f'indexers that layers share ({types.count("shared")} of {len(types)} layers) are not '
      'supported in this family: each layer must have full'
    )
  return {}


def _read_types(config: Config) -> dict[str, object]:
  _check_layers(config)
  types = indexer_types(config)
  return {'INDEXER_TYPES': types if 'shared' in types else []}


def _write_types(e: LanguageModel) -> JsonObject:
  types = e.values()['INDEXER_TYPES']
  return {'indexer_types': types} if types else {}


def indexer_types(config: Config) -> list[str]:
  """Returns for each layer whether it has an indexer ('full'), as transformers reads a config.

  Raises UserError if a kind is unknown, or the first layer or some layer has none.
  """
  layers, letters = config['num_hidden_layers'], {'F': 'full', 'S': 'shared'}
  found = config.get('indexer_types')
  name = 'indexer_types'
  if found is None and config.get('index_topk_pattern') is not None:
    name = 'index_topk_pattern'
    found = [letters.get(kind, kind) for kind in config[name]]
  if found is None:
    name = 'index_topk_freq'
    every = max(config.get(name) or 1, 1)
    first = config.get('index_skip_topk_offset', 2)
    found = ['shared' if max(i - first + 1, 0) % every else 'full' for i in range(layers)]
  if len(found) != layers or {*found} - {'full', 'shared'} or found[0] != 'full':
    raise UserError(
      f'{name}={shortened(config.get(name))} is not supported: {layers} layers must have full or '
      'shared, and the first one full'
    )
  return list(found)


def indexer(interleaved: bool, shares: bool = False) -> tuple[Key, ...]:
  """Returns the keys of the indexers of sparse attention.

  Args:
    shares: Whether layers may share indexers.
    interleaved: Whether rotary pairs of indexers are neighbors, which transformers does not read.
  """
  return (
    Same('index_topk', 'INDEXER_TOP_K'),
    Same('index_head_dim', 'INDEXER_DIMS_PER_HEAD'),
    Same('index_n_heads', 'INDEXER_HEADS'),
    only('indexer_rope_interleave', interleaved),
    Both(_SCHEDULE, ('INDEXER_TYPES',), _read_types, _write_types)
    if shares
    else Both(_SCHEDULE, (), _read_indexers, lambda e: {}),
  )  # fmt: skip


INTERLEAVED = OneOf('rope_interleave', True)
SPARSE = (
  *LATENT_EXPERTS, *GROUPS, NORMALIZED, NO_MLP_BIAS, dense_blocks(missing=3), PREDICTION_MODULES,
  only('rope_interleave', True),
)  # fmt: skip


def indexer_entries(e: DeepSeekV3_2, name: Mapping[str, str], ours: str) -> list[Entry]:
  """Returns the entries of the indexer of one layer of attention, whose variables are in `ours`."""
  D, Q, N, H = e.MODEL_DIMS, e.QUERY_LATENT_DIMS, e.INDEXER_HEADS, e.INDEXER_DIMS_PER_HEAD
  query = Entry(
    name['index_query'], (N * H, Q), f'{ours}/query/w', (Q, N, H), *head_transforms(N, H, None)
  )
  return [
    query,
    transposed(name['index_key'], (H, D), f'{ours}/key/w'),
    same(name['index_norm'], (H,), f'{ours}/key_norm/scale'),
    same(bias_of(name['index_norm']), (H,), f'{ours}/key_norm/bias'),
    transposed(name['index_weights'], (N, D), f'{ours}/weights/w'),
  ]


def sparse_entries(e: LanguageModel) -> list[Entry]:
  """Returns the entries of a model whose attention has indexers, or those of earlier blocks."""
  assert isinstance(e, DeepSeekV3_2)

  def attention(e: DeepSeekV3_2, name: Mapping[str, str], ours: str) -> list[Entry]:
    return latent_attention_entries(e, name, ours) + indexer_entries(e, name, f'{ours}/indexer')

  without = tuple(
    f'transformer/{block}/self_attention/indexer/'
    for block, kind in zip(e.block_names, e.block_kinds, strict=True)
    if not e.has_indexer(kind)
  )
  entries = decoder_entries(e, DEEPSEEK_V32, 'interleaved', attention=attention)
  return [entry for entry in entries if not entry.ours.startswith(without)]


FAMILIES: dict[str, Family] = {
  'deepseek_v32': Family(
    'DeepseekV32ForCausalLM', DeepSeekV3_2, (*SPARSE, *indexer(interleaved=False)),
    DEEPSEEK_V32, rotary='interleaved', entries=sparse_entries,
    classifier=None,
  ),
}  # fmt: skip
