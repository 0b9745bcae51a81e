"""Records of every kind of source, and their tokens, which are the same after a kill."""

import gzip
import itertools
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from paxlite.core.errors import UserError
from paxlite.data import packaged
from paxlite.data.flat_tokens import open_flat_tokens
from paxlite.data.records import open_records, read_records
from paxlite.data.tokenizer import open_tokenizer
from paxlite.files.text_files import read_text
from paxlite.tokenization.commands import tokenize
from tests.support import runs


@pytest.fixture(scope='module')
def documents() -> list[str]:
  """Paragraphs of real text; one is longer than the pieces that long documents are cut into."""
  text = read_text(packaged.TEXTS[1])[:200_000]
  return [p for p in text[:60_000].split('\n\n') if p.strip()] + [text[60_000:]]


def as_json_lines(path: pathlib.Path, documents) -> str:
  path.write_text(''.join(json.dumps({'n': i, 'text': d}) + '\n' for i, d in enumerate(documents)))
  return str(path)


def as_parquet(path: pathlib.Path, documents) -> str:
  pa = pytest.importorskip('pyarrow')
  parquet = pytest.importorskip('pyarrow.parquet')
  table = pa.table({'n': list(range(len(documents))), 'text': documents})
  parquet.write_table(table, path, row_group_size=7)
  return str(path)


def as_saved_dataset(path: pathlib.Path, documents) -> str:
  datasets = pytest.importorskip('datasets')
  rows = [{'n': i, 'text': d} for i, d in enumerate(documents)]
  datasets.DatasetDict(train=datasets.Dataset.from_list(rows)).save_to_disk(
    str(path), num_shards={'train': 3}
  )
  return f'hf:{path}/train'


def as_folder_of_files(path: pathlib.Path, documents) -> str:
  """Writes a folder that load_dataset finds and reads as a stream."""
  (path / 'train').mkdir(parents=True)
  half = len(documents) // 2
  pa, parquet = pytest.importorskip('pyarrow'), pytest.importorskip('pyarrow.parquet')
  for name, start, stop in (('a', 0, half), ('b', half, len(documents))):
    table = pa.table({'n': list(range(start, stop)), 'text': documents[start:stop]})
    parquet.write_table(table, path / 'train' / f'{name}.parquet')
  return f'hf:{path}/train'


def as_tfds(path: pathlib.Path, documents) -> str:
  pytest.importorskip('tensorflow_datasets')
  mirror = path / 'mirror'
  (mirror / 'train').mkdir(parents=True)
  as_json_lines(mirror / 'train' / '00.jsonl', documents)
  as_json_lines(mirror / 'val.jsonl', documents[:2])
  script = 'paxlite.contrib.gpu.scripts_gpu.download_the_pile'
  flags = [f'--source={mirror}', f'--tfds_data_dir={path}', '--num_shards=2']
  runs.module(script, *flags, imported='seqio')
  return 'tfds:the_pile:1.0.0/train'


MAKERS = [
  as_json_lines, as_parquet, as_saved_dataset, as_folder_of_files,
  pytest.param(as_tfds, marks=pytest.mark.slow),
]  # fmt: skip
SUFFIXES = {as_json_lines: '.jsonl', as_parquet: '.parquet'}


@pytest.mark.parametrize('make', MAKERS)
def test_every_record_once_and_from_any_on(tmp_path, documents, make, monkeypatch):
  monkeypatch.setenv('TFDS_DATA_DIR', str(tmp_path / 'source'))
  name = make(tmp_path / f'source{SUFFIXES.get(make, "")}', documents)
  found = [record['text'] for _, record in read_records(name)]
  assert sorted(found) == sorted(documents)  # TFDS keeps the order of its shuffled shards
  assert make is as_tfds or found == documents
  source = open_records(name)
  whole = [list(source.read(s)) for s in range(source.num_shards)]
  assert source.size == source.done or make is as_folder_of_files
  if make in (as_saved_dataset, as_tfds):  # the size of a record is assumed
    assert source.shard_bytes * source.num_shards == 1000 * len(documents)
  for shard, records in enumerate(whole):
    for start in (0, 3, len(records) - 1, len(records)):
      assert list(source.read(shard, start)) == [r for r in records if r[0] >= start]


