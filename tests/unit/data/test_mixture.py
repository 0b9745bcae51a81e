"""Mixtures and streamed documents: shares, epochs, exact continuation, separate held-out text."""

import itertools
import json
import pathlib
import re

import numpy as np
import pytest

from paxlite.core.errors import UserError
from paxlite.data import documents as documents_module
from paxlite.data import packaged
from paxlite.data.base import RowInput
from paxlite.data.documents import DocumentSource
from paxlite.data.mixture import StreamMixtureInput, mixture_of
from paxlite.data.positions import Field
from paxlite.data.records import read_records
from paxlite.data.streams import StreamInput
from paxlite.data.tokenizer import open_tokenizer
from paxlite.experiments.datasets import (
  DocumentFiles,
  FlatTokens,
  Mixture,
  SeqioTask,
  SftFiles,
  short_names,
)
from paxlite.experiments.demo import TinyGPT
from paxlite.files.text_files import read_text
from tests.support import runs

T = 32


class Numbered:
  """A RowSource whose row i has `first` + i in all places."""

  def __init__(self, first: int, num_rows: int, segments: bool = False):
    self.name, self.first, self.num_rows, self.segments = f'from {first}', first, num_rows, segments
    self.max_token_id = first + num_rows - 1

  def __len__(self) -> int:
    return self.num_rows

  def read(self, indices):
    ids = np.broadcast_to(self.first + np.asarray(indices)[:, None], (len(indices), T))
    batch = {'ids': ids.astype(np.int32), 'labels': ids.astype(np.int32)}
    batch['weights'] = np.ones((len(indices), T), np.float32)
    if self.segments:
      batch |= {'segment_ids': ids * 0 + 1, 'segment_pos': ids * 0 + np.arange(T)}
    return batch


def two(batch_size: int = 8, segments: bool = False):
  parts = [RowInput(Numbered(0, 100), 1), RowInput(Numbered(1000, 60, segments), 1)]
  return mixture_of(parts, [3.0, 1.0], batch_size)


def rows_of(source, count: int, start: int = 0, rows=None) -> np.ndarray:
  """Returns the first token of each row, in order."""
  rows = rows or slice(0, source.batch_size)
  found = itertools.islice(source.train_batches(start, rows), count)
  return np.concatenate([b['ids'][:, 0] for b in found])


def test_shares_are_exact_and_epochs_each_in_their_own_order():
  rows = rows_of(two(), 256)  # two blocks
  first, second = rows[rows < 1000], rows[rows >= 1000]
  assert (len(first), len(second)) == (1536, 512)
  for part, n in ((first, 100), (second - 1000, 60)):
    epochs = [part[i : i + n] for i in range(0, len(part) - n, n)]
    assert all(sorted(e) == list(range(n)) for e in epochs)
    assert len({e.tobytes() for e in epochs}) == len(epochs)


