"""Calls of functions are found in the text of an answer, and those of the request's tools alone."""

import json
import random

import pytest

from paxlite.generation.spelling import Mark
from paxlite.generation.tool_calls import parted

CALL = '{"name": "weather", "arguments": {"city": "Oslo"}}'
BOB = '{"name": "Bob", "arguments": {"age": 3}}'
TOOLS = {'weather', 'f'}


@pytest.mark.parametrize(
  ('text', 'rest', 'count'),
  [
    (f'<tool_call>\n{CALL}\n</tool_call>', '', 1),
    (f'Let me see. <tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>', 'Let me see.', 2),
    (f'<tool_call>{CALL}', '', 1),  # whose end is a token that ends the answer
    (CALL.replace('arguments', 'parameters'), '', 1),
    ('It is cold.', 'It is cold.', 0),
    ('<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', 0),
    ('{"name": "weather"}', '{"name": "weather"}', 0),
    ('[1, 2]', '[1, 2]', 0),
    (BOB, BOB, 0),
    (f'<tool_call>{BOB}</tool_call>', f'<tool_call>{BOB}</tool_call>', 0),
    (f'<tool_call>{BOB}</tool_call>  <tool_call>{CALL}</tool_call>\n',
     f'<tool_call>{BOB}</tool_call>', 1),
  ],
)  # fmt: skip
def test_calls_and_what_is_text(text, rest, count):
  found, calls = parted([text], TOOLS)
  assert found == rest
  assert len(calls) == count
  for call in calls:
    assert call['function']['name'] == 'weather'
    assert json.loads(call['function']['arguments']) == {'city': 'Oslo'}


def test_arguments_may_contain_the_closing_tag():
  call = json.dumps(dict(name='f', arguments=dict(a='</tool_call>', b='\u2028 "{')))
  found, (called,) = parted([f'<tool_call>{call}</tool_call>'], TOOLS)
  assert found == ''
  assert json.loads(called['function']['arguments'])['a'] == '</tool_call>'


def test_tags_that_are_special_tokens():
  parts = ['Ok.', Mark('<tool_call>'), CALL, Mark('</tool_call>'), Mark('<|eom|>'), ' Done.']
  assert parted(parts, TOOLS)[0] == 'Ok. Done.'
  assert len(parted(parts, TOOLS)[1]) == 1
  assert parted(parts, {'g'}) == (f'Ok.{CALL} Done.', [])
  assert parted([Mark('<|python_tag|>'), CALL], TOOLS)[0] == ''


def test_hostile_answers_are_read_once():
  """Some of them would take hours if each tag were looked for from every place."""
  rng = random.Random(0)
  units = [' ', '<tool_call>', '</tool_call>', '{"', '[', '"', '\\"', '{"name":"f"', CALL, '\n']
  for unit in units:
    for before in ('', '<tool_call>'):
      text = before + unit * (2_000_000 // len(unit))
      assert len(parted([text], TOOLS)[0]) <= len(text)
  for _ in range(300):
    parts = [rng.choice([str, str, Mark])(rng.choice(units)) for _ in range(rng.randint(1, 30))]
    said, calls = parted(parts, TOOLS)
    assert {call['function']['name'] for call in calls} <= TOOLS
    assert len(said) <= sum(map(len, parts))
