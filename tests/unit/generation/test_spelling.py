"""Tokens are spelled by what they add to the text before them, whatever their tokenizer drops."""

import json
import random

import pytest

from paxlite.data import packaged
from paxlite.data.tokenizer import open_tokenizer
from paxlite.generation.grammar import _Tokens
from paxlite.generation.spelling import Mark, Spelling, added_text, between, shown, spelled
from paxlite.generation.text import AnswerText

pytest.importorskip('tokenizers')

KINDS = 'llama', 'metaspace', 'byte_level', 'sentencepiece'
SPECIAL = ['<s>', '</s>', '<|im_end|>', '<think>', '</think>']
LEARNED = ['The capital of France is Paris.', 'Grüße aus Zürich, 東京 and  two   spaces 😀 é'] * 3
WORDS = [
  'Paris', ' Paris', '  two', ' ', '\n\n', '東京', '😀', '👩\u200d👧', 'é', 'e\u0301', '.', 'is',
  '\u0e01', '\U0001f1eb\U0001f1f7', '<s>', '\ufffd', ' x ',
]  # fmt: skip


def made(kind, folder):
  """Returns a tokenizer of one of KINDS."""
  if kind == 'sentencepiece':
    return open_tokenizer(packaged.VOCAB)
  from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

  of_bytes = [f'<0x{i:02X}>' for i in range(256)]
  special = [*SPECIAL] if kind == 'byte_level' else [*SPECIAL, '<unk>']
  alphabet = sorted({*''.join(LEARNED), '▁'} - {' ', '😀'})
  if kind == 'byte_level':
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
  elif kind == 'metaspace':
    found = Tokenizer(models.BPE(unk_token='<unk>'))
    found.pre_tokenizer = pre_tokenizers.Metaspace('▁', 'always')
    found.decoder = decoders.Metaspace('▁', 'always')
  else:
    found = Tokenizer(models.BPE(unk_token='<unk>', byte_fallback=True))
    found.normalizer = normalizers.Sequence(
      [normalizers.Prepend('▁'), normalizers.Replace(' ', '▁')]
    )
    steps = [decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse()]
    found.decoder = decoders.Sequence([*steps, decoders.Strip(' ', 1, 0)])
  found.train_from_iterator(
    LEARNED,
    trainers.BpeTrainer(
      vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    ),
  )
  if kind == 'llama':
    tree = json.loads(found.to_str())
    vocabulary = tree['model']['vocab']
    vocabulary |= {piece: len(vocabulary) + i for i, piece in enumerate(of_bytes)}
    found = Tokenizer.from_str(json.dumps(tree))
  found.save(str(folder / 'tokenizer.json'))
  names = dict(bos_token='<s>', eos_token='</s>', tokenizer_class='PreTrainedTokenizerFast')
  (folder / 'tokenizer_config.json').write_text(json.dumps(names))
  return open_tokenizer(str(folder))


@pytest.fixture(scope='module')
def tokenizers(tmp_path_factory):
  return {kind: made(kind, tmp_path_factory.mktemp(kind)) for kind in KINDS}


def texts(rng, count):
  return [''.join(rng.choices(WORDS, k=rng.randint(1, 9))) for _ in range(count)]


def streamed(answer, ids, rng):
  """Returns what a stream sends of an answer, in pieces of some tokens."""
  found = []
  for token in ids:
    answer.add(token)
    if rng.random() < 0.7:
      found += answer.news()
  answer.close()
  return found + answer.news(is_last=True)


@pytest.mark.parametrize('kind', KINDS)
def test_the_pieces_of_a_text_are_the_text(tokenizers, kind):
  """So are its bytes; and what follows a part of the tokens is what they add to it."""
  tokenizer, rng = tokenizers[kind], random.Random(1)
  for text in texts(rng, 60):
    ids = [tokenizer.special_id('bos_token'), *tokenizer.encode(text)]
    whole = tokenizer.decode(ids)
    pieces = [piece for piece, _ in spelled(tokenizer, ids) if piece.data is not None]
    assert ''.join(piece.text for piece in pieces) == whole
    assert b''.join(piece.data for piece in pieces) == whole.encode()
    cut = rng.randint(1, len(ids))
    spelling = Spelling(tokenizer)
    before = shown(Mark(p.text) if p.data is None else p.text for p in map(spelling.add, ids[:cut]))
    assert before + added_text(tokenizer, ids[cut:], ids[:cut]) == whole
    parts = streamed(AnswerText(tokenizer, before=ids[:cut]), ids[cut:], rng)
    assert before + shown(parts) == whole


