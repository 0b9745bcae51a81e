"""Flat tokens in both formats, the tokenize tool, and its error messages."""

import gzip
import itertools
import json
import lzma
import os
import pathlib
import shutil
import subprocess
import sys
import time

import numcodecs
import numpy as np
import pytest
import zarr
import zstandard

from paxlite.core.errors import UserError
from paxlite.data import checked_files, file_array, packaged
from paxlite.data.file_array import SortedFileArray
from paxlite.data.flat_tokens import FlatTokenRows, open_flat_tokens
from paxlite.data.tokenizer import open_tokenizer
from paxlite.tokenization.commands import tokenize
from paxlite.tokenization.flat_tokens_writer import FlatTokensWriter
from tests.support import runs

DOCUMENTS = [np.arange(1, 6), np.array([700]), np.arange(10, 30)]


def write(path, format, documents=DOCUMENTS, vocab_size=1000):
  writer = FlatTokensWriter(str(path), 'train', vocab_size, format)
  for document in documents:
    writer.write(document, [len(document)])
  writer.close()


@pytest.mark.parametrize('format', ['memmap', 'seqax'])
def test_round_trip(tmp_path, format):
  write(tmp_path / 'd', format)
  tokens, starts, largest = open_flat_tokens(str(tmp_path / 'd'), 'train')
  np.testing.assert_array_equal(tokens[0 : len(tokens)], np.concatenate(DOCUMENTS))
  np.testing.assert_array_equal(starts, [0, 5, 6, 26])
  assert largest == 700


def test_both_formats_give_the_same_rows(tmp_path):
  rng = np.random.default_rng(0)
  documents = [rng.integers(1, 900, rng.integers(1, 400)) for _ in range(100)]
  for format in ('memmap', 'seqax'):
    write(tmp_path / format, format, documents)
  for kind in ('stream', 'packed', 'sequences'):
    a, b = (FlatTokenRows(str(tmp_path / f), 'train', 64, kind) for f in ('memmap', 'seqax'))
    assert len(a) == len(b)
    index = rng.permutation(len(a))
    for (key, x), y in zip(a.read(index).items(), b.read(index).values(), strict=True):
      np.testing.assert_array_equal(x, y, err_msg=f'{kind} {key}')


def test_seqax_layout_on_disk(tmp_path):
  """The format has id·2 + start, uint64 starts, zarr v2, and max_token_id."""
  write(tmp_path / 'd', 'seqax')
  group = zarr.open_group(str(tmp_path / 'd' / 'train'), mode='r')
  assert group.metadata.zarr_format == 2
  encoded, starts = group['encoded_tokens'], group['seq_starts']
  assert (encoded.dtype, starts.dtype) == (np.uint32, np.uint64)
  assert encoded[:6].tolist() == [3, 4, 6, 8, 10, 1401]
  assert starts[:].tolist() == [0, 5, 6, 26]
  assert group.attrs['max_token_id'] == 700
  metadata = json.loads((tmp_path / 'd' / 'train' / 'seq_starts' / '.zarray').read_text())
  assert metadata['filters'][0]['id'] == 'delta'
  assert metadata['compressor']['cname'] == 'lz4'


def test_seqax_of_many_chunks(tmp_path, monkeypatch):
  from paxlite.data import flat_tokens
  from paxlite.tokenization import flat_tokens_writer

  monkeypatch.setattr(flat_tokens_writer, '_CHUNK', 100)
  monkeypatch.setattr(flat_tokens, '_CACHE_BYTES', 800)  # two chunks
  documents = [np.arange(1, 38)] * 30
  write(tmp_path / 'd', 'seqax', documents)
  tokens, _, _ = open_flat_tokens(str(tmp_path / 'd'), 'train')
  np.testing.assert_array_equal(tokens[0 : len(tokens)], np.concatenate(documents))
  np.testing.assert_array_equal(tokens[95:305], np.concatenate(documents)[95:305])


