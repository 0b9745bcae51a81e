"""Foreign files: the memory and time that they may cost, and the errors about them."""

import ast
import gzip
import io
import lzma
import pathlib
import tracemalloc

import numpy as np
import pytest
import zstandard

from paxlite.core import host_memory
from paxlite.core.errors import UserError
from paxlite.data.record_files import JsonLines
from paxlite.files import json_files, text_files, zstd
from tests.rules.test_security import nodes

OPENERS = {'.gz': gzip.open, '.xz': lzma.open, '.zst': zstandard.open}
MIB = 1 << 20


def write(path: pathlib.Path, part: bytes, times: int) -> str:
  with OPENERS.get(path.suffix, open)(path, 'wb') as f:
    for _ in range(times):
      f.write(part)
  return str(path)


def refusal(call) -> str:
  with pytest.raises(UserError) as error:
    call()
  return str(error.value)


def peak_of(call) -> tuple[int, object]:
  """Returns the largest number of bytes that `call` held at once, and its result."""
  tracemalloc.start()
  try:
    result = call()
    return tracemalloc.get_traced_memory()[1], result
  finally:
    tracemalloc.stop()


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize('suffix', OPENERS)
def test_a_few_bytes_that_hold_much_text_are_read_in_little_memory(tmp_path, suffix):
  line = b'{"text": "%s"}\n' % (b'a' * 50)
  path = write(tmp_path / f'a.jsonl{suffix}', line * 4096, 128)
  assert pathlib.Path(path).stat().st_size < MIB
  peak, count = peak_of(lambda: sum(b.count(b'\n') for *_, b in text_files.line_blocks(path)))
  assert count == 4096 * 128
  assert peak < 16 * MIB  # of 33 MiB; xz has a window of 8 MiB


def test_no_byte_of_zst_is_copied_again_for_every_read(tmp_path):
  """Data is decompressed in blocks, so reading takes time in proportion to the bytes."""
  path = pathlib.Path(write(tmp_path / 'a.zst', bytes(MIB), 64))
  reader, held = zstd.ZstdReader(path.open('rb'), zstandard), []
  while reader.readinto(memoryview(bytearray(1000))):
    held.append(len(reader._plain))
  assert max(held) <= 128 << 10
  assert len(held) <= 64 * 1049 + 64 * 16


@pytest.mark.parametrize('options', [{}, {'write_content_size': False}, {'write_checksum': True}])
def test_zst_of_every_kind_of_frame_and_block(options):
  rng = np.random.default_rng(0)
  noise, text = rng.bytes(300_000), b'all work and no play ' * 20_000
  compress = zstandard.ZstdCompressor(**options).compress
  skipped = (0x184D2A53).to_bytes(4, 'little') + (5).to_bytes(4, 'little') + b'12345'
  parts = [noise, bytes(400_000), b'', b'x', text]
  whole = b''.join([skipped, *map(compress, parts), skipped])
  assert io.BufferedReader(zstd.ZstdReader(io.BytesIO(whole), zstandard)).read() == b''.join(parts)
  ends = np.cumsum([len(skipped), *(len(compress(p)) for p in parts)])
  for cut in {*range(1, 200), *range(1000, len(whole), 4999)} - {*ends.tolist()}:
    with pytest.raises(EOFError, match='cut off'):
      zstd.ZstdReader(io.BytesIO(whole[:cut]), zstandard).readall()


def frame(window_log: int, mantissa: int = 0) -> bytes:
  """Returns a frame of zstd with the text x and a window of (8 + mantissa)/8 · 2^window_log."""
  header = bytes([0, (window_log - 10) << 3 | mantissa])
  return (0xFD2FB528).to_bytes(4, 'little') + header + (1 << 3 | 1).to_bytes(3, 'little') + b'x'


@pytest.mark.parametrize(('window_log', 'mantissa'), [(27, 0), (27, 7), (30, 0), (31, 0)])
def test_a_large_window_of_zst_is_read_if_there_is_memory_for_it(window_log, mantissa):
  read = lambda most: zstd.ZstdReader(
    io.BytesIO(frame(window_log, mantissa)), zstandard, most
  ).readall()
  assert read(1 << 31) == b'x'
  with pytest.raises(
    OSError, match=r'a window of [\d,]+ MiB; the limit is 127 MiB: .*zstd --long=27'
  ):
    read((1 << 27) - 1)


def test_a_window_that_zst_itself_does_not_know_and_one_of_a_single_segment(tmp_path):
  path = tmp_path / 'a.jsonl.zst'
  path.write_bytes(frame(35))
  said = refusal(lambda: list(text_files.lines(str(path))))
  assert said.startswith(f'{path} cannot be read beyond line 1: it needs a window of 32,768 MiB')
  single = (0xFD2FB528).to_bytes(4, 'little') + b'\xe0' + (1 << 40).to_bytes(8, 'little')
  path.write_bytes(single + (1 << 3 | 1).to_bytes(3, 'little') + b'x')
  assert 'a window of 1,048,576 MiB' in refusal(lambda: list(text_files.lines(str(path))))


def test_a_large_window_of_xz_is_refused_before_it_is_made(tmp_path, monkeypatch):
  path = tmp_path / 'a.txt.xz'
  filters = [{'id': lzma.FILTER_LZMA2, 'dict_size': 1 << 25}]
  path.write_bytes(lzma.compress(b'text', filters=filters))
  assert text_files.read_text(str(path)) == 'text'
  monkeypatch.setattr(text_files, 'most_window', lambda: 1 << 20)
  monkeypatch.setattr(text_files, '_XZ_BYTES', 1 << 20)
  said = refusal(lambda: text_files.read_text(str(path)))
  assert said.startswith(f'{path} needs a window of more than 1 MiB: compress it again with xz -9')


