"""SentencePiece and Hugging Face tokenizers.

Errors on opening a tokenizer say what the user should do.
"""

import functools
import itertools
import os
import pathlib
import re
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np

from paxlite.core.errors import UserError
from paxlite.data.json_tokenizer import JsonTokenizer
from paxlite.data.tokenizer_files import (
  JSON,
  MODEL,
  TOKENIZERS,
  check_model,
  fingerprint,
  published,
)
from paxlite.data.tokens import Tokens
from paxlite.files import paths, schemes

# A model may have this many more ids than its tokenizer, or a 32nd of its ids where that is more,
# because vocabulary sizes are rounded up to a multiple.
_SPARE_IDS = 1024

_FLAGS = f'VOCAB_PATH, or --tokenizer of a tool, names a SentencePiece .model or a {JSON}'

# Appended to a SentencePiece model, it makes one that puts no space before a text: the field
# normalizer_spec (3) with its field add_dummy_prefix (3) set to false. The last value counts.
_NO_PREFIX = b'\x1a\x02\x18\x00'


class Tokenizer(Protocol):
  """Encodes text as token ids and decodes ids to text."""

  @property
  def path(self) -> str: ...

  @property
  def fingerprint(self) -> int:
    """A checksum of the files, which changes wherever the ids of texts may change."""
    ...

  @property
  def vocab_size(self) -> int:
    """The largest id + 1; some ids below it may have no token."""
    ...

  @property
  def is_token(self) -> np.ndarray:
    """Whether each id has a token, bool [vocab_size]."""
    ...

  @property
  def added_texts(self) -> Mapping[int, str]:
    """The tokens that are found in a text before all others, special or not, by their ids."""
    ...

  @property
  def special_ids(self) -> frozenset[int]:
    """Those ids of added_texts whose tokens are no text, as BOS."""
    ...

  @property
  def named_tokens(self) -> dict[str, str]:
    """The texts of bos_token, eos_token …, which chat templates may use."""
    ...

  @property
  def bos_id(self) -> int | None:
    """The id that is put before the first token of a text; None: there is none."""
    ...

  @property
  def start_ids(self) -> list[int]:
    """All ids that are put before the first token of a text; the first one is bos_id."""
    ...

  @property
  def eos_id(self) -> int | None:
    """The end-of-sequence id; None: the tokenizer has none."""
    ...

  def special_id(self, name: Literal['bos_token', 'eos_token']) -> int | None:
    """The id of the special token `name`, even if texts do not use it; None: there is none."""
    ...

  @property
  def unk_id(self) -> int | None:
    """The id of text that the tokenizer does not know; None: there is none."""
    ...

  def encode(self, text: str) -> list[int]:
    """Returns the ids of a text, without BOS and EOS."""
    ...

  def encode_array(self, text: str) -> np.ndarray:
    """Returns the ids of `encode` as an integer array [n]; this is faster."""
    ...

  def encode_tokens(self, text: str, marked: bool = False) -> Tokens:
    """Returns the tokens of a text and their offsets in it.

    With `marked`, the text is one of a chat template, in which special tokens are spelled out.
    """
    ...

  def encode_quoted(
    self, text: str, plain: Sequence[tuple[int, int]], special: Collection[str]
  ) -> list[int]:
    """Returns the ids of a chat template's text, parts of which have no special tokens.

    Args:
      text: The text, in which special tokens are spelled out.
      plain: First and last + 1 character of each part that is ordinary text. What has a character
        in one of them is no special token.
      special: The texts of the added tokens that count as special.
    """
    ...

  def decode(self, ids: Iterable[int]) -> str: ...

  def decode_marked(self, ids: Iterable[int]) -> str:
    """Returns the text of ids, in which special tokens are spelled out."""
    ...

  def piece(self, token: int) -> str:
    """Returns a token as the vocabulary writes it; '' if the id has none."""
    ...


