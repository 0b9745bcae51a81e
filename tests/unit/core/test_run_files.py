"""A run writes into its own folder, and not through links that somebody put there."""

import os
import subprocess
import sys

import pytest

from paxlite.core.errors import UserError
from paxlite.core.run_files import open_file, write_file
from paxlite.files.folder_lock import FolderLock
from tests.support import runs


def test_links_are_not_followed(tmp_path):
  victim, link = tmp_path / 'victim', tmp_path / 'link'
  victim.write_text('precious')
  link.symlink_to(victim)
  for mode in ('w', 'a', 'a+', 'wb', 'r+'):
    with pytest.raises(OSError, match='symbolic links'):
      open_file(link, mode)
  (tmp_path / 'link.tmp').symlink_to(victim)
  with pytest.raises(OSError, match='symbolic links'):
    write_file(link, b'other')
  (tmp_path / 'link.tmp').unlink()
  write_file(link, b'other')
  assert victim.read_text() == 'precious'
  assert not link.is_symlink()
  assert link.read_text() == 'other'


def test_a_link_in_place_of_the_lock(tmp_path):
  victim = tmp_path / 'victim'
  victim.write_text('precious')
  (tmp_path / '.lock').symlink_to(victim)
  with pytest.raises(UserError, match=r'cannot be written: .*symbolic links'):
    FolderLock(tmp_path).acquire()
  assert victim.read_text() == 'precious'


@pytest.mark.slow
def test_links_in_place_of_every_file_of_a_run(tmp_path):
  """Each file of a run becomes a link to another file. The run continues and changes no target."""
  folder, victims = tmp_path / 'run', tmp_path / 'victims'
  runs.run(folder, '--fdl.MAX_STEPS=2')
  victims.mkdir()
  names = [p for p in folder.rglob('*') if p.is_file() and 'checkpoints' not in p.parts]
  for i, path in enumerate(names):
    if path.name == '.lock':
      continue
    victim = victims / str(i)
    path.rename(victim)
    path.symlink_to(victim)
  before = {p: p.read_bytes() for p in victims.iterdir()}
  done = runs.run(folder, '--fdl.MAX_STEPS=3')
  assert {p: p.read_bytes() for p in victims.iterdir()} == before, done.stderr
  assert 3 in runs.losses(folder)


@pytest.mark.cases(fast=0, slow=2)
@pytest.mark.slow
@pytest.mark.parametrize('make', [os.mkfifo, lambda path: path.symlink_to('/dev/null')])
@pytest.mark.parametrize('name', ['experiment.json.tmp', '.lock', 'goodput/attempt_00007.json'])
def test_files_that_somebody_puts_where_a_run_writes(tmp_path, name, make):
  """The run ends with a message or continues, and waits for nothing."""
  (tmp_path / 'goodput').mkdir()
  make(tmp_path / name)
  done = runs.run(tmp_path, '--fdl.MAX_STEPS=1', code=None)
  assert done.returncode in (0, 1, 2)
  assert done.returncode == 0 or name in done.stderr
  assert 'Traceback' not in done.stderr


def test_a_full_disk_is_no_error_of_a_lock(tmp_path):
  """The holder's name, which the disk did not take, would be written again on closing the file."""
  program = f"""
import pathlib, resource
from paxlite.files.folder_lock import FolderLock
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # each write fails
lock = FolderLock(pathlib.Path({str(tmp_path)!r}))
lock.acquire()
lock.release()
"""
  result = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True)
  assert result.returncode == 0, result.stderr