@pytest.mark.parametrize('name', ['encoded_tokens', 'seq_starts'])
def test_a_chunk_of_seqax_that_expands_is_refused(tmp_path, monkeypatch, name):
  write(tmp_path / 'd', 'seqax')
  chunk = tmp_path / 'd/train' / name / '0'
  chunk.write_bytes(numcodecs.Blosc().encode(bytes(1 << 26)))
  assert chunk.stat().st_size < 1 << 20
  with pytest.raises(UserError, match=rf'{name}/0 is damaged: it holds 67,108,864 bytes and need'):
    open_flat_tokens(str(tmp_path / 'd'), 'train')[0][0:5]
  description = chunk.with_name('.zarray')
  found = json.loads(description.read_text())
  description.write_text(json.dumps({**found, 'compressor': {'id': 'gzip', 'level': 1}}))
  with pytest.raises(UserError, match=r"compression by 'gzip' is not supported"):
    open_flat_tokens(str(tmp_path / 'd'), 'train')
  description.write_text(json.dumps({**found, 'chunks': [1 << 40]}))
  with pytest.raises(UserError, match=r'a chunk of [\d,]+ bytes does not fit in memory|chunks'):
    open_flat_tokens(str(tmp_path / 'd'), 'train')


def test_ids_beyond_uint16(tmp_path):
  write(tmp_path / 'd', 'memmap', [np.array([70_000])], vocab_size=100_000)
  tokens, _, largest = open_flat_tokens(str(tmp_path / 'd'), 'train')
  assert (tokens[0], largest, tokens.dtype) == (70_000, 70_000, np.uint32)


def damage(path, how):
  match how:
    case 'no folder':
      return
    case 'no meta':
      write(path, 'memmap')
      (path / 'train' / 'meta.json').unlink()
    case 'bad meta':
      write(path, 'memmap')
      (path / 'train' / 'meta.json').write_text('{')
    case 'short':
      write(path, 'memmap')
      with (path / 'train' / 'tokens.bin').open('r+b') as f:
        f.truncate(10)
    case 'empty':
      write(path, 'memmap', [])
    case 'unfinished seqax':
      write(path, 'seqax')
      shutil.rmtree(path / 'train' / 'seq_starts')


@pytest.mark.parametrize(
  ('how', 'message'),
  [
    ('no folder', 'd/train does not exist'),
    ('no meta', 'd/train is unfinished: meta.json is missing'),
    ('bad meta', 'meta.json is damaged'),
    ('short', 'tokens.bin has 10 bytes, but meta.json says 52'),
    ('empty', 'holds no tokens'),
    ('unfinished seqax', 'd/train is not a complete seqax dataset'),
  ],
)
def test_bad_datasets_are_named(tmp_path, how, message):
  damage(tmp_path / 'd', how)
  with pytest.raises(UserError, match=message):
    FlatTokenRows(str(tmp_path / 'd'), 'train', 8)


LINES = ['first document\nof two lines', 'second', '', 'última ☃']


def corpus(tmp_path, suffix):
  compress = {
    '': bytes, '.gz': gzip.compress, '.xz': lzma.compress,
    '.zst': zstandard.ZstdCompressor().compress,
  }[suffix]  # fmt: skip
  path = tmp_path / f'c.jsonl{suffix}'
  path.write_bytes(compress('\n'.join(json.dumps({'text': t}) for t in LINES).encode()))
  return path


@pytest.mark.parametrize('suffix', ['', '.gz', '.xz', '.zst'])
def test_tokenize_json_lines(tmp_path, suffix, capsys):
  out = tmp_path / 'out'
  file = corpus(tmp_path, suffix)
  tokenize.main([f'--vocab={packaged.VOCAB}', f'--output={out}', '--processes=1', str(file)])
  tokens, starts, _ = open_flat_tokens(str(out), 'train')
  tokenizer = open_tokenizer(packaged.VOCAB)
  texts = [tokenizer.decode(tokens[a:b].tolist()) for a, b in itertools.pairwise(starts)]
  assert texts == [t for t in LINES if t]
  size = sum(len(text.encode()) for text in LINES)
  assert size > sum(map(len, LINES))  # some are not ASCII
  assert f': 3 documents, {size:,} bytes' in capsys.readouterr().out


