"""Records that a reader refuses: one reading names all of them, or leaves them out."""

import json
import random

import numpy as np
import pytest

from paxlite.chats.chat_encoding import ChatEncoding
from paxlite.core.errors import UserError
from paxlite.data import packaged
from paxlite.data.tokenizer import open_tokenizer
from paxlite.finetuning.chats.sft import AnswerRows, SftRows
from paxlite.finetuning.preferences.labelled_answers import LabelledRows
from paxlite.finetuning.preferences.preference_rows import PreferenceRows
from paxlite.finetuning.reinforcement.prompts import Prompts
from paxlite.run_data import data

TEMPLATE = '{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}'
KINDS = {SftRows: 'chat', AnswerRows: 'chat', PreferenceRows: 'pair', LabelledRows: 'label'}
BROKEN = ['{"prompt": ', '[1, 2]', '{}', '{"note": "no answer"}', '{"messages": [{"role": 3}]}']


def record(kind, number):
  question, answer = f'What is {number}?', f'It is {number}.'
  if kind == 'chat':
    said = [{'role': 'user', 'content': question}, {'role': 'assistant', 'content': answer}]
    return {'messages': said}
  if kind == 'pair':
    return {'prompt': question, 'chosen': answer, 'rejected': 'No.'}
  return {'prompt': question, 'completion': answer, 'label': number % 2 == 0}


def drawn_files(folder, kind, seed):
  """Writes a file with broken lines and one without them; returns them, and the broken numbers."""
  draw = random.Random(seed)
  lines = [json.dumps(record(kind, number)) for number in range(draw.randint(4, 12))]
  whole, mixed = folder / 'whole.jsonl', folder / 'mixed.jsonl'
  whole.write_text('\n'.join(lines))
  numbers = sorted(draw.sample(range(1, len(lines) + 4), 3))
  for number in numbers:
    lines.insert(number - 1, draw.choice(BROKEN))
  mixed.write_text('\n'.join(lines))
  return whole, mixed, numbers


def rows(reader, file, **kwargs):
  vocab = open_tokenizer(packaged.VOCAB).vocab_size
  return reader([str(file)], packaged.VOCAB, 128, vocab, chat_template=TEMPLATE, **kwargs)


@pytest.mark.parametrize('reader', KINDS)
@pytest.mark.parametrize('seed', range(3))
def test_all_refused_records_are_named_or_left_out(tmp_path, reader, seed):
  whole, mixed, numbers = drawn_files(tmp_path, KINDS[reader], seed)
  match = rf'mixed.jsonl: 3 of \d+ records cannot be read, the first: \S*mixed.jsonl:{numbers[0]}'
  with pytest.raises(UserError, match=match):
    rows(reader, mixed)
  expected, found = rows(reader, whole), rows(reader, mixed, skip_unreadable=True)
  places = [message.split(' ')[0].removesuffix(':') for message in found.refused.messages]
  assert places == [f'{mixed}:{number}' for number in numbers]
  assert (found.fingerprint, found.tokens_fingerprint) == (
    expected.fingerprint,
    expected.tokens_fingerprint,
  )
  every = np.arange(len(expected))
  np.testing.assert_equal(found.read(every), expected.read(every))


@pytest.mark.parametrize('seed', range(3))
def test_prompts_of_rollouts_likewise(tmp_path, seed):
  _, mixed, numbers = drawn_files(tmp_path, 'chat', seed)
  tokenizer = open_tokenizer(packaged.VOCAB)
  encoding = ChatEncoding(tokenizer, tokenizer.vocab_size, None, (), TEMPLATE)
  with pytest.raises(UserError, match=f'3 of .* the first: .*mixed.jsonl:{numbers[0]}'):
    Prompts([str(mixed)], encoding, 64)
  count = len(mixed.read_text().splitlines()) - 3
  assert len(Prompts([str(mixed)], encoding, 64, skip_unreadable=True)) == count


