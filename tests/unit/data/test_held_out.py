"""What is held out goes by contents: other files beside it change the side of nothing."""

import gzip
import itertools
import json
import random

import numpy as np
import pytest

from paxlite.core.errors import UserError
from paxlite.data import packaged
from paxlite.data.base import RowInput
from paxlite.data.documents import DocumentSource
from paxlite.data.fingerprints import change, changes_of_evaluations, identity
from paxlite.data.flat_tokens import FlatTokenRows
from paxlite.data.held_out import held_out, is_held_out
from paxlite.data.streams import StreamInput
from paxlite.data.text import TextRows
from paxlite.data.tokenizer import open_tokenizer
from paxlite.finetuning.chats.sft import SftRows
from paxlite.finetuning.preferences.preference_rows import PreferenceRows
from paxlite.tokenization.commands import tokenize

EVERY = 4
DRAWS = pytest.mark.parametrize('draw', range(3))


def record(kind: str, rng: random.Random) -> dict:
  number = rng.randrange(200)  # so that many stand twice
  match kind:
    case 'documents':
      return {'text': f'The text {number}', 'id': rng.random()}
    case 'text':
      return {'text': f'The text {number}' * 40}
    case 'answers':
      return {'prompt': f'{number} is', 'completion': f' {number * number}.'}
    case 'chats':
      turns = (('user', f'What is {number}?'), ('assistant', f'It is {number}.'))
      return {'messages': [{'role': role, 'content': text} for role, text in turns]}
    case _:
      return {'prompt': f'{number} is', 'chosen': f' {number}.', 'rejected': f' {number + 1}.'}


def write_shard(folder, name: str, records: list[dict]) -> str:
  path = folder / name
  data = ''.join(json.dumps(r) + '\n' for r in records).encode()
  path.write_bytes(gzip.compress(data) if name.endswith('.gz') else data)
  return str(path)


def shards(folder, kind: str, rng: random.Random) -> tuple[list[str], list[str]]:
  """Returns the files of a training, and those that are there when it is evaluated."""
  drawn = {
    f'{rng.randrange(1000):03}{rng.choice([".jsonl", ".jsonl.gz"])}': [
      record(kind, rng) for _ in range(rng.randrange(40, 90))
    ]
    for _ in range(4)
  }
  files = sorted(write_shard(folder, name, records) for name, records in drawn.items())
  name, records = next(iter(drawn.items()))
  copy = write_shard(folder, f'{rng.randrange(1000):03}_{name}.gz'.replace('.gz.gz', ''), records)
  before = rng.sample(files, rng.randrange(1, 4))
  return before, sorted([*files, copy])


def texts(kind: str, files: list[str], split: str) -> list[str]:
  tokenizer = open_tokenizer(packaged.VOCAB)
  if kind == 'documents':
    (dataset,) = DocumentSource(
      files, packaged.VOCAB, 8192, split=split, held_out_every=EVERY
    ).datasets
    found = [x for i in range(dataset.num_shards) for _, x in dataset.examples(i, False, None, 0)]
  else:
    kind_of_rows = PreferenceRows if kind == 'pairs' else SftRows
    rows = kind_of_rows(
      files, packaged.VOCAB, 64, 8192, chat_template='{{ messages[1].content }}{{ eos_token }}',
      split=split, held_out_share=1 / EVERY,
    )  # fmt: skip
    found = [rows.example(i) for i in range(rows.num_examples)]
  return [tokenizer.decode(x.ids.tolist()) for x in found]


@pytest.mark.cases(fast=4)
@DRAWS
@pytest.mark.parametrize('kind', ['documents', 'answers', 'chats', 'pairs'])
def test_other_shards_put_nothing_on_both_sides(tmp_path, kind, draw):
  before, after = shards(tmp_path, kind, random.Random(f'{kind} {draw}'))
  trained, apart = set(texts(kind, before, 'train')), texts(kind, before, 'held_out')
  evaluated = set(texts(kind, after, 'held_out'))
  assert not trained & evaluated
  assert set(apart) <= evaluated
  assert not set(texts(kind, after, 'train')) & evaluated


@pytest.mark.parametrize('share', [0.005, 0.05, 0.3, 0.5])
def test_the_share_is_the_one_that_is_asked_for(share):
  rng = random.Random(0)
  count = sum(is_held_out(rng.randrange(2**32), share) for _ in range(20_000))
  assert count == pytest.approx(20_000 * share, abs=4 * (20_000 * share * (1 - share)) ** 0.5)