@pytest.mark.slow
def test_tokenize_with_several_processes_equals_one(tmp_path):
  """The tool tokenizes the real texts through the command line."""
  for processes in (1, 3):
    runs.module(
      'paxlite', 'tokenize', '--append_eos', f'--vocab={packaged.VOCAB}',
      f'--output={tmp_path / str(processes)}', f'--processes={processes}', *packaged.TEXTS,
    )  # fmt: skip
  for name in ('tokens.bin', 'seq_starts.bin', 'meta.json'):
    one, three = ((tmp_path / p / 'train' / name).read_bytes() for p in ('1', '3'))
    assert one == three, name
  meta = json.loads((tmp_path / '1' / 'train' / 'meta.json').read_text())
  assert meta['sequences'] == 2
  assert 2_400_000 < meta['token_count'] < 2_600_000


@pytest.mark.parametrize(
  ('content', 'message'),
  [
    (b'', 'c.jsonl is empty'),
    (b'{"text": "a"}\n{"txt": 1}\n', r"c.jsonl:2 has no text field 'text'"),
    (b'{"text": "a"}\n{"text"\n', 'c.jsonl:2 is not JSON'),
    (b'{"text": "a"}\n"\xff"\n', 'c.jsonl:2 is not UTF-8'),
    (b'\n\n', 'no text to tokenize'),
  ],
)
def test_tokenize_names_bad_lines_and_leaves_no_dataset(tmp_path, content, message):
  path = tmp_path / 'c.jsonl'
  path.write_bytes(content)
  out = tmp_path / 'out'
  with pytest.raises(UserError, match=message):
    tokenize.main([f'--vocab={packaged.VOCAB}', f'--output={out}', '--processes=1', str(path)])
  assert not out.exists()


def test_a_failed_tokenize_leaves_the_folders_that_were_there(tmp_path):
  (tmp_path / 'a.jsonl').write_text('{')
  (tmp_path / 'mine').mkdir()
  for out in (tmp_path / 'mine', tmp_path / 'mine' / 'new' / 'newer'):
    with pytest.raises(UserError, match=r'a\.jsonl:1 is not JSON'):
      tokenize.main(
        [f'--vocab={packaged.VOCAB}', f'--output={out}', '--processes=1', str(tmp_path / 'a.jsonl')]
      )
  assert list((tmp_path / 'mine').iterdir()) == []


def test_an_understated_largest_id_is_found_when_read(tmp_path):
  write(tmp_path / 'd', 'memmap')
  path = tmp_path / 'd' / 'train' / 'meta.json'
  path.write_text(path.read_text().replace('700', '29'))
  rows = FlatTokenRows(str(tmp_path / 'd'), 'train', 8)
  with pytest.raises(UserError, match='d/train has token id 700 and states 29 as its largest'):
    rows.read(np.arange(4))


@pytest.mark.parametrize(
  ('flags', 'message'),
  [
    (['--output={file}'], 'cannot be written'),
    (['--output={out}', '--split=../../escaped'], 'cannot be the name of a split'),
    (['--output={out}', '--split=..'], 'cannot be the name of a split'),
    (['--output={out}', '--processes=0'], 'must be at least 1'),
  ],
)
def test_tokenize_checks_where_it_writes(tmp_path, flags, message):
  (tmp_path / 'file').write_text('mine')
  flags = [f.format(file=tmp_path / 'file', out=tmp_path / 'out') for f in flags]
  with pytest.raises(UserError, match=message):
    tokenize.main([f'--vocab={packaged.VOCAB}', *flags, str(corpus(tmp_path, ''))])
  assert (tmp_path / 'file').read_text() == 'mine'


