"""The contents of a SentencePiece model, as its protocol buffer has them.

The fields and their numbers are those of sentencepiece_model.proto in
https://github.com/google/sentencepiece; the package sentencepiece reads such a file, and gives out
neither the kind of the model nor how it normalizes texts.
"""

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
UNIGRAM, BPE = 1, 2
_VARINT, _LONG, _BYTES, _FLOAT = 0, 1, 2, 5  # types of the wire format of protocol buffers
_PIECE, _TRAINER, _NORMALIZER = 1, 2, 3
_MODEL_TYPE, _SUFFIX, _BYTE_FALLBACK = 3, 24, 35  # of the trainer
_PIECES = {'unk': 45, 'bos': 46, 'eos': 47}
_DEFAULT = {'unk': b'<unk>', 'bos': b'<s>', 'eos': b'</s>'}
_CHARSMAP, _PREFIX, _EXTRA_SPACES = 2, 3, 4  # of the normalizer


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
  pieces: list[Piece] = []
  trainer: dict[int, bytes | int] = {}
  normalizer: dict[int, bytes | int] = {}
  for number, value in _fields(content):
    if number == _PIECE:
      told = dict(_fields(_bytes(value)))
      (score,) = struct.unpack('<f', _bytes(told.get(2, bytes(4))))
      pieces.append(Piece(_bytes(told[1]).decode(), score, int(told.get(3, NORMAL))))
    elif number == _TRAINER:
      trainer |= dict(_fields(_bytes(value)))
    elif number == _NORMALIZER:
      normalizer |= dict(_fields(_bytes(value)))
  texts = {piece.text for piece in pieces}
  special = {
    name: _bytes(trainer.get(_PIECES[name], text)).decode() for name, text in _DEFAULT.items()
  }
  return SentencePieceModel(
    pieces,
    int(trainer.get(_MODEL_TYPE, UNIGRAM)),
    _bytes(normalizer.get(_CHARSMAP, b'')),
    bool(normalizer.get(_PREFIX, True)),
    bool(normalizer.get(_EXTRA_SPACES, True)),
    bool(trainer.get(_SUFFIX, False)),
    bool(trainer.get(_BYTE_FALLBACK, False)),
    **{name: text if text in texts else None for name, text in special.items()},
  )


def _bytes(value: bytes | int) -> bytes:
  assert isinstance(value, bytes)
  return value


def _fields(content: bytes) -> Iterator[tuple[int, bytes | int]]:
  """Yields the number and the value of each field of a message."""
  at = 0

  def varint() -> int:
    nonlocal at
    value = shift = 0
    while True:
      byte = content[at]
      at += 1
      value |= (byte & 0x7F) << shift
      shift += 7
      if byte < 0x80:
        return value

  while at < len(content):
    number, kind = divmod(varint(), 8)
    if kind == _VARINT:
      yield number, varint()
      continue
    size = varint() if kind == _BYTES else {_LONG: 8, _FLOAT: 4}[kind]
    yield number, content[at : at + size]
    at += size