def tokenizer_file(path: str) -> pathlib.Path:
  """Returns the file of a tokenizer, which may be named by its folder; see open_tokenizer."""
  if not path:
    raise UserError(f'no tokenizer is set: {_FLAGS}')
  path = schemes.local(paths.stored(path), schemes.SMALL)
  file = pathlib.Path(path)
  if os.path.isdir(file):
    found = [file / name for name in TOKENIZERS if (file / name).is_file()]
    if not found:
      raise UserError(f'{path} holds no tokenizer, neither {JSON} nor {MODEL}: {_FLAGS}')
    file = found[0]
  if not os.path.isfile(file):
    raise UserError(f'the tokenizer {path} is not a file: {_FLAGS}')
  return file


def open_tokenizer(path: str) -> Tokenizer:
  """Opens the tokenizer in a file, or in a folder with tokenizer.json or tokenizer.model.

  A tokenizer.model is read as transformers does if a file next to it names a class, and otherwise
  by SentencePiece. Raises UserError if the file does not exist, or it is not a tokenizer.

  Args:
    path: Value of `VOCAB_PATH`: a SentencePiece .model, a tokenizer.json or the folder of
      one.
  """
  file = tokenizer_file(path)
  if file.suffix == '.json':
    return JsonTokenizer(str(file))
  plain = SentencePieceTokenizer(str(file))  # raises UserError if it is none
  if file.name != MODEL:
    return plain
  check_model(str(file))
  return JsonTokenizer(str(file)) if published(str(file)).tokenizer_class else plain


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
  """Raises UserError if the tokenizer cannot belong to a model with `vocab_size` ids.

  Tokens that were added to the tokenizer may have ids beyond those of the model, as in Gemma 3.
  They are refused where a text uses them (`check_ids`).
  """
  spare = vocab_size - tokenizer.vocab_size
  beyond = np.flatnonzero(tokenizer.is_token[vocab_size:]) + vocab_size
  if spare > max(_SPARE_IDS, vocab_size // 32) or not tokenizer.added_texts.keys() >= {
    *beyond.tolist()
  }:
    raise UserError(
      f'{tokenizer.path} has {tokenizer.vocab_size:,} ids, but the model has '
      f"VOCAB_SIZE={vocab_size:,}: it is another model's tokenizer"
    )


def vocabulary_fingerprint(tokenizer: Tokenizer) -> int:
  """Returns a checksum of the token of each id, wherever the files are and whoever reads them."""
  tokens = map(tokenizer.piece, range(tokenizer.vocab_size))
  return zlib.crc32('\0'.join(tokens).encode())


def check_ids(tokenizer: Tokenizer, ids: np.ndarray, vocab_size: int) -> None:
  """Raises UserError if a text has a token id beyond the model's `vocab_size`."""
  beyond = ids[ids >= vocab_size]
  if len(beyond):
    token = tokenizer.decode_marked([int(beyond[0])])
    raise UserError(
      f"the text has the token {token!r} with id {beyond[0]:,}, beyond the model's "
      f'VOCAB_SIZE={vocab_size:,}: remove it from the text'
    )


