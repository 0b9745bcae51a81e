"""The tensors of DeepSeek-V4, beside those that all decoders have."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from paxlite.core.errors import UserError
from paxlite.core.variable_names import EXPERTS_OF_IDS, LOAD_BIAS
from paxlite.experiments.deepseek_v4 import DeepSeekV4
from paxlite.experiments.language_model import LanguageModel
from paxlite.weights.layout import decoder_entries
from paxlite.weights.tensor_entries import Entry, head_transforms, same, transposed, whole

_LAYER = 'model.layers.{i}.'
DEEPSEEK_V4 = {
  'embedding': 'model.embed_tokens.weight',
  'final_norm': 'model.norm.weight',
  'head': 'head.weight',
  'merge_weights': 'model.hc_head.hc_fn',
  'merge_bias': 'model.hc_head.hc_base',
  'merge_scale': 'model.hc_head.hc_scale',
  'attention_norm': _LAYER + 'attn_norm.weight',
  'ffn_norm': _LAYER + 'ffn_norm.weight',
  'connection': _LAYER + 'hc_attn_',
  'ff_connection': _LAYER + 'hc_ffn_',
  'query_down': _LAYER + 'attn.wq_a.weight',
  'query_down_norm': _LAYER + 'attn.q_norm.weight',
  'query_up': _LAYER + 'attn.wq_b.weight',
  'key': _LAYER + 'attn.wkv.weight',
  'key_norm': _LAYER + 'attn.norm.weight',
  'sinks': _LAYER + 'attn.attn_sink',
  'post_groups': _LAYER + 'attn.wo_a.weight',
  'post': _LAYER + 'attn.wo_b.weight',
  'window_keys': _LAYER + 'attn.compressor.',
  'index_keys': _LAYER + 'attn.indexer.compressor.',
  'index_query': _LAYER + 'attn.indexer.wq_b.weight',
  'index_weights': _LAYER + 'attn.indexer.weights_proj.weight',
  'router': _LAYER + 'ffn.gate.weight',
  'router_balance': _LAYER + 'ffn.gate.bias',
  'router_table': _LAYER + 'ffn.gate.tid2eid',
  'expert_gate': _LAYER + 'ffn.experts.{x}.w1.weight',
  'expert_up': _LAYER + 'ffn.experts.{x}.w3.weight',
  'expert_down': _LAYER + 'ffn.experts.{x}.w2.weight',
  'shared_gate': _LAYER + 'ffn.shared_experts.w1.weight',
  'shared_up': _LAYER + 'ffn.shared_experts.w3.weight',
  'shared_down': _LAYER + 'ffn.shared_experts.w2.weight',
}


def deepseek_v4_entries(e: LanguageModel) -> list[Entry]:
  """Returns the entries of a DeepSeek-V4; see decoder_entries."""
  assert isinstance(e, DeepSeekV4)
  layers = dict.fromkeys(('sliding', 'sparse_windows', 'windows'), _attention)
  entries = decoder_entries(e, DEEPSEEK_V4, 'interleaved', layers)
  for i, (block, kind) in enumerate(zip(e.block_names, e.block_kinds, strict=True)):
    name = {role: text.replace('{i}', str(i)) for role, text in DEEPSEEK_V4.items()}
    ours = f'transformer/{block}'
    attention = f'{ours}/self_attention'
    keys, to = name['window_keys'], f'{attention}/window_keys'
    if kind.attention == 'windows':
      entries += _window_keys(e, keys, e.WINDOW_RATE, 1, e.DIMS_PER_HEAD, to)
    if kind.attention == 'sparse_windows':
      entries += _window_keys(e, keys, e.SPARSE_WINDOW_RATE, 2, e.DIMS_PER_HEAD, to)
      entries += _indexer(e, name, f'{attention}/indexer')
    for role in ('connection', 'ff_connection'):
      entries += _connection(e, name[role], f'{ours}/{role}')
    if kind.variant == 'by_ids':
      router = f'{ours}/ff_layer/experts/router'
      entries = [entry for entry in entries if entry.ours != f'{router}/{LOAD_BIAS}']
      entries.append(_table(e, name['router_table'], f'{router}/{EXPERTS_OF_IDS}'))
  N, merging = e.NUM_STREAMS, f'transformer/{e.merging_name}'
  return [
    *entries,
    _of_streams(e, DEEPSEEK_V4['merge_weights'], N, f'{merging}/weights/w'),
    same(DEEPSEEK_V4['merge_bias'], (N,), f'{merging}/b'),
    same(DEEPSEEK_V4['merge_scale'], (1,), f'{merging}/scale'),
  ]


def _attention(e: DeepSeekV4, name: Mapping[str, str], ours: str) -> list[Entry]:
  """Returns the entries that all kinds of attention have."""
  D, N, H, Q = e.MODEL_DIMS, e.NUM_HEADS, e.DIMS_PER_HEAD, e.QUERY_LATENT_DIMS
  G, R = e.OUTPUT_GROUPS, e.OUTPUT_GROUP_DIMS
  n = N // G
  return [
    transposed(name['query_down'], (Q, D), f'{ours}/query_latent/w'),
    same(name['query_down_norm'], (Q,), f'{ours}/query_latent_norm/scale'),
    _heads(name['query_up'], N, H, Q, f'{ours}/query/w'),
    transposed(name['key'], (H, D), f'{ours}/key/w'),
    same(name['key_norm'], (H,), f'{ours}/key_norm/scale'),
    same(name['sinks'], (N,), f'{ours}/dot_product/sinks/logits'),
    Entry(
      name['post_groups'],
      (G * R, n * H),
      f'{ours}/post_groups/w',
      (G, n, H, R),
      to_ours=lambda x: np.moveaxis(x.reshape(G, R, n, H), 1, 3),
      to_theirs=lambda w: np.moveaxis(w, 3, 1),
    ),
    Entry(
      name['post'],
      (D, G * R),
      f'{ours}/post/w',
      (D, G, R),
      to_ours=whole,
      to_theirs=lambda w: w.reshape(len(w), -1),
    ),
  ]


def _heads(theirs: str, heads: int, width: int, inputs: int, ours: str) -> Entry:
  shapes = (heads * width, inputs), (inputs, heads, width)
  return Entry(theirs, shapes[0], ours, shapes[1], *head_transforms(heads, width, None))


def _window_keys(
  e: DeepSeekV4, theirs: str, rate: int, series: int, width: int, ours: str
) -> list[Entry]:
  """Returns the entries of the keys of windows.

  Args:
    e: The experiment.
    theirs: How the names of their tensors begin.
    rate: The tokens of a window.
    series: How many keys a token is a term of.
    width: The width of a key.
    ours: How the names of the variables begin.
  """
  D, values = e.MODEL_DIMS, series * width
  return [
    transposed(f'{theirs}wkv.weight', (values, D), f'{ours}/value/w'),
    transposed(f'{theirs}wgate.weight', (values, D), f'{ours}/gate/w'),
    same(f'{theirs}ape', (rate, values), f'{ours}/b'),
    same(f'{theirs}norm.weight', (width,), f'{ours}/norm/scale'),
  ]


def _indexer(e: DeepSeekV4, name: Mapping[str, str], ours: str) -> list[Entry]:
  """Returns the entries of an indexer."""
  D, Q, N, H = e.MODEL_DIMS, e.QUERY_LATENT_DIMS, e.INDEXER_HEADS, e.INDEXER_DIMS_PER_HEAD
  return [
    *_window_keys(e, name['index_keys'], e.SPARSE_WINDOW_RATE, 2, H, f'{ours}/keys'),
    _heads(name['index_query'], N, H, Q, f'{ours}/query/w'),
    transposed(name['index_weights'], (N, D), f'{ours}/weights/w'),
  ]


def _of_streams(e: DeepSeekV4, theirs: str, rows: int, ours: str) -> Entry:
  N, D = e.NUM_STREAMS, e.MODEL_DIMS
  to_theirs = lambda w: w.reshape(rows, N * D)
  return Entry(theirs, (rows, N * D), ours, (rows, N, D), whole, to_theirs)


def _connection(e: DeepSeekV4, theirs: str, ours: str) -> list[Entry]:
  """Returns the entries of a layer's connection to the streams."""
  M = (2 + e.NUM_STREAMS) * e.NUM_STREAMS
  return [
    _of_streams(e, f'{theirs}fn', M, f'{ours}/weights/w'),
    same(f'{theirs}base', (M,), f'{ours}/b'),
    same(f'{theirs}scale', (3,), f'{ours}/scale'),
  ]


def _table(e: DeepSeekV4, theirs: str, ours: str) -> Entry:
  """Returns the entry of the table of the experts of token ids, which are integers there."""

  def to_ours(x: np.ndarray) -> np.ndarray:
    if x.size and not 0 <= x.min() <= x.max() < e.NUM_EXPERTS:
      raise UserError(f'{theirs} has numbers of experts that are not below {e.NUM_EXPERTS}, or < 0')
    return x.astype(np.float32)

  table = same(theirs, (e.VOCAB_SIZE, e.NUM_EXPERTS_PER_TOKEN), ours)
  to_theirs = lambda w: w.astype(np.int64)
  return dataclasses.replace(table, to_ours=to_ours, to_theirs=to_theirs, dtype='int64')
