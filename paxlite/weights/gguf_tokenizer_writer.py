"""The fields of a GGUF file that hold a tokenizer and its chat template.

llama.cpp has four kinds of tokenizers that paxlite's can be: `gpt2`, byte-level BPE with merges;
`llama`, BPE of SentencePiece with scores; `gemma4`, the same with merges; and `t5`, unigrams of
SentencePiece.
"""

import logging
import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from paxlite.chats.chat_encoding import ChatEncoding
from paxlite.chats.chat_format import NoTemplate
from paxlite.chats.model_texts import encoding_of
from paxlite.core.errors import UserError
from paxlite.core.json_text import Json, JsonObject
from paxlite.data import sentencepiece_model as sentencepiece
from paxlite.data.json_tokenizer import JsonTokenizer
from paxlite.data.tokenizer import Tokenizer, check_vocabulary, open_tokenizer
from paxlite.experiments.language_model import LanguageModel

log = logging.getLogger('paxlite')

_SPACE = '▁'  # what SentencePiece has in the place of a space
_PLAIN: Mapping[str, Sequence[Json]] = {  # options of BPE that llama.cpp does not have
  'dropout': (None,), 'continuing_subword_prefix': (None, ''), 'end_of_word_suffix': (None, ''),
}  # fmt: skip
_OTHER = 'llama.cpp has no tokenizer'
# llama.cpp's names of pre-tokenizers, with their configuration for the package tokenizers.
_SPLIT = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
  r'|\s*[\r\n]+|\s+(?!\S)|\s+'
)
_UPPER, _LOWER = r'[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]', r'[\p{Ll}\p{Lm}\p{Lo}\p{M}]'
_CASE_SPLIT = '|'.join((
  *(rf"[^\r\n\p{{L}}\p{{N}}]?{word}(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    for word in (f'{_UPPER}*{_LOWER}+', f'{_UPPER}+{_LOWER}*')),
  r'\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+',
))  # fmt: skip
_DIGIT_SPLIT = _SPLIT.replace(r'\p{N}{1,3}', r'\p{N}')
_MARK_SPLIT = _DIGIT_SPLIT.replace(r'?\p{L}+', r'?[\p{L}\p{M}]+')
_MARK_SPLIT = _MARK_SPLIT.replace(r'[^\s\p{L}\p{N}]', r'[^\s\p{L}\p{M}\p{N}]')


class Pipeline(NamedTuple):
  """How texts become words, and words tokens."""

  pre_tokenizers: list[JsonObject]  # configurations for the package tokenizers
  # the type of the normalizer, if there is one; llama.cpp leaves it out
  normalizer: str | None = None
  ignores_merges: bool = False  # whether a word that is a token is not made by merges

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
  'llama-bpe': Pipeline(_split(_SPLIT), ignores_merges=True), 'dbrx': Pipeline(_split(_SPLIT)),
  'qwen2': Pipeline(_split(_DIGIT_SPLIT), 'NFC'), 'qwen35': Pipeline(_split(_MARK_SPLIT), 'NFC'),
  'gpt-4o': Pipeline(_split(_CASE_SPLIT)),
}  # fmt: skip


def tokenizer_fields(
  e: LanguageModel, path: pathlib.Path | None, shown: Sequence[str] | None = None
) -> dict[str, object]:
  """Returns the fields of a tokenizer, with special tokens and the chat template of an experiment.

  Raises UserError if llama.cpp has no such tokenizer, or it is that of another model.

  Args:
    path: The tokenizer's file or folder; None: the file says that it has none.
    shown: See Architecture.
  """
  if path is None:
    return {'tokenizer.ggml.model': 'none'}
  tokenizer = open_tokenizer(str(path))
  check_vocabulary(tokenizer, e.VOCAB_SIZE)
  if isinstance(tokenizer, JsonTokenizer) and not tokenizer.follows_model:
    found = _of_json(tokenizer, e.VOCAB_SIZE, shown)
  else:
    model = sentencepiece.parsed(pathlib.Path(tokenizer.path).read_bytes())
    if isinstance(tokenizer, JsonTokenizer):
      model = _with_added(model, tokenizer.pipeline['added_tokens'])
    found = _of_pieces(model, tokenizer.path, e.VOCAB_SIZE)
  tokens = found['tokens']
  assert isinstance(tokens, list)
  named = {f'tokenizer.ggml.{name}': value for name, value in found.items()}
  encoding = encoding_of(e, tokenizer)
  if found['model'] == 'gemma4' and not encoding.start_ids:
    log.warning('llama.cpp begins each text of a Gemma 4 with BOS, and the tokenizer does not')
  return named | _special(encoding, tokenizer, tokens)


