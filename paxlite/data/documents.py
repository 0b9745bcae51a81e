"""Documents that are tokenized during training: records with a text in one of their fields."""

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from paxlite.core.errors import UserError, located
from paxlite.data.base import permute
from paxlite.data.contents import combined
from paxlite.data.document_encoding import DocumentEncoding, unknown_tokens
from paxlite.data.held_out import is_held_out, largest_every, text_identity
from paxlite.data.places import Place
from paxlite.data.record_files import Raw
from paxlite.data.records import Records, canonical, open_records, parsed, text_of
from paxlite.data.tokenizer import check_vocabulary, open_tokenizer
from paxlite.files.text_files import expanded

log = logging.getLogger('paxlite')

Split = Literal['all', 'train', 'held_out']

_BLOCK = 4096  # consecutive records that are shuffled together


@dataclasses.dataclass(frozen=True)
class Document:
  """Token ids [n], which are all targets."""

  ids: np.ndarray

  @property
  def is_target(self) -> np.ndarray:
    return np.ones(len(self.ids), bool)


class DocumentSource:
  """A Source of documents for a StreamInput; each ends with EOS if the tokenizer has it.

  Args:
    names: Names of the files and datasets, as in the docstring of paxlite.data.records.
    vocab_path: Path of the tokenizer.
    vocab_size: Vocabulary size of the model.
    field: The field of a record that holds the text.
    start_id: The first input id of a text; None: the one that DocumentEncoding.first_id says.
    eos_ids: The ids that end a text; empty: the tokenizer's EOS.
    split: 'train' leaves out the documents that are held out, 'held_out' reads only those, and
      'all' reads every document.
    held_out_every: On average, one document of this many is held out; 0: all are read. Their texts
      say which: see held_out.py.
    skip_unreadable: Whether records without a text are left out, with a warning that counts them.
    tfds_data_dir: Folder of the TFDS datasets; '': TFDS_DATA_DIR, or TFDS' own default.

  Raises:
    UserError: A source does not exist or is listed twice, or the tokenizer is another model's.
  """

  def __init__(
    self,
    names: Sequence[str],
    vocab_path: str,
    vocab_size: int,
    field: str = 'text',
    start_id: int | None = 0,
    eos_ids: Sequence[int] = (),
    split: Split = 'all',
    held_out_every: int = 0,
    skip_unreadable: bool = False,
    tfds_data_dir: str = '',
  ):
    if not names:
      raise UserError('no documents to train on: set TRAIN_SOURCES=/path/to/a.jsonl')
    names = expanded(names)
    check_once(names)
    tokenizer = open_tokenizer(vocab_path)
    check_vocabulary(tokenizer, vocab_size)
    self.name = ', '.join(names)
    encoding = DocumentEncoding(tokenizer, vocab_size, start_id, eos_ids)
    self.max_token_id = min(tokenizer.vocab_size, vocab_size) - 1
    self.start_id = encoding.first_id
    self._encoding = encoding
    sources = [open_records(name, tfds_data_dir) for name in names]
    self.datasets = [
      DocumentDataset(self.name, sources, encoding, field, split, held_out_every, skip_unreadable)
    ]

  @property
  def warnings(self) -> list[str]:
    """Warnings about the documents read so far, a line each."""
    return self._encoding.warnings


def check_once(names: Sequence[str]) -> None:
  """Raises UserError if a source is listed twice."""
  seen: set[str] = set()
  for name in names:
    if canonical(name) in seen:
      raise UserError(f'the source {name} is listed twice: leave one out')
    seen.add(canonical(name))


