"""What begins a document and ends it in every kind of source, and text that no token holds."""

import io
import json
import pathlib
import random

import numpy as np
import pytest
import sentencepiece

from paxlite.core.errors import UserError
from paxlite.data import packaged
from paxlite.data.base import RowInput
from paxlite.data.document_encoding import DocumentEncoding
from paxlite.data.documents import DocumentSource
from paxlite.data.flat_tokens import FlatTokenRows
from paxlite.data.mixture import mixture_of
from paxlite.data.streams import StreamInput
from paxlite.data.text import TextRows, split_texts
from paxlite.data.tokenizer import open_tokenizer, vocabulary_fingerprint
from paxlite.finetuning.chats.sft import SftRows
from paxlite.run_data import data_report
from paxlite.tokenization.commands import tokenize

tokenizers = pytest.importorskip('tokenizers')

WORDS = ['the', 'king', 'is', 'dead', 'and', 'long', 'live', 'a', 'queen', '東京', 'é', '7']
LETTERS = 'abcdefghijklmnopqrstuvwxyz <>/'


def drawn_text(rng: random.Random, chars: int) -> str:
  """Returns a text with sentences and blank lines, or with neither."""
  ends = rng.choice([[' '], [' ', '. '], [' ', '. ', '\n', '\n\n'], ['']])
  found = ''
  while len(found) < chars:
    found += rng.choice(WORDS) + rng.choice(ends)
  return found


def byte_tokenizer(folder: pathlib.Path, **stated: object) -> str:
  """Writes a tokenizer.json whose tokens are bytes and '<end>', which is id 256."""
  folder.mkdir(exist_ok=True)
  alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  made = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
  made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  made.decoder = tokenizers.decoders.ByteLevel()
  made.add_special_tokens(['<end>', '<begin>'])
  made.save(str(folder / 'tokenizer.json'))
  (folder / 'tokenizer_config.json').write_text(json.dumps(stated))
  return str(folder)


def english_pieces(path: pathlib.Path) -> str:
  """Writes a SentencePiece model that knows small letters alone, and no bytes."""
  made = io.BytesIO()
  lines = [f'{a}{b}{c}' for a in LETTERS[:26] for b in 'aeiou' for c in LETTERS[:26]]
  sentencepiece.SentencePieceTrainer.Train(
    sentence_iterator=iter(lines), model_writer=made, vocab_size=80, hard_vocab_limit=False,
    minloglevel=2,
  )  # fmt: skip
  path.write_bytes(made.getvalue())
  return str(path)


def written_records(path: pathlib.Path, texts) -> str:
  path.write_text(''.join(json.dumps({'text': text}) + '\n' for text in texts))
  return str(path)


def flat_tokens(path: str, vocab: str, folder: str, ends: bool = True, format: str = 'memmap'):
  """Tokenizes a file of records."""
  flags = {'vocab': vocab, 'output': folder, 'append_eos': ends, 'format': format, 'processes': 1}
  tokenize.main([path, *(f'--{name}={value}' for name, value in flags.items())])


def tokens_of(data: StreamInput | TextRows | FlatTokenRows) -> list[int]:
  if not isinstance(data, StreamInput):
    return data.tokens[0 : len(data.tokens)].tolist()
  rows = list(data.eval_batches(slice(0, data.batch_size)))
  return [int(i) for row in rows for i in row['labels'][row['weights'] > 0]]


@pytest.mark.parametrize('seed', range(12))
def test_an_end_stands_where_a_document_ends_and_nowhere_else(tmp_path, seed):
  rng = random.Random(seed)
  tokenizer = open_tokenizer(packaged.VOCAB)
  texts = [drawn_text(rng, rng.choice([40, 700, 9000, 90_000])) for _ in range(rng.randint(1, 4))]
  kind = ('files', 'documents', 'flat')[seed % 3]
  if kind == 'files':
    files = [str(tmp_path / f'{i}.txt') for i in range(len(texts))]
    for file, text in zip(files, texts, strict=True):
      pathlib.Path(file).write_text(text)
    share = rng.choice([0.02, 0.05, 0.3, 0.5])
    splits = {
      split: TextRows(files, packaged.VOCAB, 64, split, held_out_share=share)
      for split in ('all', 'train', 'held_out')
    }
    held = [pairs[-1][1] for pairs in split_texts(files, share)]
    ended = {'all': len(files), 'held_out': sum(held), 'train': len(held) - sum(held)}
  else:
    many = [drawn_text(rng, rng.choice([40, 700])) for _ in range(30)]  # so that some are held out
    path = written_records(tmp_path / 'a.jsonl', [*texts, *many] * 2)
    ended, splits = {}, {}
    for split in ('all', 'train', 'held_out'):
      source = DocumentSource([path], packaged.VOCAB, 8192, split=split, held_out_every=3)
      ended[split] = source.datasets[0].count_documents()
      splits[split] = StreamInput(source, 64, 2)
    if kind == 'flat':
      flat_tokens(path, packaged.VOCAB, f'{tmp_path}/flat')
      splits = {'all': FlatTokenRows(f'{tmp_path}/flat', 'train', 64)}
  for split, data in splits.items():
    found = tokens_of(data)
    assert found.count(tokenizer.eos_id) == ended[split], split
    assert kind == 'files' or ended[split] > 0, split
    if kind == 'files' and split == 'all':
      whole = [[*tokenizer.encode(text), tokenizer.eos_id] for text in texts]
      assert found == [i for document in whole for i in document]


