"""The conversion of published configurations to experiments, and back."""

import logging
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from paxlite.chats.model_texts import generation_of
from paxlite.config.attribute_kinds import Kind
from paxlite.config.attributes import attribute_types
from paxlite.config.templates import config_text
from paxlite.core.errors import UserError, located
from paxlite.core.json_text import Json, JsonObject
from paxlite.data.tokenizer import open_tokenizer
from paxlite.experiments import options
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.parts.prediction import MultiTokenPrediction
from paxlite.experiments.registry import experiments, has_data
from paxlite.weights.config_keys import Config, read_keys
from paxlite.weights.family_tables import FAMILIES, OTHER_TYPES, TEXT_DEFAULTS, Family
from paxlite.weights.known_keys import check_counts, check_quantization
from paxlite.weights.layout import decoder_entries, has_modules
from paxlite.weights.tensor_entries import Entry, same

log = logging.getLogger('paxlite')

# Kinds of attributes that decide the model; ROPE_LAYOUT is an order of elements, which an import
# and an export change.
_MODEL = (Kind.SHAPE, Kind.FUNCTION)
_FREE = {'ROPE_LAYOUT'}
_MOST_ENDS = 64  # ids that end a text


def experiment_of(config: Config, where: pathlib.Path, ends: Json = None) -> LanguageModel:
  """Returns the experiment of a Hugging Face config.json.

  Raises UserError if the architecture or one of its options is not supported, or a value is missing
  or not valid.

  Args:
    config: The contents of config.json.
    where: The path of the file, for messages.
    ends: The eos_token_id of generation_config.json, an id or several.
  """
  kind = config.get('model_type')
  if isinstance(kind, str):
    kind = OTHER_TYPES.get(kind, kind)
  text = TEXT_DEFAULTS.get(str(kind))
  if text is not None and isinstance(config.get('text_config'), dict):  # with images
    both = ('dtype', 'torch_dtype', 'tie_word_embeddings')
    outer = {k: config[k] for k in both if k in config}
    inner = text | config['text_config'] | outer
    with located(str(where)):
      check_quantization(config.get('quantization_config'))
    eos = [*_listed(config.get('eos_token_id')), *_listed(inner.get('eos_token_id'))]
    return experiment_of(inner | {'eos_token_id': eos}, where, ends)
  if not isinstance(kind, str) or kind not in FAMILIES:
    raise UserError(
      f'{where}: model_type {kind!r} is not supported; paxlite reads {", ".join(FAMILIES)}'
    )
  family = FAMILIES[kind]
  try:
    with located(str(where)):
      check_counts(config)
      check_quantization(config.get('quantization_config'))
      values = read_keys(family.keys, config)
  except KeyError as e:
    raise UserError(f'{where} has no {e.args[0]}') from None
  except UserError:
    raise
  except (TypeError, ValueError, ArithmeticError, AttributeError) as e:
    raise UserError(f'{where} has an impossible value ({e})') from None
  dtype = config.get('dtype', config.get('torch_dtype'))
  values['FPROP_DTYPE'] = 'float32' if dtype in (None, 'float32') else 'bfloat16'
  with located(str(where)):
    found = [*_listed(ends), *_listed(config.get('eos_token_id'))]
    experiment = published(family.experiment, values)
    return experiment.replaced(EOS_IDS=end_ids(found, experiment.VOCAB_SIZE))


def end_ids(found: Sequence[Json], vocab_size: int) -> list[int]:
  """Returns ids that end a text, each once, without those that the model does not have.

  Raises UserError if one of them is not an id.

  Args:
    found: What files say, the more complete one first.
    vocab_size: The number of ids of the model.
  """
  if wrong := [i for i in found if isinstance(i, bool) or not isinstance(i, int)]:
    raise UserError(f'eos_token_id {wrong[0]!r} is not an id')
  ids = list(dict.fromkeys(found))
  if outside := [i for i in ids if not 0 <= i < vocab_size]:
    log.warning('eos_token_id %s is never generated: the model has %s ids', outside[0], vocab_size)
  kept = [i for i in ids if 0 <= i < vocab_size]
  if len(kept) > _MOST_ENDS:
    raise UserError(f'eos_token_id has {len(kept):,} ids, and at most {_MOST_ENDS} are implemented')
  return kept


def _listed(value: Json) -> list[Json]:
  return [] if value is None else value if isinstance(value, list) else [value]


def published(family: type[LanguageModel], values: Mapping[str, object]) -> LanguageModel:
  """Returns the registered experiment with these values, validated.

  If there is none, returns the family's base class with these values.
  """
  wanted = family(**values)
  wanted.validate()
  model = {*wanted.values_of(Kind.SHAPE, Kind.FUNCTION), 'HEADS_SPAN_MODEL'}
  model.discard('NUM_PREDICTION_MODULES')  # which a folder may have or leave out
  others = {k: v for k, v in values.items() if k not in model}
  for cls in experiments().values():
    if issubclass(cls, family) and not has_data(cls):  # no dataset
      experiment = cls(**others)
      if experiment.model_values == wanted.model_values:
        return experiment
  return wanted