@pytest.mark.parametrize('name', ['prompts', 'prompts.txt', 'prompts.jsonl'])
def test_prompts_are_json_lines_whatever_the_file_is_called(tmp_path, name):
  (tmp_path / name).write_text('{"prompt": "One"}\n{"prompt": "Two"}\n')
  prompts = Prompts([f'{tmp_path}/{name}'], ChatEncoding(open_tokenizer(packaged.VOCAB)), 64)
  assert [p.record['prompt'] for p in prompts] == ['One', 'Two']
  assert prompts[1].place == f'{tmp_path}/{name}:2'


@pytest.mark.parametrize('skip', [False, True])
def test_a_template_that_prompts_lack_is_not_their_fault(tmp_path, skip):
  chat = json.dumps({'messages': [{'role': 'user', 'content': 'One'}]})
  (tmp_path / 'a.jsonl').write_text(f'{chat}\n' * 3)
  encoding = ChatEncoding(open_tokenizer(packaged.VOCAB))
  with pytest.raises(UserError, match=r'a\.jsonl:1: .*CHAT_TEMPLATE=FILE') as error:
    Prompts([f'{tmp_path}/a.jsonl'], encoding, 64, skip)
  assert 'cannot be read' not in str(error.value)


def test_the_longest_are_named_where_examples_are_too_long(tmp_path):
  file = tmp_path / 'long.jsonl'
  lines = [
    json.dumps({'prompt': 'a', 'completion': ' b' * times}) for times in (5, 300, 2, 900, 400)
  ]
  file.write_text('\n'.join(lines))
  with pytest.raises(UserError) as error:
    rows(SftRows, file)
  assert '3 examples are too long, the longest ' in str(error.value)
  found = rows(SftRows, file, too_long='skip')
  assert [found.long.longest.index(f'long.jsonl:{n}') for n in (4, 5, 2)] == sorted(
    found.long.longest.index(f'long.jsonl:{n}') for n in (4, 5, 2)
  )


def test_no_template_is_said_once_and_not_of_each_record(tmp_path):
  whole, _, _ = drawn_files(tmp_path, 'chat', 0)
  vocab = open_tokenizer(packaged.VOCAB).vocab_size
  with pytest.raises(UserError, match=r'whole.jsonl:1: .*CHAT_TEMPLATE=FILE gives one'):
    SftRows([str(whole)], packaged.VOCAB, 128, vocab, skip_unreadable=True)


def test_the_command_lists_all_and_shows_the_rest(tmp_path, capsys):
  _, mixed, numbers = drawn_files(tmp_path, 'chat', 1)
  with pytest.raises(UserError, match='a run refuses these data: 3 of the records'):
    data.main([str(mixed)])
  out = capsys.readouterr().out
  assert all(f'{mixed}:{number}' in out for number in numbers)
  assert '\nExample 1' in out
  data.main([str(mixed), 'SKIP_UNREADABLE=True'])


def test_the_command_lists_documents_that_cannot_be_read(tmp_path, capsys):
  file = tmp_path / 'documents.jsonl'
  file.write_text('{"text": "one"}\n{"text": 3}\n{"text": "two"}\n{"tex\n')
  with pytest.raises(UserError, match='a run refuses these data: 2 of the records'):
    data.main([str(file)])
  out = capsys.readouterr().out
  assert f'{file}:2' in out
  assert f'{file}:4' in out
  assert 'Contents ' in out


def test_the_command_shows_prompts_whose_answers_are_generated(tmp_path, capsys):
  from paxlite.experiments.demo import TinyGPT
  from paxlite.experiments.finetuning import PolicyTraining

  file = tmp_path / 'prompts.jsonl'
  file.write_text(
    '{"prompt": "What is 2?"}\n{"question": 3}\n{"prompt": "And 3?", "answer": "3"}\n'
  )
  cls = type('Mine', (PolicyTraining, TinyGPT), {'__module__': 'mine'})
  vocab = open_tokenizer(packaged.VOCAB).vocab_size
  e = cls(TRAIN_FILES=[str(file)], VOCAB_PATH=packaged.VOCAB, VOCAB_SIZE=vocab)
  e = e.replaced(MAX_SEQ_LEN=64, MAX_NEW_TOKENS=16)
  (refused,) = [data._show_prompts(e, 1)]
  out = capsys.readouterr().out
  assert refused.count == 1
  assert f'{file}:2' in out
  assert 'Contents  2 prompts' in out
  assert 'Example 1:\n' in out
