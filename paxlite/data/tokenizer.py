"""SentencePiece and Hugging Face tokenizers.

Errors on opening a tokenizer say what the user should do.
"""

import functools
import itertools
import os
import pathlib
import re
from collections.abc import Iterable, Iterator
from typing import Any, Literal, Protocol

import numpy as np

from paxlite.core import object_copies, paths, shell
from paxlite.core.errors import UserError
from paxlite.core.json_files import read_object
from paxlite.core.json_text import JsonObject

_JSON, _MODEL = 'tokenizer.json', 'tokenizer.model'
CONFIGURATION = 'tokenizer_config.json'
TOKENIZERS = (_JSON, _MODEL)  # a folder's tokenizer is the first of these that exists
FILES = (*TOKENIZERS, CONFIGURATION, 'chat_template.jinja', 'special_tokens_map.json')

_PIECE_CHARS = 1 << 16

# A model may have this many more ids than its tokenizer, or a 32nd of its ids where that is more,
# because vocabulary sizes are rounded up to a multiple.
_SPARE_IDS = 1024

_FLAGS = f'--fdl.VOCAB_PATH, or --tokenizer of a tool, names a SentencePiece .model or a {_JSON}'


class Tokenizer(Protocol):
  """Encodes text as token ids and decodes ids to text."""

  @property
  def path(self) -> str: ...

  @property
  def vocab_size(self) -> int: ...

  @property
  def bos_id(self) -> int:
    """The id that is put before the first token of a text; −1: there is none."""
    ...

  @property
  def eos_id(self) -> int:
    """The end-of-sequence id; −1: the tokenizer has none."""
    ...

  def special_id(self, name: Literal['bos_token', 'eos_token']) -> int:
    """The id of the special token `name`, even if texts do not use it; −1: there is none."""
    ...

  def encode(self, text: str) -> list[int]:
    """Returns the ids of a text, without BOS and EOS."""
    ...

  def encode_array(self, text: str) -> np.ndarray:
    """Returns the ids of `encode` as an integer array [n]; this is faster."""
    ...

  def encode_marked(self, text: str) -> list[int]:
    """Returns the ids of a chat template's text, in which special tokens are spelled out."""
    ...

  def decode(self, ids: Iterable[int]) -> str: ...

  def decode_marked(self, ids: Iterable[int]) -> str:
    """Returns the text of ids, in which special tokens are spelled out."""
    ...


