"""Checkpoints in an object store, by a server that enforces preconditions."""

import json
import zlib

import pytest

from paxlite.checkpointing.checksums import damage, write_checksums
from paxlite.processes.hosts import Hosts
from paxlite.stores.object_store import ObjectStore
from paxlite.stores.step_copies import AbandonedError, StepCopies
from tests.support.proxy import proxy

PLACE = 'gs://bkt/run'


def copies(folder, guard=None, **more):
  return StepCopies(ObjectStore(PLACE, guard=guard), 'checkpoints', folder, **more)


def save(folder, step, content=b'weights'):
  """Writes a checkpoint as Checkpoints does."""
  path = folder / f'checkpoint_{step:08d}'
  (path / 'state/w').mkdir(parents=True)
  (path / 'data').mkdir()
  (path / 'state/w/0.0').write_bytes(content)
  (path / 'state/w/empty').write_bytes(b'')
  (path / 'data/metadata').write_text(json.dumps({'step': step}))
  write_checksums(path)
  (path / '_CHECKPOINT_METADATA').write_bytes(b'{}')
  return path


def no_lease():
  raise OSError('the lease could not be renewed in time')


def below(gcs, step):
  return {n for n in gcs.objects['bkt'] if f'checkpoint_{step:08d}/' in n}


def test_a_step_counts_when_its_checksums_are_there(gcs, tmp_path):
  here, there = tmp_path / 'here', tmp_path / 'there'
  save(here, 3)
  copies(here).upload(3)
  last = [path for method, path in gcs.requests if method == 'PUT'][-1]
  assert last.endswith('checksums.json')
  save(here, 6)
  copies(here).upload(6)
  del gcs.objects['bkt']['run/checkpoints/checkpoint_00000006/checksums.json']
  assert copies(there).steps() == [3]
  assert copies(there).newest_good() == 3
  assert damage(there / 'checkpoint_00000003') is None
  assert (there / 'checkpoint_00000003/_CHECKPOINT_METADATA').read_bytes() == b'{}'
  assert copies(there).is_same(3)
  assert copies(there).unfinished() == [6]
  copies(there).remove_unfinished()
  assert not below(gcs, 6)


def test_after_a_failure_the_rest_is_copied(gcs, tmp_path, monkeypatch):
  save(tmp_path, 3)
  one = copies(tmp_path)
  upload = one._store.upload

  def fail(key, path):
    if key.endswith('0.0'):
      raise OSError('the store does not answer')
    upload(key, path)

  monkeypatch.setattr(one._store, 'upload', fail)
  with pytest.raises(OSError, match='does not answer'):
    one.upload(3)
  there = below(gcs, 3)
  assert there
  monkeypatch.setattr(one._store, 'upload', upload)
  before = len(gcs.requests)
  one.upload(3)
  written = {path.removeprefix('/bkt/') for method, path in gcs.requests[before:]}
  assert written == below(gcs, 3) - there
  assert one.steps() == [3]


def test_a_step_of_another_run_is_not_overwritten(gcs, tmp_path):
  save(tmp_path / 'a', 3, b'of a')
  save(tmp_path / 'b', 3, b'of b')
  copies(tmp_path / 'a').upload(3)
  with pytest.raises(AbandonedError, match='already'):
    copies(tmp_path / 'b').upload(3)
  assert not copies(tmp_path / 'b').is_same(3)


def test_nothing_is_written_without_a_lease(gcs, tmp_path):
  save(tmp_path, 3)
  with pytest.raises(OSError, match='not be renewed'):
    copies(tmp_path, guard=no_lease).upload(3)
  assert not below(gcs, 3)


@pytest.mark.parametrize('name', ['state/w/0.0', 'data/metadata', 'checksums.json'])
def test_a_flipped_bit_is_found_and_an_earlier_step_used(gcs, tmp_path, name):
  here, there = tmp_path / 'here', tmp_path / 'there'
  for step in (3, 6):
    save(here, step)
    copies(here).upload(step)
  key = f'run/checkpoints/checkpoint_00000006/{name}'
  generation, content = gcs.objects['bkt'][key]
  gcs.objects['bkt'][key] = generation, bytes([content[0] ^ 1]) + content[1:]
  assert copies(there).newest_good() == 3
  assert damage(there / 'checkpoint_00000006') is not None, 'Checkpoints moves it aside'
  # on the machine that wrote it, the files on the disk are good
  if name != 'checksums.json':
    assert copies(here).newest_good() == 6


