"""What is odd in data is counted by kind, with the place of the first record."""

import gzip
import json

import pytest

from paxlite.data import packaged
from paxlite.data.tokenizer import open_tokenizer
from paxlite.finetuning.chats import sft_warnings
from paxlite.finetuning.chats.sft import SftRows
from paxlite.run_data import data, odd_records


def chat(*contents: str) -> dict:
  roles = ('user', 'assistant') * len(contents)
  pairs = zip(roles, contents, strict=False)
  return {'messages': [{'role': role, 'content': text} for role, text in pairs]}


@pytest.mark.parametrize(
  ('record', 'kind'),
  [
    (chat('Hi', ''), sft_warnings.BLANK_ANSWER),
    (chat('Hi', ' \n'), sft_warnings.BLANK_ANSWER),
    (chat(' ', 'Yes'), sft_warnings.BLANK_QUESTION),
    (chat('Hi', 'Yes', 'And?'), sft_warnings.OPEN),
    (chat('Hi'), sft_warnings.NO_ANSWER),
    (chat('Say </s>', 'No'), odd_records.MARKED),
    (chat('Say it', '</s>'), odd_records.MARKED),
    ({'prompt': 'a', 'completion': ' '}, sft_warnings.BLANK_ANSWER),
    ({'prompt': 'a', 'completion': '</s>'}, odd_records.MARKED),
  ],
)
def test_an_odd_record_is_counted(record, kind):
  found = odd_records.Oddities(open_tokenizer(packaged.VOCAB), odd_in=SftRows.odd_in)
  found.look_at('a.jsonl:1', chat('Hi', 'Hello'))
  assert found.lines() == []
  found.look_at('a.jsonl:2', record)
  (line,) = found.lines()
  assert line.startswith(f'1 × {kind}; the first: a.jsonl:2')


def test_a_tool_call_is_an_answer():
  call = {'type': 'function', 'function': {'name': 'f', 'arguments': {}}}
  record = chat('Hi', '')
  record['messages'][1]['tool_calls'] = [call]
  found = odd_records.Oddities(None, odd_in=SftRows.odd_in)
  found.look_at('a.jsonl:1', record)
  assert found.lines() == []


def test_documents_that_are_empty_or_the_same():
  found = odd_records.Oddities(open_tokenizer(packaged.VOCAB), 'text')
  for number, text in enumerate(['one', 'two', '', 'one', 'one', '<s> two'], 1):
    found.look_at(f'a.jsonl:{number}', {'text': text, 'id': number})
  assert found.lines() == [
    f'2 × {odd_records.SAME}; the first: a.jsonl:4',
    f'1 × {odd_records.EMPTY}; the first: a.jsonl:3',
    f'1 × {odd_records.MARKED}; the first: a.jsonl:6 has <s>',
  ]


def test_a_file_beside_its_compressed_copy_is_said(tmp_path, capsys, monkeypatch):
  """Also where the first file has more records than are looked at."""
  monkeypatch.setattr(odd_records, '_MOST_RECORDS', 20)
  lines = ''.join(json.dumps({'text': f'number {i}'}) + '\n' for i in range(50))
  plain, packed = tmp_path / 'a.jsonl', tmp_path / 'a.jsonl.gz'
  plain.write_text(lines)
  packed.write_bytes(gzip.compress(lines.encode()))
  data.main([f'{tmp_path}/*', '--examples=0'])
  out = capsys.readouterr().out
  assert f'10 × {odd_records.TWICE}; the first: {packed}:1 is {plain}:1\n' in out


@pytest.mark.parametrize('count', [0, 1, 2, 9])
def test_the_command_shows_what_is_odd_and_as_many_examples(tmp_path, capsys, count):
  file = tmp_path / 'chats.jsonl'
  records = [chat('Hi', 'Hello'), chat('Hi', 'Hello'), chat('Bye', 'So long')]
  file.write_text('\n'.join(map(json.dumps, records)))
  data.main([str(file), f'--examples={count}'])
  out = capsys.readouterr().out
  assert f'Odd       1 × {odd_records.SAME}; the first: {file}:2\n' in out
  assert out.count('\nExample ') == min(count, 3)
  assert ('[[ So long' in out) == (count == 9)
