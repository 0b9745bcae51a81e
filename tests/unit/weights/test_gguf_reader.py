"""GGUF files that are none, are cut short, or hold what is not read."""

import os
import struct

import numpy as np
import pytest

from paxlite.core.errors import UserError
from paxlite.weights.gguf_families import architectures
from paxlite.weights.gguf_reader import GgufTensors, text_facts

gguf = pytest.importorskip('gguf')
LLAMA = next(a for a in architectures() if a.kind == 'llama')


def header(*counts: int, version: int = 3, order: str = '<') -> bytes:
  return b'GGUF' + struct.pack(f'{order}IQQ', version, *counts)


TEXT = struct.pack('<Q', 1) + b'a'


@pytest.mark.parametrize(
  ('content', 'match'),
  [
    (header(0, 0, order='>'), "it has another machine's byte order"),
    (header(1 << 62, 0), 'it ends too early'),
    (header(0, 1 << 62), 'it ends too early'),
    (header(0, 0, version=1), 'version 1'),
    (header(0, 2) + (TEXT + struct.pack('<IB', 0, 1)) * 2, 'Duplicate a'),
    (b'GGU', ''),
    (b'GGML' * 9, 'magic'),
    (header(0, 1) + TEXT + struct.pack('<I', 7), 'it ends too early'),  # before a truth value
    (header(0, 1) + TEXT + struct.pack('<I', 99), 'is not a valid'),
    (header(0, 1) + TEXT + struct.pack('<IIQ5I', 9, 4, 6, *range(5)), 'it ends too early'),
    (header(0, 1) + TEXT + struct.pack('<IIQ5I', 9, 4, 1 << 40, *range(5)), 'it ends too early'),
    (b'', ''),
  ],
)
def test_headers_that_are_not_good(tmp_path, content, match):
  path = tmp_path / 'm.gguf'
  path.write_bytes(content)
  with pytest.raises(UserError, match=rf'm.gguf is not a GGUF file, or is cut short \(.*{match}'):
    GgufTensors(path, LLAMA)


def test_a_fifo_is_refused_at_once(tmp_path):
  os.mkfifo(tmp_path / 'm.gguf')
  with pytest.raises(UserError, match='it is a FIFO'):
    GgufTensors(tmp_path / 'm.gguf', LLAMA)


def written(path, fields=(), raw_dtype=None):
  writer = gguf.GGUFWriter(str(path), 'llama')
  for name, value in dict(fields).items():
    writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
  blocks = np.zeros((2, 292), np.uint8) if raw_dtype else np.ones((2, 3), np.float32)
  writer.add_tensor('blk.0.w', blocks, raw_dtype=raw_dtype)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


def test_a_type_that_the_package_does_not_decode_is_named(tmp_path):
  path = written(tmp_path / 'a.gguf', raw_dtype=gguf.GGMLQuantizationType.Q8_K)
  with pytest.raises(UserError, match=r'a.gguf: blk.0.w cannot be read: .*Q8_K'):
    GgufTensors(path, LLAMA).read('blk.0.w')


def test_every_cut_of_a_file_is_refused(tmp_path):
  path = written(tmp_path / 'm.gguf', {'a': 'text', 'b': [1, 2, 3], 'c': True})
  whole = path.read_bytes()
  assert (GgufTensors(path, LLAMA).read('blk.0.w') == 1).all()
  end = whole.index(np.ones(6, np.float32).tobytes()) + 24  # padding comes after it
  for size in range(end):
    path.write_bytes(whole[:size])
    with pytest.raises(UserError, match='is not a GGUF file, or is cut short'):
      GgufTensors(path, LLAMA)


PIECES = {'model': 'llama', 'tokens': ['<unk>', 'a'], 'token_type': [2, 1], 'scores': [0.0, 0.0]}


@pytest.mark.parametrize(
  'changes', [{'tokens': 5}, {'tokens': ['a']}, {'token_type': 'ab'}, {'scores': 3},
              {'precompiled_charsmap': [999]}, {'eos_token_id': [1]}, {'unknown_token_id': 77}],
)  # fmt: skip
def test_fields_of_a_tokenizer_that_are_damaged(changes):
  named = lambda fields: {f'tokenizer.ggml.{name}': value for name, value in fields.items()}
  assert text_facts(named(PIECES))['tokenizer']['tokens'] == 2
  with pytest.raises(UserError, match='the fields of its tokenizer are damaged'):
    text_facts(named(PIECES | changes))
