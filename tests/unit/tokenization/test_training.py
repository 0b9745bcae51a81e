"""Tokenizers that are trained on own text."""

import gzip
import json
import re

import pytest

from paxlite.core.errors import UserError
from paxlite.data import packaged
from paxlite.data.tokenizer import open_tokenizer
from paxlite.files.text_files import read_text
from paxlite.tokenization.commands import train_tokenizer
from paxlite.tokenization.training import sample, train


@pytest.fixture(scope='module')
def text() -> str:
  return read_text(packaged.TEXTS[1])[20_000:60_000]


def made(folder, *flags: str) -> bytes:
  train_tokenizer.main([f'--output={folder / "tok.model"}', *flags])
  return (folder / 'tok.model').read_bytes()


def folder(tmp_path, name: str):
  (tmp_path / name).mkdir()
  return tmp_path / name


@pytest.mark.parametrize('model_type', ['unigram', 'bpe'])
def test_the_same_text_gives_the_same_tokenizer_and_every_text_back(
  tmp_path, text, capsys, model_type
):
  (tmp_path / 'a.txt').write_text(text)
  flags = [str(tmp_path / 'a.txt'), '--vocab_size=500', f'--model_type={model_type}']
  first = made(folder(tmp_path, 'b'), *flags)
  out = capsys.readouterr().out
  assert made(folder(tmp_path, 'c'), *flags) == first
  tokenizer = open_tokenizer(str(tmp_path / 'b' / 'tok.model'))
  assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (500, 1, 2)
  for sentence in ('  two  spaces\n\n\ttab ', '日本 🙂 ß\r\n', text[:3000]):
    assert tokenizer.decode(tokenizer.encode(sentence)) == sentence
  path = re.escape(str(tmp_path / 'b' / 'tok.model'))
  assert re.search(rf'{path}: 500 ids, trained on all 40,000 characters, .* [1-4]\.\d\d bytes', out)
  assert re.search(rf'VOCAB_PATH={path} VOCAB_SIZE=500', out)


def test_sources_of_every_kind_give_the_same_tokenizer(tmp_path, text):
  (tmp_path / 'a.jsonl').write_text(json.dumps({'body': text}))
  (tmp_path / 'a.txt.gz').write_bytes(gzip.compress(b'\xef\xbb\xbf' + text.encode()))
  first = made(folder(tmp_path, 'b'), str(tmp_path / 'a.jsonl'), '--vocab_size=400', '--field=body')
  assert made(folder(tmp_path, 'c'), str(tmp_path / 'a.txt.gz'), '--vocab_size=400') == first


def test_a_sample_is_bounded_and_spread_over_all_text():
  texts = [chr(ord('a') + i % 26) * (100 + 7000 * (i % 3)) for i in range(300)]
  pieces, total = sample(texts, 100_000)
  assert total == sum(map(len, texts))
  assert 90_000 < sum(map(len, pieces)) <= 100_000
  assert len({piece[0] for piece in pieces}) > 15
  assert sample(texts, 100_000)[0] == pieces
  assert ''.join(sample(texts, 10**7)[0]) == ''.join(texts)


@pytest.mark.parametrize(
  ('flags', 'match'),
  [
    (['--vocab_size=20'], '--vocab_size=20 must be at least 300'),
    (['--vocab_size=9000'], r'no tokenizer of 9,000 ids can be made: Vocabulary size too high'),
    (['--vocab_size=400', '--sample_chars=1'], '--sample_chars=1 must be at least 1000'),
    (['--vocab_size=400', '--character_coverage=2'], 'must be from 0.9 to 1'),
    (['--vocab_size=400', '--output=there.model'], 'there.model exists: choose another name'),
    (['--vocab_size=400', '--output=no/a.model'], 'in a folder that exists'),
    (['--vocab_size=400', 'b.txt'], r'b.txt:2 is not UTF-8 \(0xff\)'),
    (['--vocab_size=400', 'a.txt'], 'the source a.txt is listed twice'),
    (['--vocab_size=400', 'c.jsonl'], "c.jsonl:1 has no text field 'text'"),
  ],
)
def test_wrong_arguments_write_nothing(tmp_path, monkeypatch, text, flags, match):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'a.txt').write_text(text[:5000])
  (tmp_path / 'b.txt').write_bytes(b'a\nb\xff')
  (tmp_path / 'c.jsonl').write_text('{"body": "a"}')
  (tmp_path / 'there.model').write_text('')
  before = sorted(tmp_path.iterdir())
  with pytest.raises(UserError, match=match):
    train_tokenizer.main(['--output=new.model', *flags, 'a.txt'])
  assert sorted(tmp_path.iterdir()) == before


def test_no_text_is_an_error():
  with pytest.raises(UserError, match='no tokenizer of 400 ids can be made'):
    train([], 400)
