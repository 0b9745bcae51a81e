"""The tensors of Gemma 4, beside those that all decoders have."""

import dataclasses
from collections.abc import Mapping, Sequence

from paxlite.core.variable_names import FIXED
from paxlite.experiments.gemma4 import Gemma4, WideAttention
from paxlite.experiments.language_model import LanguageModel
from paxlite.weights import tensor_names
from paxlite.weights.layout import attention_entries, decoder_entries
from paxlite.weights.tensor_entries import Entry, same, transposed

_LAYER = 'model.layers.{i}.'
GEMMA4 = tensor_names.GEMMA2 | {
  'shared_gate': tensor_names.GEMMA2['gate'],
  'shared_up': tensor_names.GEMMA2['up'],
  'shared_down': tensor_names.GEMMA2['down'],
  'router': _LAYER + 'router.proj.weight',
  'expert_gate_up': _LAYER + 'experts.gate_up_proj',
  'expert_down': _LAYER + 'experts.down_proj',
  'router_scale': _LAYER + 'router.scale',
  'router_expert_scale': _LAYER + 'router.per_expert_scale',
  'experts_norm': _LAYER + 'pre_feedforward_layernorm_2.weight',
  'shared_post_norm': _LAYER + 'post_feedforward_layernorm_1.weight',
  'experts_post_norm': _LAYER + 'post_feedforward_layernorm_2.weight',
  'factor': _LAYER + 'layer_scalar',
  'inputs': 'model.embed_tokens_per_layer.weight',
  'inputs_projection': 'model.per_layer_model_projection.weight',
  'inputs_norm': 'model.per_layer_projection_norm.weight',
  'input_gate': _LAYER + 'per_layer_input_gate.weight',
  'input_projection': _LAYER + 'per_layer_projection.weight',
  'input_norm': _LAYER + 'post_per_layer_input_norm.weight',
}


def gemma4_entries(e: LanguageModel) -> list[Entry]:
  """Returns the entries of a Gemma 4; see decoder_entries."""
  assert isinstance(e, Gemma4)
  blocks = [*zip(e.block_names, e.block_kinds, strict=True)]
  readers = [f'transformer/{block}/self_attention' for block, kind in blocks if e.is_reader(kind)]
  entries = _with_queries_alone(
    readers, decoder_entries(e, GEMMA4, 'half', {'full': _full_attention})
  )
  D, P, L = e.MODEL_DIMS, e.LAYER_INPUT_DIMS, e.NUM_LAYERS
  if P:
    table, projection = (L * P, D), (D, L, P)
    entries += [
      same(GEMMA4['inputs'], (e.LAYER_INPUT_VOCAB_SIZE, L * P), 'layer_inputs/table/emb_var'),
      Entry(
        GEMMA4['inputs_projection'],
        table,
        'layer_inputs/projection/w',
        projection,
        to_ours=lambda x: x.T,
        to_theirs=lambda w: w.reshape(D, L * P).T,
      ),
      same(GEMMA4['inputs_norm'], (P,), 'layer_inputs/norm/scale'),
    ]
  for i, (block, kind) in enumerate(blocks):
    name = {role: text.replace('{i}', str(i)) for role, text in GEMMA4.items()}
    entries += _beside_decoder(e, name, f'transformer/{block}', kind.has_experts)
  return entries


def _beside_decoder(
  e: Gemma4, name: Mapping[str, str], ours: str, has_experts: bool
) -> list[Entry]:
  """Returns the entries of a block beside those that blocks of other decoders have."""
  D, P, E = e.MODEL_DIMS, e.LAYER_INPUT_DIMS, e.NUM_EXPERTS
  entries = [same(name['factor'], (1,), f'{ours}/{FIXED}')]
  if P:
    gate = f'{ours}/layer_input'
    entries += [
      transposed(name['input_gate'], (P, D), f'{gate}/gate/w'),
      transposed(name['input_projection'], (D, P), f'{gate}/projection/w'),
      same(name['input_norm'], (D,), f'{gate}/norm/scale'),
    ]
  if has_experts:
    layer = f'{ours}/ff_layer'
    entries += [
      same(name['router_scale'], (D,), f'{layer}/experts/router/scale'),
      same(name['router_expert_scale'], (E,), f'{layer}/experts/router/expert_scale'),
      same(name['experts_norm'], (D,), f'{layer}/experts/norm/scale'),
      same(name['shared_post_norm'], (D,), f'{layer}/shared_norm/scale'),
      same(name['experts_post_norm'], (D,), f'{layer}/experts_norm/scale'),
    ]
  return entries


def unread_by_gemma4(e: LanguageModel) -> str:
  """Returns a regular expression for tensors that published files have and no block reads.

  They are the projections and norms of keys and values of blocks that read those of others.
  """
  assert isinstance(e, Gemma4)
  readers = '|'.join(str(i) for i, kind in enumerate(e.block_kinds) if e.is_reader(kind))
  return rf'model\.layers\.({readers})\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.\w+'


def _with_queries_alone(layers: Sequence[str], entries: Sequence[Entry]) -> list[Entry]:
  """Returns entries without those of keys and values in some layers of attention."""
  found = []
  for entry in entries:
    layer = next((layer for layer in layers if entry.ours.startswith(f'{layer}/')), None)
    if layer is not None:
      if entry.part == 0:  # queries, keys and values have one variable elsewhere
        entry = dataclasses.replace(
          entry, ours=f'{layer}/qkv/query/w', our_shape=entry.our_shape[1:], part=None
        )
      if entry.part is not None or entry.ours.startswith(
        tuple(f'{layer}/{of_keys}' for of_keys in ('qkv/key/', 'qkv/value/', 'key_norm/'))
      ):
        continue
    found.append(entry)
  return found


def _full_attention(e: WideAttention, name: Mapping[str, str], ours: str) -> list[Entry]:
  """Returns the entries of full attention, which may have no tensor of values."""
  entries = attention_entries(e.of_full_attention, name, ours, swap=False)
  if not e.KEYS_ARE_VALUES:
    return entries
  found = []
  roles = {name['query']: 'query', name['key']: 'key'}
  for entry in entries:
    if entry.theirs == name['value']:
      continue
    if entry.part is not None:  # queries and keys have a variable each, without values
      role = roles[entry.theirs]
      entry = dataclasses.replace(
        entry, ours=f'{ours}/qkv/{role}/w', our_shape=entry.our_shape[1:], part=None
      )
    found.append(entry)
  return found
