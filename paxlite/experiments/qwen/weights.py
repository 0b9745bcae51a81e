"""How the published models of Qwen2 and Qwen3 are stored; see weights.family."""

from paxlite.core.json_text import JsonObject
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.qwen import Qwen2, Qwen3, Qwen3Moe
from paxlite.weights.config_keys import Both, Config, OneOf, Same, read_types, write_types
from paxlite.weights.family import Family
from paxlite.weights.family_keys import (
  COMMON,
  EXPERT_SILU,
  EXPERTS_PER_TOKEN,
  GIVEN_HEADS,
  GIVEN_KV,
  NO_BIAS,
  NORM_TOPK,
  UNTIED,
  either,
)
from paxlite.weights.key_values import is_on
from paxlite.weights.rope_keys import rope


def _read_qwen_window(config: Config) -> dict[str, object]:
  first = config.get('max_window_layers', 28)
  pattern = ['full']
  if is_on(config, 'use_sliding_window'):
    pattern = read_types(config, lambda i: 'sliding' if i >= first else 'full')
  if pattern == ['full']:
    return {'SLIDING_WINDOW': 0, 'ATTENTION_PATTERN': []}
  everywhere = pattern == ['sliding']
  return {
    'SLIDING_WINDOW': config['sliding_window'],
    'ATTENTION_PATTERN': [] if everywhere else pattern,
  }


def _write_qwen_window(e: LanguageModel) -> JsonObject:
  types = write_types(e, 'sliding' if e.SLIDING_WINDOW else 'full')
  if not e.SLIDING_WINDOW:
    return {'use_sliding_window': False, 'sliding_window': None}
  return {'use_sliding_window': True, 'sliding_window': e.SLIDING_WINDOW, 'layer_types': types}


QWEN_WINDOW = Both(
  ('use_sliding_window', 'sliding_window', 'max_window_layers', 'layer_types'),
  ('SLIDING_WINDOW', 'ATTENTION_PATTERN'), _read_qwen_window, _write_qwen_window,
)  # fmt: skip

FAMILIES: dict[str, Family] = {
  'qwen2': Family(
    'Qwen2ForCausalLM', Qwen2, (*GIVEN_KV, *COMMON, QWEN_WINDOW, OneOf('use_mrope', False))
  ),
  'qwen3': Family(
    'Qwen3ForCausalLM', Qwen3, (*GIVEN_HEADS, *COMMON, QWEN_WINDOW, NO_BIAS)
  ),
  'qwen3_moe': Family(
    'Qwen3MoeForCausalLM', Qwen3Moe,
    (
      *GIVEN_KV, EXPERT_SILU, UNTIED, rope(), NO_BIAS, EXPERTS_PER_TOKEN, NORM_TOPK,
      OneOf('use_sliding_window', False), OneOf('sliding_window', None),
      OneOf('decoder_sparse_step', 1), OneOf('mlp_only_layers', []),
      Same('moe_intermediate_size', 'EXPERT_HIDDEN_DIMS'),
      either('NUM_EXPERTS', 'num_experts', 'num_local_experts'),
    ),
  ),
}  # fmt: skip
