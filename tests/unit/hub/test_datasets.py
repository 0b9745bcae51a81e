"""Which files of a dataset a name means, and what they are read as."""

import io
import json
import random

import pytest

from paxlite.core.errors import UserError
from paxlite.data.records import read_records
from paxlite.files.text_files import expanded
from paxlite.hub import datasets, listing
from tests.support.hub_server import Fault


def lines(*texts: str) -> bytes:
  return ''.join(json.dumps({'text': text}) + '\n' for text in texts).encode()


def texts(name: str) -> list[object]:
  return [record['text'] for file in expanded([name]) for _, record in read_records(file)]


def test_the_split_of_a_name_and_a_revision(hub):
  first = hub.add(
    'org/chats',
    {'train.jsonl': lines('a', 'b'), 'dev.jsonl': lines('c'), 'README.md': b'#'},
    'dataset',
  )
  hub.add('org/chats', {'train.jsonl': lines('new')}, 'dataset')
  assert texts('hf:org/chats') == texts('hf:org/chats:train') == ['new']
  assert texts(f'hf:org/chats@{first}') == ['a', 'b']
  assert texts(f'hf:org/chats@{first}:validation') == ['c']
  assert texts(f'hf:org/chats@{first}:*.jsonl') == ['c', 'a', 'b']
  assert not hub.asked('README')


@pytest.mark.slow
def test_files_are_those_of_the_split_however_they_are_called(hub):
  rng = random.Random(0)
  for number in range(30):
    form = rng.choice(['{}.jsonl', 'data/{}-0000{}-of-00002.jsonl', '{}/x{}.jsonl', 'v1_{}.jsonl'])
    count = 2 if form.count('{}') == 2 else 1
    files, right = {}, []
    for split in ('train', 'test', rng.choice(['validation', 'valid', 'dev', 'val'])):
      for i in range(count):
        files[form.format(split, i)] = lines(f'{split}{i}')
        right += [f'{split}{i}'] * (split == 'train')
    files['dataset_infos.json'] = b'{}'
    hub.add(f'org/d{number}', files, 'dataset')
    assert texts(f'hf:org/d{number}') == right, files.keys()
    assert len(texts(f'hf:org/d{number}:validation')) == count, files.keys()


def test_what_no_name_says_is_for_training(hub):
  hub.add('org/one', {'questions.jsonl': lines('a'), 'more/answers.jsonl': lines('b')}, 'dataset')
  assert texts('hf:org/one') == ['b', 'a']
  with pytest.raises(UserError, match=r'org/one has no split test; its files are .*hf:org/one:'):
    expanded(['hf:org/one:test'])
  with pytest.raises(UserError, match=r'org/one has no file x.jsonl; its files are more/answers'):
    expanded(['hf:org/one:x.jsonl'])


@pytest.mark.parametrize(
  'data_files',
  [
    [{'split': 'train', 'path': 'b/*.jsonl'}, {'split': 'test', 'path': ['a/t.jsonl']}],
    {'split': 'train', 'path': ['b/t.jsonl']},
    'b/**',
    ['b/t.jsonl'],
  ],
)
def test_files_are_those_that_the_readme_states(hub, monkeypatch, data_files):
  card = {'configs': [{'config_name': 'default', 'data_files': data_files}]}
  files = {'a/t.jsonl': lines('a'), 'b/t.jsonl': lines('b'), 'train.jsonl': lines('c')}
  files['README.md'] = f'---\n{json.dumps(card)}\n---\n'.encode()
  hub.add('org/stated', files, 'dataset', card=card)
  assert texts('hf:org/stated:*.jsonl') == ['a', 'b', 'c']
  assert texts('hf:org/stated') == ['b']
  monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
  listing.listing_of.cache_clear()
  datasets.files_of.cache_clear()
  assert texts('hf:org/stated') == ['b']


@pytest.mark.parametrize(
  ('files', 'card', 'said'),
  [
    ({'a.png': b'x'}, {}, 'org/odd has no split train; its files are none of .jsonl'),
    (
      {'train.jsonl': b'{}', 'train.csv': b'a'},
      {},
      r'as .csv and as .jsonl: choose one, as hf:org/odd:\*\.csv$',
    ),
    (
      {'train.jsonl': b'{}'},
      {'configs': [{'config_name': c, 'data_files': f'{c}/*'} for c in 'ab']},
      'has the configurations a, b: name files, as hf:org/odd:FOLDER',
    ),
  ],
)
def test_what_is_not_clear_is_said_before_a_download(hub, files, card, said):
  hub.add('org/odd', files, 'dataset', card=card)
  with pytest.raises(UserError, match=said):
    expanded(['hf:org/odd'])
  assert not hub.asked('resolve')


def test_parquet_is_read_from_its_copies(hub):
  pyarrow = pytest.importorskip('pyarrow')
  parquet = pytest.importorskip('pyarrow.parquet')
  file = io.BytesIO()
  parquet.write_table(pyarrow.table({'text': ['a', 'b'] * 900}), file)
  hub.add('org/table', {'data/train-00000-of-00001.parquet': file.getvalue()}, 'dataset')
  assert texts('hf:org/table') == ['a', 'b'] * 900


def test_a_name_that_is_no_dataset(hub):
  with pytest.raises(UserError, match=r'nor a public dataset at http://\S+/datasets/org/no: check'):
    expanded(['hf:org/no'])
  assert datasets.files_of('gs://a/b') == []
  hub.faults[:] = [Fault('.', 500)]
  assert expanded(['hf:squad/train', 'hf:a/b:c/train']) == ['hf:squad/train', 'hf:a/b:c/train']
  assert not hub.asked('squad')