def test_a_step_that_only_the_folder_has_is_used_unless_it_is_damaged(gcs, tmp_path):
  save(tmp_path, 3)
  assert copies(tmp_path).newest_good() == 3
  (save(tmp_path, 6) / 'state/w/0.0').write_bytes(b'damaged')
  assert copies(tmp_path).newest_good() == 3


def test_what_is_missing_here_is_copied(gcs, tmp_path):
  path = save(tmp_path, 3)
  copies(tmp_path).upload(3)
  (path / 'state/w/0.0').write_bytes(b'damaged')
  (path / 'data/metadata').unlink()
  before = len(gcs.requests)
  assert copies(tmp_path).newest_good() == 3
  assert damage(path) is None
  read = [p for m, p in gcs.requests[before:] if m == 'GET' and 'state' in p]
  assert not any('empty' in p for p in read)


def test_the_uploader_follows_the_folder(gcs, tmp_path):
  uploader = copies(tmp_path, max_to_keep=2)
  uploader.begin()
  for step in (3, 6, 9):
    save(tmp_path, step)
  assert uploader.pending() == [3, 6, 9]
  uploader.look()
  assert uploader.pending() == []
  assert copies(tmp_path).steps() == [6, 9], 'CHECKPOINT_MAX_TO_KEEP'
  (tmp_path / 'checkpoint_00000009').rename(tmp_path / 'rolled_back_checkpoint_00000009')
  uploader.look()
  assert copies(tmp_path).steps() == [6]
  save(tmp_path, 9, b'after the rollback')
  uploader.look()
  content = gcs.objects['bkt']['run/checkpoints/checkpoint_00000009/state/w/0.0'][1]
  assert content == b'after the rollback'
  before = len(gcs.requests)
  uploader.look()
  assert len(gcs.requests) == before, 'a look costs nothing'


def test_a_later_start_does_not_copy_again(gcs, tmp_path):
  save(tmp_path, 3)
  copies(tmp_path).upload(3)
  again = copies(tmp_path, max_to_keep=2)
  again.begin()
  assert again.pending() == []


def test_a_step_that_is_deleted_while_it_is_copied(gcs, tmp_path):
  path = save(tmp_path, 3)
  uploader = copies(tmp_path, guard=lambda: gone(path), max_to_keep=2)
  uploader.begin()
  uploader.look()
  assert not below(gcs, 3)


def gone(path):
  if path.exists():
    path.rename(path.with_name('deleted'))


def test_a_store_that_has_lost_an_upload_is_asked_again(gcs, tmp_path, monkeypatch):
  """Its 404 does not mean that the step was deleted here."""
  save(tmp_path, 3)
  uploader = one = copies(tmp_path, max_to_keep=2)
  uploader.begin()
  upload = one._store.upload

  def lost(key, path):
    raise FileNotFoundError(2, 'the object does not exist', f'gs://bkt/{key}')

  monkeypatch.setattr(one._store, 'upload', lost)
  with pytest.raises(OSError, match='the store has lost an upload'):
    uploader.look()
  assert uploader.pending() == [3]
  monkeypatch.setattr(one._store, 'upload', upload)
  uploader.look()
  assert copies(tmp_path).steps() == [3]


def test_nothing_is_deleted_without_a_lease(gcs, tmp_path):
  """The step may be that of the run which has taken the lease over."""
  leases = [lambda: None]
  uploader = copies(tmp_path, guard=lambda: leases[-1](), max_to_keep=2)
  for step in (3, 6):
    save(tmp_path, step)
  uploader.begin()
  uploader.look()
  assert copies(tmp_path).steps() == [3, 6]
  (tmp_path / 'checkpoint_00000006').rename(tmp_path / 'rolled_back_checkpoint_00000006')
  leases.append(no_lease)
  with pytest.raises(OSError, match='the lease could not be renewed in time'):
    uploader.look()
  assert copies(tmp_path).steps() == [3, 6]
  leases.append(lambda: None)
  uploader.look()
  assert copies(tmp_path).steps() == [3]