@pytest.mark.parametrize('suffix', ['', *OPENERS])
def test_a_line_without_end_is_named(tmp_path, suffix, monkeypatch):
  monkeypatch.setattr(text_files, '_LINE_BYTES', 4 * MIB)
  path = tmp_path / f'a.jsonl{suffix}'
  with OPENERS.get(suffix, open)(path, 'wb') as f:
    f.write(b'{"text": "good"}\n')
    for _ in range(64):
      f.write(b'b' * MIB)
  said = r'a\.jsonl.*:2 is a line of more than 4 MiB'
  peak, _ = peak_of(lambda: refusal(lambda: list(text_files.line_blocks(str(path)))))
  assert peak < 20 * MIB
  for read in (text_files.line_blocks, lambda p: JsonLines(p).ranges()):
    with pytest.raises(UserError, match=said):
      list(read(str(path)))


def test_text_that_does_not_fit_in_memory_is_refused(tmp_path, monkeypatch):
  path = write(tmp_path / 'a.txt.zst', b'a' * MIB, 200)
  monkeypatch.setattr(host_memory, 'available', lambda: 80 * MIB)
  peak, said = peak_of(lambda: refusal(lambda: text_files.read_text(path)))
  assert 'a.txt.zst holds more than 40 MiB of text' in said
  assert peak < 100 * MIB
  monkeypatch.setattr(host_memory, 'available', lambda: None)
  assert len(text_files.read_text(path)) == 200 * MIB


def test_memory_that_is_there(tmp_path):
  meminfo = tmp_path / 'meminfo'
  meminfo.write_text('MemTotal:  10 kB\nMemAvailable:  4000 kB\n')
  none = tmp_path / 'none'
  assert host_memory.available(meminfo, none, tmp_path) == 4000 << 10
  assert host_memory.available(none, none, none) is None
  cgroups = tmp_path / 'cgroup'
  cgroups.write_text('0::/job/step\n')
  (tmp_path / 'job' / 'step').mkdir(parents=True)
  (tmp_path / 'job' / 'step' / 'memory.max').write_text('max\n')
  limit = {'memory.max': '3000000', 'memory.current': '2000000', 'memory.stat': 'inactive_file 500'}
  for name, text in limit.items():
    (tmp_path / 'job' / name).write_text(text)
  assert host_memory.available(meminfo, cgroups, tmp_path) == 1000500
  cgroups.write_text('11:cpu:/x\n4:memory,x:/job\n')
  (tmp_path / 'memory').mkdir()
  for name, text in (
    ('memory.limit_in_bytes', '700000'),
    ('memory.usage_in_bytes', '100000'),
    ('memory.stat', 'total_inactive_file 7'),
  ):
    (tmp_path / 'memory' / name).write_text(text)
  assert host_memory.available(meminfo, cgroups, tmp_path) == 600007


DEEP = '[' * 200_000


@pytest.mark.parametrize(
  'text', [DEEP, DEEP + ']' * 200_000, '{"a": ' + '[' * 400 + ']' * 400 + '}', '{"a":' * 200_000]
)
def test_deep_json_is_an_error_of_its_file(tmp_path, text):
  """The parser raises the error, because code that walks the value would exceed its stack too."""
  path = tmp_path / 'a.json'
  path.write_text(text)
  with pytest.raises(UserError, match=r'a\.json.* is damaged'):
    json_files.read_object(path)
  with pytest.raises(UserError, match=r'a\.json:1'):
    list(json_files.read_json_lines(str(path)))
  flat = '{"text": "[[[' + '[{' * 1000 + '", "list": [' + '[],' * 500 + '{}]}'
  path.write_text(flat)
  assert len(json_files.read_object(path)) == 2
  assert len(list(json_files.read_json_lines(str(path)))) == 1


@pytest.mark.exhaustive
@pytest.mark.slow
def test_json_is_read_where_its_errors_are_known():
  """Every other caller of a parser would have to handle RecursionError, as these modules do."""
  parsers = {
    path
    for path, node in nodes()
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ('json.loads', 'json.load')
  }
  assert parsers <= {
    'checkpointing/checksums.py',
    'files/json_files.py',
    'core/json_text.py',
    'data/checked_files.py',
    'experiments/identity.py',  # reads its own files
    'compilation/compiled_step.py',  # reads its own files
    'files/folder_lock.py',
    'training/goodput.py',
    'tracking/writers.py',
    'weights/huggingface.py',  # reads what safetensors has read
  }


@pytest.mark.parametrize('name', ['chat.jinja', 'template', 'a b.txt', 'ünï.md'])
def test_what_names_a_file_is_its_text(tmp_path, monkeypatch, name):
  monkeypatch.chdir(tmp_path)
  text = '{{ messages }}\n'
  (tmp_path / name).write_text(text)
  for given in (name, f'./{name}', str(tmp_path / name)):
    assert text_files.text_or_file(given) == text
  assert text_files.text_or_file(text) == text


@pytest.mark.parametrize('text', ['', 'You are a helper.', '{{ bos }}', 'a\nb.txt', 'x' * 9999])
def test_what_names_no_file_is_the_text(text):
  assert text_files.text_or_file(text) == text


@pytest.mark.parametrize('name', ['gone.jinja', 'chats/gone.txt', '~/gone.j2'])
def test_the_name_of_a_file_that_does_not_exist_is_refused(name):
  with pytest.raises(UserError, match='does not exist'):
    text_files.text_or_file(name)
