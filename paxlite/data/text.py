"""Text files that are tokenized at the start of a run, for corpora that fit in memory."""

import functools
import itertools
import math
import re
import zlib
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np

from paxlite.core.errors import UserError
from paxlite.data.document_encoding import DocumentEncoding
from paxlite.data.places import Place
from paxlite.data.records import canonical
from paxlite.data.rows import RowKind, TokenRows
from paxlite.data.tokenizer import open_tokenizer
from paxlite.files.text_files import expanded, read_text

Split = Literal['all', 'train', 'held_out']
Pairs = Sequence[tuple[str, bool]]  # blocks of a text, and whether each is held out

BLOCK_CHARS = 65_536
HELD_OUT_SHARE = 0.05
_LEAST_CHARS = 512  # minimum size of a block of a small text
_LEAST_BLOCKS = 20  # a text of fewer is cut into smaller ones
_FINER = 3  # times as many, because blocks go on to a good place and differ in size
_ENCODED_CHARS = 16 * BLOCK_CHARS

# Positions at which `_cut` may cut a text, best first: after a blank line (with any line endings),
# and at the end of a line, a sentence or a word. The first kind that a block has is used.
_ENDS = [
  re.compile(pattern)
  for pattern in (r'\n[ \t]*\r?\n|\r\r', r'\n|\r(?!\n)', r'[.!?]\s|[。！？]', r'\s')
]


class TextRows(TokenRows):
  """A RowSource over text files, each of which is a document that ends in EOS.

  A file is split into blocks of whole paragraphs: 64 Ki characters, and the text up to the next
  blank line. A share of the blocks, as one of every 20, is held out of training. A file of fewer
  than 20 blocks is cut into smaller ones by `_cut`; among larger files, one of a single block is
  all trained on. If all files have a single block and there are 20 of them or more, whole files are
  held out.

  Blocks that follow each other in a file are encoded together, and are one document for packed
  rows. EOS stands where a file ends, and not where a held-out block has been taken out of it.
  Raises UserError if a file cannot be read, there is too little text to hold out a part of it, or
  no id stands before the first token of a document.

  Args:
    files: Names of the files, or patterns of names.
    vocab_path: Path of the tokenizer.
    seq_len: Length of a row.
    split: 'train' leaves out what 'held_out' reads; 'all' reads everything.
    held_out_share: The share of the blocks that is held out, above 0 and at most 0.5.
    start_id: The input before the first token of a document; None: the one that
      DocumentEncoding.first_id says.
    eos_ids: The ids that end a document; empty: the tokenizer's EOS.

  Attributes beyond TokenRows':
    files: The names of the files.
    lost: Says that the tokens do not hold all of the text; '' if they do.
    bytes_per_token: UTF-8 bytes per target token, for bits per byte; None if text is lost.
    fingerprint: A checksum of the text.
    tokens_fingerprint: A checksum of the tokens, of seq_starts and of the start id of packed rows.
    warnings: What a person should know of the text, a line each.
    holds_out: Whether the blocks are a part of those in the files.
  """

  def __init__(
    self,
    files: Sequence[str],
    vocab_path: str,
    seq_len: int,
    split: Split,
    rows: RowKind = 'stream',
    held_out_share: float = HELD_OUT_SHARE,
    start_id: int | None = 0,
    eos_ids: Sequence[int] = (),
  ):
    if not files:
      raise UserError('no text to train on: set TRAIN_FILES=/path/to/a.txt')
    self.files = files = expanded(files)
    self._encoding = encoding = DocumentEncoding(
      open_tokenizer(vocab_path), None, start_id, eos_ids
    )
    of_files = split_texts(files, held_out_share)
    is_here = lambda held: split == 'all' or held == (split == 'held_out')
    ends = itertools.accumulate(len(block) for pairs in of_files for block, _ in pairs)
    found = [(block, is_here(held)) for pairs in of_files for block, held in pairs]
    self._spans = [  # of the blocks in all the text
      (end - len(block), end) for (block, here), end in zip(found, ends, strict=True) if here
    ]
    blocks = [block for block, here in found if here]
    self._passages = [p for pairs in of_files for p in _passages(pairs, is_here)]
    encoded = [self._encoded(passage).astype(np.uint32) for passage in self._passages]
    tokens = np.concatenate(encoded) if encoded else np.zeros(0, np.uint32)
    if not len(tokens):
      raise UserError(
        f'{", ".join(files)}: too little text to hold out a part for evaluation. '
        'EVAL_FILES=/path/to/b.txt names other text, EVAL_FRACTION=0 does without'
      )
    starts = np.cumsum([0, *map(len, encoded)])
    super().__init__(
      tokens=tokens, seq_starts=starts, seq_len=seq_len, rows=rows,
      max_token_id=max(int(tokens.max()), encoding.first_id), name=', '.join(files),
      start_id=encoding.first_id,
    )  # fmt: skip
    self.fingerprint = zlib.crc32(repr([zlib.crc32(b.encode()) for b in blocks]).encode())
    begins = repr(self.start_id).encode() if self.start_id and rows != 'stream' else b''
    # 0 was the start id of all rows once, so that runs which began with it go on.
    self.tokens_fingerprint = zlib.crc32(begins, zlib.crc32(tokens.data, zlib.crc32(starts.data)))
    self.holds_out = split != 'all'
    self.lost = encoding.unknown
    self.warnings = encoding.warnings
    if split == 'train':
      self.warnings += _other_share(of_files, held_out_share)
    num_bytes = sum(len(b.encode()) for b in blocks)
    self.bytes_per_token = None if self.lost else num_bytes / len(tokens)

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

  def _encoded(self, passage: '_Passage') -> np.ndarray:
    *parts, last = (''.join(blocks) for blocks in _parts(passage.blocks))
    ids = [self._encoding.document(text, ends=False) for text in parts]
    return np.concatenate([*ids, self._encoding.document(last, passage.ends_file)])

  @functools.cached_property
  def origin_starts(self) -> np.ndarray:
    """The first token of each block, then the number of all tokens."""
    tokenizer, found, first = self._encoding.tokenizer, [0], 0
    for passage, after in zip(self._passages, self.seq_starts[1:].tolist(), strict=True):
      for blocks in _parts(passage.blocks):
        places = tokenizer.encode_tokens(''.join(blocks)).starts
        ends = list(itertools.accumulate(map(len, blocks)))
        found += (first + np.searchsorted(places, ends)).tolist()
        first += len(places)
      found[-1] = first = after
    return np.array(found, np.int64)

  @property
  def contents(self) -> str:
    """Numbers of blocks and tokens, for messages."""
    return f'{len(self._spans):,} blocks of text, {len(self.tokens):,} tokens'