def _special(
  encoding: ChatEncoding, tokenizer: Tokenizer, tokens: Sequence[str]
) -> dict[str, object]:
  """Returns the fields of what begins and ends a text, and of the chat template."""
  start = encoding.start_ids
  if len(start) > 1:
    raise UserError(
      f'{_OTHER} that begins a text with several tokens, as {tokenizer.path} does: --to=hf exports '
      'it'
    )
  ids = {name.removesuffix('_token'): text for name, text in tokenizer.named_tokens.items()}
  numbers = {name: tokens.index(text) for name, text in ids.items() if text in tokens}
  renamed = {'bos': 'bos', 'unk': 'unknown', 'pad': 'padding'}
  found: dict[str, object] = {
    f'{theirs}_token_id': numbers[name] for name, theirs in renamed.items() if name in numbers
  }
  if start:
    found['bos_token_id'] = start[0]
  found |= {'add_bos_token': bool(start), 'add_eos_token': False}
  # the end of a text, of an answer (turn) and of a call (message), as llama.cpp names them
  own = encoding.eos_ids
  ends = list(dict.fromkeys([*own[:1], *encoding.answer_end_ids, *own[1:]]))
  for name, end in zip(('eos', 'eot', 'eom'), ends, strict=False):
    found[f'{name}_token_id'] = end
  if len(ends) > 3:
    log.warning('GGUF has three stop tokens; these are left out: %s', ends[3:])
  found = {f'tokenizer.ggml.{name}': value for name, value in found.items()}
  try:
    templates = encoding.chat_format.texts
  except NoTemplate:
    return found
  for name, text in templates.items():
    key = 'tokenizer.chat_template'
    found[key if name == 'default' else f'{key}.{name}'] = text
  return found


def _of_json(
  tokenizer: JsonTokenizer, vocab_size: int, shown: Sequence[str] | None
) -> dict[str, object]:
  """Returns the tokens of a tokenizer.json, as texts are encoded with it."""
  pipeline = tokenizer.pipeline
  model = pipeline['model']
  wrong = [name for name, values in _PLAIN.items() if model.get(name) not in values]
  if model['type'] != 'BPE' or wrong:
    what = f'with {wrong[0]}={model[wrong[0]]!r}' if wrong else f'of the type {model["type"]}'
    raise UserError(f'{_OTHER} {what}, as {tokenizer.path}: --to=hf exports it')
  for token in pipeline['added_tokens']:
    changed = [flag for flag in ('lstrip', 'rstrip', 'single_word') if token[flag]]
    if changed and token['id'] < vocab_size:
      log.warning('llama.cpp does not know %s of the token %r', changed[0], token['content'])
  if model['byte_fallback']:
    return _of_merges(pipeline, tokenizer.path, vocab_size, shown)
  steps = Pipeline.of(pipeline)
  pre = next((name for name, known in PIPELINES.items() if known == steps), None)
  if pre is None:
    raise UserError(
      f'{_OTHER} with the normalizer and pre-tokenizer of {tokenizer.path}: --to=hf exports it'
    )
  if pre == 'gpt-4o':
    log.warning('llama.cpp splits words by the case of ASCII letters, and the tokenizer by all')
  if steps.normalizer is not None:
    log.warning('llama.cpp does not normalize texts (%s) as the tokenizer does', steps.normalizer)
  tokens, kinds = _tokens(pipeline, vocab_size)
  merges = _merges(pipeline)
  return {'model': 'gpt2', 'pre': pre, 'tokens': tokens, 'token_type': kinds, 'merges': merges}


def _merges(pipeline: JsonObject) -> list[str]:
  return [m if isinstance(m, str) else ' '.join(m) for m in pipeline['model']['merges']]


def _tokens(pipeline: JsonObject, vocab_size: int) -> tuple[list[str], list[int]]:
  """Returns the tokens of a tokenizer.json by id, and their types; holes are unused tokens."""
  tokens = [f'[PAD{i}]' for i in range(vocab_size)]
  kinds = [sentencepiece.UNUSED] * vocab_size
  for token, i in pipeline['model']['vocab'].items():
    if i < vocab_size:
      tokens[i], kinds[i] = token, sentencepiece.NORMAL
  for added in pipeline['added_tokens']:
    if added['id'] < vocab_size:
      tokens[added['id']] = added['content']
      kind = sentencepiece.CONTROL if added['special'] else sentencepiece.USER_DEFINED
      kinds[added['id']] = kind
  return tokens, kinds


