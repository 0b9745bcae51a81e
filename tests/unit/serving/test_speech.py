"""An answer of a chat consists of thinking, content and calls, however it is cut into parts."""

import random

import pytest

from paxlite.generation.spelling import Mark
from paxlite.serving.speech import Speech, opened

CALL = '{"name": "f", "arguments": {"a": 1}}'


def said(parts, close='', tools=(), cuts=None):
  """Returns reasoning, content and calls of an answer whose texts are cut at random."""
  speech, found = Speech(close, tools), []
  pieces = []
  for part in parts:
    if isinstance(part, Mark) or cuts is None:
      pieces.append(part)
      continue
    at = 0
    while at < len(part):
      size = cuts.randint(1, 4)
      pieces.append(part[at : at + size])
      at += size
  while pieces:
    count = cuts.randint(1, 3) if cuts else len(pieces)
    taken, pieces = pieces[:count], pieces[count:]
    found.append(speech.add(taken, not pieces))
  reasoning, content, calls = zip(*found, strict=True)
  names = [call['function']['name'] for each in calls for call in each]
  return ''.join(reasoning), ''.join(content), names


THINK, OVER = Mark('<think>'), Mark('</think>')
CASES = [
  (['<think>\nwhy\n</think>\n\nYes.'], '', ('why', 'Yes.')),
  ([THINK, 'x', OVER, 'y'], '', ('x', 'y')),
  ([' \n', THINK, 'x ', Mark('<|z|>'), ' y', OVER, Mark('<|z|>'), '\n'], '', ('x  y', '')),
  (['[THINK]a[/THINK]b'], '', ('a', 'b')),
  (['why not?\n</think>\n\nYes. </think>'], '</think>', ('why not?', 'Yes. </think>')),
  (['\nwhy', OVER, 'Yes.'], '</think>', ('why', 'Yes.')),
  (['\n why, and </thin '], '</think>', ('why, and </thin', '')),
  ([' Yes <think>no</think>'], '', ('', ' Yes <think>no</think>')), (['<thin'], '', ('', '<thin')),
  ([' \n'], '', ('', ' \n')), (['a ', Mark('<|pad|>'), 'b'], '', ('', 'a b')),
  (['</think>b'], '</think>', ('', 'b')),
  (['<think>a</think><think>b</think>'], '', ('a', '<think>b</think>')),
]  # fmt: skip


@pytest.mark.parametrize(('parts', 'close', 'expected'), CASES)
def test_thinking_is_told_apart(parts, close, expected):
  for seed in range(20):
    cuts = random.Random(seed) if seed else None
    assert said(parts, close, cuts=cuts)[:2] == expected


@pytest.mark.parametrize(
  ('parts', 'close', 'expected'),
  [
    ([f'<think><tool_call>{CALL}</tool_call></think>Hm.'], '', ('', 'Hm.', [])),
    ([f'{CALL}</think>{CALL}'], '</think>', (CALL, '', ['f'])),
    (['Ok.', Mark('<tool_call>'), CALL, Mark('</tool_call>')], '', ('', 'Ok.', ['f'])),
    ([CALL.replace('"f"', '"Bob"')], '', ('', CALL.replace('"f"', '"Bob"'), [])),
  ],
)
def test_calls_are_of_tools_and_not_within_thinking(parts, close, expected):
  for seed in range(20):
    found = said(parts, close, {'f'}, random.Random(seed) if seed else None)
    assert found[1:] == expected[1:]
    assert expected[0] in found[0]


def test_a_form_that_the_request_states_is_content():
  assert said(['<think>"', CALL], None) == ('', f'<think>"{CALL}', [])


@pytest.mark.parametrize(
  ('prompt', 'close'),
  [('<|im_start|>assistant\n<think>\n', '</think>'), ('<think>\n\n</think>\n\n', ''), ('', '')],
)
def test_a_prompt_may_begin_the_thinking(prompt, close):
  assert opened(prompt) == close
