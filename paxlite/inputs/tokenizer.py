"""SentencePiece models, opened with errors that say what to do."""

import pathlib
from collections.abc import Iterable
from typing import Any

from paxlite.errors import UserError


class Tokenizer:
  """A SentencePiece model.

  Args:
    path: The .model file (`--fdl.VOCAB_PATH`).

  Raises:
    UserError: there is no such file, or it is not a SentencePiece model.
  """

  def __init__(self, path: str):
    import sentencepiece

    if not path:
      raise UserError('VOCAB_PATH names no SentencePiece model: --fdl.VOCAB_PATH=/path/to/x.model')
    if not pathlib.Path(path).is_file():
      raise UserError(f'VOCAB_PATH={path} is not a file: it must name a SentencePiece .model')
    self.path = path
    self._model: Any = sentencepiece.SentencePieceProcessor()
    try:
      self._model.LoadFromFile(str(path))
    except (RuntimeError, OSError) as e:
      raise UserError(f'VOCAB_PATH={path} is not a SentencePiece model ({e})') from None

  @property
  def vocab_size(self) -> int:
    return self._model.GetPieceSize()

  @property
  def eos_id(self) -> int:
    """The end-of-sequence id, −1 where the model has none."""
    return self._model.eos_id()

  def encode(self, text: str) -> list[int]:
    return self._model.EncodeAsIds(text)

  def decode(self, ids: Iterable[int]) -> str:
    return self._model.DecodeIds([int(i) for i in ids])
