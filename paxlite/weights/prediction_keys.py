"""The keys of config.json and tensors of a folder about prediction modules."""

import logging
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject
from paxlite.experiments import options
from paxlite.experiments.language_model import LanguageModel
from paxlite.weights.config_keys import Both, Config

log = logging.getLogger('paxlite')

_LAYER = re.compile(r'model\.layers\.(\d{1,9})\.')
# The number of modules; the first name is written.
_NUMBERS = ('num_nextn_predict_layers', 'num_mtp_layers')
_NUMBER, _DEDICATED = 'mtp_num_hidden_layers', 'mtp_use_dedicated_embeddings'


def _read_number(config: Config) -> dict[str, object]:
  counts = [config[key] for key in _NUMBERS if config.get(key) is not None]
  if len(set(counts)) > 1:
    raise UserError(f'{" and ".join(_NUMBERS)} are {counts[0]} and {counts[1]}')
  return {'NUM_PREDICTION_MODULES': counts[0] if counts else 0}


PREDICTION_MODULES = Both(
  _NUMBERS, ('NUM_PREDICTION_MODULES',), _read_number,
  lambda e: {_NUMBERS[0]: options.value(e, 'NUM_PREDICTION_MODULES')},
)  # fmt: skip


def _read_one(config: Config) -> dict[str, object]:
  number: Any = config.get(_NUMBER) or 0
  if number > 1:
    raise UserError(f'{_NUMBER}={number} is not supported: such modules share their projection')
  if number and config.get(_DEDICATED) not in (None, False):
    raise UserError(
      f'{_DEDICATED}={config[_DEDICATED]!r} is not supported: the module reads the embedding of '
      'the model'
    )
  return {'NUM_PREDICTION_MODULES': number}


def _write_one(e: LanguageModel) -> JsonObject:
  number = options.value(e, 'NUM_PREDICTION_MODULES')
  if number > 1:
    raise UserError(
      f'Hugging Face has no NUM_PREDICTION_MODULES={number} in this family: there, several modules '
      'share their projection'
    )
  return {_NUMBER: number, _DEDICATED: False}


# Qwen: one module, whose tensors have names of their own.
ONE_PREDICTION_MODULE = Both(
  (_NUMBER, _DEDICATED), ('NUM_PREDICTION_MODULES',), _read_one, _write_one
)


def own_prefix(names: Mapping[str, str]) -> str:
  """Returns how the names of the tensors of modules begin; '' where they are among the blocks.

  Args:
    names: Names of the tensors of a family by role; see tensor_names.
  """
  return names.get('prediction_layer', '').partition('layers.')[0]


def with_present_modules(
  contents: JsonObject,
  names: Mapping[str, str],
  layers: int,
  tensors: Iterable[str],
  folder: pathlib.Path,
) -> JsonObject:
  """Returns a config.json that states the modules that a folder has, which some do not.

  transformers writes their number, and not their tensors. Files of Qwen3-Next have the tensors, and
  no number.

  Args:
    contents: The contents of config.json.
    names: Names of the tensors of the family by role.
    layers: The number of blocks of the model.
    tensors: The names of the tensors of the folder.
    folder: The folder, for messages.
  """
  text: Any = contents.get('text_config')
  stated: JsonObject = text if isinstance(text, dict) else contents
  prefix = own_prefix(names)
  keys = (_NUMBER,) if prefix else _NUMBERS
  later = lambda name: (m := _LAYER.match(name)) is not None and int(m[1]) >= layers
  is_there = any(name.startswith(prefix) if prefix else later(name) for name in tensors)
  counts: list[Any] = [stated.get(key) or 0 for key in keys]
  if is_there and prefix and stated.get(_NUMBER) is None:
    changed = {_NUMBER: 1}
  elif not is_there and any(counts):
    log.warning(
      '%s: config.json says %s=%s, but their tensors are missing: imported without them',
      folder, keys[0], max(counts),
    )  # fmt: skip
    changed = dict.fromkeys(keys, 0)
  else:
    return contents
  return contents | ({'text_config': stated | changed} if stated is text else changed)
