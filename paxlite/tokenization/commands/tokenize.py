"""paxlite tokenize SOURCES… --vocab=TOKENIZER --output=FOLDER

Turns text into a flat-tokens dataset, on all cores. A source is a file (.txt, .jsonl, .json, .csv,
also .gz .xz .zst; .parquet), a TFDS dataset (tfds:c4/en:3.0.1/train) or a Hugging Face dataset
(hf:allenai/c4:en/train). A .txt file is one document; in other sources each record is one, with its
text in --field. After an interruption, the same command resumes.

Examples:
  paxlite tokenize books/*.txt.gz --vocab=tokenizer.json --output=data/books
  paxlite tokenize hf:allenai/c4:en/train --vocab=tokenizer.model --output=data/c4
"""

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import multiprocessing
import pathlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from paxlite.cli.parser import Parser, stored
from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject
from paxlite.core.wording import amount
from paxlite.data.document_encoding import DocumentEncoding, unknown_tokens
from paxlite.data.documents import check_once
from paxlite.data.flat_tokens import META
from paxlite.data.held_out import RULE, is_held_out, text_identity
from paxlite.data.record_files import FileRange, JsonLines, Raw
from paxlite.data.records import Records, open_records, parsed, share_done, text_of
from paxlite.data.tokenizer import Tokenizer, open_tokenizer, vocabulary_fingerprint
from paxlite.data.tokenizer_files import fingerprint
from paxlite.data.worker_pool import workers
from paxlite.files.json_files import read_object
from paxlite.files.output import check_output, exists, resumed_folder
from paxlite.files.schemes import is_address
from paxlite.files.text_files import expanded, lines_of
from paxlite.tokenization.flat_tokens_writer import HELD_OUT, FlatTokensWriter, is_complete

log = logging.getLogger('paxlite')

_BATCH_CHARS = 1 << 19  # of the documents that a worker is given at once, or more
_SECONDS_BETWEEN_NOTES = 5.0
_SECONDS_BETWEEN_LINES = 60.0


@dataclasses.dataclass(frozen=True)
class SourcePosition:
  """The position in the sources up to which the records are done.

  These are the records before `number` in `shard` of source `source`, and all earlier shards and
  sources.
  """

  source: int = 0
  shard: int = 0
  number: int = 0
  num_bytes: int = 0
  skipped: int = 0
  unknown: int = 0


@dataclasses.dataclass(frozen=True)
class TextBlock:
  """A document, or a block of lines that are a document each.

  Attributes:
    raw: The text, the record, or the block of lines.
    place: Location of the record, or the file of the lines.
    number: Number of the record, or of the first line.
  """

  raw: Raw | FileRange
  place: str
  number: int


@dataclasses.dataclass(frozen=True)
class EncodedBatch:
  """The encoded documents of a batch.

  It holds token ids [n], the indices in them at which documents end, the number of bytes of text,
  the number of unreadable records, and the number of unknown tokens.
  """

  tokens: np.ndarray
  ends: np.ndarray
  num_bytes: int
  skipped: int
  unknown: int


@dataclasses.dataclass(frozen=True)
class Encoder:
  """Encodes batches of documents."""

  vocab: str
  field: str
  dtype: str
  eos: bool
  skip_unreadable: bool
  held_out_every: int | None
  held_out: bool

  def __call__(self, tokenizer: Tokenizer, batch: Sequence[TextBlock]) -> EncodedBatch:
    encoding = DocumentEncoding(tokenizer)
    parts: list[np.ndarray] = []
    ends: list[int] = []
    count = num_bytes = skipped = 0
    for text in self._texts(batch):
      if text is None:
        skipped += 1
        continue
      if not self._is_wanted(text):
        continue
      num_bytes += len(text) if text.isascii() else len(text.encode())
      if text:
        parts.append(encoding.document(text, self.eos))
        count += len(parts[-1])
      ends.append(count)
    tokens = np.concatenate(parts, dtype=self.dtype, casting='unsafe') if parts else np.zeros(0)
    return EncodedBatch(
      tokens.astype(self.dtype, copy=False), np.array(ends, np.int64), num_bytes, skipped,
      encoding.num_unknown,
    )  # fmt: skip

  def _is_wanted(self, text: str) -> bool:
    """Returns whether a document belongs to the split that is written."""
    if not self.held_out_every:
      return True
    return is_held_out(text_identity(text), 1 / self.held_out_every) == self.held_out

  def _texts(self, batch: Sequence[TextBlock]) -> Iterator[str | None]:
    """Yields the text of each document, or None if it cannot be read."""
    for piece in batch:
      if isinstance(piece.raw, str):
        yield piece.raw
      elif isinstance(piece.raw, bytes | FileRange):
        block = piece.raw if isinstance(piece.raw, bytes) else piece.raw.read()
        for number, line in lines_of(block, piece.number):
          yield self._text(line, f'{piece.place}:{number + 1}')
      else:
        yield self._text(piece.raw, piece.place)

  def _text(self, raw: Raw, place: str) -> str | None:
    try:
      return text_of(parsed(raw, place), self.field, place)
    except UserError:
      if not self.skip_unreadable:
        raise
      return None


