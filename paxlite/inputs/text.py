"""Text files, tokenized at start: for corpora that fit in memory."""

import zlib
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from paxlite.errors import UserError
from paxlite.inputs.files import read_text
from paxlite.inputs.rows import RowKind, TokenRows
from paxlite.inputs.tokenizer import open_tokenizer

Split = Literal['train', 'held_out']

BLOCK_CHARS = 65_536
HELD_OUT_EVERY = 20


class TextRows(TokenRows):
  """A RowSource over text files: blocks of whole paragraphs, each ended by EOS.

  Of every 20 blocks of a file (64 Ki characters, up to the next blank line) one is held out of
  training. Files of fewer blocks than 20 hold out their last one.

  Attributes beyond TokenRows':
    bytes_per_token: UTF-8 bytes per target token, for bits per byte.
  """

  def __init__(
    self,
    files: Sequence[str],
    vocab_path: str,
    seq_len: int,
    split: Split,
    rows: RowKind = 'stream',
  ):
    if not files:
      raise UserError('no text files: --fdl.TRAIN_FILES="[\'/path/to/a.txt\']"')
    tokenizer = open_tokenizer(vocab_path)
    blocks = [
      block for file in files for block, held in split_blocks(file) if held == (split == 'held_out')
    ]
    end = [tokenizer.eos_id] if tokenizer.eos_id >= 0 else []
    encoded = [np.array(tokenizer.encode(block) + end, np.uint32) for block in blocks]
    tokens = np.concatenate(encoded) if encoded else np.zeros(0, np.uint32)
    if not len(tokens):
      raise UserError(f'{", ".join(files)}: too little text to hold out a part for evaluation')
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


def split_blocks(path: str) -> Iterator[tuple[str, bool]]:
  """The blocks of a text file with whether each is held out."""
  blocks = _blocks(path)
  for i, block in enumerate(blocks):
    last_of_few = len(blocks) < HELD_OUT_EVERY and i == len(blocks) - 1 and i > 0
    yield block, i % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 or last_of_few


def _blocks(path: str) -> list[str]:
  text = read_text(path)
  blocks, start = [], 0
  while start < len(text):
    paragraph_end = text.find('\n\n', start + BLOCK_CHARS)
    end = len(text) if paragraph_end < 0 else paragraph_end + 2
    blocks.append(text[start:end])
    start = end
  return blocks