class SentencePieceTokenizer:
  """A Tokenizer that is a SentencePiece model."""

  def __init__(self, path: str):
    import sentencepiece

    self.path = path
    self._model = sentencepiece.SentencePieceProcessor()
    try:
      self._model.LoadFromFile(path)
    except (RuntimeError, OSError) as e:
      raise UserError(f'the tokenizer {path} is not a SentencePiece model ({e})') from None

  @property
  def fingerprint(self) -> int:
    return fingerprint(self.path)

  @property
  def vocab_size(self) -> int:
    return self._model.GetPieceSize()

  @property
  def is_token(self) -> np.ndarray:
    return np.ones(self.vocab_size, bool)

  @functools.cached_property
  def added_texts(self) -> dict[int, str]:
    return {i: self._model.IdToPiece(i) for i in sorted(self.special_ids)}

  @functools.cached_property
  def special_ids(self) -> frozenset[int]:
    is_special = lambda i: self._model.IsControl(i) or self._model.IsUnknown(i)
    return frozenset(filter(is_special, range(self.vocab_size)))

  @property
  def named_tokens(self) -> dict[str, str]:
    ids = {'bos_token': self.bos_id, 'eos_token': self.eos_id, 'unk_token': self.unk_id}
    own = {name: self._model.IdToPiece(i) for name, i in ids.items() if i is not None}
    return own | published(self.path).special_tokens

  @property
  def bos_id(self) -> int | None:
    return _if_any(self._model.bos_id())

  @property
  def start_ids(self) -> list[int]:
    return [] if self.bos_id is None else [self.bos_id]

  @functools.cached_property
  def eos_id(self) -> int | None:
    named = published(self.path).special_tokens.get('eos_token')
    found = None if named is None else self._model.PieceToId(named)
    is_piece = found is not None and self._model.IdToPiece(found) == named
    return found if is_piece else _if_any(self._model.eos_id())

  def special_id(self, name: Literal['bos_token', 'eos_token']) -> int | None:
    return self.bos_id if name == 'bos_token' else self.eos_id

  @property
  def unk_id(self) -> int | None:
    return _if_any(self._model.unk_id())

  def encode(self, text: str) -> list[int]:
    return self._model.EncodeAsIds(text)

  def encode_array(self, text: str) -> np.ndarray:
    return self._model.Encode(text, return_type='numpy')

  def encode_quoted(
    self, text: str, plain: Sequence[tuple[int, int]], special: Collection[str]
  ) -> list[int]:
    ids: list[int] = self._tokens(self._split(text, plain)).ids.tolist()
    return ids

  def encode_tokens(self, text: str, marked: bool = False) -> Tokens:
    return self._tokens(self._split(text, ()) if marked else [(text, None)])

  def _tokens(self, parts: Iterable[tuple[str, int | None]]) -> Tokens:
    ids: list[int] = []
    offsets: list[tuple[int, int]] = []
    start = 0
    for part, mark in parts:
      if mark is not None:
        ids.append(mark)
        offsets.append((start, start + len(part)))
      elif part:
        # A space is put before the text, and before each of its parts only in an old class.
        model = self._without_prefix if start and not self._is_legacy else self._model
        found = model.Encode(part, return_type='offset_mapping')
        ids += found['ids']
        offsets += [(start + a, start + b) for a, b in found['offsets']]
      start += len(part)
    where = np.array(offsets, np.int64).reshape(-1, 2)
    return Tokens(np.array(ids, np.int32), where[:, 0], where[:, 1])

  def _split(self, text: str, plain: Sequence[tuple[int, int]]) -> Iterator[tuple[str, int | None]]:
    """Yields the parts of a text of a chat template, each with its id if it is a special token."""
    place, is_plain = 0, np.zeros(len(text), bool)
    for start, stop in plain:
      is_plain[start:stop] = True
    for found in self._marks.finditer(text):
      if not is_plain[found.start() : found.end()].any():
        yield text[place : found.start()], None
        yield found.group(), self._mark_ids[found.group()]
        place = found.end()
    yield text[place:], None

  def decode(self, ids: Iterable[int]) -> str:
    return self._model.DecodeIds([int(i) for i in ids])

  def decode_marked(self, ids: Iterable[int]) -> str:
    parts = itertools.groupby((int(i) for i in ids), self.special_ids.__contains__)
    spelled = lambda part: ''.join(map(self._model.IdToPiece, part))
    return ''.join(spelled(part) if mark else self.decode(part) for mark, part in parts)

  def piece(self, token: int) -> str:
    return self._model.IdToPiece(int(token)) if 0 <= token < self.vocab_size else ''

  @functools.cached_property
  def _mark_ids(self) -> dict[str, int]:
    return {text: i for i, text in self.added_texts.items()}

  @functools.cached_property
  def _marks(self) -> re.Pattern[str]:
    longest_first = sorted(self._mark_ids, key=len, reverse=True)
    return re.compile(f'({"|".join(map(re.escape, longest_first)) or "(?!)"})')

  @functools.cached_property
  def _without_prefix(self) -> Any:
    import sentencepiece

    changed = self._model.serialized_model_proto() + _NO_PREFIX
    return sentencepiece.SentencePieceProcessor(model_proto=changed)

  @functools.cached_property
  def _is_legacy(self) -> bool:
    return bool(published(self.path).configuration.get('legacy', False))


def _if_any(found: int) -> int | None:
  """Returns an id of SentencePiece; −1 becomes None."""
  return None if found < 0 else found