@pytest.mark.parametrize('batch_size', [4, 8, 32])
def test_the_order_is_the_same_for_any_batch_size_and_from_any_step(batch_size):
  whole = rows_of(two(8), 128)
  source = two(batch_size)
  found = rows_of(source, 64 // batch_size, start=512 // batch_size)
  np.testing.assert_array_equal(found, whole[512:576])
  halves = [rows_of(source, 4, rows=slice(i, i + batch_size // 2)) for i in (0, batch_size // 2)]
  both = np.concatenate([h.reshape(4, -1) for h in halves], 1).ravel()
  np.testing.assert_array_equal(both, rows_of(source, 4))


def test_a_part_without_segments_gets_them_beside_one_that_has_them():
  batch = next(two(8, segments=True).train_batches(0, slice(0, 8)))
  assert (batch['segment_ids'] == 1).all()
  np.testing.assert_array_equal(batch['segment_pos'], np.tile(np.arange(T), (8, 1)))
  assert 'segment_ids' not in next(two(8).train_batches(0, slice(0, 8)))


@pytest.mark.parametrize('weights', [[1.0], [1.0, 0.0], [1.0, -1.0], [1.0, 1e-5]])
def test_weights_that_are_none(weights):
  parts = [RowInput(Numbered(0, 100), 1), RowInput(Numbered(1000, 60), 1)]
  with pytest.raises(UserError, match='weight'):
    mixture_of(parts, weights, 8)


@pytest.fixture(scope='module')
def texts() -> list[str]:
  text = read_text(packaged.TEXTS[0])[:150_000]
  return [p for p in text.split('\n\n') if p.strip()]


@pytest.fixture(scope='module')
def files(tmp_path_factory, texts) -> list[str]:
  folder = tmp_path_factory.mktemp('documents')
  paths = [folder / f'{i}.jsonl' for i in range(3)]
  for i, path in enumerate(paths):
    path.write_text(''.join(json.dumps({'text': t}) + '\n\n' for t in texts[i::3]))
  return [str(p) for p in paths]


@pytest.fixture
def small_blocks(monkeypatch):
  monkeypatch.setattr(documents_module, '_BLOCK', 16)


def streamed(files, rows='stream', batch_size: int = 4, **kwargs) -> StreamInput:
  source = DocumentSource(files, packaged.VOCAB, 8192, **kwargs)
  return StreamInput(source, T, batch_size, rows)


def same(a, b) -> bool:
  return len(a) == len(b) and all(
    all(np.array_equal(x[k], y[k]) for k in x) for x, y in zip(a, b, strict=True)
  )


def epoch_of(source) -> list:
  """Returns the batches of one row of one epoch."""
  found = []
  stream = source.train_batches(0, slice(0, 1))
  for step in itertools.count():
    batch = next(stream)
    if source.position(step + 1)[0, Field.EPOCH] > 0:
      return found
    found.append(batch)
  return found


def targets(batches) -> list[int]:
  return sorted(int(x) for b in batches for x in b['labels'][b['weights'] > 0])


@pytest.mark.parametrize('rows', ['stream', 'packed'])
def test_streamed_documents_lose_and_double_nothing(rows, files, texts, small_blocks):
  whole = epoch_of(streamed(files, rows, batch_size=1))
  tokenizer = open_tokenizer(packaged.VOCAB)
  ids = [[*tokenizer.encode(t), tokenizer.eos_id] for t in texts]
  limit = T if rows == 'packed' else None
  assert targets(whole) == sorted(i for x in ids for i in x[:limit])


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize('process', [0, 1])
@pytest.mark.parametrize('rows', ['packed', 'stream'])
def test_a_stream_goes_on_where_it_stood(rows, process, files, small_blocks):
  mine = slice(process * 2, process * 2 + 2)
  take = lambda source, start, count: list(
    itertools.islice(source.train_batches(start, mine), count)
  )
  whole = take(streamed(files, rows), 0, 700)  # more than an epoch
  for step in (1, 99, 350, 699):
    stopped, resumed = streamed(files, rows), streamed(files, rows)
    take(stopped, 0, step)
    resumed.seek(step, stopped.position(step))
    assert same(whole[step:], take(resumed, step, 700 - step)), step


def test_going_on_reads_no_more_than_a_block_again(files, small_blocks, monkeypatch):
  stopped, resumed = streamed(files), streamed(files)
  list(itertools.islice(stopped.train_batches(0, slice(0, 4)), 60))
  tokenized = []
  encoding = resumed.source.datasets[0].encoding
  encode = encoding.document
  monkeypatch.setattr(encoding, 'document', lambda t: tokenized.append(t) or encode(t))
  resumed.seek(60, stopped.position(60))
  next(resumed.train_batches(60, slice(0, 4)))
  assert 0 < len(tokenized) < 16


def test_held_out_documents_are_never_trained_on(files, texts, small_blocks):
  train, held_out = (
    streamed(files, 'packed', 1, split=s, held_out_every=7) for s in ('train', 'held_out')
  )
  trained = {x for b in epoch_of(train) for x in segments_of(b)}
  evaluated = {x for b in held_out.eval_batches(slice(0, 1)) for x in segments_of(b)}
  whole = {x for b in epoch_of(streamed(files, 'packed', batch_size=1)) for x in segments_of(b)}
  assert trained | evaluated == whole
  assert not {x for x in trained & evaluated if len(x) > 20}  # the text repeats short ones
  assert len(evaluated) > len(whole) / 10


@pytest.mark.parametrize(
  ('kind', 'values', 'match'),
  [
    (FlatTokens, dict(TRAIN_SPLIT='a', EVAL_SPLIT='a'), 'EVAL_SPLIT: a is used for training and'),
    (SeqioTask, dict(EVAL_SPLIT='train'), 'EVAL_SPLIT: train is used for training'),
    (DocumentFiles, dict(TRAIN_SOURCES=['x', 'y'], EVAL_SOURCES=['y']), 'EVAL_SOURCES: .*/y is'),
    (DocumentFiles, dict(HELD_OUT_EVERY=1), 'HELD_OUT_EVERY=1 would hold out all'),
    (SftFiles, dict(TRAIN_FILES=['x'], EVAL_FILES=['x']), 'EVAL_FILES: .*/x is used for training'),
    (Mixture, dict(SOURCES=['x', 'x'], WEIGHTS=[1, 1]), 'is listed twice'),
    (Mixture, dict(SOURCES=['x'], WEIGHTS=[1], EVAL_SPLIT='train'), 'EVAL_SPLIT: train is'),
    (Mixture, dict(SOURCES=['x'], WEIGHTS=[1, 2]), '1 SOURCES have 2 WEIGHTS'),
    (Mixture, dict(SOURCES=['x.jsonl'], WEIGHTS=[1], HELD_OUT_EVERY=1), 'HELD_OUT_EVERY=1'),
  ],
)
def test_what_is_trained_on_is_not_evaluated_on(kind, values, match):
  with pytest.raises(UserError, match=match):
    type('Run', (kind, TinyGPT), {})(**values).validate()


def test_nothing_held_out_is_said(files):
  few = streamed(files, split='held_out', held_out_every=1_000_000)
  with pytest.raises(UserError, match='there is nothing to evaluate on') as refused:
    next(few.eval_batches(slice(0, 4)))
  every = int(re.search(r'HELD_OUT_EVERY=(\d+) holds one of these out', str(refused.value))[1])
  of_source = lambda n: streamed(files, split='held_out', held_out_every=n).source.datasets[0]
  assert of_source(every).count_documents() == 1
  assert of_source(every + 1).count_documents() == 0


def segments_of(batch) -> list[tuple[int, ...]]:
  return [
    tuple(row[segments == s].tolist())
    for row, segments in zip(batch['labels'], batch['segment_ids'], strict=True)
    for s in range(1, segments.max() + 1)
  ]


def test_a_stream_refuses_other_files_than_it_read(files, tmp_path):
  stopped = streamed(files)
  list(itertools.islice(stopped.train_batches(0, slice(0, 4)), 3))
  position = stopped.position(3)
  with pytest.raises(UserError, match='has changed since the checkpoint'):
    streamed(files[:2]).seek(3, position)
  with pytest.raises(UserError, match='is listed twice'):
    streamed([files[0], files[0]])


def test_unreadable_documents_are_left_out_only_if_asked(tmp_path, caplog):
  path = tmp_path / 'c.jsonl'
  path.write_text('{"text": "a b"}\n{"text": null}\n{"text": "c d"}\n')
  with pytest.raises(
    UserError, match=r"c.jsonl:2: the field 'text' holds no text .SKIP_UNREADABLE"
  ):
    epoch_of(streamed([str(path)], batch_size=1))
  assert len(epoch_of(streamed([str(path)], batch_size=1, skip_unreadable=True))) == 1
  assert 'unreadable records left out so far: 1' in caplog.text


@pytest.mark.slow
def test_bad_data_loses_no_step_and_bad_held_out_data_no_time(tmp_path, files):
  bad = tmp_path / 'bad.jsonl'
  good = pathlib.Path(files[0]).read_text()
  bad.write_text(good + good + '{"text": null}\n')
  flags = [
    f'--fdl.TRAIN_SOURCES={[str(bad)]}', f'--fdl.VOCAB_PATH={packaged.VOCAB}',
    '--fdl.PACKED_INPUT=False', '--fdl.CHECKPOINT_EVERY_N_STEPS=100000',
    '--fdl.MAX_STEPS=100000', '--fdl.SUMMARY_INTERVAL_STEPS=50',
  ]  # fmt: skip
  config = 'tests.support.experiments.TinyDocuments'
  evaluated = f'--fdl.EVAL_SOURCES={[files[1]]}'
  result = runs.run(tmp_path / 'run', *flags, evaluated, config=config, code=2)
  assert "the field 'text' holds no text" in result.stderr
  (saved,) = (tmp_path / 'run' / 'checkpoints').glob('checkpoint_*')
  assert int(saved.name[-8:]) > 10
  nothing = tmp_path / 'nothing.jsonl'
  nothing.write_text('{"text": ""}\n')
  evaluated = f'--fdl.EVAL_SOURCES={[str(nothing)]}'
  result = runs.run(tmp_path / 'other', *flags, evaluated, config=config, code=2)
  assert 'there is nothing to evaluate on' in result.stderr
  assert 'First step' not in result.stdout


def test_a_mixture_with_a_stream_goes_on_where_it_stood(files, small_blocks):
  make = lambda: mixture_of([RowInput(Numbered(0, 100), 1), streamed(files)], [1.0, 2.0], 6)
  assert isinstance(make(), StreamMixtureInput)
  mine = slice(3, 6)
  take = lambda source, start, count: list(
    itertools.islice(source.train_batches(start, mine), count)
  )
  whole = take(make(), 0, 120)
  stopped, resumed = make(), make()
  take(stopped, 0, 77)
  resumed.seek(77, stopped.position(77))
  assert same(whole[77:], take(resumed, 77, 43))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_mixture_trains_and_resumes_bit_for_bit(tmp_path, files):
  """The run goes through main: flat tokens, text, and documents of a file and of Hugging Face."""
  datasets = pytest.importorskip('datasets')
  from paxlite.tokenization.commands import tokenize

  flat = str(tmp_path / 'flat')
  flags = ['--processes=1', f'--vocab={packaged.VOCAB}', f'--output={flat}', '--held_out_every=10']
  tokenize.main([*flags, files[0]])
  tokenize.main([*flags, '--held_out', '--split=validation', files[0]])
  (tmp_path / 'book.txt').write_text(read_text(packaged.TEXTS[1])[:200_000])
  saved = datasets.Dataset.from_list([dict(record) for _, record in read_records(files[2])])
  datasets.DatasetDict(train=saved).save_to_disk(str(tmp_path / 'saved'))
  sources = [flat, str(tmp_path / 'book.txt'), files[1], f'hf:{tmp_path / "saved"}/train']
  flags = [
    f'--fdl.SOURCES={sources}', '--fdl.WEIGHTS=[2,1,1,1]', f'--fdl.VOCAB_PATH={packaged.VOCAB}',
    '--fdl.HELD_OUT_EVERY=3', '--fdl.CHECKPOINT_EVERY_N_STEPS=4', '--fdl.EVAL_INTERVAL_STEPS=10',
    '--fdl.SUMMARY_INTERVAL_STEPS=1',
  ]  # fmt: skip
  config = 'tests.support.experiments.TinyMixture'
  runs.run(tmp_path / 'whole', *flags, '--fdl.MAX_STEPS=10', config=config)
  runs.run(tmp_path / 'halves', *flags, '--fdl.MAX_STEPS=4', config=config)
  runs.run(tmp_path / 'halves', *flags, '--fdl.MAX_STEPS=10', config=config)
  whole = runs.losses(tmp_path / 'whole')
  assert len(whole) == 10
  assert whole == runs.losses(tmp_path / 'halves')
  evaluated = {p.name for p in (tmp_path / 'whole' / 'summaries').iterdir()}
  third = pathlib.Path(files[1]).name.partition('.')[0]
  names = ['flat_validation', 'book_held_out', f'{third}_held_out']
  assert evaluated >= {f'eval_{name}' for name in names}


def test_evaluations_of_a_mixture_have_the_names_of_its_sources():
  sources = ['data/wiki.jsonl', 's3://bucket/more/wiki.jsonl.gz', 'hf:allenai/c4:en/train']
  sources += ['seqio:lm_task', 'sft:chats.jsonl', 'books/all the.txt', 'flat/']
  expected = ['wiki', 'wiki_2', 'c4_en_train', 'lm_task', 'chats', 'all_the', 'flat']
  assert short_names(sources) == expected
  assert short_names(['a_2.jsonl', 'a.jsonl', 'b/a.jsonl']) == ['a_2', 'a', 'a_3']
