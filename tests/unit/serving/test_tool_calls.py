"""Calls of functions are found in the text of an answer."""

import json

import pytest

from paxlite.serving.tool_calls import parted

CALL = '{"name": "weather", "arguments": {"city": "Oslo"}}'


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
  ],
)
def test_calls_and_what_is_text(text, rest, count):
  found, calls = parted(text)
  assert found == rest
  assert len(calls) == count
  for call in calls:
    assert call['function']['name'] == 'weather'
    assert json.loads(call['function']['arguments']) == {'city': 'Oslo'}
