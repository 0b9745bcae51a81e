"""Files of a run and their copies in an object store."""

import pytest

from paxlite.stores import mirror
from paxlite.stores.object_store import ObjectStore

RUN = 'gs://bkt/run'


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
  monkeypatch.setattr(mirror, '_PIECE', 10)


def mirror_of(folder):
  folder.mkdir(exist_ok=True)
  return mirror.Mirror(ObjectStore(RUN), folder)


def files(folder):
  return {
    p.relative_to(folder).as_posix(): p.read_bytes()
    for p in folder.rglob('*')
    if p.is_file() and not p.name.startswith('.')
  }


def objects(gcs):
  return {name: content for name, (_, content) in gcs.objects['bkt'].items()}


def test_growing_files_are_copied_in_pieces(gcs, tmp_path):
  here, there = tmp_path / 'here', tmp_path / 'there'
  one = mirror_of(here)
  (here / 'checkpoints/checkpoint_00000001').mkdir(parents=True)
  (here / 'checkpoints/checkpoint_00000001/x').write_bytes(b'not copied here')
  (here / 'goodput').mkdir()
  (here / 'goodput/a.json').write_bytes(b'{}')
  (here / 'metrics.jsonl').write_bytes(b'0123456789abcde')
  one.upload()
  assert objects(gcs) == {
    'run/goodput/a.json': b'{}',
    'run/metrics.jsonl': b'0123456789',
    'run/metrics.jsonl.piece00001': b'abcde',
  }
  with (here / 'metrics.jsonl').open('ab') as f:
    f.write(b'fgh')
  before = len(gcs.requests)
  one.upload()
  assert gcs.requests[before:] == [('PUT', '/bkt/run/metrics.jsonl.piece00001')]
  one.upload()
  assert len(gcs.requests) == before + 1, 'nothing has changed'
  mirror_of(there).download()
  assert files(there) == {'goodput/a.json': b'{}', 'metrics.jsonl': b'0123456789abcdefgh'}


def test_a_file_that_was_cut_or_renamed(gcs, tmp_path):
  one = mirror_of(tmp_path)
  (tmp_path / 'metrics.jsonl').write_bytes(b'x' * 35)
  (tmp_path / 'old').write_bytes(b'1')
  one.upload()
  (tmp_path / 'metrics.jsonl').write_bytes(b'x' * 12)
  (tmp_path / 'old').rename(tmp_path / 'damaged_old')
  one.upload()
  assert objects(gcs) == {
    'run/metrics.jsonl': b'x' * 10,
    'run/metrics.jsonl.piece00001': b'xx',
    'run/damaged_old': b'1',
  }


def test_the_next_start_continues_with_its_own_files(gcs, tmp_path):
  one = mirror_of(tmp_path)
  (tmp_path / 'a').write_bytes(b'1')
  (tmp_path / 'b').write_bytes(b'2')
  one.upload()
  (tmp_path / 'a').write_bytes(b'newer, and not copied yet')
  (tmp_path / 'b').unlink()  # by its user
  again = mirror_of(tmp_path)
  again.download(resumes=True)
  assert files(tmp_path) == {'a': b'newer, and not copied yet', 'b': b'2'}
  again.upload()
  assert objects(gcs)['run/a'] == b'newer, and'
  assert objects(gcs)['run/b'] == b'2'


def test_files_of_an_earlier_history_are_replaced(gcs, tmp_path):
  here, there = tmp_path / 'here', tmp_path / 'there'
  one, other = mirror_of(here), mirror_of(there)
  (there / 'metrics.jsonl').write_bytes(b'of another attempt')
  (there / 'left').write_bytes(b'1')
  (here / 'metrics.jsonl').write_bytes(b'mine')
  one.upload()
  other.download()
  assert files(there) == {'metrics.jsonl': b'mine'}


def test_markers_of_folders_are_no_files(gcs, tmp_path):
  gcs.put('/bkt/run/metrics.jsonl', b'1')
  gcs.put('/bkt/run/.hidden', b'1')
  for marker in ('run/', 'run/goodput/', 'run/checkpoints/'):
    gcs.put(f'/bkt/{marker}')
  mirror_of(tmp_path).download()
  assert [p.name for p in tmp_path.iterdir()] == ['metrics.jsonl']


def test_files_are_not_deleted_because_the_folder_is_gone(gcs, tmp_path):
  one = mirror_of(tmp_path / 'run')
  (tmp_path / 'run/a').write_bytes(b'1')
  one.upload()
  (tmp_path / 'run').rename(tmp_path / 'moved')
  with pytest.raises(FileNotFoundError, match='its files are gone; none is deleted'):
    one.upload()
  assert objects(gcs) == {'run/a': b'1'}


def test_a_list_without_the_lease_is_not_believed(gcs, tmp_path):
  (tmp_path / 'metrics.jsonl').write_bytes(b'1')
  one = mirror.Mirror(ObjectStore(RUN), tmp_path, 'lease.json')
  with pytest.raises(OSError, match=r'gs://bkt/run/lease\.json is missing in its list'):
    one.download()
