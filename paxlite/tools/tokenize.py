"""python -m paxlite.tools.tokenize --vocab=x.model --output=FOLDER FILES…

Turns text and JSON lines (.txt, .jsonl, also .gz .xz .zst) into a flat-tokens dataset, on all
cores.
A .txt file is one document; of a .jsonl file each line is one, in its field --field.
"""

import argparse
import contextlib
import itertools
import multiprocessing
import pathlib
import time
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from paxlite.errors import UserError
from paxlite.inputs.files import COMPRESSED, read_documents
from paxlite.inputs.flat_tokens import Writer
from paxlite.inputs.tokenizer import Tokenizer, open_tokenizer
from paxlite.tools import cli

_BATCH_CHARS = 1 << 19  # what goes to a worker at once
_PIECE_CHARS = 1 << 16

Piece = tuple[str, bool]  # text, and whether it ends its document
Encoded = tuple[list[tuple[np.ndarray, bool]], int]  # ids of each piece, and bytes of all

_worker_tokenizer: Tokenizer


def main(argv: Sequence[str]) -> None:
  parser = argparse.ArgumentParser(
    prog='python -m paxlite.tools.tokenize',
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument('files', nargs='+', help='text or JSON lines')
  parser.add_argument('--vocab', required=True, help='SentencePiece .model file')
  parser.add_argument('--output', required=True, help='folder of the dataset')
  parser.add_argument('--split', default='train', help='split that is written (train)')
  parser.add_argument('--field', default='text', help='field of a JSON line (text)')
  parser.add_argument('--format', choices=('memmap', 'seqax'), default='memmap')
  parser.add_argument('--append_eos', action='store_true', help='end each document with EOS')
  parser.add_argument('--processes', type=int, default=multiprocessing.cpu_count())
  args = parser.parse_args(argv)

  tokenizer = open_tokenizer(args.vocab)
  if args.append_eos and tokenizer.eos_id < 0:
    raise UserError(f'--append_eos: {args.vocab} has no EOS')
  for file in args.files:
    if not pathlib.Path(file).is_file():
      raise UserError(f'{file} is not a file')
  if args.processes < 1:
    raise UserError(f'--processes={args.processes} must be at least 1')

  documents = itertools.chain.from_iterable(read_documents(f, args.field) for f in args.files)
  writer = Writer(args.output, args.split, tokenizer.vocab_size, args.format)
  eos = np.array([tokenizer.eos_id] if args.append_eos else [], np.uint32)
  started = time.perf_counter()
  count = size = 0
  try:
    with _progress(args.files) as report, _encoder(args.vocab, args.processes) as encode:
      document: list[np.ndarray] = []
      for encoded, num_bytes in encode(_batches(_pieces(documents))):
        for tokens, is_last in encoded:
          document.append(tokens)
          if is_last:
            writer.write(np.concatenate([*document, eos]))
            document = []
            count += 1
        size += num_bytes
        report(size, writer.token_count)
    if writer.token_count == 0:
      raise UserError(f'{", ".join(args.files)}: no text to tokenize')
  except BaseException:
    writer.abort()
    raise
  writer.close()
  seconds = time.perf_counter() - started
  print(
    f'{args.output}/{args.split}: {count:,} documents, {size:,} bytes, '
    f'{writer.token_count:,} tokens in {seconds:.1f} s '
    f'({size / seconds / 1e6:.1f} MB/s, {writer.token_count / seconds:,.0f} tokens/s)'
  )


def _pieces(documents: Iterable[str]) -> Iterator[Piece]:
  """Documents in pieces that end at a line's end, so that a long one keeps all cores busy."""
  for text in documents:
    start = 0
    while start < len(text):
      end = text.find('\n', start + _PIECE_CHARS) + 1 or len(text)
      yield text[start:end], end == len(text)
      start = end


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
  """Pieces in groups of about _BATCH_CHARS characters."""
  batch: list[Piece] = []
  chars = 0
  for piece in pieces:
    batch.append(piece)
    chars += len(piece[0])
    if chars >= _BATCH_CHARS:
      yield batch
      batch, chars = [], 0
  if batch:
    yield batch


@contextlib.contextmanager
def _encoder(vocab: str, processes: int):
  """A function from batches of documents to their tokens, in order, on `processes` processes."""
  if processes == 1:
    _start_worker(vocab)
    yield lambda batches: map(_encode_batch, batches)
    return
  context = multiprocessing.get_context('spawn')
  with context.Pool(processes, _start_worker, (vocab,)) as pool:
    yield lambda batches: _bounded_imap(pool, batches, 4 * processes)


def _bounded_imap(pool, batches: Iterator[list[Piece]], ahead: int) -> Iterator[Encoded]:
  """pool.imap that reads at most `ahead` batches before their results are taken."""
  pending = [pool.apply_async(_encode_batch, (b,)) for b in itertools.islice(batches, ahead)]
  while pending:
    yield pending.pop(0).get()
    pending += [pool.apply_async(_encode_batch, (b,)) for b in itertools.islice(batches, 1)]


def _start_worker(vocab: str) -> None:
  global _worker_tokenizer
  _worker_tokenizer = open_tokenizer(vocab)


def _encode_batch(batch: list[Piece]) -> Encoded:
  ids = [(np.array(_worker_tokenizer.encode(text), np.uint32), is_last) for text, is_last in batch]
  return ids, sum(len(text.encode()) for text, _ in batch)


@contextlib.contextmanager
def _progress(files: Sequence[str]):
  """A bar, moved by the function of (bytes, tokens) that it gives; compressed files have no end."""
  from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

  compressed = any(pathlib.Path(f).suffix in COMPRESSED for f in files)
  total = None if compressed else sum(pathlib.Path(f).stat().st_size for f in files)
  text = TextColumn('{task.description}')
  with Progress(BarColumn(), text, TimeElapsedColumn(), TimeRemainingColumn()) as progress:
    task = progress.add_task('tokenizing', total=total)
    started = time.perf_counter()

    def report(size: int, tokens: int) -> None:
      seconds = time.perf_counter() - started
      speed = f'{size / seconds / 1e6:.1f} MB/s  {tokens / seconds:,.0f} tokens/s'
      progress.update(task, completed=size, description=f'{size / 1e6:,.1f} MB  {speed}')

    yield report
    progress.update(task, total=progress.tasks[0].completed)  # a JSON line is more than its text


if __name__ == '__main__':
  cli.run(main)
