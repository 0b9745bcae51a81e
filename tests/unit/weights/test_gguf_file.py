"""GGUF files that are not what they claim to be."""

import struct

import numpy as np
import pytest

from paxlite.core.errors import UserError
from paxlite.weights.gguf_file import GgufTensors

gguf = pytest.importorskip('gguf')


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


def test_a_type_that_the_package_does_not_decode_is_named(tmp_path):
  path = tmp_path / 'a.gguf'
  writer = gguf.GGUFWriter(str(path), 'llama')
  blocks = np.zeros((2, 292), np.uint8)  # of 256 numbers each
  writer.add_tensor('blk.0.w', blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_K)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  with pytest.raises(UserError, match=r'a.gguf: blk.0.w cannot be read: .*Q8_K'):
    GgufTensors(path).read('blk.0.w')
