"""The documents that both sides train on, and the files in which each side reads them."""

import json
import pathlib
import random
import shutil
from collections.abc import Iterator

LEAST, MOST = 200, 700  # characters of a document, before the line in which it ends
HELD_OUT_EVERY = 40
_DONE = 'held_out.json'  # what is written last


def documents() -> tuple[list[str], list[str]]:
  """Returns (those of training, those held out), of the texts that ship with paxlite."""
  from paxlite.data import packaged
  from paxlite.files.text_files import read_text

  draw = random.Random(0)
  found = [document for path in packaged.TEXTS for document in _cut(read_text(path), draw)]
  draw.shuffle(found)
  held_out = len(found) // HELD_OUT_EVERY
  return found[held_out:], found[:held_out]


def _cut(text: str, draw: random.Random) -> Iterator[str]:
  """Cuts a text into documents of whole lines.

  They are short, so that most of them fit into a row: nanochat drops what is left of a document
  that does not.
  """
  lines: list[str] = []
  size, enough = 0, draw.randint(LEAST, MOST)
  for line in text.splitlines(keepends=True):
    lines.append(line)
    size += len(line)
    if size >= enough:
      yield ''.join(lines).strip()
      lines, size, enough = [], 0, draw.randint(LEAST, MOST)
  if rest := ''.join(lines).strip():
    yield rest


def write(folder: pathlib.Path, seeds: list[int], vocab_size: int, length: int) -> None:
  """Writes what is not there yet: for paxlite once, and for nanochat in an order for each seed."""
  train, held_out = documents()
  if not (folder / 'paxlite' / _DONE).exists():
    shutil.rmtree(folder / 'paxlite', ignore_errors=True)
    write_for_paxlite(folder / 'paxlite', train, held_out, vocab_size, length)
  for seed in seeds:
    if not (folder / f'nanochat_{seed}' / _DONE).exists():
      shutil.rmtree(folder / f'nanochat_{seed}', ignore_errors=True)
      random.Random(seed).shuffle(ordered := list(train))
      write_for_nanochat(folder / f'nanochat_{seed}', ordered, held_out)


def write_for_nanochat(folder: pathlib.Path, train: list[str], held_out: list[str]) -> None:
  """Writes shards of its format; the last one is held out."""
  import pyarrow as pa
  import pyarrow.parquet as pq

  (folder / 'base_data_climbmix').mkdir(parents=True)
  for number, texts in enumerate((train, held_out)):
    path = folder / 'base_data_climbmix' / f'shard_{number:05d}.parquet'
    pq.write_table(pa.table({'text': texts}), path, row_group_size=1024)
  (folder / _DONE).write_text(json.dumps(held_out))


def write_for_paxlite(
  folder: pathlib.Path, train: list[str], held_out: list[str], vocab_size: int, length: int
) -> None:
  """Writes a tokenizer of the documents of training, flat tokens, and the size of what is held out.

  Held-out documents have no EOS, and those of more than `length` tokens are cut, so that a row of
  one document each has all of their bytes, and nothing else.
  """
  import numpy as np

  from paxlite.data.tokenizer import open_tokenizer, vocabulary_fingerprint
  from paxlite.tokenization.flat_tokens_writer import FlatTokensWriter
  from paxlite.tokenization.training import pieces_of
  from paxlite.tokenization.training import train as train_tokenizer

  folder.mkdir(parents=True)
  pieces = (piece for text in train for piece in pieces_of(text))
  (folder / 'tokenizer.model').write_bytes(train_tokenizer(pieces, vocab_size))
  tokenizer = open_tokenizer(str(folder / 'tokenizer.model'))
  eos = tokenizer.eos_id
  of_train = [[*tokenizer.encode(text), eos] for text in train]
  encoded = [tokenizer.encode(text) for text in held_out]
  rows = [ids[i : i + length] for ids in encoded for i in range(0, len(ids), length)]
  for split, parts in (('train', of_train), ('validation', rows)):
    writer = FlatTokensWriter(str(folder), split, tokenizer.vocab_size)
    ids = np.concatenate([np.array(part, np.int64) for part in parts])
    writer.write(ids, np.cumsum([len(part) for part in parts]))
    writer.close({'tokenizer': vocabulary_fingerprint(tokenizer)})
  size = {'tokens': sum(map(len, rows)), 'bytes': sum(len(text.encode()) for text in held_out)}
  (folder / _DONE).write_text(json.dumps(size))
