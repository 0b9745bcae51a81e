"""Each token of a traced batch is that token of the record that its origin names."""

import json

import numpy as np
import pytest

from paxlite.chats.chat_encoding import ChatEncoding
from paxlite.data import packaged
from paxlite.data.base import RowInput
from paxlite.data.documents import DocumentSource
from paxlite.data.flat_tokens import FlatTokenRows
from paxlite.data.mixture import mixture_of
from paxlite.data.records import read_records
from paxlite.data.streams import StreamInput
from paxlite.data.synthetic import SyntheticRows
from paxlite.data.text import TextRows
from paxlite.data.tokenizer import open_tokenizer
from paxlite.files.text_files import read_text
from paxlite.finetuning.chats.sft import AnswerRows, SftRows
from paxlite.finetuning.preferences.preference_rows import PreferenceRows
from paxlite.run_data.origins import (
  ORIGIN,
  Column,
  length_of,
  names_records,
  num_documents,
  pieces,
  place_of,
  traced,
)
from paxlite.tokenization.flat_tokens_writer import FlatTokensWriter

ENCODING = ChatEncoding(open_tokenizer(packaged.VOCAB), 8192, None)
DOCUMENTS = ChatEncoding(open_tokenizer(packaged.VOCAB), 8192, 0)
SENTENCE = 'once upon a time there lived the king of all rivers, who had no crown'
WORDS = SENTENCE.split(' ')


def text_of(number: int, words: int = 0) -> str:
  words = words or 3 + number * 7 % 40
  return ' '.join(WORDS[(number + i * i) % len(WORDS)] for i in range(words)) + f' {number}'


def write(path, records) -> str:
  if path.suffix == '.csv':
    lines = ['text', *(f'"{r["text"]}"' for r in records)]
    path.write_text('\n'.join(lines) + '\n')
  elif path.suffix == '.json':
    path.write_text(json.dumps(records, indent=1))
  elif path.suffix == '.parquet':
    pa, parquet = map(pytest.importorskip, ('pyarrow', 'pyarrow.parquet'))
    parquet.write_table(pa.Table.from_pylist(records), str(path), row_group_size=7)
  else:
    path.write_text(''.join(json.dumps(r) + '\n' for r in records))
  return str(path)


def documents(folder, suffix: str, files: int, rows, **more) -> StreamInput:
  names = [
    write(folder / f'{f}{suffix}', [{'text': text_of(100 * f + i)} for i in range(30 + f)])
    for f in range(files)
  ]
  return StreamInput(DocumentSource(names, packaged.VOCAB, 8192, **more), 24, 8, rows)


def flat(folder, rows, format='memmap') -> RowInput:
  writer = FlatTokensWriter(str(folder / 'flat'), 'train', 8192, format)
  for i in range(40):
    ids = np.arange(3, 4 + i * 5 % 67) + i
    writer.write(ids, [len(ids)])
  writer.close()
  return RowInput(FlatTokenRows(str(folder / 'flat'), 'train', 16, rows), 8)


def examples(folder) -> list[dict]:
  return [{'prompt': f'{i} times {i}?', 'completion': f' {text_of(i, 4)}'} for i in range(30)]


def made(folder, kind: str):
  match kind.split():
    case ['documents', suffix, files, rows]:
      return documents(folder, suffix, int(files), rows)
    case ['held-out', rows]:
      return documents(folder, '.jsonl', 2, rows, split='train', held_out_every=5)
    case ['flat', rows, format]:
      return flat(folder, rows, format)
    case ['text', rows]:
      for name, first in (('a.txt', 0), ('b.txt', 50)):
        text = '\n\n'.join(text_of(first + i, 60) for i in range(90))
        (folder / name).write_text(text)
      files = [str(folder / 'a.txt'), str(folder / 'b.txt')]
      return RowInput(TextRows(files, packaged.VOCAB, 32, 'train', rows), 8)
    case ['sft', how]:
      path = write(
        folder / 'sft.jsonl', [*examples(folder), {'prompt': 'a', 'completion': ' b' * 80}]
      )
      source = SftRows(
        [path], packaged.VOCAB, 48, 8192, too_long='truncate', packed=how == 'packed'
      )
      return RowInput(source, 8)
    case ['mixture']:
      parts = [
        made(folder, k) for k in ('documents .jsonl 2 packed', 'flat packed memmap', 'sft packed')
      ]
      # rows of one length
      parts[1].source.seq_len = 24
      parts[2] = RowInput(
        SftRows([str(folder / 'sft.jsonl')], packaged.VOCAB, 24, 8192, too_long='skip'), 8
      )
      return mixture_of(parts, [1, 2, 1], 8)
  raise AssertionError(kind)


KINDS = [
  'documents .jsonl 1 stream', 'documents .jsonl 3 packed', 'documents .csv 2 stream',
  'documents .json 1 packed', 'documents .parquet 2 stream', 'held-out packed',
  'flat stream memmap', 'flat packed memmap', 'flat sequences memmap', 'flat packed seqax',
  'text stream', 'text packed', 'sft packed', 'sft alone', 'mixture',
]  # fmt: skip


