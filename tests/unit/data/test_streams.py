"""The order of a stream's rows depends on the data and the batch size, not on the processes."""

import dataclasses
import itertools
import json

import numpy as np
import pytest

from paxlite.core.errors import UserError
from paxlite.data import packaged, streams
from paxlite.data.base import RowInput
from paxlite.data.documents import Document, DocumentSource
from paxlite.data.mixture import mixture_of
from paxlite.data.positions import Field, merged
from paxlite.data.streams import StreamInput
from paxlite.data.synthetic import SyntheticRows
from paxlite.training.train_data import TrainData

B, T = 8, 6


@dataclasses.dataclass
class Shards:
  """A Dataset whose shards hold documents of different lengths; every token occurs once."""

  first: int
  num_shards: int
  rate: float = 1.0
  documents: int = 9
  name = 'shards'

  @property
  def fingerprint(self) -> int:
    return self.first

  @property
  def shard_bytes(self):
    return [float(1 << 20)] * self.num_shards

  def examples(self, shard, shuffle, seed, start):
    order = np.random.default_rng([seed or 0, shard]).permutation(self.documents)
    for number in range(start, self.documents):
      document = int(order[number])
      at = self.first + 1000 * shard + 20 * document
      yield number, Document(np.arange(at, at + 3 + document % 8 * 2))


class Source:
  name, max_token_id, start_id = 'a source', 10**6, 0

  def __init__(self, *datasets: Shards):
    self.datasets = datasets


# one, two and eight readers; datasets of different numbers of shards; a mixture with random access
INPUTS = {
  'one shard': lambda rows: StreamInput(Source(Shards(0, 1)), T, B, rows),
  'five shards': lambda rows: StreamInput(Source(Shards(0, 5)), T, B, rows),
  'two shards': lambda rows: StreamInput(Source(Shards(0, 2)), T, B, rows),
  'many shards': lambda rows: StreamInput(Source(Shards(0, 16)), T, B, rows),
  'datasets': lambda rows: StreamInput(
    Source(Shards(0, 16, 3.0), Shards(50_000, 1), Shards(90_000, 2)), T, B, rows
  ),
  'mixture': lambda rows: mixture_of(
    [
      RowInput(SyntheticRows(100, T), 1),
      StreamInput(Source(Shards(0, 16)), T, 1, rows),
      StreamInput(Source(Shards(50_000, 1), Shards(90_000, 2)), T, 1, rows),
    ],
    [1.0, 2.0, 1.0],
    B,
  ),
}
each_input = pytest.mark.parametrize('kind', INPUTS)
each_kind_of_rows = pytest.mark.parametrize('rows', ['stream', 'packed'])


