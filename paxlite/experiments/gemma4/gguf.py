"""How llama.cpp stores Gemma 4; see weights.gguf_architecture."""

import numpy as np

from paxlite.core.json_text import JsonObject
from paxlite.experiments.gemma.gguf import GELU
from paxlite.experiments.gemma4.weights import gemma4_entries
from paxlite.experiments.language_model import LanguageModel
from paxlite.weights.config_keys import Config
from paxlite.weights.gguf_architecture import (
  PATTERN,
  PLAIN,
  ROPE_FREQS,
  WINDOW,
  Architecture,
  stored_entry,
)
from paxlite.weights.tensor_entries import Entry

_FULL, _SLIDING = 'full_attention', 'sliding_attention'
_UNTURNED = 1e30  # what the rate of a pair without a position is divided by


class Gemma4Architecture(Architecture):
  """Fields of two kinds of attention, and of the small sizes."""

  def entries(self, e: LanguageModel) -> list[Entry]:
    return [stored_entry(entry) for entry in gemma4_entries(e, self.names)]

  def own_fields(self, config: Config) -> dict[str, object]:
    width, wide, rope = config['head_dim'], config['global_head_dim'], config['rope_parameters']
    kinds, layers = config['layer_types'], config['num_hidden_layers']
    found: dict[str, object] = {
      PATTERN: [kind == _SLIDING for kind in kinds],
      'attention.key_length': wide,
      'attention.value_length': wide,
      'attention.key_length_swa': width,
      'attention.value_length_swa': width,
      'rope.dimension_count': wide,
      'rope.dimension_count_swa': width,
      'rope.freq_base': float(rope[_FULL]['rope_theta']),
      'rope.freq_base_swa': float(rope[_SLIDING]['rope_theta']),
      # without this field, llama.cpp caps logits at 30
      'final_logit_softcapping': float(config['final_logit_softcapping'] or 0),
    }
    if heads := config['num_global_key_value_heads']:
      of = {_FULL: heads, _SLIDING: config['num_key_value_heads']}
      found['attention.head_count_kv'] = [of[kind] for kind in kinds]
    if config['use_double_wide_mlp']:
      hidden, readers = config['intermediate_size'], config['num_kv_shared_layers']
      found['feed_forward_length'] = [hidden * (1 + (i >= layers - readers)) for i in range(layers)]
    return found

  def refused(self, config: Config) -> JsonObject:
    found: JsonObject = {}
    rope, readers = config['rope_parameters'], config['num_kv_shared_layers']
    if rope[_FULL]['rope_type'] not in ('proportional', 'default'):
      found['rope_parameters'] = rope[_FULL]
    rows = config['vocab_size_per_layer_input']
    if config['hidden_size_per_layer_input'] and rows != config['vocab_size']:
      found['vocab_size_per_layer_input'] = rows
    # blocks without keys read those of the last two with keys: of sliding, and of full attention
    first = config['num_hidden_layers'] - readers
    if first < 2 or (readers and config['layer_types'][first - 2 : first] != [_SLIDING, _FULL]):
      found['num_kv_shared_layers'] = readers
    return found

  def constants(self, config: Config) -> dict[str, np.ndarray]:
    """Full attention rotates the first pairs of a head alone."""
    share = config['rope_parameters'][_FULL].get('partial_rotary_factor', 1.0)
    pairs = np.arange(config['global_head_dim'] // 2)
    is_turned = pairs < int(config['global_head_dim'] * share / 2)
    return {ROPE_FREQS: np.where(is_turned, 1, _UNTURNED).astype(np.float32)}


ARCHITECTURES = (
  Gemma4Architecture(
    'gemma4_text', 'gemma4',
    {k: v for k, v in PLAIN.items() if v != 'rope_theta'} | WINDOW | {
      'attention.shared_kv_layers': 'num_kv_shared_layers',
      'embedding_length_per_layer_input': 'hidden_size_per_layer_input',
      'expert_count': 'num_experts', 'expert_used_count': 'top_k_experts',
      'expert_feed_forward_length': 'moe_intermediate_size',
    },
    {**GELU, 'use_bidirectional_attention': (None, False, 'vision')}, stretchings=(),
    own_names={
      'factor': 'layer_output_scale.weight', 'expert_gate_up': 'ffn_gate_up_exps.weight',
      'expert_down': 'ffn_down_exps.weight', 'router_scale': 'ffn_gate_inp.scale',
      'router_expert_scale': 'ffn_down_exps.scale',
    },
    said=(
      'head_dim', 'global_head_dim', 'num_global_key_value_heads', 'attention_k_eq_v',
      'enable_moe_block', 'use_double_wide_mlp', 'rope_parameters', 'vocab_size_per_layer_input',
      'final_logit_softcapping',
    ),
    # the converter shows these, so that llama.cpp finds thoughts and calls in an answer
    shown=(
      '<|channel>', '<channel|>', '<|tool_call>', '<tool_call|>', '<|tool_response>',
      '<tool_response|>', '<|"|>',
    ),
  ),
)  # fmt: skip