PARSER = Parser(__doc__)
PARSER.option('sources', 'files and datasets', stored, nargs='+')
PARSER.option('--vocab', 'SentencePiece .model, or tokenizer.json', stored, required=True)
PARSER.option('--output', 'dataset folder', stored, required=True)
PARSER.option('--split', 'name of the split (train)', default='train')
PARSER.option('--field', 'record field (text)', default='text')
PARSER.option('--format', '', choices=('memmap', 'seqax'), default='memmap')
PARSER.option('--append_eos', 'end each document with EOS', bool)
PARSER.option('--held_out_every', 'hold out every Nth document', int)
PARSER.option('--held_out', 'write the held-out documents instead', bool)
PARSER.option('--skip_unreadable', 'records without text too', bool)
PARSER.option('--processes', '', int, default=multiprocessing.cpu_count())


def main(argv: Sequence[str]) -> None:
  args = PARSER.parsed(argv)

  tokenizer = open_tokenizer(args.vocab)
  if args.append_eos and tokenizer.eos_id is None:
    raise UserError(f'--append_eos: {args.vocab} has no EOS')
  if args.processes < 1:
    raise UserError(f'--processes={args.processes} must be at least 1')
  every = args.held_out_every
  if (args.held_out and every is None) or (every is not None and every < 2):
    raise UserError('--held_out_every=N holds out one of N documents, so N must be at least 2')
  args.sources = expanded(args.sources)
  check_once(args.sources)
  sources = [open_records(s) for s in args.sources]
  read_anew = tokenizer.fingerprint != fingerprint(tokenizer.path)
  settings = {
    'sources': [[s.name, s.fingerprint] for s in sources],
    'tokenizer': hashlib.sha256(pathlib.Path(tokenizer.path).read_bytes()).hexdigest(),
    'field': args.field,
    'append_eos': args.append_eos,
    'held_out_every': args.held_out_every,
    'held_out': args.held_out,
    'tokenizer_files': tokenizer.fingerprint if read_anew else None,  # of earlier versions: None
    'held_out_by': RULE if args.held_out_every else None,
  }
  if not is_address(args.output):
    _check_apart(args)
    _write(args, args.output, sources, settings, tokenizer)
    return
  check_output('--output', f'{args.output}/{args.split}')
  last = f'{args.split}/{META if args.format == "memmap" else ".zattrs"}'
  if exists(f'{args.output}/{last}'):
    raise UserError(f'{args.output}/{args.split} exists: choose another --output or remove it')
  about = json.dumps([settings, args.split, args.format])
  with resumed_folder(args.output, about, last) as folder:
    if not is_complete(folder, args.split):  # or a copy of it to the store has failed
      _write(args, str(folder), sources, settings, tokenizer)
  print(f'{args.output}/{args.split}: copied')


def _check_apart(args: argparse.Namespace) -> None:
  """Raises UserError if the split would share documents with one that leaves them out."""
  if not args.held_out_every:
    return
  for path in sorted(pathlib.Path(args.output).glob(f'[!.]*/{META}')):
    every, held_out = map(read_object(path).get, HELD_OUT)
    if held_out is None:
      print(
        f'{path.parent} was written by an earlier version, which held out other documents. Write '
        'it again',
        file=sys.stderr,
      )
    elif every and every != args.held_out_every and held_out != args.held_out:
      raise UserError(
        f'--held_out_every={args.held_out_every}: {path.parent} was written with {every}, so both '
        'would share documents. Use the same number'
      )


def _write(
  args: argparse.Namespace,
  path: str,
  sources: Sequence[Records],
  settings: JsonObject,
  tokenizer: Tokenizer,
) -> None:
  """Writes the split into a folder on this machine, and prints what is in it."""
  writer = FlatTokensWriter(path, args.split, tokenizer.vocab_size, args.format, settings)
  encoder = Encoder(
    args.vocab,
    args.field,
    writer.dtype.str,
    args.append_eos,
    args.skip_unreadable,
    args.held_out_every,
    args.held_out,
  )
  try:
    position = _tokenize(sources, writer, encoder, args.processes)
    if writer.token_count == 0:
      raise UserError(f'{", ".join(args.sources)}: no text to tokenize')
    about = {'tokenizer': vocabulary_fingerprint(tokenizer), 'unknown_tokens': position.unknown}
    writer.close(about)
  except OSError as e:  # raised by writing; errors of reading name their file
    writer.abort()
    raise UserError(
      f'{args.output} cannot be written ({e}): run the command again to continue'
    ) from None
  except BaseException:
    writer.abort()
    raise
  skipped = f', {position.skipped:,} unreadable records left out' if position.skipped else ''
  print(
    f'{args.output}/{args.split}: {amount(writer.sequences, "document")}, '
    f'{position.num_bytes:,} bytes, {writer.token_count:,} tokens, read back and checked{skipped}'
  )
  if position.unknown:
    log.warning('%s', unknown_tokens(position.unknown, writer.token_count))


