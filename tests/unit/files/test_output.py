"""Files that commands write into a bucket, or to a path."""

import os

import pytest

from paxlite.core.errors import UserError
from paxlite.files.output import check_output, exists, write_output


@pytest.fixture
def objects(gcs):
  return gcs.objects['bkt']


def test_a_file_is_written_to_an_address(objects):
  check_output('--json', 'gs://bkt/a/x.json')
  assert not objects
  assert not exists('gs://bkt/a/x.json')
  write_output('gs://bkt/a/x.json', b'{}')
  assert objects['a/x.json'][1] == b'{}'
  assert exists('gs://bkt/a/x.json')
  assert exists('gs://bkt/a')


def test_what_cannot_be_written_is_said_before_the_work(objects, tmp_path):
  with pytest.raises(UserError, match='gs://none: bucket none does not exist: create it'):
    check_output('--json', 'gs://none/x.json')
  (tmp_path / 'file').touch()
  with pytest.raises(UserError, match=r'--json=.*file/x cannot be written: '):
    check_output('--json', f'{tmp_path}/file/x')
  with pytest.raises(UserError, match='it names a folder'):
    check_output('--json', str(tmp_path))


def test_a_pipe_is_not_replaced_by_a_file(tmp_path):
  pipe = tmp_path / 'pipe'
  os.mkfifo(pipe)
  reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
  check_output('--json', str(pipe))
  write_output(str(pipe), b'{}')
  assert os.read(reader, 10) == b'{}'
  assert pipe.is_fifo()
  os.close(reader)
