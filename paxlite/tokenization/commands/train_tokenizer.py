"""paxlite train-tokenizer SOURCES… --vocab_size=8192 --output=tok.model

Trains a SentencePiece tokenizer on the sources of `paxlite tokenize`. Of more than --sample_chars
characters, it uses a fixed random sample, with about 25 bytes of memory per character. White space
is kept, and characters without an id are encoded as bytes, so that decoding always restores the
text.

Example:
  paxlite train-tokenizer books/*.txt --vocab_size=16384 --output=books.model
"""

import argparse
import pathlib
from collections.abc import Iterator, Sequence

from paxlite.cli.parser import Parser, stored
from paxlite.core import shell
from paxlite.core.errors import UserError
from paxlite.files.output import check_output, exists, write_output
from paxlite.files.schemes import is_address
from paxlite.files.text_files import BOM, expanded, line_blocks

_SAMPLE_CHARS = 20_000_000

PARSER = Parser(__doc__)
PARSER.option('sources', 'files and datasets', stored, nargs='+')
PARSER.option('--vocab_size', 'number of ids', int, required=True)
PARSER.option('--output', 'file to write: NAME.model', stored, required=True)
PARSER.option('--field', 'record field (text)', default='text')
PARSER.option('--model_type', '', choices=('unigram', 'bpe'), default='unigram')
PARSER.option('--sample_chars', '(20 million)', int, default=_SAMPLE_CHARS)
PARSER.option(
  '--character_coverage', 'share of characters with ids (0.9995)', float, default=0.9995
)


def main(argv: Sequence[str]) -> None:
  args = PARSER.parsed(argv)
  _check(args)

  from paxlite.data.tokenizer import open_tokenizer
  from paxlite.tokenization.training import sample, train

  pieces, num_chars = sample(_documents(expanded(args.sources), args.field), args.sample_chars)
  model = train(pieces, args.vocab_size, args.model_type, args.character_coverage)
  write_output(args.output, model)
  tokenizer = open_tokenizer(args.output)
  num_bytes = sum(len(piece.encode()) for piece in pieces)
  num_tokens = sum(len(tokenizer.encode_array(piece)) for piece in pieces)
  used = sum(map(len, pieces))
  part = f'{used:,} of {num_chars:,}' if used < num_chars else f'all {num_chars:,}'
  print(
    f'{args.output}: {tokenizer.vocab_size:,} ids, trained on {part} characters, with '
    f'{num_bytes / num_tokens:.2f} bytes per token'
  )
  flags = shell.flags({'VOCAB_PATH': args.output, 'VOCAB_SIZE': tokenizer.vocab_size})
  print(f'Use it with {flags}, or with --vocab of a tool')


def _check(args: argparse.Namespace) -> None:
  """Raises UserError for arguments that would fail after all text is read."""
  if exists(args.output):
    raise UserError(f'--output={args.output} exists: choose another name, or remove it')
  path = pathlib.Path(args.output)
  if path.suffix == '.json' or not (is_address(args.output) or path.parent.is_dir()):
    raise UserError(f'--output={path} must be NAME.model in a folder that exists')
  check_output('--output', args.output)
  for name, least in (('vocab_size', 300), ('sample_chars', 1000)):
    if getattr(args, name) < least:
      raise UserError(f'--{name}={getattr(args, name)} must be at least {least}')
  if not 0.9 <= args.character_coverage <= 1:
    raise UserError(f'--character_coverage={args.character_coverage:g} must be from 0.9 to 1')


def _documents(sources: Sequence[str], field: str) -> Iterator[str]:
  """Yields the documents of the sources; a text file is read block by block."""
  from paxlite.data.documents import check_once
  from paxlite.data.record_files import Text
  from paxlite.data.records import open_records, read_records, text_of

  check_once(sources)
  for source in sources:
    if not isinstance(open_records(source), Text):
      yield from (text_of(record, field, place) for place, record in read_records(source))
      continue
    for first, _, block in line_blocks(source):
      try:
        yield block.removeprefix(BOM if first == 0 else b'').decode('utf-8')
      except UnicodeDecodeError as e:
        line = first + block.count(b'\n', 0, e.start) + 1
        raise UserError(f'{source}:{line} is not UTF-8 (0x{block[e.start]:02x})') from None
