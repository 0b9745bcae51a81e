"""The families that llama.cpp knows, too: the keys of config.json, and the fields of a GGUF file.

The module `gguf` in the folder of a family has ARCHITECTURES; see weights.gguf_architecture.
"""

import functools
import importlib.util
import pkgutil

from paxlite import experiments
from paxlite.core.errors import UserError
from paxlite.core.json_text import Json, JsonObject
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.registry import imported
from paxlite.weights.config_keys import Config
from paxlite.weights.families import config_json, family_of
from paxlite.weights.gguf_architecture import Architecture
from paxlite.weights.known_keys import HARMLESS

# Keys that fields and tensors say in another way.
_SAID = {
  'tie_word_embeddings', 'rope_scaling', 'layer_types', 'query_pre_attn_scalar',
  'num_nextn_predict_layers', 'mtp_num_hidden_layers',  # they are left out
}  # fmt: skip


@functools.cache
def architectures() -> tuple[Architecture, ...]:
  """Returns what the folders of all families have."""
  found: list[Architecture] = []
  for folder in pkgutil.iter_modules(experiments.__path__, f'{experiments.__name__}.'):
    if folder.ispkg and importlib.util.find_spec(f'{folder.name}.gguf'):
      found += imported(f'{folder.name}.gguf').ARCHITECTURES
  return tuple(found)


def architecture_of(e: LanguageModel) -> tuple[Architecture, JsonObject]:
  """Returns the architecture of an experiment's model, and its config.json.

  Raises UserError if llama.cpp has no such model, or computes something else for it.
  """
  kind = family_of(e)
  of_kind = [a for a in architectures() if a.kind == kind]
  if not of_kind or e.gives_rewards:
    what = 'reward models' if e.gives_rewards else f'the family {kind}'
    known = ', '.join(sorted({a.kind for a in architectures()}))
    raise UserError(f'{what} cannot be exported to GGUF: --to=hf writes it; GGUF has {known}')
  config = config_json(e, 'float32', None)
  found = next(a for a in of_kind if a.fits(config))
  window = config.get('sliding_window')
  if 'sliding_window' in found.fixed and window and window >= config['max_position_embeddings']:
    config['sliding_window'] = None  # no text is longer than the window
  if wrong := _unknown(found, config):
    key, value = next(iter(wrong.items()))
    raise UserError(
      f'llama.cpp has no {kind} with {key}={value!r} of config.json: --to=hf exports it'
    )
  return found, config


def _unknown(architecture: Architecture, config: Config) -> dict[str, Json]:
  """Returns keys of a config.json with values that llama.cpp does not have."""
  read = {*architecture.fields.values(), *architecture.fixed, *architecture.said}
  read |= {*_SAID, *HARMLESS}
  found = {k: v for k, v in config.items() if k not in read}
  for key, values in architecture.fixed.items():
    if key in config and config[key] not in values:
      found[key] = config[key]
  found |= architecture.refused(config)
  if architecture.spans_model:
    found.pop('head_dim', None)
    if config['num_attention_heads'] * config['head_dim'] != config['hidden_size']:
      found['head_dim'] = config['head_dim']
  width = config.get('query_pre_attn_scalar')
  if width is not None and width != architecture.scale_width(config):
    found['query_pre_attn_scalar'] = width
  rope = config.get('rope_scaling') or {}
  kind = rope.get('rope_type', 'default')
  # llama.cpp always truncates; its files of gpt-oss are published so, and differ by a little
  truncates = kind == 'yarn' and (rope['truncate'] or architecture.kind == 'gpt_oss')
  of_yarn = truncates and not rope.get('attention_factor')
  if kind not in ('default', *architecture.stretchings) or (kind == 'yarn' and not of_yarn):
    found['rope_scaling'] = rope
  return found


def model_fields(architecture: Architecture, config: Config) -> dict[str, object]:
  """Returns the fields of a model, with the name of the architecture before them."""
  found: dict[str, object] = {
    name: config[key] for name, key in architecture.fields.items() if config.get(key) is not None
  }
  for name in ('rope.freq_base', 'rope.freq_base_swa', 'attn_logit_softcapping'):
    if name in found:
      found[name] = float(config[architecture.fields[name]])
  if (share := config.get('partial_rotary_factor', 1.0)) != 1:
    found['rope.dimension_count'] = int(config['head_dim'] * share)
  found |= architecture.own_fields(config) | _stretching_fields(config)
  return {f'{architecture.name}.{name}': value for name, value in found.items()}


def _stretching_fields(config: Config) -> dict[str, object]:
  """Returns the fields of stretched rotary positions; those of llama3 are a tensor."""
  rope = config.get('rope_scaling') or {}
  kind = rope.get('rope_type', 'default')
  before = 'rope.scaling'
  if kind == 'default':
    return {}
  if kind == 'llama3':
    return {f'{before}.original_context_length': rope['original_max_position_embeddings']}
  if kind == 'linear':
    return {f'{before}.type': kind, f'{before}.factor': float(rope['factor'])}
  return {
    f'{before}.type': kind,
    f'{before}.factor': float(rope['factor']),
    f'{before}.original_context_length': rope['original_max_position_embeddings'],
    f'{before}.yarn_beta_fast': float(rope['beta_fast']),
    f'{before}.yarn_beta_slow': float(rope['beta_slow']),
  }
