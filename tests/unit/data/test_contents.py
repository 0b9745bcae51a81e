"""Fingerprints of datasets are of contents: they follow a copy, and notice other texts."""

import dataclasses
import json
import pathlib
import random
import shutil
import zlib

import numpy as np
import pytest

from paxlite.contrib.seqio_tasks import SeqioDataset
from paxlite.core.errors import UserError
from paxlite.data import packaged
from paxlite.data.contents import can_compare, checksum, combined, differ, of_files
from paxlite.data.documents import DocumentSource
from paxlite.data.fingerprints import change, identity, is_unknown
from paxlite.data.positions import Field
from paxlite.data.records import open_records
from paxlite.data.streams import StreamInput
from paxlite.data.text import TextRows

DRAWS = pytest.mark.parametrize('draw', range(3))


def drawn(seed: object) -> list[str]:
  """Returns as many texts of the same lengths for any seed."""
  rng = random.Random(repr(seed))
  return [''.join(rng.choices('abcdef ', k=100)) for _ in range(300)]


def write(folder: pathlib.Path, kind: str, texts: list[str]) -> str:
  """Makes a dataset of a kind anew; returns its name."""
  shutil.rmtree(folder, ignore_errors=True)
  if kind == 'saved':
    datasets = pytest.importorskip('datasets')
    whole = datasets.DatasetDict(train=datasets.Dataset.from_dict({'text': texts}))
    whole.save_to_disk(str(folder), num_shards={'train': 3})
    return f'hf:{folder}/train'
  pytest.importorskip('datasets')
  folder.mkdir()
  for i in range(3):
    lines = (json.dumps({'text': text}) + '\n' for text in texts[i * 100 : (i + 1) * 100])
    (folder / f'train-{i}.jsonl').write_text(''.join(lines))
  return f'hf:{folder}/train'


@DRAWS
@pytest.mark.parametrize('kind', ['saved', 'folder'])
def test_a_dataset_that_is_made_again(tmp_path, kind, draw):
  one = open_records(write(tmp_path / 'data', kind, drawn(draw)))
  before = one.fingerprint
  assert [r['text'] for i in range(one.num_shards) for _, r in one.read(i)] == drawn(draw)
  shutil.move(tmp_path / 'data', tmp_path / 'moved')
  moved = open_records(f'hf:{tmp_path}/moved/train')
  assert (moved.fingerprint, moved.num_shards, moved.size) == (before, one.num_shards, one.size)
  other = open_records(write(tmp_path / 'data', kind, drawn((draw, 'other'))))
  assert (other.num_shards, other.size) == (one.num_shards, one.size)
  assert differ(other.fingerprint, before)


def stream(name: str) -> StreamInput:
  return StreamInput(DocumentSource([name], packaged.VOCAB, 8192), 16, 2)


@pytest.mark.parametrize('kind', ['saved', 'folder'])
def test_a_run_goes_on_with_a_dataset_that_moved_and_with_no_other(tmp_path, kind):
  first = stream(write(tmp_path / 'data', kind, drawn(0)))
  known, position = identity(first), first.first_position(2)
  shutil.move(tmp_path / 'data', tmp_path / 'moved')
  moved = stream(f'hf:{tmp_path}/moved/train')
  moved.seek(3, position)
  assert change(identity(moved), known) == ''
  other = stream(write(tmp_path / 'data', kind, drawn(1)))
  with pytest.raises(UserError, match='has changed since the checkpoint'):
    other.seek(3, position)
  assert 'its contents have changed' in change(identity(other), known)


def test_a_run_of_an_earlier_version_goes_on(tmp_path):
  """It has noted 32 bits of the name and the size, which tell nothing of the contents."""
  now = stream(write(tmp_path / 'data', 'folder', drawn(0)))
  former = {'fingerprint': 123_456_789, 'tokens': identity(now)['tokens']}
  assert change(identity(now), former) == ''
  assert is_unknown(identity(now), former)
  assert not is_unknown(identity(now), identity(now))
  position = now.first_position(2)
  position[:, Field.FINGERPRINT] = 123_456_789
  now.seek(3, position)
  assert (now._positions.begin(3)[0][:, Field.FINGERPRINT] > 1 << 32).all()
  assert (position[:, Field.FINGERPRINT] == 123_456_789).all(), 'the caller keeps its own'