def test_many_and_one_are_chosen_alike():
  identities = list(range(500))
  one_by_one = [is_held_out(i, 0.1) for i in identities]
  np.testing.assert_array_equal(held_out(identities, 0.1), one_by_one)


def test_a_share_that_few_examples_miss_is_said(tmp_path):
  files = [write_shard(tmp_path, 'a.jsonl', [record('answers', random.Random(0))] * 3)]
  with pytest.raises(UserError, match='too few, or too similar'):
    texts('answers', files, 'train')
  records = [{'prompt': f'{i} is', 'completion': f' {i}'} for i in range(8)]
  path = write_shard(tmp_path, 'b.jsonl', records)
  rows = SftRows([path], packaged.VOCAB, 64, 8192, split='train', held_out_share=0.01)
  assert rows.warnings == [
    '1 of 8 examples are held out, 12.5% instead of 1.0% (EVAL_FRACTION), because hashes of their '
    'contents choose them'
  ]


@DRAWS
def test_splits_of_tokens_share_no_document(tmp_path, draw):
  before, after = shards(tmp_path, 'documents', random.Random(draw))
  flags = [
    f'--vocab={packaged.VOCAB}', f'--output={tmp_path / "out"}', '--processes=1',
    f'--held_out_every={EVERY}',
  ]  # fmt: skip
  tokenize.main([*flags, *before])
  tokenize.main([*flags, '--held_out', '--split=validation', *after])

  def documents(split):
    rows = FlatTokenRows(str(tmp_path / 'out'), split, 16)
    starts = rows.seq_starts
    pairs = itertools.pairwise(starts)
    return {rows.tokens[int(a) : int(b)].tobytes() for a, b in pairs}

  assert not documents('train') & documents('validation')
  with pytest.raises(UserError, match=r'out/train was written with 4, .*Use the same number'):
    tokenize.main([*flags, '--held_out_every=8', '--held_out', '--split=other', *after])


def test_a_split_of_an_earlier_version_is_said(tmp_path, capsys):
  path = write_shard(tmp_path, 'a.jsonl', [{'text': f'text {i}'} for i in range(40)])
  flags = [
    f'--vocab={packaged.VOCAB}', f'--output={tmp_path / "out"}', '--processes=1',
    f'--held_out_every={EVERY}', path,
  ]  # fmt: skip
  tokenize.main(flags)
  meta = tmp_path / 'out' / 'train' / 'meta.json'
  kept = {k: v for k, v in json.loads(meta.read_text()).items() if not k.startswith('held_out')}
  meta.write_text(json.dumps(kept))
  tokenize.main([*flags, '--held_out', '--split=validation'])
  assert 'out/train was written by an earlier version' in capsys.readouterr().err


def data(path: str, kind: str, split: str) -> StreamInput | RowInput:
  if kind == 'documents':
    source = DocumentSource([path], packaged.VOCAB, 8192, split=split, held_out_every=EVERY)
    return StreamInput(source, 16, 2)
  share = 1 / EVERY
  if kind == 'text':
    return RowInput(TextRows([path], packaged.VOCAB, 16, split, held_out_share=share), 2)
  rows = SftRows([path], packaged.VOCAB, 64, 8192, split=split, held_out_share=share)
  return RowInput(rows, 2)


@pytest.mark.parametrize('kind', ['documents', 'answers', 'text'])
def test_a_run_that_chose_in_another_way_is_told(tmp_path, kind):
  rng = random.Random(kind)
  path = write_shard(tmp_path, 'a.jsonl', [record(kind, rng) for _ in range(60)])
  now = identity(data(path, kind, 'train'))
  assert now['held_out'] == 'contents'
  assert change(now, now) == ''
  former = {k: v for k, v in now.items() if k != 'held_out'}
  assert 'an earlier version held out other data,' in change(now, former)
  whole = identity(data(path, kind, 'all'))
  assert 'held_out' not in whole
  assert change(whole, whole) == ''
  evaluated = {'held_out': identity(data(path, kind, 'held_out'))}
  (line,) = changes_of_evaluations(evaluated, former)
  assert line.startswith(
    "held_out is not the data of the run's evaluations: an earlier version held"
  )
  assert changes_of_evaluations(evaluated, {**now, 'evaluated': evaluated}) == []
  assert changes_of_evaluations(evaluated, {}) == []
  write_shard(tmp_path, 'a.jsonl', [record(kind, rng) for _ in range(70)])
  later = {'held_out': identity(data(path, kind, 'held_out'))}
  (line,) = changes_of_evaluations(later, {**now, 'evaluated': evaluated})
  assert 'its contents have changed since' in line
