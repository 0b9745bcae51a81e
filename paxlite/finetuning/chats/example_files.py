"""Reads files of records as examples: few of them at each start, many once, on all cores.

What many records are encoded to is kept under a key of all that it depends on: the contents of the
files, the tokenizer, the chat template, the options, and the code of paxlite.
"""

import dataclasses
import functools
import importlib.metadata
import itertools
import logging
import os
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import paxlite
from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject
from paxlite.core.wording import amount
from paxlite.data.checked_files import crc32c_of
from paxlite.data.record_files import File, FileRange, JsonLines, Raw
from paxlite.data.records import Records, share_done
from paxlite.data.tokenizer import tokenizer_file
from paxlite.data.worker_pool import usable_cores, workers
from paxlite.files.schemes import is_address
from paxlite.files.text_files import lines_of
from paxlite.finetuning.chats.encoded_examples import (
  LAZY,
  EncodedBlock,
  EncodedExamples,
  write_blocks,
)
from paxlite.finetuning.chats.example_reader import ReaderOptions, SftReader
from paxlite.finetuning.chats.fast_tokenizer import FastTokenizer, OtherIds, is_faster
from paxlite.finetuning.example_cache import ArrayWriter, ExampleCache, checksum_of_code, in_memory

log = logging.getLogger('paxlite')

_MOST_RECORDS = 20_000  # that are encoded at each start, and kept in memory
_MOST_BYTES = 32 << 20
_BLOCK_RECORDS, _BLOCK_BYTES = 256, 1 << 19  # of what a worker is given at once
_SECONDS_BETWEEN_LINES = 5.0
_PACKAGES = 'tokenizers', 'sentencepiece', 'jinja2'
_CODE = 'core', 'data', 'files', 'chats', 'finetuning'

Placed = tuple[str, Raw]
T = TypeVar('T')


@dataclasses.dataclass(frozen=True)
class LineBlock:
  """Lines of a file from number `first` on, as bytes or as a range of the file."""

  name: str
  first: int
  lines: bytes | FileRange


def read_examples(
  files: Sequence[str], options: ReaderOptions, reader: SftReader, cache: ExampleCache
) -> EncodedExamples:
  """Returns the examples of all records.

  Args:
    files: The names of the sources.
    options: Opens readers in other processes.
    reader: The reader of this one.
    cache: Keeps the examples of many records.

  Raises:
    UserError: A source cannot be read, or has changed meanwhile, or the reader can read no record.
  """
  records = itertools.chain.from_iterable(_placed(reader.open(name)) for name in files)
  stays = cache.is_off or _reads_clock(reader, options)
  is_large = not stays and _are_large(files)
  head = [] if stays or is_large else list(_first(records))
  if stays or not (is_large or next(records, None)):
    encoded = map(reader.block, itertools.chain([head], _grouped(records)))
    return EncodedExamples(in_memory(lambda writer: write_blocks(writer, encoded)))
  key = key_of(files, options, reader)

  def make(writer: ArrayWriter, fast: bool = True) -> JsonObject:
    sources = [reader.open(name) for name in files]
    fast = fast and is_faster(reader.encoding.tokenizer)
    done = functools.partial(share_done, sources)
    encoded = encode_blocks(_blocks(sources), options, done, fast=fast)
    facts = write_blocks(writer, encoded)
    if key_of(files, options, reader) != key:
      raise UserError(f'{", ".join(files)}: a file changed while it was read: start again')
    return facts

  try:
    found = cache.get(key, make, LAZY)
  except OtherIds as e:
    log.warning('%s: tokenizing again without it', e)
    found = cache.get(key, functools.partial(make, fast=False), LAZY)
  return EncodedExamples(found, key)


def encode_blocks(
  blocks: Iterable[T],
  options: ReaderOptions,
  share: Callable[[], float | None],
  encode: 'Callable[[SftReader, T], EncodedBlock] | None' = None,
  fast: bool = False,
) -> Iterator[EncodedBlock]:
  """Yields what workers on all cores make of blocks, and logs the progress every few seconds.

  Args:
    blocks: The blocks.
    options: Opens the reader of each worker.
    share: Returns the fraction of the blocks that is done; None: it is not known.
    encode: Encodes one block; None: blocks are those of records.
    fast: Whether workers use a FastTokenizer.

  Raises:
    OtherIds: It has found other ids; what was yielded may be wrong, too.
  """
  of_block: Callable[[SftReader, T], EncodedBlock] = encode or _encoded  # type: ignore[assignment]
  make: Callable[[], Callable[[T], EncodedBlock]] = functools.partial(
    _encoder, options, of_block, fast
  )
  way_out = 'start again, with more memory, or allow fewer cores with taskset'
  examples, tokens, begun = 0, 0, time.monotonic()
  said = begun
  with workers(make, usable_cores(), way_out) as encoded:
    for block, done in encoded((each, share()) for each in blocks):
      yield block
      examples += len(block.arrays['length'])
      tokens += len(block.arrays['tokens'])
      now = time.monotonic()
      if now > said + _SECONDS_BETWEEN_LINES:
        said = now
        log.warning('%s', _progress(examples, tokens, now - begun, done))
  seconds = max(time.monotonic() - begun, 1e-3)
  log.info('Tokenized %s, %s tokens/s', amount(examples, 'example'), f'{tokens / seconds:,.0f}')


