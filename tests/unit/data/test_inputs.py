"""Rows, their order, packing, synthetic tokens and text files."""

import gzip
import lzma
import os
import pathlib
import socket

import fiddle as fdl
import jax
import numpy as np
import pytest

from paxlite.core.errors import UserError
from paxlite.data import data_summary, packaged
from paxlite.data import text as text_module
from paxlite.data.base import RowInput, permute, prefetch
from paxlite.data.device_batches import DeviceBatches
from paxlite.data.documents import DocumentSource
from paxlite.data.mixture import mixture_of
from paxlite.data.records import open_records
from paxlite.data.rows import TokenRows
from paxlite.data.streams import StreamInput
from paxlite.data.synthetic import SyntheticRows
from paxlite.data.text import TextRows, split_blocks, split_texts
from paxlite.data.tokenizer import open_tokenizer
from paxlite.experiments.datasets import TextFiles
from paxlite.experiments.demo import TinyGPT
from paxlite.files.json_files import read_json_lines
from paxlite.files.text_files import expanded, read_text
from paxlite.finetuning.chats.sft import SftRows
from paxlite.parallel.mesh import make_mesh

ALL = slice(None)


@pytest.mark.parametrize('n', [1, 2, 3, 7, 64, 1000])
def test_permute_is_a_permutation_and_differs_by_epoch_and_seed(n):
  orders = [permute(np.arange(n), n, seed, epoch) for seed, epoch in [(0, 0), (0, 1), (1, 0)]]
  for order in orders:
    assert sorted(order) == list(range(n))
  if n >= 64:
    assert not np.array_equal(orders[0], orders[1])
    assert not np.array_equal(orders[0], orders[2])


def test_permute_spreads_neighbors():
  """The mean distance of consecutive positions is that of a random order, n/3."""
  n = 10_000
  distance = np.abs(np.diff(permute(np.arange(n), n, 3, 0))).mean()
  assert 0.9 * n / 3 < distance < 1.1 * n / 3


def rows(tokens, starts, seq_len, kind):
  tokens = np.array(tokens, np.uint16)
  return TokenRows(tokens, np.array(starts), seq_len, kind, int(tokens.max()))


DOCUMENTS = [11, 12, 13, 21, 22, 31, 32, 33, 34, 35], [0, 3, 5, 10]


def test_stream_rows_have_one_token_of_context():
  source = rows(*DOCUMENTS, 4, 'stream')
  assert len(source) == 3
  batch = source.read(np.array([0, 1, 2]))
  np.testing.assert_array_equal(
    batch['labels'], [[11, 12, 13, 21], [22, 31, 32, 33], [34, 35, 0, 0]]
  )
  np.testing.assert_array_equal(batch['ids'], [[0, 11, 12, 13], [21, 22, 31, 32], [33, 34, 35, 0]])
  np.testing.assert_array_equal(batch['weights'], [[1] * 4, [1] * 4, [1, 1, 0, 0]])
  assert 'segment_ids' not in batch


def test_packed_rows_are_seqax_rows():
  batch = rows(*DOCUMENTS, 4, 'packed').read(np.array([0, 1, 2]))
  np.testing.assert_array_equal(
    batch['labels'], [[11, 12, 13, 21], [22, 31, 32, 33], [34, 35, 0, 0]]
  )
  np.testing.assert_array_equal(batch['ids'], [[0, 11, 12, 0], [0, 0, 31, 32], [0, 34, 0, 0]])
  np.testing.assert_array_equal(batch['segment_ids'], [[1, 1, 1, 2], [1, 2, 2, 2], [1, 1, 0, 0]])
  np.testing.assert_array_equal(batch['segment_pos'], [[0, 1, 2, 0], [0, 0, 1, 2], [0, 1, 0, 1]])


def test_sequence_rows_hold_one_document():
  batch = rows(*DOCUMENTS, 4, 'sequences').read(np.array([0, 1, 2]))
  np.testing.assert_array_equal(
    batch['labels'], [[11, 12, 13, 0], [21, 22, 0, 0], [31, 32, 33, 34]]
  )
  np.testing.assert_array_equal(batch['ids'], [[0, 11, 12, 13], [0, 21, 22, 0], [0, 31, 32, 33]])
  np.testing.assert_array_equal(batch['weights'], [[1, 1, 1, 0], [1, 1, 0, 0], [1] * 4])
  np.testing.assert_array_equal(batch['segment_ids'], [[1, 1, 1, 0], [1, 1, 0, 0], [1] * 4])


