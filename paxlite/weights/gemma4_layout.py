"""The tensors of Gemma 4, beside those that all decoders have."""

import dataclasses
from collections.abc import Mapping

from paxlite.core.variable_names import FIXED
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.parts.experts import MixtureOfExperts
from paxlite.experiments.parts.wide_attention import WideAttention
from paxlite.weights import tensor_names
from paxlite.weights.layout import attention_entries, decoder_entries
from paxlite.weights.tensor_entries import Entry, same

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
}


def gemma4_entries(e: LanguageModel) -> list[Entry]:
  """Returns the entries of a Gemma 4; see decoder_entries."""
  assert isinstance(e, MixtureOfExperts)
  entries = decoder_entries(e, GEMMA4, 'half', {'full': _full_attention})
  D, E = e.MODEL_DIMS, e.NUM_EXPERTS
  for i, (block, kind) in enumerate(zip(e.block_names, e.block_kinds, strict=True)):
    name = {role: text.replace('{i}', str(i)) for role, text in GEMMA4.items()}
    ours = f'transformer/{block}'
    entries.append(same(name['factor'], (1,), f'{ours}/{FIXED}'))
    if not kind.has_experts:
      continue
    layer = f'{ours}/ff_layer'
    entries += [
      same(name['router_scale'], (D,), f'{layer}/experts/router/scale'),
      same(name['router_expert_scale'], (E,), f'{layer}/experts/router/expert_scale'),
      same(name['experts_norm'], (D,), f'{layer}/experts/norm/scale'),
      same(name['shared_post_norm'], (D,), f'{layer}/shared_norm/scale'),
      same(name['experts_post_norm'], (D,), f'{layer}/experts_norm/scale'),
    ]
  return entries


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
