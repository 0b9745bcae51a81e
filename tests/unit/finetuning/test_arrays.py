"""Files of arrays: the bytes of np.save, and errors that say why and where."""

import errno
import re
import resource

import jax.numpy as jnp
import numpy as np
import pytest

from paxlite.finetuning.reference_values import write_array
from tests.support import runs

SHAPES = [(), (0, 3), (5,), (3, 4), (2, 3, 4)]


@pytest.mark.parametrize('dtype', ['float32', 'int8', 'uint16', 'bool', jnp.bfloat16])
@pytest.mark.parametrize('shape', SHAPES)
def test_the_bytes_are_those_of_numpy(tmp_path, shape, dtype):
  drawn = np.random.default_rng(len(shape)).integers(0, 2, shape).astype(dtype)
  for array in (drawn, drawn.T, np.broadcast_to(drawn, (2, *shape))):
    write_array(tmp_path / 'ours.npy', array)
    np.save(tmp_path / 'theirs.npy', np.asarray(array, order='C'))
    assert (tmp_path / 'ours.npy').read_bytes() == (tmp_path / 'theirs.npy').read_bytes()


@pytest.mark.parametrize('share', [0.0, 0.01, 0.5, 0.99])
def test_a_full_disk_is_named_and_the_old_file_stays(tmp_path, share):
  """np.save says only how many values are missing."""
  path, old, new = tmp_path / 'x.npy', np.ones(3), np.ones(100_000)
  write_array(path, old)
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (int(share * new.nbytes), before[1]))
  try:
    with pytest.raises(OSError, match=re.escape(str(path))) as error:
      write_array(path, new)
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
  assert error.value.errno == errno.EFBIG
  np.testing.assert_array_equal(np.load(path), old)
  assert [p.name for p in tmp_path.iterdir()] == ['x.npy']


def test_no_other_code_writes_arrays():
  writes = re.compile(r'\bnp\.savez?\(|\.tofile\(')
  files = (runs.ROOT / 'paxlite').rglob('*.py')
  assert [p.name for p in files if writes.search(p.read_text())] == []
