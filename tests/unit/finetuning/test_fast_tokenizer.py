"""Ids of fastokens are those of tokenizers, or it is not used."""

import json
import random

import numpy as np
import pytest
from tokenizers import normalizers

from paxlite.data.json_tokenizer import JsonTokenizer
from paxlite.finetuning.chats import example_files
from paxlite.finetuning.chats.fast_tokenizer import FastTokenizer, OtherIds, is_faster
from paxlite.finetuning.chats.sft import SftRows
from tests.support.tokenizer_draws import (
  SPLITS,
  TEMPLATES,
  byte_level_tokenizer,
  draw_chat,
  draw_text,
)

pytest.importorskip('fastokens')


def written(folder, splits=(), normalizer=None) -> str:
  path = str(folder / 'tokenizer.json')
  byte_level_tokenizer(list(splits), normalizer).save(path)
  return path


@pytest.mark.parametrize('kind', ['gpt2', *SPLITS])
@pytest.mark.parametrize('normalizer', [None, normalizers.NFC()], ids=['', 'nfc'])
def test_ids_of_any_text_are_the_same(tmp_path, kind, normalizer):
  path = written(tmp_path, SPLITS.get(kind, ()), normalizer)
  exact, fast = JsonTokenizer(path), FastTokenizer(path)
  marks, encoded = [*exact.added_texts.values()], 0
  for seed in range(600):
    text = draw_text(random.Random(seed), [*marks, '  \u180e'])  # one that they know differently
    for one, other in zip(exact.encode_tokens(text), fast.encode_tokens(text), strict=True):
      np.testing.assert_array_equal(one, other, repr(text))
      assert one.dtype == other.dtype
    encoded += fast._knows(text)
  assert encoded > 300


@pytest.fixture
def file(tmp_path, monkeypatch):
  """Chats that count as many, which one process encodes."""
  rng = random.Random(3)
  chats = [json.dumps({'messages': draw_chat(rng, 'chatml')}) + '\n' for _ in range(400)]
  (tmp_path / 'chats.jsonl').write_text(''.join(chats))
  monkeypatch.setattr(example_files._first, '__defaults__', (20, 1 << 25))
  monkeypatch.setattr(example_files, 'usable_cores', lambda: 1)
  return str(tmp_path / 'chats.jsonl')


def cached(file, path, folder) -> dict[str, bytes]:
  """Returns what the cache of these chats holds."""
  SftRows(
    [file], path, 600, 700, chat_template=TEMPLATES['chatml'], too_long='skip', cache=str(folder)
  )
  return {p.name: p.read_bytes() for p in folder.glob('*/*')}


def test_the_cache_is_the_same(tmp_path, file, monkeypatch, caplog):
  path, encoded = written(tmp_path, SPLITS['llama3']), []
  find = FastTokenizer._fast_ids
  monkeypatch.setattr(
    FastTokenizer, '_fast_ids', lambda self, text: encoded.append(text) or find(self, text)
  )
  fast = cached(file, path, tmp_path / 'fast')
  assert len(encoded) > 400
  wrong = lambda self, text: find(self, text)[:: -1 if 'spaces' in text else 1]
  monkeypatch.setattr(FastTokenizer, '_fast_ids', wrong)
  assert cached(file, path, tmp_path / 'wrong') == fast
  assert 'with other ids than tokenizers: tokenizing again without it' in caplog.text
  monkeypatch.setattr(example_files, 'is_faster', lambda tokenizer: False)
  assert cached(file, path, tmp_path / 'exact') == fast


def test_what_it_does_not_know_is_encoded_by_tokenizers(tmp_path, monkeypatch, caplog):
  path = written(tmp_path)
  find = FastTokenizer._fast_ids
  wrong = lambda self, text: find(self, text)[: None if text.isascii() else -1]
  monkeypatch.setattr(FastTokenizer, '_fast_ids', wrong)
  text, exact = 'naïve café', JsonTokenizer(path)
  assert FastTokenizer(path).encode_array(text).tolist() == exact.encode(text)
  assert is_faster(exact)
  monkeypatch.setattr(FastTokenizer, '_fast_ids', lambda self, text: np.zeros(1, np.uint32))
  with pytest.raises(OtherIds):
    FastTokenizer(path)
  assert not is_faster(exact)
  assert 'and is not used' in caplog.text


def test_special_tokens_that_are_text_are_not_known(tmp_path):
  path = written(tmp_path)
  (tmp_path / 'tokenizer_config.json').write_text(json.dumps({'split_special_tokens': True}))
  assert not is_faster(JsonTokenizer(path))