@pytest.mark.parametrize('kind', KINDS)
def test_tokens_that_are_no_text(tokenizers, kind):
  """Bytes that are not UTF-8 are replaced as by Python, where each tokenizer has its own way."""
  tokenizer, rng = tokenizers[kind], random.Random(2)
  partial = [i for i in range(tokenizer.vocab_size) if '\ufffd' in tokenizer.decode([i])]
  for _ in range(200):
    pool = rng.choice([partial or range(9), range(tokenizer.vocab_size)])
    ids = rng.choices(pool, k=rng.randint(1, 12))
    cut = rng.randint(0, len(ids))
    told = spelled(tokenizer, ids)
    pieces = [piece for piece, _ in told if piece.data is not None]
    text, data = ''.join(p.text for p in pieces), b''.join(p.data for p in pieces)
    assert text == data.decode('utf-8', 'replace')
    is_valid = text.encode() == data
    if is_valid or kind == 'byte_level':
      assert text == tokenizer.decode(ids)
    if pieces:
      assert shown(streamed(AnswerText(tokenizer), ids, rng)) == text
    peeked = spelled(tokenizer, ids, others=[[i] for i in ids[:cut]])
    assert all([piece.data for piece in others] == [own.data] for own, others in peeked[:cut])
    names = [piece.text for piece, _ in told if piece.data is None]
    assert names == [tokenizer.decode_marked([i]) for i in ids if i in tokenizer.special_ids]


def test_a_space_that_a_tokenizer_drops_is_there_within_a_text(tokenizers):
  tokenizer = tokenizers['llama']
  before = [0, *tokenizer.encode('The capital of France is')]
  after = tokenizer.encode('Paris')
  assert tokenizer.decode(after) == 'Paris'
  assert added_text(tokenizer, after, before) == ' Paris'
  assert added_text(tokenizer, after, [0]) == added_text(tokenizer, after) == 'Paris'
  answer = AnswerText(tokenizer, [' Paris'], before)
  for token in after:
    answer.add(token)
  assert answer.is_ended
  assert answer.text == shown(answer.news(True)) == ''


@pytest.mark.parametrize('kind', KINDS)
def test_texts_end_an_answer_behind_its_least_tokens(tokenizers, kind):
  tokenizer, rng = tokenizers[kind], random.Random(3)
  for text in texts(rng, 60):
    ids = [i for i in tokenizer.encode(text + ' is Paris') if i not in tokenizer.special_ids]
    whole, least = tokenizer.decode(ids), rng.randint(0, 4)
    start = rng.randrange(len(whole))
    endings = [whole[start : start + rng.randint(1, 4)], 'nowhere']
    settled = ''.join(piece.text for piece in map(Spelling(tokenizer).add, ids[:least]))
    answer = AnswerText(tokenizer, endings, least=least)
    used = 0
    while used < len(ids) and not answer.is_ended:
      answer.add(ids[used])
      used += 1
    at = whole.find(endings[0], max(0, len(settled) - len(endings[0]) + 1))
    answer.close()
    assert answer.text == (whole if at < 0 else whole[:at])
    assert not answer.is_ended or used > least


def test_a_grammar_knows_the_bytes_of_pieces(tokenizers):
  """Those of byte fallback are no characters, and pieces keep the space that they begin with."""
  tokenizer = tokenizers['sentencepiece']
  known = _Tokens(tokenizer).tokens
  pieces = [tokenizer.piece(i) for i in range(tokenizer.vocab_size)]
  for piece, data in zip(pieces, known, strict=True):
    if piece.startswith('<0x'):
      assert data == bytes.fromhex(piece[3:5])
    elif piece.startswith('▁'):
      assert data == piece.replace('▁', ' ').encode()
  assert known[tokenizer.eos_id] == b''


def test_special_tokens_are_parts_of_their_own(tokenizers):
  tokenizer = tokenizers['byte_level']
  ids = tokenizer.encode_tokens('<think>a</s>b<|im_end|>c', marked=True).ids.tolist()
  answer = AnswerText(tokenizer, ['<|im_end|>'])
  for token in ids:
    if not answer.is_ended:
      answer.add(token)
  parts = answer.parts
  assert ''.join(parts) == '<think>a</s>b'
  assert [part for part in parts if isinstance(part, Mark)] == ['<think>', '</s>']
  assert shown(parts) == 'ab'
  assert between(parts, 3, 9) == ['a']
