"""A folder is complete or absent, and only one process at a time writes it."""

import os
import subprocess
import sys

import pytest

from paxlite.core.errors import UserError
from paxlite.weights.unfinished_folder import unfinished_folder
from tests.support import runs

# Writes 300 files, waits for a line, and writes 300 more.
WRITER = """
import pathlib, sys
from paxlite.core.errors import UserError
from paxlite.weights.unfinished_folder import unfinished_folder
try:
  with unfinished_folder(pathlib.Path(sys.argv[1])) as folder:
    for i in range(600):
      if i == 300:
        print('half', flush=True)
        sys.stdin.readline()
      (folder / str(i)).write_text(sys.argv[2])
except UserError as e:
  sys.exit(f'error: {e}')
"""


def start(folder, name):
  return subprocess.Popen(
    [sys.executable, '-c', WRITER, str(folder), name], cwd=runs.ROOT, stdin=subprocess.PIPE,
    stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
  )  # fmt: skip


def test_of_two_processes_one_writes_and_the_other_reports_it(tmp_path):
  folder = tmp_path / 'new' / 'weights'
  first = start(folder, 'a')
  assert first.stdout.readline() == 'half\n'
  second = start(folder, 'b')
  _, error = second.communicate(timeout=60)
  assert second.returncode == 1
  assert error == (
    f'error: {folder} is being written by another process: wait for it, or choose another folder\n'
  )
  _, error = first.communicate('\n', timeout=60)
  assert (first.returncode, error) == (0, '')
  assert {p.read_text() for p in folder.iterdir()} == {'a'}
  assert len(list(folder.iterdir())) == 600
  assert [p.name for p in folder.parent.iterdir()] == ['weights']


def test_what_a_killed_process_left_is_made_again(tmp_path):
  folder = tmp_path / 'weights'
  killed = start(folder, 'a')
  assert killed.stdout.readline() == 'half\n'
  killed.kill()
  killed.communicate()
  assert not folder.exists()
  again = start(folder, 'b')
  again.communicate('\n', timeout=60)
  assert {p.read_text() for p in folder.iterdir()} == {'b'}
  assert [p.name for p in tmp_path.iterdir()] == ['weights']


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path):
  victim = tmp_path / 'victim'
  victim.write_text('precious')
  os.symlink(victim, tmp_path / '.weights.lock')
  with pytest.raises(UserError, match='cannot be written'), unfinished_folder(tmp_path / 'weights'):
    pass
  assert victim.read_text() == 'precious'


def test_a_failure_leaves_nothing(tmp_path):
  def fail():
    with unfinished_folder(tmp_path / 'weights') as folder:
      (folder / 'x').touch()
      raise KeyError

  with pytest.raises(KeyError):
    fail()
  assert list(tmp_path.iterdir()) == []