def test_two_hosts_write_one_step(gcs, tmp_path):
  """Each host has the files of its own devices; the checksums are those of all."""
  folders = tmp_path / 'h0', tmp_path / 'h1'
  for host, folder in enumerate(folders):
    path = save(folder, 3)
    (path / 'state/w/0.0').rename(path / f'state/w/0.{host}')
    write_checksums(path)
  copies(folders[1], hosts=Hosts(1, 2)).upload(3)
  assert copies(folders[0]).steps() == []
  copies(folders[0], hosts=Hosts(0, 2)).upload(3)
  assert copies(folders[0]).steps() == [3]
  for host, folder in enumerate(folders):  # a later start; each folder has one host's checksums
    later = copies(folder, hosts=Hosts(host, 2), max_to_keep=2)
    later.begin()
    assert later.pending() == []
  for folder in folders:
    assert copies(folder).newest_good() == 3
    found = json.loads((folder / 'checkpoint_00000003/checksums.json').read_text())
    assert found['state/w/0.1'] == [7, zlib.crc32(b'weights')]
    assert {'state/w/0.0', 'state/w/0.1'} <= found.keys()
    assert damage(folder / 'checkpoint_00000003') is None


def test_a_folder_that_vanishes_deletes_nothing_in_the_store(gcs, tmp_path):
  here = tmp_path / 'here'
  save(here, 3)
  uploader = copies(here, max_to_keep=2)
  uploader.begin()
  uploader.look()
  here.rename(tmp_path / 'cleaned')
  with pytest.raises(FileNotFoundError, match='none is deleted'):
    uploader.look()
  assert copies(here).steps() == [3]


def test_a_step_that_was_saved_again_and_not_copied_is_the_newest(gcs, tmp_path):
  """A run was rolled back, saved the step again, and was killed before it could copy it."""
  path = save(tmp_path, 3)
  copies(tmp_path).upload(3)
  path.rename(tmp_path / 'rolled_back_checkpoint_00000003')
  save(tmp_path, 3, b'after the rollback')
  assert copies(tmp_path).newest_good() == 3
  assert (path / 'state/w/0.0').read_bytes() == b'after the rollback'


def test_many_damaged_files_of_a_step_are_one_warning(gcs, tmp_path, caplog):
  save(tmp_path / 'here', 3)
  copies(tmp_path / 'here').upload(3)
  for name in ('state/w/0.0', 'data/metadata'):
    gcs.put(f'/bkt/run/checkpoints/checkpoint_00000003/{name}', b'else')
  assert not copies(tmp_path / 'there').download(3)
  (record,) = caplog.records
  assert record.getMessage().endswith(
    'damaged (size or CRC-32 differs), and so are 1 more files of this step'
  )


def test_no_steps_are_believed_only_if_the_list_shows_what_is_there(gcs, tmp_path):
  save(tmp_path, 3)
  copies(tmp_path).upload(3)
  gcs.put('/bkt/run/lease.json', b'{}')
  assert copies(tmp_path, known='lease.json').steps() == [3]
  gcs.put('/bkt/run/checkpoints/')
  gcs.put('/bkt/run/checkpoints/checkpoint_00000003/')
  assert copies(tmp_path, known='lease.json').steps() == [3]
  with proxy(gcs.endpoint, mode='list-page') as between:
    store = ObjectStore(PLACE, environment=gcs.environment(between.endpoint))
    with pytest.raises(OSError, match=r'lease\.json is missing in its list'):
      StepCopies(store, 'checkpoints', tmp_path, known='lease.json').steps()
    with pytest.raises(OSError, match='the server is not an object store'):
      StepCopies(store, 'checkpoints/checkpoint_00000003', tmp_path).steps()
