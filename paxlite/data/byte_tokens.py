"""The bytes of the tokens of byte-level tokenizers, which say where in a text each token is."""

import functools
from collections.abc import Mapping

import numpy as np

from paxlite.data.tokens import Tokens

_NO_TOKEN = b'\xff'  # is in no text


@functools.cache
def byte_letters() -> dict[str, int]:
  """Returns the bytes that the letters of byte-level tokens stand for, as GPT-2 has them."""
  printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
  others = [i for i in range(256) if i not in printed]
  return {chr(i): i for i in printed} | {chr(256 + n): i for n, i in enumerate(others)}


def bytes_of(piece: str) -> bytes:
  """Returns the bytes of a token as a byte-level vocabulary writes it; of others, its UTF-8."""
  try:
    return bytes(map(byte_letters().__getitem__, piece))
  except KeyError:
    return piece.encode()


class ByteTokens:
  """Locates the tokens of byte-level tokenizers, faster than the library that finds them.

  Args:
    vocabulary: The ids of the tokens, as the vocabulary writes them.
    added: The texts of added tokens by their ids.
  """

  def __init__(self, vocabulary: Mapping[str, int], added: Mapping[int, str]):
    found = [_NO_TOKEN] * (1 + max([*vocabulary.values(), *added], default=-1))
    for piece, i in vocabulary.items():
      found[i] = bytes_of(piece)
    for i, text in added.items():
      found[i] = text.encode()
    self._lengths = np.array([*map(len, found)], np.int64)
    self._starts = self._lengths.cumsum() - self._lengths
    self._bytes = np.frombuffer(b''.join(found), np.uint8)

  def located(self, ids: np.ndarray, text: str) -> Tokens | None:
    """Returns the tokens of a text with their offsets.

    None: their bytes are not those of the text, because the tokenizer changes it before.
    """
    data = np.frombuffer(text.encode(), np.uint8)
    lengths = self._lengths[ids]
    ends = lengths.cumsum()
    starts = ends - lengths
    if len(data) != lengths.sum():
      return None
    places = np.arange(len(data)) + np.repeat(self._starts[ids] - starts, lengths)
    if (self._bytes[places] != data).any():
      return None
    if len(data) > len(text):  # a token may begin or end within a character
      begun = ((data & 0xC0) != 0x80).cumsum()  # characters up to each byte
      starts, ends = begun[starts] - 1, begun[ends - 1]
    return Tokens(ids.astype(np.int32), starts, ends)
