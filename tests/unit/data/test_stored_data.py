"""Datasets in a bucket equal those in a folder, and are fetched before they are needed."""

import threading

import numpy as np
import pytest

from paxlite.core.errors import UserError
from paxlite.data import flat_tokens, packaged
from paxlite.data.base import RowInput
from paxlite.data.flat_tokens import FlatTokenRows
from paxlite.data.records import open_records, read_records
from paxlite.stores.object_store import ObjectStore
from paxlite.tokenization.commands import tokenize
from paxlite.tokenization.flat_tokens_writer import FlatTokensWriter


def write(path, documents, format='memmap'):
  writer = FlatTokensWriter(str(path), 'train', 500, format)
  for document in documents:
    writer.write(document.astype(np.uint32), [len(document)])
  writer.close()


def put(store, folder, key):
  for path in folder.rglob('*'):
    if path.is_file():
      store.upload(f'{key}/{path.relative_to(folder).as_posix()}', path)


@pytest.mark.cases(fast=2, slow=1)
@pytest.mark.parametrize('kind', ['stream', 'packed', 'sequences'])
@pytest.mark.parametrize('format', ['memmap', 'seqax'])
def test_flat_tokens(store, tmp_path, kind, format):
  rng = np.random.default_rng(0)
  write(tmp_path / 'd', [rng.integers(0, 500, rng.integers(1, 60)) for _ in range(200)], format)
  put(store, tmp_path / 'd', 'data')
  here = FlatTokenRows(str(tmp_path / 'd'), 'train', 16, kind)
  there = FlatTokenRows('gs://bkt/data', 'train', 16, kind)
  assert there.fingerprint == here.fingerprint, 'a run may continue with the other one'
  assert len(there) == len(here)
  assert there.read_ahead == (16 if format == 'memmap' else 0)
  for batch, expected in zip(batches(there), batches(here), strict=True):
    for name in expected:
      np.testing.assert_array_equal(batch[name], expected[name])


@pytest.mark.parametrize('kind', ['stream', 'packed', 'sequences'])
def test_more_documents_than_are_kept_in_memory(store, tmp_path, kind, monkeypatch):
  rng = np.random.default_rng(0)
  write(tmp_path / 'd', [rng.integers(0, 500, rng.integers(1, 60)) for _ in range(200)])
  put(store, tmp_path / 'd', 'data')
  here = FlatTokenRows(str(tmp_path / 'd'), 'train', 16, kind)
  monkeypatch.setattr(flat_tokens, '_STARTS_IN_MEMORY', 0)
  there = FlatTokenRows('gs://bkt/data', 'train', 16, kind)
  for batch, expected in zip(batches(there), batches(here), strict=True):
    for name in expected:
      np.testing.assert_array_equal(batch[name], expected[name])


def batches(rows):
  found = RowInput(rows, 4).train_batches(3, slice(0, 4))
  return [next(found) for _ in range(40)]


def test_rows_are_asked_for_ahead(store, tmp_path):
  """The order is shuffled, so that only the input knows which rows come next."""
  write(tmp_path / 'd', [np.arange(16)] * 64)
  put(store, tmp_path / 'd', 'data')
  rows = FlatTokenRows('gs://bkt/data', 'train', 16)
  asked, read = [], []
  rows.will_read = lambda indices: asked.append(indices.tolist())
  found = RowInput(rows, 4).train_batches(0, slice(0, 4))
  take = rows.read
  rows.read = lambda indices: (read.append(indices.tolist()), take(indices))[1]
  for _ in range(5):
    next(found)
  assert len(asked) == 16 + 5
  assert asked[:5] == read, 'the first batch, too'
  assert read[0] != [0, 1, 2, 3]


def test_starts_of_documents_are_fetched_at_once(store, tmp_path, monkeypatch):
  """A request waits here until those for all three blocks of starts are under way."""
  writer = FlatTokensWriter(str(tmp_path / 'd'), 'train', 500, 'memmap')
  writer.write(np.arange(140_000, dtype=np.uint32) % 500, np.arange(1, 140_001))
  writer.close()
  put(store, tmp_path / 'd', 'data')
  monkeypatch.setattr(flat_tokens, '_STARTS_IN_MEMORY', 0)
  rows = FlatTokenRows('gs://bkt/data', 'train', 16, 'sequences')
  together, take = threading.Barrier(3), ObjectStore.read_range

  def read_range(self, name, *args):
    if self.address(name).endswith('seq_starts.bin'):
      together.wait(timeout=20)
    return take(self, name, *args)

  monkeypatch.setattr(ObjectStore, 'read_range', read_range)
  indices = np.array([40_000, 70_000, 100_000])
  rows.will_read(indices)
  np.testing.assert_array_equal(rows.read(indices)['labels'][:, 0], indices % 500)


def test_records(store, tmp_path):
  texts = [f'{{"text": "document {i}"}}' for i in range(1000)]
  (tmp_path / 'a.jsonl').write_text('\n'.join(texts))
  store.upload('a.jsonl', tmp_path / 'a.jsonl')
  store.write('b.csv', b'text,n\none,1\ntwo,2\n')
  here = open_records(str(tmp_path / 'a.jsonl'))
  there = open_records('gs://bkt/a.jsonl')
  assert (there.size, there.fingerprint) == (here.size, here.fingerprint)
  assert list(there.read(0, 400)) == list(here.read(0, 400))
  assert list(read_records('gs://bkt/b.csv'))[1] == ('gs://bkt/b.csv:3', {'text': 'two', 'n': '2'})
  with pytest.raises(UserError, match=r'gs://bkt/c\.jsonl'):
    open_records('gs://bkt/c.jsonl')


def test_parquet(store, tmp_path):
  import pyarrow
  from pyarrow import parquet

  table = pyarrow.table({'text': ['a', 'b', 'c']})
  parquet.write_table(table, tmp_path / 'a.parquet', row_group_size=2)
  store.upload('a.parquet', tmp_path / 'a.parquet')
  assert [r['text'] for _, r in read_records('gs://bkt/a.parquet')] == ['a', 'b', 'c']


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize('format', ['memmap', 'seqax'])
def test_tokenizing_into_a_bucket(store, tmp_path, format, monkeypatch, capsys):
  """A copy that fails is done again by the same command, which does not tokenize again."""
  store.write('a.jsonl', b'{"text": "Once upon a time"}\n{"text": "there was a king"}\n')
  arguments = ['gs://bkt/a.jsonl', f'--vocab={packaged.VOCAB}', '--processes=1']
  arguments.append(f'--format={format}')
  tokenize.main([*arguments, f'--output={tmp_path}/here'])
  upload, there = ObjectStore.upload, [*arguments, '--output=gs://bkt/there']
  last = 'train/' + {'memmap': 'meta.json', 'seqax': '.zattrs'}[format]

  def fail(self, key, path):
    if key == last:
      raise OSError(5, 'the connection was reset')
    upload(self, key, path)

  with monkeypatch.context() as m:
    m.setattr(ObjectStore, 'upload', fail)
    with pytest.raises(UserError, match=r'gs://bkt/there cannot be written: .* the command again'):
      tokenize.main(there)
  capsys.readouterr()
  tokenize.main(there)
  assert capsys.readouterr().out == 'gs://bkt/there/train: copied\n'
  for name, value in FlatTokenRows(f'{tmp_path}/here', 'train', 4).read(np.arange(2)).items():
    found = FlatTokenRows('gs://bkt/there', 'train', 4).read(np.arange(2))[name]
    np.testing.assert_array_equal(found, value)
  with pytest.raises(UserError, match=r'gs://bkt/there/train exists'):
    tokenize.main(there)
