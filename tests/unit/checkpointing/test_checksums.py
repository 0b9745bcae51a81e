"""What counts as damage and what does not: a disk that cannot be read proves no damage."""

import errno
import json
import os
import shutil
import subprocess
import sys
import zlib

import pytest

from paxlite.checkpointing.checksums import (
  check_metadata,
  damage,
  fingerprint,
  step_of,
  write_checksums,
)
from paxlite.core.errors import UserError
from tests.support import failing_calls, runs


@pytest.fixture
def folder(tmp_path):
  folder = tmp_path / 'checkpoint_00000003'
  (folder / 'state' / 'w').mkdir(parents=True)
  (folder / 'data').mkdir()
  (folder / 'state' / 'w' / '0.0').write_bytes(b'weights')
  (folder / 'data' / 'metadata').write_text('{"step": 3, "batch_size": 2}')
  write_checksums(folder)
  return folder


@pytest.mark.cases(fast=3)
@failing_calls.NEEDS_A_COMPILER
@pytest.mark.parametrize(
  ('call', 'path'),
  [
    ('open', 'checksums.json'),
    ('read', 'checksums.json'),
    ('open', 'state/w/0.0'),
    ('read', 'state/w/0.0'),
    ('read', 'data/metadata'),
    ('opendir', 'state/w'),
    ('opendir', 'data'),
  ],
)
def test_what_cannot_be_read_is_not_damaged(folder, tmp_path, call, path):
  code = (
    'import pathlib, sys\n'
    'from paxlite.checkpointing.checksums import damage\n'
    'from paxlite.core.errors import UserError\n'
    'try: print("damaged:", damage(pathlib.Path(sys.argv[1])))\n'
    'except UserError as e: print(e)\n'
  )
  library = failing_calls.library(tmp_path)
  for number in (errno.EIO, errno.ESTALE, errno.EMFILE, errno.EACCES):
    env = failing_calls.environment(library, call, path, number, times=1)
    told = subprocess.run(
      [sys.executable, '-c', code, folder], env=os.environ | env, cwd=runs.ROOT,
      capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert told == f'{folder}/{path} cannot be read: {os.strerror(number)}\n'
  assert damage(folder) is None


DEEP = '[' * 200_000


@pytest.mark.parametrize(
  ('contents', 'problem'),
  [
    (DEEP, 'checksums.json is damaged ('),
    (f'{{"a": {DEEP}', 'checksums.json is damaged ('),
    ('', 'checksums.json is damaged ('),
    ('[]', 'checksums.json is damaged (it does not hold a JSON object)'),
    ('null', 'checksums.json is damaged (it does not hold a JSON object)'),
    ('{"a": 1}', 'checksums.json is damaged (a file lacks its size or CRC-32)'),
    ('{"a": [1]}', 'checksums.json is damaged (a file lacks its size or CRC-32)'),
    ('{"a": [1, null]}', 'checksums.json is damaged (a file lacks its size or CRC-32)'),
    ('{"a": [1, Infinity]}', 'checksums.json is damaged (a file lacks its size or CRC-32)'),
    ('{"a": {"1": 1, "2": 2}}', 'checksums.json is damaged (a file lacks its size or CRC-32)'),
    (f'{{"a": [1, {"9" * 5000}]}}', 'checksums.json is damaged ('),
    ('{"../a": [1, 1]}', '../a is missing'),
    ('{}', 'data/metadata is not in checksums.json'),
    ('\udcff', 'checksums.json is damaged ('),
  ],
)  # fmt: skip
def test_whatever_stands_in_the_manifest_is_an_answer(folder, contents, problem):
  (folder / 'checksums.json').write_text(contents, errors='surrogateescape')
  assert (damage(folder) or '').startswith(problem)


@pytest.mark.parametrize('kind', ['none', 'folder', 'fifo', 'link to itself', 'whole folder'])
def test_a_manifest_that_is_no_file(folder, kind):
  path = folder / 'checksums.json'
  path.unlink()
  match kind:
    case 'folder':
      path.mkdir()
    case 'fifo':
      os.mkfifo(path)
    case 'link to itself':
      path.symlink_to(path)
    case 'whole folder':
      shutil.rmtree(folder)
      folder.write_text('a file')
  is_there = kind in ('folder', 'fifo')
  assert damage(folder) == f'checksums.json is {"not a file" if is_there else "missing"}'
  assert fingerprint(folder) is None


def test_a_folder_under_the_name_of_another_step(folder):
  other = folder.rename(folder.with_name('checkpoint_00000010'))
  assert damage(other) == 'it is of step 3, as data/metadata says'
  assert damage(other.rename(folder.with_name('weights'))) is None, 'any other name says nothing'


@pytest.mark.parametrize(
  'metadata', [DEEP, '7', '{"step": "3"}', '{"step": [3]}', '{"step": true}']
)
def test_metadata_that_are_none(folder, metadata):
  (folder / 'data' / 'metadata').write_text(metadata)
  write_checksums(folder)
  assert (damage(folder) or '').startswith('data/metadata is damaged (')


@pytest.mark.parametrize(
  ('name', 'step'),
  [
    ('checkpoint_00000011', 11),
    ('checkpoint_123456789', 123456789),
    ('checkpoint_11', None),
    ('checkpoint_000000011', None),
    ('checkpoint_²', None),
    ('checkpoint_0000000²', None),
    ('checkpoint_٠٠٠٠٠٠١١', None),
    ('checkpoint_', None),
    ('checkpoint_00000011\n', None),
    ('checkpoint_00000011.orbax-checkpoint-tmp', None),
    ('damaged_checkpoint_00000011', None),
    (f'checkpoint_{"9" * 5000}', None),
  ],
)
def test_names_of_steps(name, step):
  assert step_of(name) == step


def test_the_manifest_holds_sizes_and_crcs(folder):
  found = json.loads((folder / 'checksums.json').read_text())
  assert found.keys() == {'state/w/0.0', 'data/metadata'}
  assert found['state/w/0.0'] == [7, zlib.crc32(b'weights')]
  assert fingerprint(folder) == zlib.crc32((folder / 'checksums.json').read_bytes())


@pytest.mark.parametrize(
  'name', ['checkpoint_00000003/_CHECKPOINT_METADATA', 'metadata/notes', 'a']
)
def test_a_fifo_among_the_metadata_of_orbax_is_refused_at_once(tmp_path, name):
  """Orbax would wait for its other end; it reads the metadata of all steps."""
  (tmp_path / 'checkpoint_00000003' / 'state').mkdir(parents=True)
  (tmp_path / 'metadata').mkdir()
  check_metadata(tmp_path)
  os.mkfifo(tmp_path / name)
  with pytest.raises(UserError, match=f'{name} is not a file'):
    check_metadata(tmp_path)