def test_tokenize_refuses_to_overwrite(tmp_path):
  args = [f'--vocab={packaged.VOCAB}', f'--output={tmp_path / "out"}', '--processes=1']
  args.append(str(corpus(tmp_path, '')))
  tokenize.main(args)
  with pytest.raises(UserError, match='exists: choose another --output'):
    tokenize.main(args)


@pytest.mark.cases(fast=3)
@pytest.mark.parametrize('kind', ['stream', 'packed', 'sequences'])
@pytest.mark.parametrize('file', ['tokens.bin', 'seq_starts.bin'])
def test_a_file_that_is_cut_off_while_it_is_read(tmp_path, kind, file):
  """It runs in its own process, because a signal would end it."""
  write(tmp_path / 'd', 'memmap', [np.arange(1, 900)] * 300)
  program = f"""
import os, numpy as np
from paxlite.core.errors import UserError
from paxlite.data import flat_tokens
flat_tokens._STARTS_IN_MEMORY = 0
rows = flat_tokens.FlatTokenRows({str(tmp_path / 'd')!r}, 'train', 64, {kind!r})
rows.read(np.arange(2))
os.truncate({str(tmp_path / 'd' / 'train' / file)!r}, 64)
try:
  rows.read(np.array([200]))
  print('read')
except UserError as e:
  print(e)
"""
  result = subprocess.run(
    [sys.executable, '-c', program], capture_output=True, text=True, cwd=runs.ROOT, check=False
  )
  assert result.returncode == 0, (result.returncode, result.stderr)
  size = {'tokens.bin': 300 * 899 * 2, 'seq_starts.bin': 301 * 8}[file]
  if file == 'seq_starts.bin':  # the file has only one block, which was read before
    assert result.stdout == 'read\n'
  else:
    assert f'{file} has 64 bytes but had {size:,} when opened' in result.stdout


@pytest.mark.slow
def test_a_run_whose_tokens_are_cut_off_saves_what_it_has_trained(tmp_path):
  write(tmp_path / 'd', 'memmap', [np.arange(1, 125)] * 400)
  flags = [
    f'--fdl.DATASET_PATH={tmp_path / "d"}', '--fdl.EVAL_SPLIT=None', '--fdl.MAX_STEPS=100000',
    '--fdl.CHECKPOINT_EVERY_N_STEPS=100000', '--fdl.SUMMARY_INTERVAL_STEPS=1',
  ]  # fmt: skip
  run = tmp_path / 'run'
  process = subprocess.Popen(
    runs.command(run, *flags, config='tests.support.experiments.TinyTokens'),
    env=runs.environment(), cwd=runs.ROOT, stderr=subprocess.PIPE, text=True,
  )  # fmt: skip
  while not (run / 'metrics.jsonl').exists() or len(runs.records(run)) < 5:
    assert process.poll() is None, process.stderr.read()
    time.sleep(0.1)
  os.truncate(tmp_path / 'd' / 'train' / 'tokens.bin', 100)
  _, stderr = process.communicate(timeout=120)
  assert process.returncode == 2, stderr
  assert 'tokens.bin has 100 bytes but had 99,200 when opened' in stderr.splitlines()[-1]
  (saved,) = (run / 'checkpoints').glob('checkpoint_*')
  assert int(saved.name[-8:]) >= 5


def test_values_are_looked_up_in_a_file_as_in_memory(tmp_path, monkeypatch):
  monkeypatch.setattr(file_array, '_BLOCK', 16)
  values = np.sort(np.random.default_rng(0).integers(0, 5000, 1003)).astype('<u8')
  (tmp_path / 'a').write_bytes(values.tobytes())
  array = SortedFileArray(tmp_path / 'a', '<u8')
  wanted = np.arange(0, 5100, dtype=np.uint64)
  np.testing.assert_array_equal(array.searchsorted(wanted), np.searchsorted(values, wanted))
  np.testing.assert_array_equal(array, values)
  np.testing.assert_array_equal(array[10:700], values[10:700])
  assert [array[i] for i in (0, 15, 16, 1002, -1)] == values[[0, 15, 16, 1002, -1]].tolist()