def read(make, processes: int, start: int, count: int, position=None):
  """Returns the labels of global batches [count, B, T] and the position after them."""
  found, known = [], []
  for process in range(processes):
    data = make()
    if position is not None:
      data.seek(start, position)
    mine = slice(process * B // processes, (process + 1) * B // processes)
    batches = itertools.islice(data.train_batches(start, mine), count)
    found.append([b['labels'] for b in batches])
    known.append(data.position(start + count))
  return np.concatenate(found, axis=1), merged(np.stack(known))


@pytest.mark.cases(fast=4, slow=1)
@each_input
@each_kind_of_rows
def test_any_number_of_processes_reads_the_same_batches(kind, rows):
  """Also if it changes at random steps. The steps are more than an epoch of most readers."""
  make = lambda: INPUTS[kind](rows)
  whole, end = read(make, 1, 0, 60)
  rng = np.random.default_rng(0)
  at, position, parts = 0, None, []
  while at < 60:
    count = min(60 - at, int(rng.integers(1, 12)))
    found, position = read(make, int(rng.choice([1, 2, 4, 8])), at, count, position)
    position = np.array(json.loads(json.dumps(position.tolist())), np.int64)  # as metadata holds it
    parts.append(found)
    at += count
  np.testing.assert_array_equal(np.concatenate(parts), whole)
  np.testing.assert_array_equal(position, end)


def test_processes_whose_rows_are_no_readers_read_the_same():
  make = lambda: INPUTS['many shards']('packed')
  whole = read(make, 1, 0, 9)[0]
  for mine in (slice(0, 3), slice(3, 8), slice(2, 7)):
    found = [b['labels'] for b in itertools.islice(make().train_batches(0, mine), 9)]
    np.testing.assert_array_equal(found, whole[:, mine])


@pytest.mark.parametrize(
  ('sizes', 'batch_size', 'readers'),
  [
    ([1e9], 8, 1),
    ([1e9] * 2, 8, 2),
    ([1e9] * 1024, 64, 8),
    ([1e9] * 1024, 12, 4),  # a divisor of the batch size
    ([1e9] * 1024, 7, 1),
    ([1e9, 5e8], 8, 1),  # the smaller file would be read twice as often
    ([1e9] * 7, 8, 1),
    ([1e9] * 30, 8, 2),  # 8, 8, 7 and 7 files are less even
    ([1e5] * 8, 8, 1),  # small data may hold too few rows for each reader
    ([4e5] * 8, 8, 2),
  ],
)
def test_the_number_of_readers(sizes, batch_size, readers):
  assert streams._num_readers(sizes, batch_size) == readers


def test_processes_share_the_work(monkeypatch):
  read_by = []
  examples = Shards.examples

  def counted(self, shard, *args):
    for found in examples(self, shard, *args):
      read_by.append(shard)
      yield found

  monkeypatch.setattr(Shards, 'examples', counted)
  counts = {}
  for processes in (1, 2, 4, 8, 16):
    read_by.clear()
    data = StreamInput(Source(Shards(0, 16, documents=400)), T, 16, 'stream')
    list(itertools.islice(data.train_batches(0, slice(0, 16 // processes)), 100))
    counts[processes] = len(read_by)
  for processes in (2, 4, 8, 16):  # two of 16 have the same reader
    assert counts[1] / counts[processes] == pytest.approx(min(processes, 8), rel=0.05)


def test_every_batch_has_each_dataset_by_its_rate():
  """Sub-batches are at different places of the order of datasets, and each reader is used."""
  data = StreamInput(Source(Shards(0, 8, 3.0), Shards(50_000, 8, 1.0)), T, B, 'packed')
  found, position = read(lambda: data, 1, 0, 200)
  of_second = (found[:, :, 0] >= 50_000).sum(axis=1)
  np.testing.assert_array_equal(of_second, 2)
  table = position.reshape(8, 2, -1)
  assert (table[:, :, Field.SUB_BATCHES] == 8).all()
  used = np.unique(found[:, :, 0] // 1000)
  np.testing.assert_array_equal(used, [*range(8), *range(50, 58)])


def test_a_position_in_other_datasets_is_refused():
  _, position = read(lambda: INPUTS['datasets']('packed'), 1, 0, 2)
  for kind in ('many shards', 'mixture'):
    with pytest.raises(UserError, match=r'other sources|has changed since the checkpoint'):
      INPUTS[kind]('packed').seek(2, position)


def test_files_of_documents_are_shared_by_readers(tmp_path, monkeypatch):
  monkeypatch.setattr(streams, '_LEAST_BYTES', 1000)
  paths = [tmp_path / f'{i}.jsonl' for i in range(4)]
  for path in paths:
    path.write_text('{"text": "in the beginning God created the heaven and the earth"}\n' * 40)
  source = DocumentSource([str(p) for p in paths], packaged.VOCAB, 8192)
  data = StreamInput(source, T, B)
  assert data.first_position(B)[0, Field.READERS] == 4
  make = lambda: StreamInput(source, T, B)
  np.testing.assert_array_equal(read(make, 1, 0, 5)[0], read(make, 4, 0, 5)[0])


def test_a_checkpoint_without_a_position_is_refused():
  with pytest.raises(UserError, match='the checkpoint of step 5 has no position'):
    TrainData(INPUTS['one shard']('packed')).resume(5, {})
