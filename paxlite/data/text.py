"""Text files that are tokenized at the start of a run, for corpora that fit in memory."""

import functools
import itertools
import re
import zlib
from collections.abc import Container, Iterator, Sequence
from typing import Literal

import numpy as np

from paxlite.core.errors import UserError
from paxlite.data.places import Place
from paxlite.data.records import canonical
from paxlite.data.rows import RowKind, TokenRows
from paxlite.data.text_encoding import TextEncoding
from paxlite.data.tokenizer import open_tokenizer
from paxlite.files.text_files import expanded, read_text

Split = Literal['all', 'train', 'held_out']

BLOCK_CHARS = 65_536
HELD_OUT_EVERY = 20
_LEAST_CHARS = 512  # minimum size of a block of a small text

# Positions at which `_cut` may cut a text, best first: after a blank line (with any line endings),
# and at the end of a line, a sentence or a word. The first kind that a block has is used.
_ENDS = [
  re.compile(pattern)
  for pattern in (r'\n[ \t]*\r?\n|\r\r', r'\n|\r(?!\n)', r'[.!?]\s|[。！？]', r'\s')
]


class TextRows(TokenRows):
  """A RowSource over text files: blocks of whole paragraphs, each ended by EOS.

  A block has 64 Ki characters and the text up to the next blank line. One of every 20 blocks of a
  file is held out of training, or the last block of a file with fewer than 20. If this holds out
  nothing, because no file has two blocks, one of every 20 files is held out. With fewer than 20
  files, each file is cut into smaller blocks by `_cut`.

  Args:
    files: Names of the files, or patterns of names.
    vocab_path: Path of the tokenizer.
    seq_len: Length of a row.
    split: 'train' leaves out what 'held_out' reads; 'all' reads everything.
    rows: Kind of row.
    held_out_every: One of this many blocks is held out (20 above).
    eos_ids: The ids that end a block; empty: the tokenizer's EOS.

  Attributes beyond TokenRows':
    files: The names of the files.
    bytes_per_token: UTF-8 bytes per target token, for bits per byte.
    fingerprint: A checksum of the text.
    tokens_fingerprint: A checksum of the tokens and of seq_starts.
    warnings: What a person should know of the text, a line each.

  Raises:
    UserError: A file cannot be read, or there is too little text to hold out a part of it.
  """

  def __init__(
    self,
    files: Sequence[str],
    vocab_path: str,
    seq_len: int,
    split: Split,
    rows: RowKind = 'stream',
    held_out_every: int = HELD_OUT_EVERY,
    eos_ids: Sequence[int] = (),
  ):
    if not files:
      raise UserError('there is no text to train on: --fdl.TRAIN_FILES=/path/to/a.txt names files')
    files = expanded(files)
    encoding = TextEncoding(open_tokenizer(vocab_path), eos_ids=eos_ids)
    found = split_files(files, held_out_every)
    is_here = [split == 'all' or held == (split == 'held_out') for _, held in found]
    blocks = [block for (block, _), here in zip(found, is_here, strict=True) if here]
    ends = itertools.accumulate(len(block) for block, _ in found)
    self.files = files
    self._spans = [  # of the blocks in all the text
      (end - len(block), end)
      for (block, _), end, here in zip(found, ends, is_here, strict=True)
      if here
    ]
    encoded = [encoding.document(block).astype(np.uint32) for block in blocks]
    tokens = np.concatenate(encoded) if encoded else np.zeros(0, np.uint32)
    if not len(tokens):
      raise UserError(
        f'{", ".join(files)}: too little text to hold out a part for evaluation. '
        '--fdl.EVAL_FILES=/path/to/b.txt names other text, --fdl.EVAL_FRACTION=0 does without'
      )
    starts = np.cumsum([0, *map(len, encoded)])
    super().__init__(
      tokens=tokens,
      seq_starts=starts,
      seq_len=seq_len,
      rows=rows,
      max_token_id=int(tokens.max()),
      name=', '.join(files),
    )
    self.fingerprint = zlib.crc32(repr([zlib.crc32(b.encode()) for b in blocks]).encode())
    self.tokens_fingerprint = zlib.crc32(tokens.data, zlib.crc32(starts.data))
    self.warnings = encoding.warnings
    self.bytes_per_token = sum(len(b.encode()) for b in blocks) / len(tokens)

  noun = 'block'

  def place_of(self, document: int) -> Place:
    """Returns the file of a block, the line in which it begins, and its characters."""
    start, end = self._spans[document]
    for file, text in zip(self.files, self._texts, strict=True):
      if start < len(text):
        line = 1 + text[:start].count('\n')
        return Place(file, line, f'characters {start} to {end - 1}')
      start, end = start - len(text), end - len(text)
    raise IndexError(document)

  def _keys(self, sources: Container[str]) -> Iterator[tuple[tuple[str, int | None], int]]:
    for i, place in enumerate(map(self.place_of, range(self.num_documents))):
      # one line may be cut into several blocks, which all have its number
      yield (canonical(place.source), place.record), i

  @functools.cached_property
  def _texts(self) -> list[str]:
    return [read_text(file) for file in self.files]

  @property
  def contents(self) -> str:
    """Numbers of blocks and tokens, for messages."""
    return f'{len(self.seq_starts) - 1:,} blocks of text, {len(self.tokens):,} tokens'


def split_files(files: Sequence[str], every: int) -> list[tuple[str, bool]]:
  """Returns the blocks of text files, and whether each is held out, as TextRows describes."""
  found = [pair for file in files for pair in split_blocks(file, every)]
  if any(held for _, held in found):
    return found
  # Here every file is one block.
  if len(files) >= every:
    return [(text, _is_held_out(i, len(found), every)) for i, (text, _) in enumerate(found)]
  return [pair for text, _ in found for pair in _marked(_cut(text, every), every)]


def split_blocks(path: str, every: int = HELD_OUT_EVERY) -> Iterator[tuple[str, bool]]:
  """Yields the blocks of a text file, cut only at blank lines, and whether each is held out."""
  return _marked(_blocks(path), every)


def _marked(blocks: Sequence[str], every: int) -> Iterator[tuple[str, bool]]:
  for i, block in enumerate(blocks):
    yield block, _is_held_out(i, len(blocks), every)


def _is_held_out(number: int, count: int, every: int) -> bool:
  last_of_few = count < every and number == count - 1 and number > 0
  return number % every == every - 1 or last_of_few


def _blocks(path: str) -> list[str]:
  text = read_text(path)
  blocks, start = [], 0
  while start < len(text):
    paragraph_end = text.find('\n\n', start + BLOCK_CHARS)
    end = len(text) if paragraph_end < 0 else paragraph_end + 2
    blocks.append(text[start:end])
    start = end
  return blocks


def _cut(text: str, every: int) -> list[str]:
  """Cuts a text into blocks of about one size, `every` or more of them if it is long enough.

  Each block ends at the best position (see _ENDS) between that size and twice that size.
  """
  size = max(1, min(BLOCK_CHARS, max(_LEAST_CHARS, -(-len(text) // every)), len(text) // 2))
  least = max(1, size // 2)  # of the last block
  blocks, start = [], 0
  while len(text) - start >= size + least:
    first, last = start + size, min(start + 2 * size, len(text) - least)
    ends = (pattern.search(text, first - 1, last) for pattern in _ENDS)
    end = next((found.end() for found in ends if found), first)
    blocks.append(text[start:end])
    start = end
  return [*blocks, text[start:]]