def test_the_checksum_is_compared_once(tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  write(tmp_path / 'd', 'memmap')
  opened = lambda: FlatTokenRows(str(tmp_path / 'd'), 'train', 8)
  tokens = tmp_path / 'd' / 'train' / 'tokens.bin'
  read = []
  whole = checked_files._crc32c_of
  monkeypatch.setattr(checked_files, '_crc32c_of', lambda path: read.append(path) or whole(path))
  opened()  # the writer has just read the file
  assert read == []
  shutil.rmtree(tmp_path / 'cache')
  opened()
  opened()
  assert read == [tokens]
  content = tokens.read_bytes()
  tokens.write_bytes(content[:2] + b'\x09' + content[3:])  # this id is in the vocabulary too
  for _ in range(2):
    with pytest.raises(UserError, match=r'tokens.bin is damaged: its CRC-32C is \w{8} and .*meta'):
      opened()
  tokens.write_bytes(content)
  opened()
  (tmp_path / 'cache').rename(tmp_path / 'gone')
  (tmp_path / 'cache').write_text('no folder')
  opened()
  meta = tmp_path / 'd' / 'train' / 'meta.json'
  meta.write_text(
    json.dumps({k: v for k, v in json.loads(meta.read_text()).items() if k != 'crc32c'})
  )
  tokens.write_bytes(content[:2] + b'\x09' + content[3:])
  opened()  # an older dataset has no checksum


def test_of_several_processes_one_compares_the_checksum(tmp_path):
  write(tmp_path / 'd', 'memmap', [np.arange(1, 1000)] * 20_000)
  program = f"""
from paxlite.data import checked_files
from paxlite.data.flat_tokens import FlatTokenRows
whole = checked_files._crc32c_of
checked_files._crc32c_of = lambda path: print('read') or whole(path)
FlatTokenRows({str(tmp_path / 'd')!r}, 'train', 8)
"""
  environment = os.environ | {'XDG_CACHE_HOME': str(tmp_path / 'cache')}
  processes = [
    subprocess.Popen(
      [sys.executable, '-c', program], stdout=subprocess.PIPE, cwd=runs.ROOT, env=environment
    )
    for _ in range(3)
  ]
  said = [process.communicate(timeout=60)[0] for process in processes]
  assert sorted(said) == [b'', b'', b'read\n']


@pytest.mark.parametrize('format', ['memmap', 'seqax'])
@pytest.mark.parametrize('other', ['FIFO', 'device', 'folder'])
def test_a_path_that_is_not_a_file_is_refused_and_not_read(tmp_path, format, other):
  write(tmp_path / 'd', format)
  folder = tmp_path / 'd' / 'train'
  names = {
    'memmap': ['tokens.bin', 'seq_starts.bin', 'meta.json'],
    'seqax': ['encoded_tokens/0', 'seq_starts/0', 'encoded_tokens/.zarray', '.zattrs'],
  }[format]
  for name in names:
    path = folder / name
    path.rename(folder / 'kept')
    replace(path, other)
    with pytest.raises(UserError, match=f'{name} is not a file, it is a {other}'):
      FlatTokenRows(str(tmp_path / 'd'), 'train', 8)
    path.rmdir() if other == 'folder' else path.unlink()
    (folder / 'kept').rename(path)
  FlatTokenRows(str(tmp_path / 'd'), 'train', 8)


def replace(path: pathlib.Path, other: str) -> None:
  if other == 'FIFO':
    os.mkfifo(path)
  elif other == 'device':
    path.symlink_to('/dev/zero')
  else:
    path.mkdir()
