"""Files of local states: what is read is what was written, or the damage is found."""

import os
import pathlib

import ml_dtypes
import numpy as np
import pytest

from paxlite.core.errors import UserError
from paxlite.local_checkpoints.local_files import DamagedError, LocalFile, LocalFolder, Name

NAME = Name(12, '0123abcd', 3)
SHARDS = {
  ('a/w', ((0, 2), (4, 7))): np.arange(6, dtype=np.float32).reshape(2, 3),
  ('a/b', ((1, 4),)): np.array([1, np.nan, -0.0], ml_dtypes.bfloat16),
  ('step', ()): np.array(12, np.int32),
}


@pytest.fixture
def folder(tmp_path) -> LocalFolder:
  found = LocalFolder(str(tmp_path), pathlib.Path('/runs/a'))
  found.make()
  return found


def write(folder: LocalFolder, name: Name = NAME, kept: bool = True) -> bool:
  return folder.write(name, iter(SHARDS.items()), {'position': [[1, 2]]}, lambda: kept)


def whole(folder: LocalFolder) -> dict:
  file = folder.open(NAME)
  assert file.metadata == {'position': [[1, 2]]}
  return {key: file.read(key) for key in SHARDS}


def test_what_is_read_is_what_was_written(folder):
  assert write(folder)
  assert folder.names() == [NAME]
  for key, array in whole(folder).items():
    assert array.dtype == SHARDS[key].dtype == folder.open(NAME).dtype(key)
    assert array.shape == SHARDS[key].shape
    assert array.tobytes() == SHARDS[key].tobytes()
  assert folder.open(NAME).dtype(('a/w', ((0, 2), (0, 3)))) is None


@pytest.mark.parametrize('size', [1, 1000], ids=['a shorter file', 'a longer file'])
def test_the_pages_of_an_old_file_are_written_over(folder, size):
  old = Name(6, '0123abcd', 3)
  shards = iter([(('other', ((0, size),)), np.zeros(size, np.float32))])
  folder.write(old, shards, {}, lambda: True)
  new = 405  # bytes
  assert ((folder.path / str(old)).stat().st_size < new) is (size == 1)
  number = (folder.path / str(old)).stat().st_ino
  assert folder.write(NAME, iter(SHARDS.items()), {'position': [[1, 2]]}, lambda: True, over=old)
  assert (folder.path / str(NAME)).stat().st_ino == number
  assert os.listdir(folder.path) == [str(NAME)]
  assert (folder.path / str(NAME)).stat().st_size > new
  for key, array in whole(folder).items():
    assert array.tobytes() == SHARDS[key].tobytes()


def test_an_old_file_that_is_gone_is_no_obstacle(folder):
  shards = iter(SHARDS.items())
  assert folder.write(NAME, shards, {}, lambda: True, over=Name(6, '0123abcd', 3))
  assert folder.names() == [NAME]


def test_the_content_of_another_step_is_damage(folder):
  write(folder)
  later = Name(18, '0123abcd', 3)
  (folder.path / str(NAME)).rename(folder.path / str(later))
  with pytest.raises(DamagedError, match=rf'it holds {NAME}\)'):
    folder.open(later)


def test_an_old_file_does_not_count_while_it_is_written_over(folder):
  old = Name(6, '0123abcd', 3)
  write(folder, old)

  def fails():
    yield next(iter(SHARDS.items()))
    assert folder.names() == []
    raise OSError(28, 'No space left on device')

  with pytest.raises(OSError, match='No space left'):
    folder.write(NAME, fails(), {}, lambda: True, over=old)
  assert os.listdir(folder.path) == []


def test_a_changed_byte_anywhere_and_a_shorter_file_are_found(folder):
  write(folder)
  path = folder.path / str(NAME)
  content = path.read_bytes()
  for i in range(0, len(content), 3):
    path.write_bytes(content[:i] + bytes([content[i] ^ 4]) + content[i + 1 :])
    with pytest.raises(DamagedError, match=r'is damaged'):
      whole(folder)
    path.write_bytes(content[:i])
    with pytest.raises(DamagedError, match=r'is damaged'):
      whole(folder)
  path.unlink()
  with pytest.raises(DamagedError, match='cannot be read: No such file'):
    whole(folder)


def test_only_complete_files_have_names(folder):
  assert not write(folder, kept=False)
  with pytest.raises(OSError, match='no space'):
    folder.write(NAME, iter(SHARDS.items()), {}, lambda: _full())
  assert list(folder.path.iterdir()) == []
  (folder.path / f'{NAME}.unfinished').touch()
  (folder.path / 'of-a-user').touch()
  assert folder.names() == []
  folder.remove_unfinished()
  assert [p.name for p in folder.path.iterdir()] == ['of-a-user']


def _full() -> bool:
  raise OSError('no space')


def test_files_are_removed_by_what_their_names_say(folder):
  for step in (3, 20, 100_000_000):
    write(folder, Name(step, '0123abcd', 0))
  folder.remove(lambda name: name.step > 3)
  assert [name.step for name in folder.names()] == [20, 100_000_000]
  folder.remove_if_empty()
  assert folder.path.is_dir()
  folder.remove(lambda name: False)
  folder.remove_if_empty()
  assert not folder.path.exists()
  assert folder.names() == []


def test_a_folder_that_others_can_read_is_refused(tmp_path):
  (tmp_path / f'paxlite-{os.getuid()}').mkdir(mode=0o755)
  with pytest.raises(UserError, match='is accessible to other users:'):
    LocalFolder(str(tmp_path), pathlib.Path('/runs/a')).make()
  (tmp_path / 'file').touch()
  with pytest.raises(UserError, match='cannot be made'):
    LocalFolder(str(tmp_path / 'file'), pathlib.Path('/runs/a')).make()


def test_runs_have_folders_of_their_own(tmp_path):
  paths = {LocalFolder(str(tmp_path), pathlib.Path(p)).path for p in ('/runs/a', '/runs/b')}
  assert len(paths) == 2


def test_a_fifo_is_damaged_at_once(tmp_path):
  os.mkfifo(tmp_path / 'state')
  with pytest.raises(DamagedError, match='it is not a file'):
    LocalFile(tmp_path / 'state')