class Numbers:
  """A source whose row i contains i."""

  max_token_id = 10**6
  name = 'numbers'

  def __init__(self, n):
    self.n = n

  def __len__(self):
    return self.n

  def read(self, indices):
    ids = np.repeat(indices[:, None], 2, axis=1)
    return {'ids': ids, 'labels': ids, 'weights': np.ones(ids.shape, np.float32)}


def take(iterator, n):
  return [next(iterator) for _ in range(n)]


def test_every_epoch_has_every_row_once_in_its_own_order():
  packaged = RowInput(Numbers(10), batch_size=4, seed=1)
  order = np.concatenate([b['ids'][:, 0] for b in take(packaged.train_batches(0, ALL), 5)])
  assert sorted(order[:10]) == sorted(order[10:]) == list(range(10))
  assert not np.array_equal(order[:10], order[10:])


def test_resume_and_process_slices_read_the_same_rows():
  packaged = RowInput(Numbers(1000), batch_size=8)
  whole = [b['ids'] for b in take(packaged.train_batches(0, ALL), 6)]
  resumed = [b['ids'] for b in take(packaged.train_batches(3, ALL), 3)]
  np.testing.assert_array_equal(whole[3:], resumed)
  parts = [take(packaged.train_batches(0, slice(s, s + 4)), 6) for s in (0, 4)]
  for step in range(6):
    joined = np.concatenate([parts[p][step]['ids'] for p in range(2)])
    np.testing.assert_array_equal(joined, whole[step])


@pytest.mark.parametrize('batch_size', [1, 3, 4, 10, 16])
def test_evaluation_counts_every_row_once(batch_size):
  packaged = RowInput(Numbers(10), batch_size=batch_size)
  seen = []
  for batch in packaged.eval_batches(ALL):
    assert batch['ids'].shape == (batch_size, 2)
    seen += batch['ids'][batch['weights'][:, 0] > 0, 0].tolist()
  assert seen == list(range(10))


def test_prefetch_passes_items_and_errors_on_and_stops():
  def broken():
    yield 1
    raise UserError('file gone')

  stream = prefetch(broken(), 2)
  assert next(stream) == 1
  with pytest.raises(UserError, match='file gone'):
    next(stream)
  endless = prefetch(iter(int, 1), 2)
  assert next(endless) == 0
  endless.close()


@pytest.mark.parametrize('packed', [False, True])
def test_synthetic_rows_are_a_function_of_seed_and_row(packed):
  source = SyntheticRows(vocab_size=50, seq_len=8, packed=packed)
  one, two = source.read(np.array([5, 9])), source.read(np.array([9, 5]))
  np.testing.assert_array_equal(one['ids'], two['ids'][::-1])
  np.testing.assert_array_equal(one['ids'][:, 1:], one['labels'][:, :-1])
  assert one['ids'].max() < 50
  if packed:
    np.testing.assert_array_equal(one['segment_ids'][0], [1] * 4 + [2] * 4)
    np.testing.assert_array_equal(one['segment_pos'][0], [0, 1, 2, 3] * 2)


@pytest.mark.parametrize('start', [None, 0])
def test_a_row_of_too_many_segments_is_refused(start):
  """Padding counts as a text, as the kernels that need the limit compute it too."""
  data = RowInput(rows(*DOCUMENTS, 4, 'packed'), batch_size=3)
  mesh = make_mesh([1, 1, 1], [1, 1, 1], ['replica', 'data', 'mdl'], jax.devices()[:1])
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  batches = DeviceBatches(data, sharding, start, max_segments=2)
  assert next(batches)['ids'].shape == (3, 4)
  batches.close()
  with pytest.raises(UserError, match=r'a sequence of 2 segments .*MAX_SEGMENTS_PER_SEQ=4'):
    next(DeviceBatches(data, sharding, start, max_segments=1))


def test_the_tokenizer_keeps_every_character():
  tokenizer = open_tokenizer(packaged.VOCAB)
  assert tokenizer.vocab_size == 8192
  text = 'A line,\n  and   another.\n\nÄ ☃\ttab'
  assert tokenizer.decode(tokenizer.encode(text)) == text


def split_files(files, share=0.05):
  return [pair for pairs in split_texts(files, share) for pair in pairs]


