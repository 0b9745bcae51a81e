"""Makes tokenizers of the package tokenizers of a SentencePiece model, as transformers does.

A tokenizer.model whose folder names a class of transformers is not read by SentencePiece there. Its
pieces become the vocabulary and the merges of that class, and the other files of the folder add
tokens and say what begins a text.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject
from paxlite.data.sentencepiece_model import (
  BPE,
  CONTROL,
  NORMAL,
  UNIGRAM,
  USER_DEFINED,
  SentencePieceModel,
)
from paxlite.data.tokenizer_growth import check_growth

_SPACE = '▁'


def tokenizer_of_class(model: SentencePieceModel) -> Any:
  """Returns a Tokenizer with the pieces as BPE, whose pipeline a class of transformers decides.

  Such a class merges pieces in the order of their ids.
  """
  from tokenizers import Tokenizer, models

  vocabulary = {piece.text: i for i, piece in enumerate(model.pieces)}
  merges = [pair for text in vocabulary for pair in _halves(text, vocabulary)]
  return Tokenizer(models.BPE(vocabulary, merges, fuse_unk=True, byte_fallback=True))


def plain_tokenizer(
  model: SentencePieceModel, path: str, renamed: Mapping[int, str], is_legacy: bool
) -> Any:
  """Returns a Tokenizer that follows the settings of the model, as transformers' TokenizersBackend.

  Raises UserError if it is neither unigrams nor BPE.

  Args:
    path: Its file, for messages.
    renamed: Texts that the files beside it give to pieces, by their ids.
    is_legacy: Whether a space is put before each part of a text between added tokens.
  """
  from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

  if model.kind not in (UNIGRAM, BPE):
    raise UserError(f'the tokenizer {path} is neither unigrams nor BPE, which transformers does '
                    'not read either: train one of these')  # fmt: skip
  texts = _renamed(model, renamed) if model.kind == BPE else [p.text for p in model.pieces]
  user_defined = [
    text for text, piece in zip(texts, model.pieces, strict=True) if piece.kind == USER_DEFINED
  ]
  if model.kind == BPE:
    tokenizer = Tokenizer(_ranked_bpe(model, texts, bool(user_defined)))
  else:
    scored = [(piece.text, piece.score) for piece in model.pieces]
    unknown = None if model.unk is None else texts.index(model.unk)
    tokenizer = Tokenizer(models.Unigram(scored, unknown, model.byte_fallback))
  steps: list[Any] = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
  for step in steps:
    check_growth(path, 'normalizer', step)
  if model.removes_spaces:
    steps.append(normalizers.Replace(Regex(r'\A +| +\z'), ''))
    steps.append(normalizers.Replace(Regex(' {2,}'), ' '))
  steps.append(normalizers.Replace(' ', _SPACE))
  words: list[Any] = []
  decoding: list[Any] = [decoders.Replace(_SPACE, ' ')]
  decoding += [decoders.ByteFallback()] if model.byte_fallback else []
  if model.adds_prefix:
    if is_legacy:  # a text that begins with a space gets another one
      steps.append(normalizers.Replace(Regex(rf'\A{_SPACE}'), _SPACE * 2))
    scheme = 'always' if is_legacy else 'first'
    words.append(pre_tokenizers.Metaspace(_SPACE, prepend_scheme=scheme, split=False))
    decoding += [decoders.Fuse(), decoders.Strip(content=' ', left=1)]
  elif model.byte_fallback:
    decoding.append(decoders.Fuse())
  if user_defined:
    longest_first = sorted(user_defined, key=len, reverse=True)
    words.append(pre_tokenizers.Split(Regex('|'.join(map(re.escape, longest_first))), 'isolated'))
  tokenizer.normalizer = normalizers.Sequence(steps)
  if words:
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(words)
  tokenizer.decoder = decoders.Sequence(decoding)
  return tokenizer


def added_pieces(model: SentencePieceModel, is_plain: bool) -> list[JsonObject]:
  """Returns the pieces that are found in a text before all others, as tokenizer.json has them.

  Those that a user has defined are part of the pipeline of a plain tokenizer.
  """
  kinds = (CONTROL,) if is_plain else (CONTROL, USER_DEFINED)
  return [
    {'content': piece.text, 'special': piece.kind == CONTROL, 'normalized': False}
    for piece in model.pieces
    if piece.kind in kinds
  ]


def _renamed(model: SentencePieceModel, renamed: Mapping[int, str]) -> list[str]:
  """Returns the texts of pieces with their new names, if no other piece keeps such a name."""
  kept = {piece.text for i, piece in enumerate(model.pieces) if i not in renamed}
  return [
    renamed[i] if i in renamed and renamed[i] not in kept else piece.text
    for i, piece in enumerate(model.pieces)
  ]


def _ranked_bpe(model: SentencePieceModel, texts: list[str], ignores_merges: bool) -> Any:
  """Returns BPE that merges ordinary pieces as SentencePiece does, those with high scores first."""
  from tokenizers import models

  normal = {
    text: (-piece.score, i)
    for i, (text, piece) in enumerate(zip(texts, model.pieces, strict=True))
    if piece.kind == NORMAL
  }
  ranked = sorted((rank, pair) for text, rank in normal.items() for pair in _halves(text, normal))
  return models.BPE(
    {text: i for i, text in enumerate(texts)}, [pair for _, pair in ranked],
    unk_token=model.unk or '<unk>', fuse_unk=True, byte_fallback=model.byte_fallback,
    ignore_merges=ignores_merges,
  )  # fmt: skip


def _halves(text: str, vocabulary: Mapping[str, object]) -> Iterator[tuple[str, str]]:
  """Yields the pairs of pieces that a piece can be merged of, the shortest first half first."""
  for i in range(1, len(text)):
    if text[:i] in vocabulary and text[i:] in vocabulary:
      yield text[:i], text[i:]