def open_tokenizer(path: str) -> Tokenizer:
  """Opens the tokenizer in a file, or in a folder with tokenizer.json or tokenizer.model.

  Args:
    path: Value of `--fdl.VOCAB_PATH`: a SentencePiece .model, a tokenizer.json or the folder of
      one.

  Raises:
    UserError: The file does not exist, or it is not a tokenizer.
  """
  if not path:
    raise UserError(f'there is no tokenizer: {_FLAGS}')
  path = object_copies.local(paths.stored(path), object_copies.SMALL)
  file = pathlib.Path(path)
  if os.path.isdir(file):
    found = [file / name for name in TOKENIZERS if (file / name).is_file()]
    if not found:
      raise UserError(f'{path} holds no tokenizer, neither {_JSON} nor {_MODEL}: {_FLAGS}')
    file = found[0]
  if not os.path.isfile(file):
    raise UserError(f'the tokenizer {path} is not a file: {_FLAGS}')
  if file.suffix == '.json':
    return JsonTokenizer(str(file))
  return SentencePieceTokenizer(str(file))


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
  """Raises UserError if the tokenizer cannot belong to a model with `vocab_size` ids."""
  spare = vocab_size - tokenizer.vocab_size
  if not 0 <= spare <= max(_SPARE_IDS, vocab_size // 32):
    raise UserError(
      f'{tokenizer.path} has {tokenizer.vocab_size:,} ids and the model VOCAB_SIZE={vocab_size:,}: '
      'it is the tokenizer of another model'
    )


def pieces(text: str) -> Iterator[tuple[str, bool]]:
  """Cuts a document into pieces; yields each piece, and whether it is the last.

  A piece has 64 Ki characters and the rest of its last line. A long document is encoded piece by
  piece, so that time and memory stay linear and several cores can share the work.
  """
  start = 0
  while start < len(text):
    end = text.find('\n', start + _PIECE_CHARS) + 1 or len(text)
    yield text[start:end], end == len(text)
    start = end


def encode_document(tokenizer: Tokenizer, text: str) -> list[np.ndarray]:
  """Returns the ids of a document, one array for each of its pieces."""
  if len(text) <= _PIECE_CHARS:  # true of nearly all documents
    return [tokenizer.encode_array(text)] if text else []
  return [tokenizer.encode_array(piece) for piece, _ in pieces(text)]


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
  def vocab_size(self) -> int:
    return self._model.GetPieceSize()

  @property
  def bos_id(self) -> int:
    return self._model.bos_id()

  @property
  def eos_id(self) -> int:
    return self._model.eos_id()

  def special_id(self, name: Literal['bos_token', 'eos_token']) -> int:
    return self.bos_id if name == 'bos_token' else self.eos_id

  def encode(self, text: str) -> list[int]:
    return self._model.EncodeAsIds(text)

  def encode_array(self, text: str) -> np.ndarray:
    return self._model.Encode(text, return_type='numpy')

  def encode_marked(self, text: str) -> list[int]:
    marks = {self._model.IdToPiece(i): i for i in (self.bos_id, self.eos_id) if i >= 0}
    if not marks:
      return self.encode(text)
    pieces = re.split(f'({"|".join(map(re.escape, marks))})', text)
    return [i for p in pieces if p for i in ([marks[p]] if p in marks else self.encode(p))]

  def decode(self, ids: Iterable[int]) -> str:
    return self._model.DecodeIds([int(i) for i in ids])

  def decode_marked(self, ids: Iterable[int]) -> str:
    parts = itertools.groupby((int(i) for i in ids), self._model.IsControl)
    spelled = lambda part: ''.join(map(self._model.IdToPiece, part))
    return ''.join(spelled(part) if mark else self.decode(part) for mark, part in parts)


class JsonTokenizer:
  """A Tokenizer from a Hugging Face tokenizer.json and the tokenizer_config.json next to it."""

  def __init__(self, path: str):
    try:
      import tokenizers
    except ImportError:
      raise UserError(
        f'the tokenizer {path} needs the package tokenizers: {shell.install("weights")}'
      ) from None

    self.path = path
    try:
      self._tokenizer = tokenizers.Tokenizer.from_file(path)
    except BaseException as e:
      if _is_of_library(e):
        raise UserError(f'the tokenizer {path} is not a {_JSON} ({e})') from None
      raise
    # The file may enable truncation or padding, but texts must be encoded in full and unpadded.
    self._tokenizer.no_truncation()
    self._tokenizer.no_padding()

  @property
  def vocab_size(self) -> int:
    return self._tokenizer.get_vocab_size(with_added_tokens=True)

  @property
  def bos_id(self) -> int:
    framed = self._call('encode', '', add_special_tokens=True).ids
    return framed[0] if framed and framed[0] != self.eos_id else -1

  @functools.cached_property
  def eos_id(self) -> int:
    return self.special_id('eos_token')

  def special_id(self, name: Literal['bos_token', 'eos_token']) -> int:
    token = special_tokens(self.path).get(name)
    found = None if token is None else self._tokenizer.token_to_id(token)
    return -1 if found is None else found

  def encode(self, text: str) -> list[int]:
    return self._call('encode', text, add_special_tokens=False).ids

  def encode_array(self, text: str) -> np.ndarray:
    # Faster, because it does not compute where in the text each token is.
    (encoded,) = self._call('encode_batch_fast', [text], add_special_tokens=False)
    return np.array(encoded.ids, np.uint32)

  def encode_marked(self, text: str) -> list[int]:
    return self.encode(text)

  def decode(self, ids: Iterable[int]) -> str:
    return self._call('decode', [int(i) for i in ids])

  def decode_marked(self, ids: Iterable[int]) -> str:
    return self._call('decode', [int(i) for i in ids], skip_special_tokens=False)

  def _call(self, name: str, *args: object, **kwargs: object) -> Any:
    """Calls a method of the library; raises UserError if the tokenizer file makes it fail."""
    try:
      return getattr(self._tokenizer, name)(*args, **kwargs)
    except BaseException as e:
      if not _is_of_library(e):
        raise
      verb = 'decode ids' if name == 'decode' else 'encode a text'
      raise UserError(f'the tokenizer {self.path} cannot {verb} ({e})') from None


def _is_of_library(e: BaseException) -> bool:
  """Returns whether the library tokenizers raised the exception.

  A panic in its Rust code is a BaseException but not an Exception, so it is recognized by its name.
  Other exceptions of this kind, such as KeyboardInterrupt, do not come from the library.
  """
  return isinstance(e, Exception) or type(e).__name__ == 'PanicException'


def special_tokens(path: str) -> dict[str, str]:
  """Returns bos_token, eos_token … from the tokenizer's tokenizer_config.json."""
  entries = configuration(path).items()
  texts = {k: v['content'] if isinstance(v, dict) and 'content' in v else v for k, v in entries}
  return {k: v for k, v in texts.items() if k.endswith('_token') and isinstance(v, str)}


def configuration(tokenizer_path: str) -> JsonObject:
  """Returns the tokenizer_config.json next to a tokenizer; {} if there is none."""
  path = pathlib.Path(tokenizer_path).parent / CONFIGURATION
  if not path.is_file():
    return {}
  return read_object(path)
