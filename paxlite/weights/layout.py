"""The variable that each tensor of a published model becomes, and the order of its elements.

One table for each family serves both directions.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from paxlite.core import shell
from paxlite.core.errors import UserError
from paxlite.experiments import options
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.parts.experts import MixtureOfExperts
from paxlite.experiments.parts.prediction import MultiTokenPrediction
from paxlite.experiments.parts.stack import BlockKind
from paxlite.layers.moe.group_router import LOAD_BIAS
from paxlite.weights.packed_experts import packed_tensors
from paxlite.weights.tensor_entries import (
  Entry,
  bias_of,
  bias_transforms,
  columns_of,
  head_transforms,
  norm_entries,
  of_heads,
  of_pairs,
  rows_of,
  same,
  swapped,
  transposed,
  whole,
)

# Makes the entries of a layer of an experiment: the names of tensors by role, and the variable's
LayerEntries = Callable[[Any, Mapping[str, str], str], list['Entry']]


def check_layers(
  e: LanguageModel, shapes: Mapping[str, Sequence[int]], names: Mapping[str, str]
) -> None:
  """Raises UserError if there are fewer tensors than layers, or than experts in all layers.

  Their numbers come from a file, and loops run over them. `names` are as for decoder_entries.
  """
  if len(shapes) < e.NUM_LAYERS:
    raise UserError(f'{len(shapes):,} tensors are too few for NUM_LAYERS={e.NUM_LAYERS:,}')
  one_each = 'experts_gate_up' not in names and '{x}' in names.get('expert_down', '')
  if isinstance(e, MixtureOfExperts) and one_each:
    layers = sum(kind.has_experts for kind in e.block_kinds)
    if len(shapes) + packed_tensors(shapes) < layers * e.NUM_EXPERTS:
      raise UserError(
        f'{len(shapes):,} tensors are too few for NUM_EXPERTS={e.NUM_EXPERTS:,} in {layers} layers'
      )


def has_modules(names: Mapping[str, str]) -> bool:
  """Returns whether a format has names for modules that predict further tokens."""
  return 'prediction_projection' in names


def decoder_entries(
  e: LanguageModel,
  names: Mapping[str, str],
  rotary: str,
  layers: Mapping[str, LayerEntries] = MappingProxyType({}),
  attention: LayerEntries | None = None,
) -> list[Entry]:
  """Returns the entries of a decoder whose linear layers are [out, in].

  Args:
    names: Names of the tensors by role; see tensor_names.
    rotary: Layout of the rotary pairs in the published queries and keys; see RotaryEmbedding.
    layers: Makes the entries of layers in the place of attention, by their kind.
    attention: Makes the entries of attention of all other kinds; None: attention_entries does.

  Raises:
    UserError: Pairs would have to be reordered in heads that are rotated in part, or in latents.
  """
  D, V = e.MODEL_DIMS, e.VOCAB_SIZE
  share, swaps = options.value(e, 'ROPE_FRACTION'), rotary != e.ROPE_LAYOUT
  if swaps and (share != 1 or attention is not None):
    what = 'latent attention' if attention is not None else f'ROPE_FRACTION={share:g}'
    raise UserError(f'{what} needs {shell.flag("ROPE_LAYOUT", rotary)}, as its files have')
  attention = attention or functools.partial(attention_entries, swap=swaps)
  entries_of = lambda kind: layers.get(str(kind), attention)
  entries = [
    same(names['embedding'], (V, D), 'embedding/emb_var'),
    *norm_entries(e, names['final_norm'], 'final_ln'),
  ]
  if e.SEPARATE_EMBEDDING:
    entries.append(same(names['head'], (V, D), 'softmax/w'))
  if options.value(e, 'USE_SOFTMAX_BIAS'):
    entries.append(same(bias_of(names['head']), (V,), 'logits_bias/b'))
  for i, (block, kind) in enumerate(zip(e.block_names, e.block_kinds, strict=True)):
    name = {role: text.replace('{i}', str(i)) for role, text in names.items()}
    entries += _block(e, name, f'transformer/{block}', kind, entries_of)
  if isinstance(e, MultiTokenPrediction) and has_modules(names):
    for i in range(e.NUM_PREDICTION_MODULES):
      name = _names_of_module(names, e.NUM_LAYERS, i)
      entries += _prediction_module(e, name, f'predictions_{i}', attention)
  return entries


def _block(
  e: LanguageModel,
  name: Mapping[str, str],
  layer: str,
  kind: BlockKind,
  entries_of: Callable[[str | None], LayerEntries],
) -> list[Entry]:
  """Returns the entries of one block, whose variables are in `layer`."""
  D = e.MODEL_DIMS
  norms = {'attention_norm': 'layer_norm', 'ffn_norm': 'ff_layer_norm'}
  if options.value(e, 'BLOCK_ORDER') == 'parallel_one_norm':
    del norms['ffn_norm']
  post = {'attention_post_norm': 'post_layer_norm', 'ffn_post_norm': 'ff_post_layer_norm'}
  policy = e.norm_policy_of(kind)
  norms = {'pre': norms, 'post': post, 'primer_hybrid': norms | post}[policy]
  entries = []
  for role, ours in norms.items():
    entries += norm_entries(e, name[role], f'{layer}/{ours}')
  entries += entries_of(kind.attention)(e, name, f'{layer}/self_attention')
  ours = f'{layer}/ff_layer'
  if not kind.has_experts:
    return entries + _feed_forward(e, name, e.hidden_dims_of(kind), ours)
  assert isinstance(e, MixtureOfExperts)
  if e.NUM_SHARED_EXPERTS:
    roles = {
      role: name[f'shared_{role}']
      for role in ('gate', 'up', 'gate_up', 'down')
      if f'shared_{role}' in name
    }
    entries += _feed_forward(e, roles, e.shared_hidden_dims_of(kind), f'{ours}/shared')
    if e.USE_SHARED_EXPERT_GATE:
      entries.append(transposed(name['shared_factor'], (1, D), f'{ours}/shared_gate/w'))
    ours = f'{ours}/experts'
  return entries + _experts(e, name, ours)


def _names_of_module(names: Mapping[str, str], layers: int, i: int) -> dict[str, str]:
  """Returns the names of module i by role: its block has a number of its own, or the next one."""
  own = names.get('prediction_layer')
  if own is None:
    return {role: text.replace('{i}', str(layers + i)) for role, text in names.items()}
  blocks = names['attention_norm'].partition('{i}')[0] + '{i}.'
  return {role: text.replace(blocks, own).replace('{i}', str(i)) for role, text in names.items()}


def _prediction_module(
  e: MultiTokenPrediction, name: Mapping[str, str], ours: str, attention: LayerEntries
) -> list[Entry]:
  """Returns the entries of a module that predicts a further token, whose variables are in `ours`.

  Its embedding and its head are those of the model, of which some formats have copies.
  """
  D, V = e.MODEL_DIMS, e.VOCAB_SIZE
  norms = {
    'prediction_embedding_norm': 'embedding_norm',
    'prediction_hidden_norm': 'hidden_norm',
    'prediction_norm': 'norm',
  }
  head = 'softmax/w' if e.SEPARATE_EMBEDDING else 'embedding/emb_var'
  copies = {'prediction_embedding': 'embedding/emb_var', 'prediction_head': head}
  return [
    *_block(e, name, f'{ours}/block', e.prediction_kind, lambda kind: attention),
    *(same(name[role], (D,), f'{ours}/{norm}/scale') for role, norm in norms.items()),
    Entry(
      name['prediction_projection'], (D, 2 * D), f'{ours}/projection/w', (2, D, D),
      to_ours=lambda x: x.T, to_theirs=lambda w: w.reshape(2 * D, D).T,
    ),
    *(
      dataclasses.replace(same(name[role], (V, D), variable), is_copy=True)
      for role, variable in copies.items()
      if role in name
    ),
  ]  # fmt: skip


def attention_entries(
  e: LanguageModel, name: Mapping[str, str], ours: str, swap: bool
) -> list[Entry]:
  """Returns the entries of one layer of attention; `swap` reorders rotary pairs."""
  D, N, G, H = e.MODEL_DIMS, e.NUM_HEADS, e.NUM_KV_HEADS, e.DIMS_PER_HEAD
  entries = [
    Entry(
      name['post'], (D, N * H), f'{ours}/post/w', (D, N, H), to_ours=lambda x: x,
      to_theirs=lambda w: w.reshape(len(w), -1),
    )
  ]  # fmt: skip
  if e.USE_BIAS:
    entries.append(same(bias_of(name['post']), (D,), f'{ours}/post/b'))
  if options.value(e, 'USE_ATTENTION_SINKS'):
    entries.append(same(name['sinks'], (N,), f'{ours}/dot_product/sinks/logits'))
  packed = (N + 2 * G) * H
  start = 0
  for part, (role, heads) in enumerate((('query', N), ('key', G), ('value', G))):
    layout = e.ROPE_LAYOUT if swap and role != 'value' else None
    to_ours, to_theirs = head_transforms(heads, H, layout)
    rows = slice(start, start := start + heads * H)
    theirs, view = name.get(role, ''), whole
    shape: tuple[int, ...] = (heads * H, D)
    if role == 'query' and 'query_gate' in name:
      theirs, shape, view = name['query_gate'], (2 * N * H, D), of_pairs(N, 0)
      gate = Entry(
        theirs, shape, f'{ours}/gate/projection/w', (D, N, H), *head_transforms(N, H, None)
      )
      entries.append(dataclasses.replace(gate, view=of_pairs(N, 1)))
    if 'query_key_value' in name:
      theirs, shape, view = name['query_key_value'], (packed, D), rows_of(rows)
    if 'heads' in name:  # queries, keys and values of one head stand together
      theirs, shape, view = name['heads'], (3 * N * H, D), of_heads(N, part)
    for leaf in ('w', 'b') if e.USE_QKV_BIAS else ('w',):
      if leaf == 'b':
        shape, (to_ours, to_theirs) = shape[:1], bias_transforms(heads, layout)
        theirs = bias_of(theirs)
      ours_shape = (D, heads, H) if leaf == 'w' else (heads, H)
      entry = functools.partial(
        Entry, theirs, shape, to_ours=to_ours, to_theirs=to_theirs, view=view
      )
      if N == G:
        entries.append(entry(f'{ours}/qkv/combined/{leaf}', (3, *ours_shape), part=part))
      else:
        entries.append(entry(f'{ours}/qkv/{role}/{leaf}', ours_shape))
    if role == 'value' or e.QK_NORM == 'none':
      continue
    heads = heads if e.QK_NORM == 'all_heads' else 1
    norm = f'{role}_norm/norm' if e.QK_NORM == 'all_heads' else f'{role}_norm'
    transforms = bias_transforms(heads, layout)
    entries += [
      dataclasses.replace(entry, to_ours=transforms[0], to_theirs=transforms[1])
      for entry in norm_entries(e, name[f'{role}_norm'], f'{ours}/{norm}', heads * H)
    ]
  return entries


def _feed_forward(e: LanguageModel, name: Mapping[str, str], F: int, ours: str) -> list[Entry]:
  """Returns the entries of a feed-forward layer, gated or not."""
  D = e.MODEL_DIMS
  down = transposed(name['down'], (D, F), f'{ours}/ffn_layer2/w')
  if 'gate_up' not in name:
    roles = {'gate': 'ffn_layer1_gate', 'up': 'ffn_layer1'}
    if not e.USE_GATED_ACTIVATION:
      del roles['gate']
    ups = [transposed(name[role], (F, D), f'{ours}/{of}/w') for role, of in roles.items()]
    weights = [*ups, down]
    if not e.USE_FFN_BIAS:
      return weights
    return weights + [
      same(bias_of(w.theirs), w.shape[:1], w.ours.removesuffix('w') + 'b') for w in weights
    ]
  packed = transposed(name['gate_up'], (2 * F, D), '')
  return [
    dataclasses.replace(packed, ours=f'{ours}/{role}/w', our_shape=(D, F), view=rows_of(rows))
    for role, rows in (('ffn_layer1_gate', slice(0, F)), ('ffn_layer1', slice(F, 2 * F)))
  ] + [down]


def _experts(e: MixtureOfExperts, name: Mapping[str, str], ours: str) -> list[Entry]:
  """Returns the entries of a router and of gated experts."""
  D, F, E = e.MODEL_DIMS, e.EXPERT_HIDDEN_DIMS, e.NUM_EXPERTS
  entries = [transposed(name['router'], (E, D), f'{ours}/router/gate')]
  if e.ROUTER == 'balanced':
    shape = (1, E) if 'moe_statics' in name['router_balance'] else (E,)
    entries.append(same(name['router_balance'], shape, f'{ours}/router/{LOAD_BIAS}', (E,)))
  if e.USE_ROUTER_BIAS:
    entries.append(same(name['router_bias'], (E,), f'{ours}/router/b'))
  if 'experts_gate_up' in name:
    turns = {'gate': lambda x: x[..., 0::2], '': lambda x: x[..., 1::2]}
    for role, view in turns.items():
      suffix = f'_{role}' if role else ''
      w = same(name['experts_gate_up'], (E, D, 2 * F), f'{ours}/w_in{suffix}', (E, D, F))
      b = same(name['experts_gate_up_bias'], (E, 2 * F), f'{ours}/b_in{suffix}', (E, F))
      entries += [dataclasses.replace(entry, view=view) for entry in (w, b)]
    return [
      *entries,
      same(name['experts_down'], (E, F, D), f'{ours}/w_out'),
      same(name['experts_down_bias'], (E, D), f'{ours}/b_out'),
    ]
  roles = {'w_in_gate': ('gate', D, F), 'w_in': ('up', D, F), 'w_out': ('down', F, D)}
  if not e.USE_GATED_EXPERTS:
    del roles['w_in_gate']
  if 'expert_gate_up' in name:  # one tensor, in which all gates come first
    halves = {'w_in_gate': slice(0, F), 'w_in': slice(F, 2 * F)}
    entries += [
      Entry(
        name['expert_gate_up'],
        (E, 2 * F, D),
        f'{ours}/{leaf}',
        (E, D, F),
        swapped,
        swapped,
        view=columns_of(rows),
      )
      for leaf, rows in halves.items()
    ]
    roles = {'w_out': roles['w_out']}
  for leaf, (role, inputs, outputs) in roles.items():
    if '{x}' not in name[f'expert_{role}']:  # all experts are one tensor
      shapes = (E, outputs, inputs), (E, inputs, outputs)
      entries.append(
        Entry(name[f'expert_{role}'], shapes[0], f'{ours}/{leaf}', shapes[1], swapped, swapped)
      )
      if bias := name.get(f'expert_{role}_bias'):
        entries.append(same(bias, (E, outputs), f'{ours}/{leaf.replace("w", "b", 1)}'))
      continue
    for x in range(E):
      theirs = name[f'expert_{role}'].replace('{x}', str(x))
      one = transposed(theirs, (outputs, inputs), f'{ours}/{leaf}')
      entries.append(dataclasses.replace(one, our_shape=(E, inputs, outputs), part=x))
  return entries