def key_of(files: Sequence[str], options: ReaderOptions, reader: SftReader) -> JsonObject:
  """Returns all that the examples of files depend on."""
  tokenizer = reader.encoding.tokenizer
  return {
    'files': list(files),
    'contents': [_contents(reader.open(name)) for name in files],
    'reader': options.reader.__qualname__,
    'options': {k: v for k, v in vars(options).items() if k not in ('reader', 'vocab_path')},
    'tokenizer': [tokenizer.fingerprint, tokenizer.named_tokens],
    'template': _templates(reader),
    'code': _code(),
    'packages': {name: _version(name) for name in _PACKAGES},
  }


@functools.cache
def _code() -> str:
  folder = pathlib.Path(paxlite.__file__).parent
  return checksum_of_code(*(folder / name for name in _CODE))


def _version(package: str) -> str:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return ''


def _contents(source: Records) -> list[object]:
  """Returns what tells other contents of a source apart; a file is read once for that."""
  if isinstance(source, File) and not is_address(source.name):
    return [os.path.getsize(source.name), crc32c_of(pathlib.Path(source.name))]
  return [source.size, source.fingerprint]


def _templates(reader: SftReader) -> dict[str, str]:
  try:
    return reader.encoding.chat_format.texts
  except UserError:  # reported at the first conversation
    return {}


def _reads_clock(reader: SftReader, options: ReaderOptions) -> bool:
  """Returns whether a template writes the present day, so that nothing can be kept."""
  return bool(_templates(reader)) and reader.encoding.chat_format.reads_clock and not options.date


def _are_large(files: Sequence[str]) -> bool:
  """Returns whether files are so large that not even the first records need to be looked at."""
  return sum(os.path.getsize(name) for name in files if os.path.isfile(name)) > 2 * _MOST_BYTES


def _encoder(
  options: ReaderOptions, encode: Callable[[SftReader, T], EncodedBlock], fast: bool = False
) -> Callable[[T], EncodedBlock]:
  tokenizer = FastTokenizer(str(tokenizer_file(options.vocab_path))) if fast else None
  return functools.partial(encode, options.opened(tokenizer))


def _encoded(reader: SftReader, block: 'LineBlock | Sequence[Placed]') -> EncodedBlock:
  if not isinstance(block, LineBlock):
    return reader.block(block)
  data = block.lines if isinstance(block.lines, bytes) else block.lines.read()
  lines = lines_of(data, block.first)
  return reader.block((f'{block.name}:{number + 1}', line) for number, line in lines)


def _blocks(sources: Sequence[Records]) -> Iterator['LineBlock | list[Placed]']:
  for source in sources:
    if isinstance(source, JsonLines):
      for first, _, lines in source.ranges():
        yield LineBlock(source.name, first, lines)
      continue
    yield from _grouped(_placed(source))


def _placed(source: Records) -> Iterator[Placed]:
  for shard in range(source.num_shards):
    for number, raw in source.read(shard):
      yield source.place(shard, number), raw


def _grouped(records: Iterator[Placed]) -> Iterator[list[Placed]]:
  while block := list(_first(records, _BLOCK_RECORDS, _BLOCK_BYTES)):
    yield block


def _first(
  records: Iterator[Placed], most: int = _MOST_RECORDS, most_bytes: int = _MOST_BYTES
) -> Iterator[Placed]:
  """Yields the first of the records: at most `most`, and about `most_bytes` of text."""
  size = 0
  for place, raw in itertools.islice(records, most):
    yield place, raw
    size += len(raw) if isinstance(raw, bytes | str) else sum(len(str(v)) for v in raw.values())
    if size > most_bytes:
      return


def _progress(examples: int, tokens: int, seconds: float, share: float | None) -> str:
  done = f'{share:.0%}, ' if share is not None else ''
  left = f', {(1 / share - 1) * seconds / 60:,.1f} min left' if share else ''
  return f'Tokenizing, once: {done}{examples:,} examples, {tokens / seconds:,.0f} tokens/s{left}'
