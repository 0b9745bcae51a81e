"""Variables on disk, which are read in slices."""

import json
import re
import zlib

import ml_dtypes
import numcodecs
import numpy as np
import pytest
import tensorstore

from paxlite.checkpointing.variables import (
  layer_of,
  stacked,
  stored_variables,
  transposed,
  write_variable,
)
from paxlite.core.errors import UserError

VALUE = np.arange(5 * 7 * 3, dtype=np.float32).reshape(5, 7, 3)
INDICES = [
  (slice(None), slice(None), slice(None)), (slice(3, 4), slice(None), slice(None)),
  (slice(1, 5), slice(2, 6), slice(1, 3)), (slice(2, 2), slice(None), slice(None)),
]  # fmt: skip


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


def described(folder, **changes):
  """Returns a float32 variable [4, 6] in chunks [2, 6] whose description was changed."""
  write_variable(folder, 'x', np.zeros((4, 6), np.float32))
  path = folder / 'x' / '.zarray'
  path.write_text(json.dumps(json.loads(path.read_text()) | changes))
  return path


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'dtype': '|O'}, r"dtype '\|O' is not a type of numbers"),
    ({'dtype': '|V8'}, 'is not a type of numbers'),
    ({'dtype': '<U4'}, 'is not a type of numbers'),
    ({'dtype': '<M8[s]'}, 'is not a type of numbers'),
    ({'dtype': [['a', '<f4']]}, 'is not a type of numbers'),
    ({'dtype': None}, 'is not a type of numbers'),
    ({'dtype': 'object'}, 'is not a type of numbers'),
    ({'shape': [10**12, 6], 'chunks': [1, 6]}, 'chunks are missing'),
    ({'shape': [10**12, 6], 'chunks': [10**12, 6]}, 'bytes and needs'),
    ({'shape': [10**30, 6]}, 'shape has other sizes'),
    ({'shape': [-4, 6]}, 'shape has other sizes'),
    ({'shape': [4.0, 6]}, 'shape has other sizes'),
    ({'shape': [True, 6]}, 'shape has other sizes'),
    ({'shape': '46'}, 'shape is not a list'),
    ({'shape': [1] * 40, 'chunks': [1] * 40}, 'shape is not a list'),
    ({'chunks': [0, 6]}, 'chunks has other sizes than numbers from 1'),
    ({'chunks': [-1, 6]}, 'chunks has other sizes'),
    ({'chunks': [4]}, 'chunks is not a list of as many sizes'),
    ({'chunks': [3, 6]}, 'chunks are missing'),
    ({'order': 'K'}, 'order'),
    ({'dimension_separator': '../'}, 'separator'),
    ({'filters': [{'id': 'pickle'}]}, 'filters'),
    ({'compressor': {'id': 'pickle'}}, "compression by 'pickle'"),
    ({'compressor': 5}, "compression by '5'"),
    ({'compressor': {'id': ['zstd']}}, 'compression by .* is not supported'),
  ],
)
def test_descriptions_of_something_else_than_numbers(tmp_path, changes, message):
  described(tmp_path, **changes)
  with pytest.raises(UserError, match=message):
    stored_variables(tmp_path)


def test_descriptions_that_are_no_objects(tmp_path):
  for i, text in enumerate(('[' * 200_000, 'x', '[]', '"x"', '\xff', '')):
    path = described(tmp_path / str(i))
    path.write_bytes(text.encode('latin-1'))
    with pytest.raises(UserError, match='is damaged'):
      stored_variables(path.parents[1])


@pytest.mark.parametrize('name', ['zstd', 'gzip', 'zlib', 'blosc'])
@pytest.mark.parametrize('order', ['C', 'F'])
def test_compressed_chunks(tmp_path, name, order):
  value = np.arange(24, dtype='<f4').reshape(4, 6)
  path = described(tmp_path, compressor={'id': name}, order=order)
  codecs = {'zstd': numcodecs.Zstd, 'gzip': numcodecs.GZip, 'zlib': numcodecs.Zlib}
  codec = codecs.get(name, numcodecs.Blosc)()
  chunk = path.with_name('0.0')
  chunk.write_bytes(codec.encode(np.frombuffer(value.tobytes(order=order), np.uint8)))
  np.testing.assert_array_equal(stored_variables(tmp_path)['x'].whole(), value)
  for other in (20, 28, 1 << 24):  # a bomb: the chunk holds more than the description says
    chunk.write_bytes(codec.encode(np.zeros(4 * other, np.uint8)))
    with pytest.raises(UserError, match=r'holds .* bytes|cannot be read'):
      stored_variables(tmp_path)['x'].whole()
  whole = codec.encode(np.frombuffer(value.tobytes(order=order), np.uint8))
  refused = []
  for end in range(len(whole)):
    chunk.write_bytes(whole[:end])
    try:
      np.testing.assert_array_equal(stored_variables(tmp_path)['x'].whole(), value)
    except UserError as error:
      refused.append(str(error))
  rest = {'gzip': 11, 'zlib': 7}.get(name, 0)  # what comes after the elements, as a checksum
  assert len(refused) >= len(whole) - rest
  assert all(re.search('0.0 (cannot be read|is damaged)', message) for message in refused)
  chunk.write_bytes(b'something else that is long enough')
  with pytest.raises(UserError, match=r'cannot be read|holds .* bytes'):
    stored_variables(tmp_path)['x'].whole()


@pytest.mark.parametrize('name', ['zstd', 'gzip', 'zlib', 'blosc'])
def test_chunks_that_claim_more_than_the_memory(tmp_path, name):
  path = described(tmp_path, compressor={'id': name}, shape=[4, 6], chunks=[1 << 61, 6])
  path.with_name('0.0').write_bytes(zlib.compress(b'x') * 20)
  with pytest.raises(UserError, match=r'does not fit in memory|holds .* bytes'):
    stored_variables(tmp_path)['x'].whole()
