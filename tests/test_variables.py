"""Variables on disk, read by slices."""

import ml_dtypes
import numpy as np
import pytest
import tensorstore

from paxlite.variables import layer_of, stacked, stored_variables, transposed, write_variable

VALUE = np.arange(5 * 7 * 3, dtype=np.float32).reshape(5, 7, 3)
INDICES = [
  (slice(None), slice(None), slice(None)),
  (slice(3, 4), slice(None), slice(None)),
  (slice(1, 5), slice(2, 6), slice(1, 3)),
  (slice(2, 2), slice(None), slice(None)),
]


@pytest.mark.parametrize('compressor', [None, {'id': 'zstd', 'level': 1}])
@pytest.mark.parametrize('chunks', [(5, 7, 3), (2, 3, 3), (1, 7, 2)])
def test_slices_over_chunks(compressor, chunks, tmp_path):
  spec = {
    'driver': 'zarr',
    'kvstore': {'driver': 'file', 'path': str(tmp_path / 'a.b')},
    'metadata': {'shape': [5, 7, 3], 'chunks': chunks, 'dtype': '<f4', 'compressor': compressor},
  }
  tensorstore.open(spec, create=True).result().write(VALUE).result()
  variable = stored_variables(tmp_path)['a/b']
  assert variable.shape == (5, 7, 3)
  for index in INDICES:
    np.testing.assert_array_equal(variable.read(index), VALUE[index])
  np.testing.assert_array_equal(layer_of(variable, 2).whole(), VALUE[2])
  both = stacked([layer_of(variable, 4), layer_of(variable, 1)])
  np.testing.assert_array_equal(both.read((slice(1, 2), *INDICES[1][1:])), VALUE[1:2])
  np.testing.assert_array_equal(both.whole(), VALUE[[4, 1]])
  np.testing.assert_array_equal(
    transposed(layer_of(variable, 0)).read((slice(1, 3), slice(2, 6))), VALUE[0, 2:6, 1:3].T
  )


def test_what_is_written_is_read(tmp_path):
  values = {
    'count': np.array(3, np.int32),
    'w': VALUE.astype(ml_dtypes.bfloat16),
    'view': VALUE.transpose(2, 0, 1),
  }
  for name, value in values.items():
    write_variable(tmp_path, name, value)
  found = stored_variables(tmp_path)
  for name, value in values.items():
    assert found[name].dtype == value.dtype
    np.testing.assert_array_equal(found[name].whole(), value)
    stored = tensorstore.open(
      {'driver': 'zarr', 'kvstore': {'driver': 'file', 'path': str(tmp_path / name)}}
    ).result()
    np.testing.assert_array_equal(stored.read().result(), value)