def _of_merges(
  pipeline: JsonObject, path: str, vocab_size: int, shown: Sequence[str] | None
) -> dict[str, object]:
  """Returns the tokens of a tokenizer.json that was made of BPE of SentencePiece.

  llama.cpp joins the two pieces whose token has the highest score, and tokenizers those of the
  first merge. So the score of a token is the number of its first merge, with a minus. It takes the
  merges themselves for an architecture that tells what is `shown`.
  """
  adds_prefix = _adds_prefix(pipeline)
  if adds_prefix is None:
    raise UserError(f'{_OTHER} with the normalizer and pre-tokenizer of {path}: --to=hf exports it')
  tokens, kinds = _tokens(pipeline, vocab_size)
  vocabulary = pipeline['model']['vocab']
  for i, token in enumerate(tokens):
    if kinds[i] == sentencepiece.NORMAL and len(token) == 6 and token[:3] == '<0x':
      kinds[i] = sentencepiece.BYTE
    if kinds[i] == sentencepiece.USER_DEFINED:  # llama.cpp looks for it in the text as it is
      tokens[i] = token.replace(_SPACE, ' ')
  if shown is not None and not adds_prefix:
    kinds = [
      sentencepiece.USER_DEFINED if t in shown else k for t, k in zip(tokens, kinds, strict=True)
    ]
    return {
      'model': 'gemma4', 'tokens': tokens, 'token_type': kinds, 'merges': _merges(pipeline),
      'scores': [-1000.0] * vocab_size,  # as the converter has it; llama.cpp does not read them
      'add_space_prefix': False,
    }  # fmt: skip
  if (unknown := pipeline['model']['unk_token']) in vocabulary:
    kinds[vocabulary[unknown]] = sentencepiece.UNKNOWN
  scores = [0.0] * max(vocab_size, len(vocabulary))
  # pairs may have spaces, where they are lists
  merges = [m.split(' ') if isinstance(m, str) else m for m in pipeline['model']['merges']]
  for rank, (left, right) in reversed(list(enumerate(merges))):
    scores[vocabulary[left + right]] = float(-rank)
  return {
    'model': 'llama', 'pre': 'default', 'tokens': tokens, 'token_type': kinds,
    'scores': scores[:vocab_size],
    'add_space_prefix': adds_prefix, 'remove_extra_whitespaces': False,
  }  # fmt: skip


def _adds_prefix(pipeline: JsonObject) -> bool | None:
  """Returns whether a tokenizer puts a space before a text; None: it does not know spaces so."""
  outer, pre = pipeline['normalizer'], pipeline['pre_tokenizer']
  steps = [] if outer is None else outer.get('normalizers', [outer])
  replaced = {'type': 'Replace', 'pattern': {'String': ' '}, 'content': _SPACE}
  prepended = {'type': 'Prepend', 'prepend': _SPACE}
  if pre is not None and pre['type'] == 'Metaspace' and not steps and not pre['split']:
    if pre['prepend_scheme'] != 'never':
      log.warning('llama.cpp puts a space before texts that begin with one, too')
    return pre['prepend_scheme'] != 'never'
  is_gemma = pre is not None and pre['type'] == 'Split' and pre['pattern'] == {'String': ' '}
  if steps == [replaced] and (pre is None or is_gemma):
    return False
  return True if steps == [prepended, replaced] and pre is None else None


def _with_added(
  model: sentencepiece.SentencePieceModel, added: Sequence[JsonObject]
) -> sentencepiece.SentencePieceModel:
  """Returns a model with the tokens that other files add to it, by their ids."""
  pieces = dict(enumerate(model.pieces))
  for token in added:
    old = pieces.get(token['id'], sentencepiece.Piece('', 0.0, sentencepiece.NORMAL))
    kind = sentencepiece.CONTROL if token['special'] else sentencepiece.USER_DEFINED
    kind = old.kind if old.kind == sentencepiece.UNKNOWN else kind
    pieces[token['id']] = sentencepiece.Piece(token['content'], old.score, kind)
  return model._replace(pieces=[pieces[i] for i in sorted(pieces)])


def _of_pieces(
  model: sentencepiece.SentencePieceModel, path: str, vocab_size: int
) -> dict[str, object]:
  """Returns the tokens of a SentencePiece model."""
  if model.kind not in (sentencepiece.UNIGRAM, sentencepiece.BPE) or model.spaces_behind:
    raise UserError(f'{_OTHER} as {path}, which is neither unigrams nor BPE: --to=hf exports it')
  is_bpe = model.kind == sentencepiece.BPE
  if is_bpe and (model.charsmap or model.removes_spaces):
    log.warning('llama.cpp does not normalize texts for BPE of SentencePiece, as %s does', path)
  if not is_bpe and any(piece.kind == sentencepiece.BYTE for piece in model.pieces):
    log.warning(
      'llama.cpp has no bytes for characters that are unknown to unigrams, as in %s', path
    )
  pieces = list(model.pieces[:vocab_size])
  unused = [
    sentencepiece.Piece(f'[PAD{i}]', -1000.0, sentencepiece.UNUSED)
    for i in range(len(pieces), vocab_size)
  ]
  texts, scores, kinds = zip(*pieces, *unused, strict=True)
  return {
    'model': 'llama' if is_bpe else 't5', 'pre': 'default', 'tokens': list(texts),
    'scores': list(scores), 'token_type': list(kinds), 'add_space_prefix': model.adds_prefix,
    'remove_extra_whitespaces': model.removes_spaces, 'precompiled_charsmap': model.charsmap,
  }  # fmt: skip