@dataclasses.dataclass
class DocumentDataset:
  """A Dataset for streams.StreamInput; see DocumentSource."""

  name: str
  sources: Sequence[Records]
  encoding: DocumentEncoding
  field: str
  split: Split
  held_out_every: int
  skip_unreadable: bool
  num_skipped: int = 0
  left_out: frozenset[str] = frozenset()  # places of records; see left_out.py

  rate = 1.0

  @property
  def fingerprint(self) -> int:
    return combined(source.fingerprint for source in self.sources)

  @property
  def holds_out(self) -> bool:
    return self.split != 'all' and self.held_out_every > 0

  @property
  def tokens_fingerprint(self) -> int:
    return self.encoding.fingerprint

  @property
  def num_shards(self) -> int:
    return sum(source.num_shards for source in self.sources)

  @property
  def shard_bytes(self) -> list[float]:
    return [source.shard_bytes for source in self.sources for _ in range(source.num_shards)]

  def examples(
    self, shard: int, shuffle: bool, seed: int | None, start: int
  ) -> Iterator[tuple[int, Document]]:
    """Yields the documents of one shard from number `start` on; each block is shuffled by itself.

    Raises UserError if a record cannot be read, or has no text.
    """
    source, inner = self._find(shard)
    first = start // _BLOCK
    records = source.read(inner, first * _BLOCK)
    found = next(records, None)
    block = first
    while found is not None:
      raws = {}
      while found is not None and found[0] < (block + 1) * _BLOCK:
        raws[found[0]] = found[1]
        found = next(records, None)
      order = block * _BLOCK + np.arange(_BLOCK, dtype=np.int64)
      numbers = _in_order(order, shard, shuffle, seed)
      for here, number in zip(order.tolist(), numbers.tolist(), strict=True):
        if here < start or number not in raws:
          continue
        place = source.place(inner, number)
        if place in self.left_out:
          continue
        text = self._text(raws[number], place)
        if text and self._is_wanted(text):
          with located(place):
            ids = self._encoded(text, place).astype(np.int32)
          yield here, Document(ids)
      block += 1

  def _encoded(self, text: str, place: str) -> np.ndarray:
    encoding = self.encoding
    tokens, unknown = encoding.num_tokens, encoding.num_unknown
    ids = encoding.document(text)
    if not unknown and encoding.num_unknown:
      log.warning('%s: %s. This is said once', place,
                  unknown_tokens(encoding.num_unknown, encoding.num_tokens - tokens))  # fmt: skip
    return ids

  def record_of(self, shard: int, shuffle: bool, seed: int | None, number: int) -> int:
    """Returns the number in its shard of the record that `examples` calls `number`."""
    return int(_in_order(np.array([number], np.int64), shard, shuffle, seed)[0])

  def place_of(self, shard: int, record: int) -> Place:
    source, inner = self._find(shard)
    return Place.of(source.place(inner, record))

  def count_documents(self) -> int:
    """Returns how many records of the split have a text, also those left out; reads all of them."""
    return sum(map(self._is_wanted, self._texts()))

  @property
  def way_out(self) -> str:
    """The end of a sentence on what holds a document out, where none is; ''."""
    every = largest_every(map(text_identity, self._texts())) if self.holds_out else 0
    return f'; HELD_OUT_EVERY={every} holds one of these out, and 0 none' if every > 1 else ''

  def _texts(self) -> Iterator[str]:
    for shard in range(self.num_shards):
      source, inner = self._find(shard)
      for number, raw in source.read(inner):
        if text := self._text(raw, source.place(inner, number)):
          yield text

  def _text(self, raw: Raw, place: str) -> str:
    try:
      return text_of(parsed(raw, place), self.field, place)
    except UserError as e:
      if not self.skip_unreadable:
        raise UserError(f'{e} (SKIP_UNREADABLE=True leaves such records out)') from None
      self.num_skipped += 1
      if self.num_skipped & (self.num_skipped - 1) == 0:  # 1, 2, 4, 8 …
        log.warning('unreadable records left out so far: %d; this one: %s', self.num_skipped, e)
      return ''

  def _find(self, shard: int) -> tuple[Records, int]:
    """Returns a shard's source, and its number in the source."""
    for source in self.sources:
      if shard < source.num_shards:
        return source, shard
      shard -= source.num_shards
    raise IndexError(shard)

  def _is_wanted(self, text: str) -> bool:
    if not self.holds_out:
      return True
    here = is_held_out(text_identity(text), 1 / self.held_out_every)
    return here == (self.split == 'held_out')


def _in_order(here: np.ndarray, shard: int, shuffle: bool, seed: int | None) -> np.ndarray:
  """Returns the numbers of the records at these places [n] of one block in the order of reading."""
  if not shuffle:
    return here
  block, inside = int(here[0]) // _BLOCK, here % _BLOCK
  return block * _BLOCK + permute(inside, _BLOCK, (seed or 0) * 65_537 + shard, block)