@pytest.mark.cases(fast=4, slow=1)
@pytest.mark.parametrize('kind', KINDS)
def test_each_token_is_where_its_origin_says(tmp_path, kind):
  data = made(tmp_path, kind)
  plain = data.train_batches(0, slice(0, 8))
  # what two processes have; an input of its own, because streams keep their position
  (tmp_path / 'again0').mkdir()
  (tmp_path / 'again4').mkdir()
  halves = [
    made(tmp_path / f'again{rows.start}', kind).train_batches(0, rows)
    for rows in (slice(0, 4), slice(4, 8))
  ]
  tokens = 0
  whole_batches = traced(data).train_batches(0, slice(0, 8))
  for batch, whole, *parts in zip(whole_batches, plain, *halves, strict=True):
    origin = batch[ORIGIN]
    for name, array in whole.items():
      np.testing.assert_array_equal(batch[name], array)
      np.testing.assert_array_equal(np.concatenate([p[name] for p in parts]), array)
    assert batch.keys() == {*whole, ORIGIN}
    np.testing.assert_array_equal(origin[..., Column.TOKEN] >= 0, is_text(batch))
    for row in range(8):
      found = pieces(batch, row)
      assert sum(p.end - p.start for p in found) == is_text(batch)[row].sum()
      for piece in found:
        ids = batch['labels'][row, piece.start : piece.end]
        expected = record_tokens(data, piece.key)
        assert names_records(data, piece.key)
        if (length := length_of(data, piece.key)) is not None:
          assert piece.token + len(ids) <= length + (piece.token == 1)
        np.testing.assert_array_equal(ids, expected[piece.token : piece.token + len(ids)])
        tokens += len(ids)
    if tokens > 2000:
      break
  assert tokens > 1000


def is_text(batch) -> np.ndarray:
  return batch['segment_ids'] > 0 if 'segment_ids' in batch else batch['weights'] > 0


RECORDS: dict = {}


def record_tokens(data, key) -> np.ndarray:
  """Returns the tokens of a document, read from its place by other code than the input's."""
  place = place_of(data, key)
  if place.unknown:  # flat tokens
    assert 'names of the files' in place.unknown
    i = key[Column.DOCUMENT]
    assert f'document {i},' in str(place)
    return np.arange(3, 4 + i * 5 % 67) + i
  if place.detail:
    first, last = (int(n) for n in place.detail.removeprefix('characters ').split(' to '))
    text = read_text(place.source)
    assert place.record == 1 + text[:first].count('\n')
    return DOCUMENTS.document(text[first : last + 1])
  records = RECORDS.setdefault(place.source, dict(read_records(place.source)))
  record = records[f'{place.source}:{place.record}']
  if 'text' in record:
    return DOCUMENTS.document(record['text'])
  return ENCODING.pair(record['prompt'], record['completion']).ids


def test_how_many_documents_there_are(tmp_path):
  assert num_documents(documents(tmp_path, '.jsonl', 2, 'stream')) == 61
  held = documents(tmp_path, '.jsonl', 2, 'stream', split='held_out', held_out_every=5)
  left = documents(tmp_path, '.jsonl', 2, 'stream', split='train', held_out_every=5)
  assert num_documents(held) + num_documents(left) == 61
  assert num_documents(flat(tmp_path, 'stream')) == 40
  assert num_documents(RowInput(SyntheticRows(99, 8), 2)) is None


def test_answers_and_pairs_name_their_records(tmp_path):
  turns = [{'role': r, 'content': f'{r} {i}'} for i in range(2) for r in ('user', 'assistant')]
  path = write(tmp_path / 'chats.jsonl', [{'messages': turns}] * 3)
  template = '{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}'
  source = AnswerRows([path], packaged.VOCAB, 64, 8192, chat_template=template)
  assert [str(source.place_of(i)) for i in range(6)] == [f'{path}:{1 + i // 2}' for i in range(6)]
  records = [{'prompt': f'{i}?', 'chosen': ' yes', 'rejected': ' no'} for i in range(3)]
  path = write(tmp_path / 'pairs.jsonl', records)
  source = PreferenceRows([path], packaged.VOCAB, 64, 8192)
  assert [str(source.place_of(i)) for i in range(6)] == [f'{path}:{1 + i // 2}' for i in range(6)]


class Own:
  """A source that a user defines, which knows nothing of places."""

  max_token_id, name = 9, 'of my own'

  def __len__(self):
    return 5

  def read(self, indices):
    ids = np.tile(np.arange(4, dtype=np.int32), (len(indices), 1))
    return {'ids': ids, 'labels': ids, 'weights': np.ones(ids.shape, np.float32)}


@pytest.mark.parametrize(
  ('source', 'why'),
  [(Own(), 'does not name the origin of its sequences'), (SyntheticRows(9, 4), 'random numbers')],
)
def test_what_is_not_known_is_said(source, why):
  data = RowInput(source, 2)
  batch = next(traced(data).train_batches(3, slice(0, 2)))
  (piece,) = pieces(batch, 1)
  assert (piece.start, piece.end, piece.token) == (0, 4, None)
  assert why in str(place_of(data, piece.key))
  assert not names_records(data, piece.key)