@pytest.mark.parametrize(
  ('name', 'message'),
  [
    ('nowhere.jsonl', 'nowhere.jsonl is not a file'),
    ('tfds:the_pile:1.0.0', r'names no split: write tfds:the_pile:1.0.0/train'),
    ('tfds:no_such_dataset/train', 'no TFDS dataset no_such_dataset with split train'),
    ('hf:/no/such/folder/train', 'hf:/no/such/folder/train cannot be read'),
    ('README.parquet', 'README.parquet cannot be read'),
  ],
)
def test_what_is_no_source_is_named(tmp_path, monkeypatch, name, message):
  monkeypatch.chdir(tmp_path)
  pathlib.Path('README.parquet').write_text('no table')
  with pytest.raises(UserError, match=message):
    open_records(name)


def run(*flags: str, code: int = 0) -> str:
  result = runs.module('paxlite', 'tokenize', *flags, code=code)
  return result.stdout + result.stderr


def texts(folder: pathlib.Path, vocab: str, split: str = 'train') -> list[str]:
  tokens, starts, _ = open_flat_tokens(str(folder), split)
  tokenizer = open_tokenizer(vocab)
  return [tokenizer.decode(tokens[a:b].tolist()) for a, b in itertools.pairwise(starts.tolist())]


@pytest.mark.parametrize('make', MAKERS)
def test_tokenizing_is_the_same_from_every_source(tmp_path, documents, make, monkeypatch):
  monkeypatch.setenv('TFDS_DATA_DIR', str(tmp_path / 'source'))
  name = make(tmp_path / f'source{SUFFIXES.get(make, "")}', documents)
  flags = [f'--vocab={packaged.VOCAB}', f'--output={tmp_path / "out"}', '--processes=1', name]
  tokenize.main(flags)
  found = texts(tmp_path / 'out', packaged.VOCAB)
  assert sorted(found) == sorted(documents)


@pytest.fixture(scope='module')
def json_vocab(tmp_path_factory) -> str:
  """A byte-level BPE of Hugging Face's tokenizers that is trained on the text."""
  tokenizers = pytest.importorskip('tokenizers')
  folder = tmp_path_factory.mktemp('bpe')
  bpe = tokenizers.ByteLevelBPETokenizer()
  bpe.train_from_iterator(
    [read_text(packaged.TEXTS[1])[:400_000]], vocab_size=1000, special_tokens=['<|end|>']
  )
  bpe.save(str(folder / 'tokenizer.json'))
  (folder / 'tokenizer_config.json').write_text(json.dumps({'eos_token': '<|end|>'}))
  return str(folder / 'tokenizer.json')


@pytest.mark.slow
def test_a_tokenizer_of_hugging_face_on_all_cores(tmp_path, documents, json_vocab):
  source = as_json_lines(tmp_path / 'c.jsonl', documents)
  for processes in ('1', '2'):
    run(f'--vocab={json_vocab}', f'--output={tmp_path / processes}', '--append_eos',
        f'--processes={processes}', source)  # fmt: skip
  one, two = (tmp_path / p / 'train' / 'tokens.bin' for p in '12')
  assert one.read_bytes() == two.read_bytes()
  assert texts(tmp_path / '1', json_vocab) == documents  # the end token is not part of the text
  tokens, starts, _ = open_flat_tokens(str(tmp_path / '1'), 'train')
  assert set(tokens[:][starts[1:].astype(int) - 1]) == {open_tokenizer(json_vocab).eos_id}


def test_held_out_documents_are_in_one_split_only(tmp_path, documents):
  source = as_json_lines(tmp_path / 'c.jsonl', documents)
  flags = [
    f'--vocab={packaged.VOCAB}', f'--output={tmp_path / "out"}', '--held_out_every=5', source,
  ]  # fmt: skip
  tokenize.main(['--processes=1', *flags])
  tokenize.main(['--processes=1', '--held_out', '--split=validation', *flags])
  train, held_out = (texts(tmp_path / 'out', packaged.VOCAB, s) for s in ('train', 'validation'))
  assert sorted(held_out + train) == sorted(documents)
  assert 0.15 < len(held_out) / len(documents) < 0.25
  positions = [documents.index(d) for d in held_out if len(d) > 40]
  assert positions == sorted(positions)