@DRAWS
def test_a_seqio_task_over_files(tmp_path, draw):
  """The same files elsewhere are the same data, and others under their names are not."""
  rng = np.random.default_rng(draw)

  def task(folder: str) -> SeqioDataset:
    names = tuple(str(tmp_path / folder / f'task-{i}.tfrecord') for i in range(3))
    return SeqioDataset('task', None, 'train', 1.0, names, 100, 1)

  for folder in ('one', 'two'):
    (tmp_path / folder).mkdir()
  for name in task('one').shards:
    pathlib.Path(name).write_bytes(rng.bytes(200_000))
    shutil.copy(name, tmp_path / 'two')
  one, two = task('one'), task('two')
  assert one.fingerprint == two.fingerprint
  changed = pathlib.Path(two.shards[rng.integers(3)])
  changed.write_bytes(rng.bytes(200_000))
  assert differ(dataclasses.replace(two).fingerprint, one.fingerprint)


def test_of_many_files_some_are_looked_into_and_all_are_measured(tmp_path):
  names = [str(tmp_path / f'{i:03}') for i in range(100)]
  for name in names:
    pathlib.Path(name).write_text('x' * 50)
  whole = of_files(names)
  for i in (0, 99):
    pathlib.Path(names[i]).write_text('y' * 50)
    assert of_files(names) != whole
    pathlib.Path(names[i]).write_text('x' * 50)
  assert of_files(names) == whole
  pathlib.Path(names[41]).write_text('x' * 51)
  assert of_files(names) != whole


@pytest.mark.parametrize('key', ['blob_id', 'ETag'])
def test_files_of_a_hub_are_what_it_states_of_them(monkeypatch, key):
  fsspec = pytest.importorskip('fsspec')
  stated = {'size': 3, key: 'abc'}

  class Hub:
    def info(self, path):
      return stated

  monkeypatch.setattr(fsspec.core, 'url_to_fs', lambda name: (Hub(), name))
  one = of_files(['hf://datasets/a/b@1/c.jsonl'])
  assert of_files(['hf://datasets/a/b@2/c.jsonl']) == one
  stated[key] = 'abd'
  assert of_files(['hf://datasets/a/b@2/c.jsonl']) != one


def test_checksums_of_two_rules_are_not_compared():
  narrow, wide = combined([3, None]), combined([checksum('a'), 3])
  assert narrow < 1 << 32 < wide < 1 << 63
  assert not can_compare(narrow, wide)
  assert not differ(narrow, wide)
  assert differ(narrow, combined([4, None]))
  assert differ(wide, combined([checksum('b'), 3]))
  assert not differ(np.array([narrow, wide]), np.array([wide, wide])).any()


@pytest.mark.parametrize('rows', ['stream', 'packed', 'sequences'])
def test_another_start_id_than_that_of_all_runs_once_is_other_tokens(tmp_path, rows):
  (tmp_path / 'a.txt').write_text('A short text.\n')
  text = lambda start: TextRows([f'{tmp_path}/a.txt'], packaged.VOCAB, 8, 'all', rows, 0.5, start)
  former, begun = text(0), text(None)
  assert former.tokens_fingerprint == zlib.crc32(
    former.tokens.data, zlib.crc32(former.seq_starts.data)
  )
  assert (begun.tokens_fingerprint == former.tokens_fingerprint) is (rows == 'stream')
  task = lambda start: SeqioDataset('task', None, 'train', 1.0, [], 100, 1, start)
  assert [task(start).tokens_fingerprint for start in (0, 1, 2)] == [None, 1, 2]
