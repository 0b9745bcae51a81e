"""Which texts name a model or a dataset of the Hub, and which are paths."""

import random
import string

import pytest

from paxlite.hub import names
from paxlite.hub.names import HubName, dataset_named, model_named


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv('HF_HOME', str(tmp_path / 'home'))
  names._say.cache_clear()
  return tmp_path


def drawn(rng: random.Random) -> str:
  rest = string.ascii_letters + string.digits + '-_.'
  return rng.choice(string.ascii_letters) + ''.join(rng.choices(rest, k=rng.randrange(1, 12)))


def test_names_are_read_with_their_revisions():
  rng = random.Random(0)
  for _ in range(200):
    repo, revision = f'{drawn(rng)}/{drawn(rng)}', rng.choice(['v1.0', 'refs/pr/3', 'a' * 40])
    assert model_named(repo) == model_named(f'hf:{repo}') == HubName(repo)
    assert model_named(f'{repo}@{revision}') == HubName(repo, revision)
    part = rng.choice(['validation', 'data/*.jsonl', 'a/b/train.parquet', 'x.json.gz'])
    found = dataset_named(f'hf:{repo}@{revision}:{part}')
    assert found == HubName(repo, revision, part, 'dataset')
    assert dataset_named(f'hf:{repo}:{part}') == HubName(repo, 'main', part, 'dataset')
    assert dataset_named(repo) is None


@pytest.mark.parametrize(
  'text',
  [
    '',
    'runs',
    './a/b',
    '/a/b',
    'a/b/c',
    'a/b/',
    '~/a',
    'gs://a/b',
    'a b/c',
    '../b',
    'a/b@',
    'a/b@../c',
    'C:/a',
  ],
)
def test_other_texts_are_paths(text):
  assert model_named(text) is None
  assert dataset_named(text) is None


@pytest.mark.parametrize(
  'text',
  ['hf:squad/train', 'hf:allenai/c4:en/train', 'hf:/data/wiki/train', 'hf:data/wiki/train',
   'hf:imdb/test[:10]', 'tfds:a/b'],
)  # fmt: skip
def test_datasets_that_are_streamed_stay_what_they_were(text):
  assert dataset_named(text) is None


def test_a_folder_here_is_meant_unless_the_name_says_hub(here, caplog):
  (here / 'org' / 'name').mkdir(parents=True)
  assert model_named('org/name') is None
  assert model_named('org/nmae') is None  # a misspelled path is nobody else's business
  assert model_named('org/name@v1') is None
  assert dataset_named('hf:org/name') is None
  assert model_named('hf:org/name') == HubName('org/name')
  assert not caplog.records
  HubName('org/name').copies.mkdir(parents=True)
  assert model_named('org/name') is None
  assert model_named('org/name') is None
  (said,) = caplog.messages
  assert 'hf:org/name names the model on the Hub' in said
