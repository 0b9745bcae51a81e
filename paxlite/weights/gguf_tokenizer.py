"""The tokenizer in a GGUF file, written as tokenizer.json."""

import collections
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject
from paxlite.data.tokenizer import open_tokenizer
from paxlite.weights.known_keys import check_known, shortened

# llama.cpp's names of pre-tokenizers, with their configuration for the package tokenizers.
_SPLIT = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
  r'|\s*[\r\n]+|\s+(?!\S)|\s+'
)
_BYTE_LEVEL = {
  'type': 'ByteLevel',
  'add_prefix_space': False,
  'trim_offsets': True,
  'use_regex': True,
}
_PRE_TOKENIZERS: dict[str, list[JsonObject]] = {
  'gpt-2': [_BYTE_LEVEL],
  'smollm': [{'type': 'Digits', 'individual_digits': True}, _BYTE_LEVEL],
  'llama-bpe': [
    {'type': 'Split', 'pattern': {'Regex': _SPLIT}, 'behavior': 'Isolated', 'invert': False},
    _BYTE_LEVEL | {'use_regex': False},
  ],
}
_BEGINS = ('llama-bpe',)  # texts begin with BOS, if the file does not say

# gguf's types of tokens
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = range(1, 6)
_KNOWN_TYPES = (_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED)

# Fields that are read, and those that change nothing here; both are after 'tokenizer.'.
_SPECIAL = ('bos', 'eos', 'unknown', 'padding')
_NAMES = {'unknown': 'unk', 'padding': 'pad'}  # transformers' names of special tokens
READ = (
  'ggml.model', 'ggml.pre', 'ggml.tokens', 'ggml.token_type', 'ggml.merges',
  'ggml.add_bos_token', 'ggml.add_eos_token', *(f'ggml.{name}_token_id' for name in _SPECIAL),
  'chat_template', 'chat_template.*', 'chat_templates',
)  # fmt: skip
HARMLESS = (
  'ggml.eot_token_id', 'ggml.eom_token_id', 'ggml.scores', 'ggml.token_type_count',
  'ggml.seperator_token_id', 'ggml.mask_token_id', 'ggml.cls_token_id', 'ggml.prefix_token_id',
  'ggml.suffix_token_id', 'ggml.middle_token_id', 'ggml.fim_pre_token_id', 'ggml.fim_suf_token_id',
  'ggml.fim_mid_token_id', 'ggml.fim_pad_token_id', 'ggml.fim_rep_token_id',
  'ggml.fim_sep_token_id',
)  # fmt: skip
NEUTRAL: Mapping[str, Sequence[object]] = {
  'ggml.add_space_prefix': (False,),
  'ggml.add_sep_token': (False,),
  'ggml.remove_extra_whitespaces': (False,),
}

_T = TypeVar('_T')


def kind_of(fields: Mapping[str, object]) -> str:
  """Returns the kind of a tokenizer as a message shows it; '' where the file has none."""
  if 'tokenizer.ggml.model' not in fields:
    return ''
  return f'{fields["tokenizer.ggml.model"]}, {fields.get("tokenizer.ggml.pre", "default")}'


def write_tokenizer(
  fields: Mapping[str, object], folder: pathlib.Path, vocab_size: int | None = None
) -> bool:
  """Writes the byte-level BPE tokenizer of a GGUF file as tokenizer.json.

  Args:
    fields: The fields of the file.
    folder: The folder to write it to.
    vocab_size: The number of ids of the model, which the tokenizer must have; None: any number.

  Returns:
    False, with nothing written, if the tokenizer is of another kind.

  Raises:
    UserError: The tokenizer is damaged, or says something that is not implemented.
  """
  pre = fields.get('tokenizer.ggml.pre')
  if fields.get('tokenizer.ggml.model') != 'gpt2' or pre not in list(_PRE_TOKENIZERS):
    return False
  _check_fields(fields)
  tokens, merges = (_list(fields, f'tokenizer.ggml.{name}', str) for name in ('tokens', 'merges'))
  kinds = _list(fields, 'tokenizer.ggml.token_type', int)
  if len(kinds) != len(tokens):
    raise UserError(f'tokenizer.ggml has {len(tokens):,} tokens and {len(kinds):,} of token_type')
  if vocab_size is not None and len(tokens) != vocab_size:
    raise UserError(f'it has {len(tokens):,} tokens, and the model has {vocab_size:,} ids')
  if wrong := sorted(set(kinds) - set(_KNOWN_TYPES)):
    raise UserError(f'tokenizer.ggml.token_type {wrong[0]} is not implemented')
  # llama.cpp's converter fills holes in the ids with unused tokens
  used = {i: token for i, token in enumerate(tokens) if kinds[i] != _UNUSED}
  if twice := [t for t, n in collections.Counter(used.values()).items() if n > 1]:
    raise UserError(f'the token {twice[0]!r} is there twice')
  special = {name: _special(fields, name, tokens) for name in _SPECIAL}
  config: JsonObject = {
    f'{_NAMES.get(name, name)}_token': token for name, token in special.items() if token is not None
  }
  if (templates := _templates(fields)) is not None:
    config['chat_template'] = templates
  tokenizer = {
    'version': '1.0',
    'truncation': None,
    'padding': None,
    'added_tokens': [  # at which texts are cut before they are encoded
      _added(i, tokens[i], kind)
      for i, kind in enumerate(kinds)
      if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ],
    'normalizer': None,
    'pre_tokenizer': {'type': 'Sequence', 'pretokenizers': _PRE_TOKENIZERS[pre]},
    'post_processor': _frame(fields, pre, special, tokens),
    'decoder': _BYTE_LEVEL,
    'model': {
      'type': 'BPE',
      'vocab': {token: i for i, token in used.items()},
      'merges': merges,
      'ignore_merges': pre == 'llama-bpe',
    },
  }
  (folder / 'tokenizer.json').write_text(
    json.dumps(tokenizer, ensure_ascii=False), encoding='utf-8'
  )
  (folder / 'tokenizer_config.json').write_text(json.dumps(config, indent=2) + '\n')
  open_tokenizer(str(folder))  # raises UserError if the tokenizer is not valid
  return True