def test_unreadable_records_are_skipped_only_if_asked(tmp_path, capsys):
  source = tmp_path / 'c.jsonl'
  source.write_bytes(b'{"text": "a b"}\n{"text": 3}\n{"te\n{"text": "c d"}\n')
  flags = [
    f'--vocab={packaged.VOCAB}', f'--output={tmp_path / "out"}', '--processes=1', str(source),
  ]  # fmt: skip
  with pytest.raises(UserError, match=r"c.jsonl:2: the field 'text' holds no text"):
    tokenize.main(flags)
  tokenize.main([*flags, '--skip_unreadable'])
  assert texts(tmp_path / 'out', packaged.VOCAB) == ['a b', 'c d']
  assert '2 unreadable records left out' in capsys.readouterr().out


@pytest.mark.parametrize(
  ('name', 'content', 'message'),
  [
    ('c.jsonl', b'{"text": "a \\ud800 b"}\n', 'c.jsonl:1 has half of a surrogate pair'),
    ('c.doc', b'text\na b\n', r'c.doc is neither .jsonl, .*, .csv, .tsv, .parquet nor .txt'),
    (
      'c.jsonl.gz',
      gzip.compress(random.Random(0).randbytes(200_000), mtime=0)[:100_000] + b'\0' * 100_000,
      'cannot be read',
    ),
    ('c.JSONL', b'{"text": 3}\n', "c.JSONL:1: the field 'text' holds no text"),
  ],
)
def test_bad_files_are_one_clear_error(tmp_path, name, content, message):
  path = tmp_path / name
  path.write_bytes(content)
  with pytest.raises(UserError, match=message):
    tokenize.main([f'--vocab={packaged.VOCAB}', f'--output={tmp_path / "out"}', str(path)])
  assert not list((tmp_path / 'out').glob('*'))


def test_a_source_twice_or_changed_is_refused(tmp_path, documents, monkeypatch):
  source = as_json_lines(tmp_path / 'c.jsonl', documents * 5)
  flags = [f'--vocab={packaged.VOCAB}', f'--output={tmp_path / "out"}', '--processes=1']
  monkeypatch.chdir(tmp_path)
  with pytest.raises(UserError, match=r'the source c\.jsonl is listed twice'):
    tokenize.main([*flags, source, 'c.jsonl'])
  monkeypatch.setattr(tokenize, '_SECONDS_BETWEEN_NOTES', 0.0)
  with monkeypatch.context() as m:
    m.setattr(tokenize, 'share_done', lambda sources: 1 / 0)
    with pytest.raises(ZeroDivisionError):
      tokenize.main([*flags, source])
  text = pathlib.Path(source).read_text()
  pathlib.Path(source).write_text(text.replace('KING', 'LORD'))  # has the same size
  with pytest.raises(UserError, match='was started with sources='):
    tokenize.main([*flags, source])


@pytest.mark.slow
def test_a_full_disk_is_said_and_gone_on_after(tmp_path, documents):
  source = as_json_lines(tmp_path / 'c.jsonl', documents * 20)
  flags = f'--vocab={packaged.VOCAB} --output={tmp_path / "out"} --processes=1 {source}'
  command = f'{sys.executable} -m paxlite tokenize {flags}'
  limited = subprocess.run(
    ['bash', '-c', f'ulimit -f 400; {command}'], capture_output=True, text=True, check=False,
    cwd=runs.ROOT, env=runs.environment(),
  )  # fmt: skip
  assert limited.returncode == 2, limited.stderr
  assert 'cannot be written' in limited.stderr.splitlines()[-1]
  run(*flags.split())
  assert len(texts(tmp_path / 'out', packaged.VOCAB)) == 20 * len(documents)