def test_text_rows_split_hold_out_and_know_their_bytes():
  blocks = [list(split_blocks(path)) for path in packaged.TEXTS]
  for file in blocks:
    held = sum(len(b) for b, h in file if h) / sum(len(b) for b, _ in file)
    assert 0.03 < held < 0.07
  read = {s: TextRows(packaged.TEXTS, packaged.VOCAB, 256, s) for s in ('train', 'held_out')}
  held_out = [b for file in blocks for b, h in file if h]
  source = read['held_out']
  tokenizer = open_tokenizer(packaged.VOCAB)
  assert tokenizer.decode(source.tokens[: source.seq_starts[1]].tolist()) == held_out[0]
  total = sum(len(b.encode()) for b in held_out)
  assert source.bytes_per_token == pytest.approx(total / len(source.tokens))
  assert read['train'].max_token_id < 8192
  train_text = ''.join(b for file in blocks for b, h in file if not h)
  assert held_out[0][1000:3000] not in train_text


WORDS = 'In the beginning was the word and it was a long one. '
TEXTS = {
  'one long line': WORDS * 200_000, 'single newlines': f'{WORDS}\n' * 80_000,
  'CRLF': f'{WORDS}\r\n{WORDS}\r\n\r\n' * 10_000, 'CR alone': f'{WORDS}\r{WORDS}\r\r' * 10_000,
  'no space': 'a' * 300_000, 'small': f'{WORDS}\n\n' * 100, 'smaller': f'{WORDS}\n',
  'a byte order mark': f'\ufeff{WORDS}\n' * 10_000,
}  # fmt: skip


@pytest.mark.parametrize('name', TEXTS)
def test_text_as_people_have_it(tmp_path, name):
  text = TEXTS[name]
  path = tmp_path / 'a.txt'
  path.write_bytes(text.encode())
  blocks = split_files([str(path)])
  assert ''.join(block for block, _ in blocks) == text.removeprefix('\ufeff')
  held = sum(len(block) for block, is_held in blocks if is_held)
  assert 0 < held / len(text) < (0.1 if len(text) > 10_000 else 0.6)
  largest = max(len(block) for block, _ in blocks)
  assert largest < 2.1 * text_module.BLOCK_CHARS
  expected = {
    'one long line': '. ', 'single newlines': '\n', 'CRLF': '\r\n\r\n', 'CR alone': '\r\r',
    'small': '\n\n',
  }.get(name, '')  # fmt: skip
  assert all(block.endswith(expected.strip(' ')) or block.endswith(expected) for block, _ in blocks)
  if len(text) < 1_000_000:
    read = {s: TextRows([str(path)], packaged.VOCAB, 32, s) for s in ('all', 'train', 'held_out')}
    tokenizer = open_tokenizer(packaged.VOCAB)
    decoded = {s: tokenizer.decode(rows.tokens.tolist()) for s, rows in read.items()}
    assert decoded['all'] == text.removeprefix('\ufeff')
    assert len(decoded['all']) == len(decoded['train']) + len(decoded['held_out'])
    ends = {s: int((rows.tokens == tokenizer.eos_id).sum()) for s, rows in read.items()}
    assert ends['all'] == ends['train'] + ends['held_out'] == 1


def test_of_many_small_files_whole_ones_are_held_out(tmp_path):
  for i in range(40):
    (tmp_path / f'{i:02}.txt').write_text(f'file {i}\n' * 100)
  files = sorted(map(str, tmp_path.glob('*.txt')))
  found = split_files(files)
  assert [block.split('\n')[0] for block, held in found if held] == ['file 19', 'file 39']
  assert len(found) == 40


def test_texts_with_blank_lines_are_split_as_ever(tmp_path):
  """A run that was started by an older version has held out the same texts."""
  found = split_files(packaged.TEXTS)
  assert found == [pair for path in packaged.TEXTS for pair in split_blocks(path)]
  rows = TextRows(packaged.TEXTS, packaged.VOCAB, 256, 'train')
  assert (len(rows.tokens), rows.fingerprint) == (2_382_702, 2_077_129_160)
  small, large = tmp_path / 'small.txt', tmp_path / 'large.txt'
  small.write_text(WORDS * 100)  # is not cut, unlike the other file
  large.write_text(f'{WORDS}\n\n' * 3000)
  one, other = split_texts([str(small), str(large)], 0.05)
  assert [held for _, held in one] == [False]
  assert 0.02 < sum(len(b) for b, held in other if held) / len(large.read_text()) < 0.08