def _check_fields(fields: Mapping[str, object]) -> None:
  """Raises UserError for fields that may change what a tokenizer does, and are not read."""
  before = 'tokenizer.'
  unread = {
    name: value
    for name, value in fields.items()
    if name.startswith(before)
    and not any(re.fullmatch(known, name.removeprefix(before)) for known in READ)
  }
  neutral = {before + name: values for name, values in NEUTRAL.items()}
  check_known(unread, {before + name for name in HARMLESS}, neutral)


def _added(number: int, token: str, kind: int) -> JsonObject:
  plain = dict.fromkeys(('lstrip', 'rstrip', 'normalized', 'single_word'), False)
  return {'id': number, 'content': token, 'special': kind != _USER_DEFINED, **plain}


def _special(fields: Mapping[str, object], name: str, tokens: Sequence[str]) -> str | None:
  """Returns a special token; None if the file has none of the name."""
  number = fields.get(f'tokenizer.ggml.{name}_token_id')
  if number is None:
    return None
  if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(tokens):
    raise UserError(
      f'tokenizer.ggml.{name}_token_id is none of {len(tokens):,} ids: {shortened(number)}'
    )
  return tokens[number]


def _frame(
  fields: Mapping[str, object],
  pre: object,
  special: Mapping[str, str | None],
  tokens: Sequence[str],
) -> JsonObject | None:
  """Returns the post-processor that puts BOS before a text and EOS after it, or None."""
  asked = {'bos': pre in _BEGINS and special['bos'] is not None, 'eos': False}
  for name in asked:
    asked[name] = fields.get(f'tokenizer.ggml.add_{name}_token', asked[name])  # type: ignore
    if not isinstance(asked[name], bool):
      raise UserError(f'tokenizer.ggml.add_{name}_token must be true or false')
    if asked[name] and special[name] is None:
      raise UserError(f'tokenizer.ggml.add_{name}_token needs tokenizer.ggml.{name}_token_id')
  used = [str(special[name]) for name, on in asked.items() if on]
  if not used:
    return None
  mark = lambda name, part: [{'SpecialToken': {'id': special[name], 'type_id': part}}] * asked[name]
  text = lambda name, part: [{'Sequence': {'id': name, 'type_id': part}}]
  single = [*mark('bos', 0), *text('A', 0), *mark('eos', 0)]
  return {
    'type': 'TemplateProcessing',
    'single': single,
    'pair': [*single, *mark('bos', 1), *text('B', 1), *mark('eos', 1)],
    'special_tokens': {
      token: {'id': token, 'ids': [tokens.index(token)], 'tokens': [token]} for token in used
    },
  }


def _templates(fields: Mapping[str, object]) -> str | list[JsonObject] | None:
  """Returns the chat template, or several with their names, as tokenizer_config.json has them."""
  name = 'tokenizer.chat_template'
  found = {k: v for k, v in fields.items() if k == name or k.startswith(f'{name}.')}
  for key, template in found.items():
    if not isinstance(template, str):
      raise UserError(f'{key} must be a string')
  if not found or set(found) == {name}:
    return found.get(name)  # type: ignore[return-value]
  named = {k.removeprefix(name).removeprefix('.') or 'default': v for k, v in found.items()}
  return [{'name': k, 'template': v} for k, v in named.items()]


def _list(fields: Mapping[str, object], name: str, of: type[_T]) -> list[_T]:
  found = fields.get(name)
  if not isinstance(found, list) or not all(isinstance(value, of) for value in found):
    raise UserError(f'{name} is missing, or not a list of {of.__name__}')
  return found