def killed_until_it_ends(*flags: str) -> int:
  """Calls the tool until it completes; returns the number of kills."""
  for kills in range(20):
    process = runs.module('tests.support.killed_tokenize', *flags, code=None)
    if process.returncode == 0:
      return kills
    assert process.returncode == -signal.SIGKILL, process.stderr
  raise AssertionError('it never ended')


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize('format', ['memmap', 'seqax'])
def test_killed_it_goes_on_and_loses_nothing(tmp_path, format):
  text = read_text(packaged.TEXTS[0])[:1_500_000]
  lines = [p for p in text.split('\n\n') if p.strip()]
  source = as_json_lines(tmp_path / 'c.jsonl', lines)
  flags = [
    f'--vocab={packaged.VOCAB}', '--append_eos', f'--format={format}', '--processes=2', source,
  ]  # fmt: skip
  run(f'--output={tmp_path / "whole"}', *flags)
  assert killed_until_it_ends(f'--output={tmp_path / "killed"}', *flags) >= 3
  whole, killed = (open_flat_tokens(str(tmp_path / f), 'train') for f in ('whole', 'killed'))
  np.testing.assert_array_equal(whole[0][0 : len(whole[0])], killed[0][0 : len(killed[0])])
  np.testing.assert_array_equal(whole[1], killed[1])
  assert not list((tmp_path / 'killed').glob('.*.unfinished'))


def test_an_unfinished_split_goes_on_only_as_it_was_begun(tmp_path, documents, monkeypatch):
  source = as_json_lines(tmp_path / 'c.jsonl', documents * 20)
  flags = [f'--vocab={packaged.VOCAB}', f'--output={tmp_path / "out"}', '--processes=1', source]
  monkeypatch.setattr(tokenize, '_SECONDS_BETWEEN_NOTES', 0.0)
  with monkeypatch.context() as m:
    m.setattr(tokenize, 'share_done', lambda sources: 1 / 0)  # fails after the first note
    with pytest.raises(ZeroDivisionError):
      tokenize.main(flags)
  assert not (tmp_path / 'out' / 'train').exists()
  with pytest.raises(UserError, match='was started with append_eos=False, not True'):
    tokenize.main([*flags, '--append_eos'])
  tokenize.main(flags)
  assert len(texts(tmp_path / 'out', packaged.VOCAB)) == 20 * len(documents)


def test_two_at_once_and_a_faulty_disk_are_refused(tmp_path, documents, monkeypatch):
  from paxlite.tokenization.flat_tokens_writer import FlatTokensWriter

  path = str(tmp_path / 'out')
  writer = FlatTokensWriter(path, 'train', 1000)
  with pytest.raises(UserError, match='another process is writing it'):
    FlatTokensWriter(path, 'train', 1000)
  writer.write(np.arange(1, 9), [3, 8])
  writer.note({})
  with (tmp_path / 'out' / '.train.unfinished' / 'tokens.bin').open('r+b') as f:
    f.write(b'\7')
  with pytest.raises(UserError, match='the disk does not hold what was written'):
    writer.close()
  assert not (tmp_path / 'out' / 'train').exists()


@pytest.mark.slow
def test_workers_end_with_their_parent(tmp_path):
  source = as_json_lines(tmp_path / 'c.jsonl', [read_text(packaged.TEXTS[0])[:400_000]] * 60)
  process = subprocess.Popen(
    [sys.executable, '-m', 'paxlite', 'tokenize', f'--vocab={packaged.VOCAB}', '--processes=2',
     f'--output={tmp_path / "out"}', source],
    cwd=runs.ROOT, env=runs.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
  )  # fmt: skip
  children: list[int] = []
  while len(children) < 3 and process.poll() is None:  # two workers and multiprocessing's tracker
    time.sleep(0.05)
    found = pathlib.Path(f'/proc/{process.pid}/task/{process.pid}/children').read_text()
    children = [int(c) for c in found.split()]
  time.sleep(1.0)
  process.kill()
  process.wait()
  deadline = time.monotonic() + 10
  while (alive := [c for c in children if os.path.exists(f'/proc/{c}')]) and (
    time.monotonic() < deadline
  ):
    time.sleep(0.1)
  assert children
  assert alive == []