def _tokenize(
  sources: Sequence[Records], writer: FlatTokensWriter, encoder: Encoder, processes: int
) -> SourcePosition:
  """Writes the documents that are not yet done; returns the position at the end."""
  position = SourcePosition(**(writer.position or {}))
  if writer.position:
    print(f'continues after {amount(writer.sequences, "document")}, {writer.token_count:,} tokens')
  noted = time.monotonic()
  make = functools.partial(_opened, encoder)
  way_out = 'run the command again to continue, with fewer --processes'
  with _progress(sources, position) as report, workers(make, processes, way_out) as encode:
    for encoded, end in encode(_batches(_pieces(sources, position, encoder))):
      writer.write(encoded.tokens, encoded.ends)
      position = dataclasses.replace(
        end,
        num_bytes=position.num_bytes + encoded.num_bytes,
        skipped=position.skipped + encoded.skipped,
        unknown=position.unknown + encoded.unknown,
      )
      if time.monotonic() > noted + _SECONDS_BETWEEN_NOTES:
        writer.note(dataclasses.asdict(position))
        noted = time.monotonic()
      report(position.num_bytes, writer.token_count)
  position = dataclasses.replace(position, source=len(sources), shard=0, number=0)
  if writer.token_count:
    writer.note(dataclasses.asdict(position))
  return position


def _opened(encoder: Encoder) -> Callable[[Sequence[TextBlock]], EncodedBatch]:
  return functools.partial(encoder, open_tokenizer(encoder.vocab))


def _pieces(
  sources: Sequence[Records], start: SourcePosition, encoder: Encoder
) -> Iterator[tuple[TextBlock, SourcePosition]]:
  """Yields the pieces after `start`, each with the position after it."""
  for s, source in enumerate(sources):
    if s < start.source:
      source.done = source.size or 0
      continue
    here = s == start.source
    for shard in range(start.shard if here else 0, source.num_shards):
      first = start.number if here and shard == start.shard else 0
      if isinstance(source, JsonLines):
        for number, next_number, block in source.ranges(first):
          yield TextBlock(block, source.name, number), SourcePosition(s, shard, next_number)
        continue
      for number, raw in source.read(shard, first):
        after = SourcePosition(s, shard, number + 1)
        text = raw.get(encoder.field) if isinstance(raw, Mapping) else raw
        if isinstance(text, str):
          yield TextBlock(text, source.name, number), after
        else:
          yield TextBlock(raw, source.place(shard, number), number), after


Pieces = tuple[list[TextBlock], SourcePosition]


def _batches(found: Iterable[tuple[TextBlock, SourcePosition]]) -> Iterator[Pieces]:
  """Yields groups of pieces of at least _BATCH_CHARS characters, with the position after each."""
  batch: list[TextBlock] = []
  chars, after = 0, SourcePosition()
  for piece, after in found:
    batch.append(piece)
    chars += len(piece.raw)
    if chars >= _BATCH_CHARS:
      yield batch, after
      batch, chars = [], 0
  if batch:
    yield batch, after


@contextlib.contextmanager
def _progress(
  sources: Sequence[Records], start: SourcePosition
) -> Iterator[Callable[[int, int], None]]:
  """Yields a function that reports the progress, called with the bytes and tokens done.

  The progress is a bar on a terminal, and one line a minute elsewhere.
  """
  from rich.console import Console
  from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

  console = Console(stderr=True)
  columns = (BarColumn(), TextColumn('{task.description}'), TimeElapsedColumn())
  with Progress(*columns, TimeRemainingColumn(), console=console,
                disable=not console.is_terminal) as bar:  # fmt: skip
    task = bar.add_task('tokenizing', total=1.0)
    started = said = time.monotonic()
    first: tuple[float, int] | None = None  # share and tokens at the first report

    def report(num_bytes: int, tokens: int) -> None:
      nonlocal said, first
      now, share = time.monotonic(), share_done(sources)
      if first is None:
        first = share or 0.0, tokens
        return
      seconds = now - started
      line = (
        f'{num_bytes / 1e6:,.1f} MB  {(num_bytes - start.num_bytes) / seconds / 1e6:.1f} MB/s  '
        f'{(tokens - first[1]) / seconds:,.0f} tokens/s'
      )
      if share is not None:
        bar.update(task, completed=share, description=line)
      if not console.is_terminal and now > said + _SECONDS_BETWEEN_LINES:
        said = now
        gained = 0.0 if share is None else share - first[0]
        left = f'  {(1 - (share or 0)) / gained * seconds / 60:,.0f} min left' if gained > 0 else ''
        print(line + left, file=sys.stderr, flush=True)

    yield report