@pytest.mark.parametrize('share', [0.02, 0.05, 0.3, 0.5])
@pytest.mark.parametrize('chars', [9_000, 150_000, 2_000_000])
def test_the_share_that_is_asked_for_is_held_out(tmp_path, share, chars):
  (tmp_path / 'a.txt').write_text(drawn_text(random.Random(chars), chars))
  (pairs,) = split_texts([str(tmp_path / 'a.txt')], share)
  held = sum(len(block) for block, is_held in pairs if is_held) / sum(len(b) for b, _ in pairs)
  smallest = max(len(block) for block, _ in pairs) / chars
  assert abs(held - share) < max(0.35 * share, smallest)


def test_another_share_is_said(tmp_path):
  (tmp_path / 'a.txt').write_text('a word. ' * 200)
  source = TextRows([str(tmp_path / 'a.txt')], packaged.VOCAB, 8, 'train', held_out_share=0.01)
  assert any('of the text is held out, and EVAL_FRACTION asks for 1.00%' in w
             for w in source.warnings)  # fmt: skip


@pytest.mark.parametrize('named', [{}, {'bos_token': '<begin>'}, {'eos_token': '<end>'}])
@pytest.mark.parametrize('stated', [None, 0, 7])
def test_the_first_input_of_a_document(tmp_path, named, stated):
  """It is START_ID, or what the tokenizer has; id 0 stands for no token that there is not."""
  vocab = byte_tokenizer(tmp_path / 'v', **named)
  first = stated if stated is not None else {'bos_token': 257, 'eos_token': 256}.get(*named or '-')
  path = written_records(tmp_path / 'a.jsonl', ['abc', 'de'])
  text = tmp_path / 'a.txt'
  text.write_text('abc')
  flat_tokens(path, vocab, f'{tmp_path}/flat', ends=False)
  makers = [
    lambda: StreamInput(DocumentSource([path], vocab, 258, start_id=stated), 8, 2, 'packed'),
    lambda: StreamInput(DocumentSource([path], vocab, 258, start_id=stated), 8, 2, 'stream'),
    lambda: RowInput(TextRows([str(text)], vocab, 8, 'all', 'packed', start_id=stated), 1),
    *(
      lambda kind=kind: RowInput(
        FlatTokenRows(f'{tmp_path}/flat', 'train', 8, kind, stated, vocab), 1
      )
      for kind in ('stream', 'packed', 'sequences')
    ),
  ]
  for make in makers:
    if first is None:
      with pytest.raises(UserError, match=r'neither BOS nor EOS.*START_ID=ID'):
        make()
      continue
    data = make()
    batch = next(data.eval_batches(slice(0, 1)))
    assert batch['ids'][0, 0] == first
    if 'segment_ids' in batch:
      starts = (batch['segment_pos'] == 0) & (batch['weights'] > 0)
      assert set(batch['ids'][starts]) == {first}
    assert data.max_token_id >= first


def test_tokens_whose_tokenizer_nobody_knows(tmp_path):
  path = written_records(tmp_path / 'a.jsonl', ['abc', 'de'])
  flat_tokens(path, packaged.VOCAB, f'{tmp_path}/flat')
  rows = FlatTokenRows(f'{tmp_path}/flat', 'train', 8, 'stream', None)
  assert rows.read(np.arange(1))['ids'][0, 0] == open_tokenizer(packaged.VOCAB).eos_id  # the last
  match = r'VOCAB_PATH=PATH, or .* version, which used 0: START_ID=0 with --accept_changes'
  with pytest.raises(UserError, match=match):
    FlatTokenRows(f'{tmp_path}/flat', 'train', 8, 'packed', None)


