"""The tokenizer in a GGUF file, written as tokenizer.json or tokenizer.model."""

import collections
import json
import pathlib
import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, TypeVar

from paxlite.core.errors import UserError
from paxlite.core.json_text import Json, JsonObject
from paxlite.data.sentencepiece_model import (
  BPE,
  BYTE,
  CONTROL,
  NORMAL,
  UNIGRAM,
  UNKNOWN,
  UNUSED,
  USER_DEFINED,
  Piece,
  SentencePieceModel,
  serialized,
)
from paxlite.data.tokenizer import open_tokenizer
from paxlite.weights.known_keys import check_known, shortened

# llama.cpp's names of pre-tokenizers, with their configuration for the package tokenizers.
_SPLIT = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
  r'|\s*[\r\n]+|\s+(?!\S)|\s+'
)
_DIGIT_SPLIT = _SPLIT.replace(r'\p{N}{1,3}', r'\p{N}')


class Pipeline(NamedTuple):
  """How texts become words, and words tokens.

  Attributes:
    pre_tokenizers: Configurations for the package tokenizers.
    normalizer: The type of the normalizer, if there is one; llama.cpp leaves it out.
    ignores_merges: Whether a word that is a token is not made by merges.
  """

  pre_tokenizers: list[JsonObject]
  normalizer: str | None = None
  ignores_merges: bool = False

  @classmethod
  def of(cls, tokenizer: JsonObject) -> 'Pipeline':
    """Returns the pipeline of the contents of a tokenizer.json."""
    pre, normalizer = tokenizer['pre_tokenizer'] or {}, tokenizer['normalizer']
    steps = pre.get('pretokenizers', [pre])
    steps = [{k: v for k, v in step.items() if k != 'trim_offsets'} for step in steps]
    return cls(steps, normalizer and normalizer['type'], bool(tokenizer['model']['ignore_merges']))


def _byte_level(**changes: Json) -> JsonObject:
  return {'type': 'ByteLevel', 'add_prefix_space': False, 'use_regex': True, **changes}


def _split(pattern: str) -> list[JsonObject]:
  split = {'type': 'Split', 'pattern': {'Regex': pattern}, 'behavior': 'Isolated', 'invert': False}
  return [split, _byte_level(use_regex=False)]


# By llama.cpp's names of pre-tokenizers.
PIPELINES: dict[str, Pipeline] = {
  'gpt-2': Pipeline([_byte_level()]),
  'smollm': Pipeline([{'type': 'Digits', 'individual_digits': True}, _byte_level()]),
  'llama-bpe': Pipeline(_split(_SPLIT), ignores_merges=True),
  'dbrx': Pipeline(_split(_SPLIT)),
  'qwen2': Pipeline(_split(_DIGIT_SPLIT), 'NFC'),
}
_BEGINS = ('llama-bpe',)  # texts begin with BOS, if the file does not say

# gguf's types of tokens are those of SentencePiece
_TYPES = (NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED)
# Kinds of tokenizers that are pieces with scores.
_PIECES = {'llama': BPE, 't5': UNIGRAM}

