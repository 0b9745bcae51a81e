"""The published family Llama 4, and its tensors; see family_tables."""

import dataclasses

from paxlite.core.json_text import JsonObject
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.llama4 import Llama4
from paxlite.weights import tensor_names
from paxlite.weights.config_keys import Same, activation
from paxlite.weights.family import Family
from paxlite.weights.family_keys import EXPERTS_PER_TOKEN, GIVEN_HEADS, UNTIED, unread
from paxlite.weights.layout import decoder_entries
from paxlite.weights.llama4_keys import (
  LLAMA4_BLOCKS,
  LLAMA4_GROWTH,
  LLAMA4_TYPES,
  LLAMA4_WIDTHS,
)
from paxlite.weights.rope_keys import rope
from paxlite.weights.tensor_entries import Entry, whole

_FEED_FORWARD = 'model.layers.{i}.feed_forward.'
_LLAMA4 = tensor_names.HUGGING_FACE | {
  'gate': _FEED_FORWARD + 'gate_proj.weight',
  'up': _FEED_FORWARD + 'up_proj.weight',
  'down': _FEED_FORWARD + 'down_proj.weight',
  'shared_gate': _FEED_FORWARD + 'shared_expert.gate_proj.weight',
  'shared_up': _FEED_FORWARD + 'shared_expert.up_proj.weight',
  'shared_down': _FEED_FORWARD + 'shared_expert.down_proj.weight',
  'router': _FEED_FORWARD + 'router.weight',
  'expert_gate_up': _FEED_FORWARD + 'experts.gate_up_proj',
  'expert_down': _FEED_FORWARD + 'experts.down_proj',
}

# What text_config of models with images leaves out, because these are transformers' defaults.
LLAMA4_DEFAULTS: JsonObject = dict(
  model_type='llama4_text', vocab_size=202_048, hidden_size=5120, intermediate_size=8192,
  intermediate_size_mlp=16_384, num_hidden_layers=48, num_attention_heads=40,
  num_key_value_heads=8, head_dim=128, hidden_act='silu', max_position_embeddings=131_072,
  rms_norm_eps=1e-5, num_experts_per_tok=1, num_local_experts=16, attention_chunk_size=8192,
)  # fmt: skip


def llama4_entries(e: LanguageModel) -> list[Entry]:
  """Returns the entries of a Llama 4, whose experts are [E, in, out], as the variables are."""
  found = []
  for entry in decoder_entries(e, _LLAMA4, 'interleaved'):
    if entry.theirs.endswith('experts.gate_up_proj'):
      E, D, F = entry.our_shape
      halves = slice(0, F) if entry.ours.endswith('w_in_gate') else slice(F, 2 * F)
      view = lambda x, halves=halves: x[..., halves]
      entry = dataclasses.replace(
        entry, shape=(E, D, 2 * F), to_ours=whole, to_theirs=whole, view=view
      )
    elif entry.theirs.endswith('experts.down_proj'):
      entry = dataclasses.replace(entry, shape=entry.our_shape, to_ours=whole, to_theirs=whole)
    found.append(entry)
  return found


LLAMA4_FAMILIES: dict[str, Family] = {
  'llama4_text': Family(
    'Llama4ForCausalLM', Llama4,
    (
      *(key for key in GIVEN_HEADS if 'intermediate_size' not in key.theirs), UNTIED,
      rope(theta=5e5), LLAMA4_TYPES, LLAMA4_GROWTH, LLAMA4_BLOCKS, LLAMA4_WIDTHS,
      EXPERTS_PER_TOKEN,
      activation('hidden_act', ours=('ACTIVATION_CLS', 'EXPERT_ACTIVATION_CLS')),
      Same('num_local_experts', 'NUM_EXPERTS'),
      Same('use_qk_norm', 'USE_UNSCALED_QK_NORM', default=True),
      Same('attention_bias', 'USE_BIAS', default=False), unread('for_llm_compression'),
    ),
    _LLAMA4, rotary='interleaved',
    entries=llama4_entries,
  ),
}  # fmt: skip
