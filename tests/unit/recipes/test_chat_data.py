"""The data of the bundled recipes: tokenizers and questions from records, and what is right."""

import json

import pytest

from paxlite.core.errors import UserError
from paxlite.data.held_out import is_held_out, text_identity
from paxlite.recipes import chat_data


@pytest.mark.parametrize(
  ('answer', 'reward'),
  [
    ('It is 1,234.', 1.0),
    ('10 and then 1234', 1.0),
    ('#### 1234', 1.0),
    ('1234.00', 1.0),
    ('1234 or 5', 0.0),
    ('-1234', 0.0),
    ('1234.5', 0.0),
    ('none', 0.0),
    ('', 0.0),
  ],
)
def test_the_last_number_of_an_answer_counts(answer, reward):
  assert chat_data.last_number({'answer': '1234'}, answer) == reward


def test_questions_become_prompts(tmp_path):
  record = {'question': 'How many?', 'answer': 'Two and two. <<2+2=4>>4\n#### 1,004'}
  (tmp_path / 'a.jsonl').write_text(json.dumps(record) + '\n')
  chat_data.write_questions(tmp_path, str(tmp_path / 'a.jsonl'))
  found = json.loads((tmp_path / 'prompts.jsonl').read_text())
  user = {'role': 'user', 'content': 'How many?'}
  assert found == {'messages': [user], 'answer': '1004'}
  # an answer without a number would be right for this question
  (tmp_path / 'a.jsonl').write_text(json.dumps(record | {'answer': '#### four'}) + '\n')
  with pytest.raises(UserError, match=r"a\.jsonl.*1: the answer '#### four' has no number"):
    chat_data.write_questions(tmp_path, str(tmp_path / 'a.jsonl'))


def test_a_tokenizer_is_made_of_what_is_not_held_out(tmp_path):
  texts = [f'text {i} of words' for i in range(400)]
  (tmp_path / 'a.jsonl').write_text(''.join(json.dumps({'text': x}) + '\n' for x in texts))
  shown = [*chat_data._shown(str(tmp_path / 'a.jsonl'))]
  assert shown == [x for x in texts if not is_held_out(text_identity(x), 1 / 200)]
  assert 0 < len(shown) < len(texts)
  assert [*chat_data._first(iter(['ab', 'cd', 'ef']), 3)] == ['ab', 'cd']