def hugging_face_entries(e: LanguageModel) -> list[Entry]:
  """Returns the entries of the tensors of an experiment's model in a Hugging Face folder.

  Raises UserError if the experiment belongs to no family that Hugging Face has.
  """
  family = FAMILIES[family_of(e)]
  if family.entries is not None:
    entries = family.entries(e)
  else:
    entries = decoder_entries(e, family.names, family.rotary, family.layers, family.attention)
  if not e.gives_rewards:
    return entries
  return _with_reward(entries, e.MODEL_DIMS)


def _with_reward(entries: list[Entry], dims: int) -> list[Entry]:
  """Returns the entries of a reward model: those of its language model, with another head."""
  head = 'softmax/w'
  rest = [entry for entry in entries if entry.ours not in (head, 'logits_bias/b')]
  return [*rest, same('score.weight', (1, dims), head)]


def family_of(e: LanguageModel) -> str:
  """Returns transformers' model_type for an experiment.

  It is the first family whose class has the values of the experiment, apart from those that its
  config.json can state. Families whose class the experiment is derived from come first. Raises
  UserError if there is none; the message names an attribute that does not fit.
  """
  derived = [name for name, f in FAMILIES.items() if isinstance(e, f.experiment)]
  derived.sort(key=lambda name: -len(FAMILIES[name].experiment.__mro__))
  problems: dict[str, list[str]] = {}
  for name in dict.fromkeys([*derived, *FAMILIES]):
    problems[name] = _differences(e, FAMILIES[name])
    if not problems[name]:
      return name
  nearest = min(problems, key=lambda name: len(problems[name]))
  raise UserError(f'Hugging Face has no {nearest} with {problems[nearest][0]}')


def _differences(e: LanguageModel, family: Family) -> list[str]:
  """Returns what a family's config.json cannot say about an experiment."""
  cls, stated = family.experiment, family.attributes
  if not has_modules(family.names) and isinstance(e, MultiTokenPrediction):
    e = e.replaced(NUM_PREDICTION_MODULES=0)  # which are left out
  ours: dict[str, Any] = e.values_of(*_MODEL)
  plain = cls(**{name: getattr(e, name) for name in stated if hasattr(e, name)})
  theirs: dict[str, Any] = plain.values_of(*_MODEL)
  for one, other in ((ours, theirs), (theirs, ours)):  # parts that one of the two does not have
    one.update({k: options.usual(k, v) for k, v in other.items() if options.is_lost(one, k)})
  missing = object()
  found = [
    f'{name}={ours.get(name)!r}, which {type(e).__name__} has: there it is {theirs.get(name)!r}'
    for name in {**theirs, **ours}
    if name not in _FREE
    and ours.get(name, missing) != theirs.get(name, missing)
    and not (name in ('ATTEN_LOGIT_CAP', 'SOFTMAX_CAP_LOGITS') and ours[name] <= 0 >= theirs[name])
  ]
  if found:
    return found
  known = attribute_types(type(plain))
  names = [*known, *(k for k in attribute_types(type(e)) if options.is_lost(known, k))]
  same = type(plain)(**{name: getattr(e, name) for name in names if hasattr(e, name)})
  model = e.language_model()
  if config_text(same.model()) != config_text(model):  # Fiddle's == takes seconds
    return [
      f'the layers of {type(e).__name__}: it changes them beyond what attributes say (its methods '
      'model, layer or attention)'
    ]
  return []


def config_json(e: LanguageModel, dtype: str, tokenizer: pathlib.Path | None) -> JsonObject:
  """Returns the contents of config.json with which transformers reads an experiment's model."""
  kind = family_of(e)
  family = FAMILIES[kind]
  bos, end = _special_ids(e, tokenizer)
  config: JsonObject = {
    'architectures': [family.architecture], 'model_type': kind, 'torch_dtype': dtype,
    'bos_token_id': bos, 'eos_token_id': end[0] if len(end) == 1 else end or None,
    'pad_token_id': None,
  }  # fmt: skip
  for key in family.keys:
    config |= key.write(e)
  if e.gives_rewards:
    # transformers reads the reward at the last token that is no padding
    labels = {'id2label': {'0': 'REWARD'}, 'label2id': {'REWARD': 0}}
    config |= {'architectures': [_classifier(kind, family)], **labels}
  return config


def _classifier(kind: str, family: Family) -> str:
  """Returns the class of transformers that reads a reward model of a family."""
  if family.classifier is None:
    raise UserError(f'transformers has no class for reward models of the family {kind}')
  return family.classifier or family.architecture.replace(
    'ForCausalLM', 'ForSequenceClassification'
  )


def _special_ids(e: LanguageModel, tokenizer: pathlib.Path | None) -> tuple[int | None, list[int]]:
  """Returns the id of bos_token, None if there is none, and the ids that stop generation."""
  if tokenizer is None:
    return None, list(e.EOS_IDS)
  try:
    opened = open_tokenizer(str(tokenizer))
  except UserError:
    return None, list(e.EOS_IDS)
  return opened.special_id('bos_token'), generation_of(e, opened).ends_of(chat=False)
