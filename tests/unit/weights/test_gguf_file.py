"""GGUF files that are not what they claim to be."""

import struct

import pytest

from paxlite.core.errors import UserError
from paxlite.weights.gguf_file import GgufTensors

pytest.importorskip('gguf')


@pytest.mark.parametrize('count', [6, 9, 1 << 40])
def test_an_array_that_claims_more_than_there_is(tmp_path, count):
  """Five numbers of 32 bits are there."""
  text = lambda name: struct.pack('<Q', len(name)) + name
  header = b'GGUF' + struct.pack('<IQQ', 3, 0, 1)
  array = text(b'a.numbers') + struct.pack('<IIQ', 9, 4, count) + struct.pack('<5I', *range(5))
  path = tmp_path / 'model.gguf'
  path.write_bytes(header + array)
  with pytest.raises(UserError, match=r'is no GGUF file, or is cut short \(it ends too early'):
    GgufTensors(path)
