"""Text files, tokenized at start: for corpora that fit in memory."""

import re
import zlib
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from paxlite.core.errors import UserError
from paxlite.core.files import expanded, read_text
from paxlite.data.rows import RowKind, TokenRows
from paxlite.data.tokenizer import open_tokenizer

Split = Literal['all', 'train', 'held_out']

BLOCK_CHARS = 65_536
HELD_OUT_EVERY = 20
_LEAST_CHARS = 512  # of a block of a small text

# Where a text without blank lines is cut, the first that a block has: after a blank line, whatever
# ends its lines, at the end of a line, of a sentence, of a word.
_ENDS = [
  re.compile(pattern)
  for pattern in (r'\n[ \t]*\r?\n|\r\r', r'\n|\r(?!\n)', r'[.!?]\s|[。！？]', r'\s')
]


class TextRows(TokenRows):
  """A RowSource over text files: blocks of whole paragraphs, each ended by EOS.

  Of every 20 blocks of a file (64 Ki characters, up to the next blank line) one is held out of
  training. Files of fewer blocks than 20 hold out their last one. Where that holds out nothing, as
  no file has two blocks, it is one file of 20, or files are cut as `_cut` does.

  Args:
    files: Their names, or patterns of them.
    vocab_path: The tokenizer.
    seq_len: Length of a row.
    split: 'train' leaves out what 'held_out' reads; 'all' reads everything.
    rows: Kind of row.
    held_out_every: Of how many blocks one is held out.

  Attributes beyond TokenRows':
    bytes_per_token: UTF-8 bytes per target token, for bits per byte.
    fingerprint: Of the tokens.

  Raises:
    UserError: a file cannot be read, or there is too little text to hold out a part of it.
  """

  def __init__(
    self,
    files: Sequence[str],
    vocab_path: str,
    seq_len: int,
    split: Split,
    rows: RowKind = 'stream',
    held_out_every: int = HELD_OUT_EVERY,
  ):
    if not files:
      raise UserError('no text files: --fdl.TRAIN_FILES=/path/to/a.txt')
    files = expanded(files)
    tokenizer = open_tokenizer(vocab_path)
    found = split_files(files, held_out_every)
    blocks = [block for block, held in found if split == 'all' or held == (split == 'held_out')]
    end = [tokenizer.eos_id] if tokenizer.eos_id >= 0 else []
    encoded = [np.array(tokenizer.encode(block) + end, np.uint32) for block in blocks]
    tokens = np.concatenate(encoded) if encoded else np.zeros(0, np.uint32)
    if not len(tokens):
      raise UserError(
        f'{", ".join(files)}: too little text to hold out a part for evaluation. '
        '--fdl.EVAL_FILES=/path/to/b.txt names other text, --fdl.EVAL_FRACTION=0 does without'
      )
    super().__init__(
      tokens=tokens,
      seq_starts=np.cumsum([0, *map(len, encoded)]),
      seq_len=seq_len,
      rows=rows,
      max_token_id=int(tokens.max()),
      name=', '.join(files),
    )
    self.fingerprint = zlib.crc32(self.tokens, zlib.crc32(self.seq_starts))
    self.bytes_per_token = sum(len(b.encode()) for b in blocks) / len(tokens)

  @property
  def contents(self) -> str:
    """What there is, for messages."""
    return f'{len(self.seq_starts) - 1:,} blocks of text, {len(self.tokens):,} tokens'


def split_files(files: Sequence[str], every: int) -> list[tuple[str, bool]]:
  """The blocks of text files with whether each is held out, one of `every` (see TextRows)."""
  found = [pair for file in files for pair in split_blocks(file, every)]
  if any(held for _, held in found):
    return found
  # one block a file
  if len(files) >= every:
    return [(text, _is_held_out(i, len(found), every)) for i, (text, _) in enumerate(found)]
  return [pair for text, _ in found for pair in _marked(_cut(text, every), every)]


def split_blocks(path: str, every: int = HELD_OUT_EVERY) -> Iterator[tuple[str, bool]]:
  """The blocks of a text file, cut at blank lines alone, with whether each is held out."""
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
  """A text as blocks of about the same size, `every` of them or more where it is long enough.

  Each ends where it best can (see _ENDS) between its size and twice that.
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
