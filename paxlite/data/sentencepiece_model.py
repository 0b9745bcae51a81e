"""The contents of a SentencePiece model: pieces, kind, and how texts are normalized."""

from collections.abc import Sequence
from typing import NamedTuple

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
UNIGRAM, BPE = 1, 2


class Piece(NamedTuple):
  """A token: its text, its score, and its type, as NORMAL."""

  text: str
  score: float
  kind: int


class SentencePieceModel(NamedTuple):
  """A model.

  Attributes:
    pieces: The pieces by id.
    kind: UNIGRAM or BPE.
    charsmap: The compiled rules by which characters of texts are replaced.
    adds_prefix: Whether a space is put before a text.
    removes_spaces: Whether several spaces become one.
    spaces_behind: Whether a space belongs to the word before it.
    byte_fallback: Whether bytes stand for characters that no piece has.
    unk, bos, eos: The special pieces; None: there is none.
  """

  pieces: Sequence[Piece]
  kind: int
  charsmap: bytes = b''
  adds_prefix: bool = True
  removes_spaces: bool = True
  spaces_behind: bool = False
  byte_fallback: bool = False
  unk: str | None = None
  bos: str | None = None
  eos: str | None = None


def parsed(content: bytes) -> SentencePieceModel:
  """Returns the contents of a file that the package sentencepiece can open."""
  from sentencepiece import sentencepiece_model_pb2

  model = sentencepiece_model_pb2.ModelProto.FromString(content)
  trainer, normalizer = model.trainer_spec, model.normalizer_spec
  pieces = [Piece(piece.piece, piece.score, piece.type) for piece in model.pieces]
  texts = {piece.text for piece in pieces}
  special = {name: getattr(trainer, f'{name}_piece') for name in ('unk', 'bos', 'eos')}
  return SentencePieceModel(
    pieces, trainer.model_type, normalizer.precompiled_charsmap, normalizer.add_dummy_prefix,
    normalizer.remove_extra_whitespaces, trainer.treat_whitespace_as_suffix, trainer.byte_fallback,
    **{name: text if text in texts else None for name, text in special.items()},
  )  # fmt: skip