# Fields that are read, and those that change nothing here; both are after 'tokenizer.'.
_SPECIAL = ('bos', 'eos', 'unknown', 'padding')
_NAMES = {'unknown': 'unk', 'padding': 'pad'}  # transformers' names of special tokens
READ = (
  'ggml.model', 'ggml.pre', 'ggml.tokens', 'ggml.token_type', 'ggml.merges',
  'ggml.add_bos_token', 'ggml.add_eos_token', *(f'ggml.{name}_token_id' for name in _SPECIAL),
  'chat_template', 'chat_template.*', 'chat_templates',
)  # fmt: skip
PIECES = (  # read of a tokenizer that is pieces with scores
  'ggml.scores', 'ggml.add_space_prefix', 'ggml.remove_extra_whitespaces',
  'ggml.precompiled_charsmap',
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
  if fields.get('tokenizer.ggml.model', 'none') == 'none':
    return ''
  return f'{fields["tokenizer.ggml.model"]}, {fields.get("tokenizer.ggml.pre", "default")}'


def write_tokenizer(
  fields: Mapping[str, object], folder: pathlib.Path, vocab_size: int | None = None
) -> bool:
  """Writes the tokenizer of a GGUF file, with tokenizer_config.json.

  Byte-level BPE becomes a tokenizer.json, and pieces with scores a SentencePiece tokenizer.model.

  Args:
    fields: The fields of the file.
    folder: The folder to write it to.
    vocab_size: The number of ids of the model, which the tokenizer must have; None: any number.

  Returns:
    False, with nothing written, if the tokenizer is of another kind.

  Raises:
    UserError: The tokenizer is damaged, or says something that is not implemented.
  """
  model, pre = fields.get('tokenizer.ggml.model'), fields.get('tokenizer.ggml.pre')
  of_pieces = model in list(_PIECES)
  if not of_pieces and (model != 'gpt2' or pre not in list(PIPELINES)):
    return False
  _check_fields(fields, PIECES if of_pieces else ())
  tokens, kinds = _tokens(fields, vocab_size, (*_TYPES, *[BYTE] * of_pieces))
  special = {name: _special(fields, name, tokens) for name in _SPECIAL}
  config: JsonObject = {
    f'{_NAMES.get(name, name)}_token': token for name, token in special.items() if token is not None
  }
  if (templates := _templates(fields)) is not None:
    config['chat_template'] = templates
  if of_pieces:
    content = _sentencepiece(fields, tokens, kinds, special)
    (folder / 'tokenizer.model').write_bytes(content)
  else:
    contents = _byte_level_bpe(fields, str(pre), tokens, kinds, special)
    text = json.dumps(contents, ensure_ascii=False)
    (folder / 'tokenizer.json').write_text(text, encoding='utf-8')
  (folder / 'tokenizer_config.json').write_text(json.dumps(config, indent=2) + '\n')
  open_tokenizer(str(folder))  # raises UserError if the tokenizer is not valid
  return True


def _tokens(
  fields: Mapping[str, object], vocab_size: int | None, types: Collection[int]
) -> tuple[list[str], list[int]]:
  """Returns the tokens by id, and their types, which must be among `types`."""
  tokens = _list(fields, 'tokenizer.ggml.tokens', str)
  kinds = _list(fields, 'tokenizer.ggml.token_type', int)
  if len(kinds) != len(tokens):
    raise UserError(f'tokenizer.ggml has {len(tokens):,} tokens and {len(kinds):,} of token_type')
  if vocab_size is not None and len(tokens) != vocab_size:
    raise UserError(f'it has {len(tokens):,} tokens, and the model has {vocab_size:,} ids')
  if wrong := sorted(set(kinds) - set(types)):
    raise UserError(f'tokenizer.ggml.token_type {wrong[0]} is not implemented')
  used = (token for token, kind in zip(tokens, kinds, strict=True) if kind != UNUSED)
  if twice := [t for t, n in collections.Counter(used).items() if n > 1]:
    raise UserError(f'the token {twice[0]!r} is there twice')
  return tokens, kinds


def _byte_level_bpe(
  fields: Mapping[str, object],
  pre: str,
  tokens: Sequence[str],
  kinds: Sequence[int],
  special: Mapping[str, str | None],
) -> JsonObject:
  """Returns the contents of the tokenizer.json of byte-level BPE."""
  merges, pipeline = _list(fields, 'tokenizer.ggml.merges', str), PIPELINES[pre]
  return {
    'version': '1.0',
    'truncation': None,
    'padding': None,
    'added_tokens': [  # at which texts are cut before they are encoded
      _added(i, tokens[i], kind)
      for i, kind in enumerate(kinds)
      if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ],
    'normalizer': pipeline.normalizer and {'type': pipeline.normalizer},
    'pre_tokenizer': {
      'type': 'Sequence',
      'pretokenizers': [{'trim_offsets': True} | step for step in pipeline.pre_tokenizers],
    },
    'post_processor': _frame(fields, pre, special, tokens),
    'decoder': _byte_level(trim_offsets=True),
    'model': {
      'type': 'BPE',
      # llama.cpp's converter fills holes in the ids with unused tokens
      'vocab': {token: i for i, token in enumerate(tokens) if kinds[i] != UNUSED},
      'merges': merges,
      'ignore_merges': pipeline.ignores_merges,
    },
  }


def _sentencepiece(
  fields: Mapping[str, object],
  tokens: Sequence[str],
  kinds: Sequence[int],
  special: Mapping[str, str | None],
) -> bytes:
  """Returns the SentencePiece model of tokens with scores."""
  scores = _list(fields, 'tokenizer.ggml.scores', float)
  if len(scores) != len(tokens):
    raise UserError(f'tokenizer.ggml has {len(tokens):,} tokens and {len(scores):,} of scores')
  kind = _PIECES[str(fields['tokenizer.ggml.model'])]
  used = len(tokens)
  while used and kinds[used - 1] == UNUSED:  # the model has more ids than the tokenizer
    used -= 1
  # llama.cpp finds these in texts as they are, where SentencePiece has another character
  spelled = lambda i: tokens[i].replace(' ', '▁') if kinds[i] == USER_DEFINED else tokens[i]
  pieces = [Piece(spelled(i), scores[i], kinds[i]) for i in range(used)]
  charsmap = fields.get('tokenizer.ggml.precompiled_charsmap', [])
  if not isinstance(charsmap, list) or not all(i in range(256) for i in charsmap):
    raise UserError('tokenizer.ggml.precompiled_charsmap must be a list of bytes')
  flags = {
    name: _flag(fields, name, default=True)
    for name in ('add_space_prefix', 'remove_extra_whitespaces', 'add_bos_token')
  }
  model = SentencePieceModel(
    pieces, kind, bytes(charsmap), flags['add_space_prefix'], flags['remove_extra_whitespaces']
  )
  names = {_NAMES.get(name, name): token for name, token in special.items() if token is not None}
  if not flags['add_bos_token']:
    names.pop('bos', None)  # SentencePiece's BOS is before every text
  return serialized(model, names)


def _flag(fields: Mapping[str, object], name: str, default: bool) -> bool:
  value = fields.get(f'tokenizer.ggml.{name}', default)
  if not isinstance(value, bool):
    raise UserError(f'tokenizer.ggml.{name} must be true or false')
  return value


def _check_fields(fields: Mapping[str, object], more: Collection[str]) -> None:
  """Raises UserError for fields that may change what a tokenizer does, and are not read.

  Args:
    fields: The fields of the file.
    more: Fields that are read beside READ.
  """
  before = 'tokenizer.'
  unread = {
    name: value
    for name, value in fields.items()
    if name.startswith(before)
    and not any(re.fullmatch(known, name.removeprefix(before)) for known in (*READ, *more))
  }
  neutral = {before + name: values for name, values in NEUTRAL.items()}
  check_known(unread, {before + name for name in HARMLESS}, neutral)


def _added(number: int, token: str, kind: int) -> JsonObject:
  plain = dict.fromkeys(('lstrip', 'rstrip', 'normalized', 'single_word'), False)
  return {'id': number, 'content': token, 'special': kind != USER_DEFINED, **plain}


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
