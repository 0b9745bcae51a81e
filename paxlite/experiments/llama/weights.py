"""How the published models of LLaMA, Mistral and SmolLM are stored; see weights.family."""

from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.llama import LLaMA, SmolLM3
from paxlite.weights.config_keys import (
  Both,
  Config,
  OneOf,
  read_types,
  shortest,
  window,
  write_types,
)
from paxlite.weights.family import Family
from paxlite.weights.family_keys import COMMON, GIVEN_KV, NO_BIAS, NO_MLP_BIAS, PLAIN, SILU, TIED
from paxlite.weights.key_values import interval, is_on
from paxlite.weights.rope_keys import rope


def _read(config: Config) -> dict[str, object]:
  layers, every = config['num_hidden_layers'], interval(config, 'no_rope_layer_interval', 4)
  rotated = config.get('no_rope_layers') or [int((i + 1) % every != 0) for i in range(layers)]
  if len(rotated) != layers:
    raise UserError(f'no_rope_layers must have {layers} numbers')
  window = config.get('sliding_window')
  is_used = is_on(config, 'use_sliding_window') and window is not None
  default = lambda i: 'sliding' if is_used and not rotated[i] else 'full'
  period = read_types(config, default)
  kinds = [period[i % len(period)] for i in range(layers)]
  if 'sliding' not in kinds:
    window = 0
  elif window is None or not window > 0:
    raise UserError(f'layer_types with sliding_attention and sliding_window={window!r}')
  found = [kind if on else f'{kind}_nope' for kind, on in zip(kinds, rotated, strict=True)]
  return {'SLIDING_WINDOW': window, 'ATTENTION_PATTERN': shortest(found)}


def _write(e: LanguageModel) -> JsonObject:
  found = [kind.attention or ('sliding' if e.SLIDING_WINDOW else 'full') for kind in e.block_kinds]
  kinds = [kind.removesuffix('_nope') for kind in found]
  types = write_types(e.replaced(ATTENTION_PATTERN=kinds))
  return {
    'no_rope_layers': [int(not kind.endswith('_nope')) for kind in found],
    'layer_types': types,
    'use_sliding_window': 'sliding' in kinds,
    'sliding_window': e.SLIDING_WINDOW if 'sliding' in kinds else None,
  }


SMOLLM3_LAYERS = Both(
  (
    'no_rope_layers', 'no_rope_layer_interval', 'layer_types', 'use_sliding_window',
    'sliding_window',
  ),
  ('SLIDING_WINDOW', 'ATTENTION_PATTERN'),
  _read,
  _write,
)  # fmt: skip
TEXT_DEFAULTS: dict[str, JsonObject] = {'mistral3': dict(model_type='mistral')}

FAMILIES: dict[str, Family] = {
  'llama': Family(
    'LlamaForCausalLM', LLaMA,
    (*PLAIN, NO_BIAS, NO_MLP_BIAS, OneOf('rope_interleaved', False)),
  ),
  'mistral': Family(
    'MistralForCausalLM', LLaMA,
    (*GIVEN_KV, *COMMON, window(missing=4096)),
  ),
  'smollm3': Family(
    'SmolLM3ForCausalLM', SmolLM3,
    (*GIVEN_KV, SILU, TIED, rope(theta=2e6), NO_BIAS, NO_MLP_BIAS, SMOLLM3_LAYERS),
  ),
}  # fmt: skip