def test_what_is_held_out_is_chosen(tmp_path):
  path, other = tmp_path / 'a.txt', tmp_path / 'b.txt'
  path.write_text(WORDS * 1000)
  other.write_text(WORDS * 10)
  cls = type('Run', (TextFiles, TinyGPT), {})
  make = lambda **values: cls(TRAIN_FILES=[str(path)], VOCAB_PATH=packaged.VOCAB, **values)
  built = lambda cfg: fdl.build(cfg).source
  whole = len(TextRows([str(path)], packaged.VOCAB, 32, 'all').tokens)
  assert make(EVAL_FRACTION=0).eval_inputs() == {}
  assert len(built(make(EVAL_FRACTION=0).train_input()).tokens) == whole
  apart = make(EVAL_FILES=[str(other)])
  assert len(built(apart.train_input()).tokens) == whole
  assert built(apart.eval_inputs()['held_out']).name == str(other)
  half = built(make(EVAL_FRACTION=0.5).eval_inputs()['held_out'])
  assert 0.3 < len(half.tokens) / whole < 0.7
  for values, message in [
    (dict(EVAL_FRACTION=0.6), 'EVAL_FRACTION=0.6 must be 0, or from 1e-9 to 0.5'),
    (dict(EVAL_FILES=[str(tmp_path / '*.txt')]), r'EVAL_FILES: .*a\.txt is used for training'),
  ]:
    with pytest.raises(UserError, match=message):
      make(**values).validate()
  path.write_text('a')
  with pytest.raises(UserError, match=r'too little text to hold out .*EVAL_FILES.*EVAL_FRACTION=0'):
    built(make().eval_inputs()['held_out'])


def test_what_is_said_of_the_data(tmp_path):
  examples = tmp_path / 'a.jsonl'
  examples.write_text('{"inputs": "one", "targets": "two"}\n' * 3)
  sft = SftRows([str(examples)], packaged.VOCAB, 32, 8192)
  assert data_summary.lines(RowInput(sft, 8)) == [
    f'Training data: {examples}: 3 examples, 9 tokens, 6 of them learned, the longest 3, in 1 row '
    'of 32, 28% full; fewer than the 8 rows of a step, so each is read 8 times'
  ]
  tokens = RowInput(rows(*DOCUMENTS, 4, 'packed'), 2)
  assert data_summary.lines(tokens) == [
    'Training data: tokens: 3 documents, 10 tokens, in 3 rows of 4; an epoch is 1.5 steps of 2 rows'
  ]
  stream = StreamInput(DocumentSource([str(examples)], packaged.VOCAB, 8192, field='inputs'), 8, 4)
  assert data_summary.lines(stream) == [f'Training data: {examples}: a stream, 4 rows a step']
  assert data_summary.lines(mixture_of([tokens, stream], [3, 1], 8)) == [
    f'Training data: tokens + {examples}: a mixture of 2',
    '  75.0% tokens: 3 documents, 10 tokens, in 3 rows of 4; fewer than the 6 rows of a step, so '
    'each is read 2 times',
    f'  25.0% {examples}: a stream',
  ]
  assert data_summary.lines(RowInput(Numbers(1000), 8)) == [
    'Training data: numbers: 1,000 rows; an epoch is 125 steps of 8 rows'
  ]