class _Passage(NamedTuple):
  """Blocks that follow each other in a file, and whether the file ends with them."""

  blocks: Sequence[str]
  ends_file: bool


def _passages(pairs: Pairs, is_here: Callable[[bool], bool]) -> Iterator[_Passage]:
  """Yields the passages of one file that are in a split."""
  number = 0
  for here, group in itertools.groupby(pairs, lambda pair: is_here(pair[1])):
    blocks = [block for block, _ in group]
    number += len(blocks)
    if here:
      yield _Passage(blocks, number == len(pairs))


def _parts(blocks: Sequence[str]) -> Iterator[Sequence[str]]:
  """Yields the blocks that are encoded together, so that memory is bounded."""
  ends = itertools.accumulate(map(len, blocks))
  numbered = zip(ends, blocks, strict=True)
  for _, group in itertools.groupby(numbered, lambda pair: pair[0] // _ENCODED_CHARS):
    yield [block for _, block in group]


def split_texts(files: Sequence[str], share: float) -> list[Pairs]:
  """Returns the blocks of each file, and whether each is held out, as TextRows describes."""
  found = [_blocks(file) for file in files]
  are_single = all(len(blocks) == 1 for blocks in found)
  if are_single and len(files) >= _least(share):
    held = _held(files, share)
    return [[(blocks[0], is_held)] for blocks, is_held in zip(found, held, strict=True)]
  return [
    _marked(_fine(blocks, share) if are_single or len(blocks) > 1 else blocks, share)
    for blocks in found
  ]


def split_blocks(path: str, share: float = HELD_OUT_SHARE) -> Pairs:
  """Returns the blocks of a text file, and whether each is held out."""
  (found,) = split_texts([path], share)
  return found


def _least(share: float) -> int:
  """Returns the least number of blocks of which this share can be held out."""
  return max(_LEAST_BLOCKS, math.ceil(1 / share))


def _fine(blocks: Sequence[str], share: float) -> Sequence[str]:
  """Returns the blocks of a text, or more and smaller ones if they are too few."""
  least = _least(share)
  return blocks if len(blocks) >= least else _cut(''.join(blocks), _FINER * least)


def _marked(blocks: Sequence[str], share: float) -> Pairs:
  held = _held(blocks, share)
  if len(held) > 1 and not any(held):
    held[-1] = True
  return list(zip(blocks, held, strict=True))


def _held(blocks: Sequence[str], share: float) -> list[bool]:
  """Returns whether each block is held out, so that this share of the first ones always is."""
  counts = [math.floor(round(share * number, 9)) for number in range(len(blocks) + 1)]
  return [after > before for before, after in itertools.pairwise(counts)]


def _other_share(of_files: Sequence[Pairs], share: float) -> list[str]:
  """Returns a warning if the held-out share differs from the requested one."""
  sizes = [(len(block), held) for pairs in of_files for block, held in pairs]
  found = sum(size for size, held in sizes if held) / sum(size for size, _ in sizes)
  if share / 2 <= found <= share * 2:
    return []
  return [f'{found:.2%} of the text is held out, and EVAL_FRACTION asks for {share:.2%}: the text '
          'has too few places to cut it']  # fmt: skip


def _blocks(path: str) -> list[str]:
  text = read_text(path)
  blocks, start = [], 0
  while start < len(text):
    paragraph_end = text.find('\n\n', start + BLOCK_CHARS)
    end = len(text) if paragraph_end < 0 else paragraph_end + 2
    blocks.append(text[start:end])
    start = end
  return blocks


def _cut(text: str, count: int) -> list[str]:
  """Cuts a text into at most about `count` blocks of one size, of at least 512 characters.

  Each block ends at the best position (see _ENDS) between that size and twice that size.
  """
  size = max(1, min(BLOCK_CHARS, max(_LEAST_CHARS, -(-len(text) // count)), len(text) // 2))
  least = max(1, size // 2)  # of the last block
  blocks, start = [], 0
  while len(text) - start >= size + least:
    first, last = start + size, min(start + 2 * size, len(text) - least)
    ends = (pattern.search(text, first - 1, last) for pattern in _ENDS)
    end = next((found.end() for found in ends if found), first)
    blocks.append(text[start:end])
    start = end
  return [*blocks, text[start:]]