@pytest.mark.parametrize('format', ['memmap', 'seqax'])
def test_stored_tokens_know_their_tokenizer(tmp_path, format):
  path = written_records(tmp_path / 'a.jsonl', ['abc', 'de'])
  vocabularies = [byte_tokenizer(tmp_path / 'v', eos_token='<end>'), packaged.VOCAB]
  folders = [f'{tmp_path}/flat{i}' for i in range(2)]
  for vocab, folder in zip(vocabularies, folders, strict=True):
    flat_tokens(path, vocab, folder, format=format)
  moved = byte_tokenizer(tmp_path / 'moved', eos_token='<end>', padding_side='left')
  packed = FlatTokenRows(folders[0], 'train', 8, 'packed', None, moved)
  assert packed.tokens_fingerprint == 256  # a run that began with id 0 does not go on silently
  assert FlatTokenRows(folders[0], 'train', 8, 'packed', 0, moved).tokens_fingerprint is None
  with pytest.raises(UserError, match=r'flat1/train was not tokenized with'):
    FlatTokenRows(folders[1], 'train', 8, 'packed', None, moved)
  inputs = [RowInput(FlatTokenRows(folder, 'train', 8), 1) for folder in folders]
  mixture_of([inputs[0], inputs[0]], [1, 1], 2)
  with pytest.raises(UserError, match='use different tokenizers'):
    mixture_of(inputs, [1, 1], 2)
  facts = pathlib.Path(folders[1], 'train', 'meta.json' if format == 'memmap' else '.zattrs')
  known = json.loads(facts.read_text())
  assert known.pop('tokenizer') == vocabulary_fingerprint(open_tokenizer(packaged.VOCAB))
  facts.write_text(json.dumps(known))  # as older versions wrote it
  old = [inputs[0], RowInput(FlatTokenRows(folders[1], 'train', 8, 'packed', 0, moved), 1)]
  mixture_of(old, [1, 1], 2)


def test_unknown_text_is_counted_and_has_no_bits_per_byte(tmp_path, caplog):
  vocab = english_pieces(tmp_path / 'en.model')
  tokenizer = open_tokenizer(vocab)
  known, unknown = 'bab cec', 'bab Привет 東京'
  count = tokenizer.encode(unknown).count(tokenizer.unk_id)
  assert count
  for text, lost in ((known, 0), (unknown, count)):
    (tmp_path / 'a.txt').write_text(text)
    path = written_records(tmp_path / 'a.jsonl', [text] * 3)
    pairs = tmp_path / 'pairs.jsonl'
    pairs.write_text(json.dumps({'prompt': text, 'completion': ' bab'}) + '\n')
    rows = TextRows([str(tmp_path / 'a.txt')], vocab, 8, 'all')
    assert (rows.bytes_per_token is None) == bool(rows.lost) == bool(lost)
    caplog.clear()
    stream = StreamInput(DocumentSource([path], vocab, tokenizer.vocab_size), 8, 1)
    report = data_report.report(stream)
    said = [r for r in caplog.records if 'unknown' in r.message]
    assert len(said) == bool(lost)
    sft = SftRows([str(pairs)], vocab, 99, tokenizer.vocab_size)
    caplog.clear()
    folder = f'{tmp_path}/flat{lost}'
    flat_tokens(path, vocab, folder)
    assert bool(caplog.records) == bool(lost)
    flat = FlatTokenRows(folder, 'train', 8)
    length = len(tokenizer.encode(text))
    for found, total in (
      (rows.warnings, f'{lost:,} of {length:,} tokens'),
      (report, f'{3 * lost:,} of {3 * length:,} tokens'),
      (flat.warnings, f'{3 * lost:,} of {3 * length + 3:,} tokens'),
      (sft.warnings, 'tokens are unknown'),
    ):
      assert any(total in line and 'unknown' in line for line in found) == bool(lost)


def test_what_is_unknown_to_a_tokenizer_json(tmp_path):
  models = tokenizers.models
  for model in (
    models.WordLevel({'a': 0, '[UNK]': 1}, '[UNK]'),
    models.BPE({'a': 0, '[UNK]': 1}, [], unk_token='[UNK]'),
    models.Unigram([('a', 0.0), ('[UNK]', 0.0)], 1),
  ):
    tokenizers.Tokenizer(model).save(str(tmp_path / 'tokenizer.json'))
    encoding = DocumentEncoding(open_tokenizer(str(tmp_path)))
    encoding.document('b')
    assert (encoding.num_tokens, encoding.num_unknown) == (1, 1)