def test_patterns_of_files(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  for name in ('b.txt', 'a.txt', 'c[1].txt'):
    (tmp_path / name).write_text(name)
  assert expanded(['*.txt', 'hf:a/*', 'x.txt']) == ['a.txt', 'b.txt', 'c[1].txt', 'hf:a/*', 'x.txt']
  assert expanded(['c[1].txt']) == ['c[1].txt']
  monkeypatch.setenv('HOME', str(tmp_path))
  assert expanded(['~/a.txt', '~/b.*']) == [str(tmp_path / name) for name in ('a.txt', 'b.txt')]
  for read in (lambda names: TextRows(names, packaged.VOCAB, 8, 'train'), expanded):
    with pytest.raises(UserError, match=r'no/\*\.txt matches no file'):
      read(['no/*.txt'])
  assert expanded(['no/*.txt'], strict=False) == ['no/*.txt']


@pytest.mark.parametrize('suffix', ['.txt', '.jsonl', '.gz', '.xz', '.zst', '.parquet'])
@pytest.mark.parametrize('kind', ['FIFO', 'socket', 'device', 'folder'])
def test_a_path_that_is_not_a_file_is_refused_and_not_read(tmp_path, monkeypatch, suffix, kind):
  monkeypatch.chdir(tmp_path)  # names of sockets must be short
  path = pathlib.Path(f'a{suffix}')
  match kind:
    case 'FIFO':
      os.mkfifo(path)
    case 'socket':
      with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
    case 'device':
      path.symlink_to('/dev/zero')
    case 'folder':
      path.mkdir()
  for read in (open_records, read_text, lambda name: list(read_json_lines(name))):
    with pytest.raises(UserError, match=f'a{suffix} is not a file, it is a {kind}'):
      read(str(path))


@pytest.mark.parametrize('suffix', ['', '.gz', '.xz', '.zst'])
def test_compressed_text_reads_the_same(tmp_path, suffix):
  import zstandard

  text = 'one line\n\n' * 20_000
  compress = {
    '': bytes, '.gz': gzip.compress, '.xz': lzma.compress,
    '.zst': zstandard.ZstdCompressor().compress,
  }[suffix]  # fmt: skip
  path = tmp_path / f'a.txt{suffix}'
  path.write_bytes(compress(text.encode()))
  assert ''.join(b for b, _ in split_blocks(str(path))) == text


@pytest.mark.parametrize(
  ('content', 'message'),
  [
    (b'', 'a.txt is empty'),
    (b'\xef\xbb\xbfgood line\nbad \xff byte', r'a.txt:2 is not UTF-8 \(byte 17: 0xff\)'),
    (b'good line\nbad \xff byte', r'a.txt:2 is not UTF-8 \(byte 14: 0xff\)'),
    (None, 'a.txt is not a file'),
  ],
)
def test_bad_text_files_are_named(tmp_path, content, message):
  path = tmp_path / 'a.txt'
  if content is not None:
    path.write_bytes(content)
  with pytest.raises(UserError, match=message):
    TextRows([str(path)], packaged.VOCAB, 8, 'train')


@pytest.mark.parametrize('suffix', ['.gz', '.xz', '.zst'])
@pytest.mark.parametrize('damage', ['cut off', 'something else'])
def test_a_damaged_archive_is_named(tmp_path, suffix, damage):
  import zstandard

  compress = {
    '.gz': gzip.compress,
    '.xz': lzma.compress,
    '.zst': zstandard.ZstdCompressor().compress,
  }[suffix]
  path = tmp_path / f'a.txt{suffix}'
  noise = np.random.default_rng(0).integers(32, 127, 2_000_000, dtype=np.uint8).tobytes()
  path.write_bytes(compress(noise)[:-20] if damage == 'cut off' else b'no archive')
  with pytest.raises(UserError, match=f'a.txt{suffix} cannot be decompressed'):
    TextRows([str(path)], packaged.VOCAB, 8, 'train')


def test_zst_of_several_frames(tmp_path):
  import zstandard

  path = tmp_path / 'a.txt.zst'
  path.write_bytes(b''.join(zstandard.ZstdCompressor().compress(x) for x in (b'one ', b'two')))
  assert read_text(str(path)) == 'one two'


def test_bad_vocabularies_are_named(tmp_path):
  wrong = tmp_path / 'x.model'
  wrong.write_bytes(b'no model')
  for path, message in [
    ('', 'no tokenizer is set:'),
    ('gone.model', 'not a file'),
    (str(wrong), 'is not a Sent'),
  ]:
    with pytest.raises(UserError, match=message):
      open_tokenizer(path)


class Pairs:
  """Rows whose two halves belong together; a row's tokens are its own index."""

  rows_per_example = 2
  max_token_id = 1000
  name = 'pairs'

  def __init__(self, count: int):
    self.count = count

  def __len__(self):
    return self.count

  def read(self, indices):
    ids = np.repeat(np.asarray(indices, np.int32)[:, None], 3, 1)
    return {'ids': ids, 'labels': ids, 'weights': np.ones(ids.shape, np.float32)}


def test_rows_that_belong_together_are_shuffled_together():
  data = RowInput(Pairs(20), batch_size=8)
  drawn = np.concatenate([b['ids'][:, 0] for b, _ in zip(
    data.train_batches(0, slice(0, 8)), range(5), strict=False)])  # fmt: skip
  assert (drawn[::2] % 2 == 0).all()
  assert (drawn[1::2] == drawn[::2] + 1).all()
  for epoch in drawn.reshape(2, 20):
    assert sorted(epoch) == list(range(20))
  assert (drawn[:20] != drawn[20:]).any()
  assert (drawn[:20] != np.arange(20)).any()
  later = next(data.train_batches(3, slice(4, 8)))['ids'][:, 0]
  assert later.tolist() == drawn[28:32].tolist()


def test_an_evaluation_is_filled_up_with_whole_examples():
  data = RowInput(Pairs(6), batch_size=4)
  *_, last = data.eval_batches(slice(0, 4))
  assert last['ids'][:, 0].tolist() == [4, 5, 4, 5]
  assert last['weights'].max(1).tolist() == [1, 1, 0, 0]


def test_an_incomplete_example_is_refused():
  with pytest.raises(UserError, match='pairs holds 7 sequences in examples of 2'):
    RowInput(Pairs(7), batch_size=2)
