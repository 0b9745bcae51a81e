"""Solved examples before a text, as one document and as a chat."""

import json

import pytest

from paxlite.core.errors import UserError
from paxlite.eval.eval_tasks import read_tasks

TASK = {
  'kind': 'multiple_choice', 'files': 'asked.jsonl', 'doc_to_text': 'Q: {{q}}\nA:',
  'doc_to_choice': ['no', 'yes'], 'doc_to_target': '{{a}}', 'num_fewshot': 2,
  'fewshot_files': 'shown.jsonl',
}  # fmt: skip


def read(folder, **changes):
  asked, shown = ([dict(q=f'{kind}{i}', a=i % 2) for i in range(3)] for kind in ('asked', 'shown'))
  for name, records in (('asked', asked), ('shown', shown)):
    (folder / f'{name}.jsonl').write_text(''.join(json.dumps(r) + '\n' for r in records))
  (folder / 'task.json').write_text(json.dumps(TASK | changes))
  (task,) = read_tasks([str(folder / 'task.json')])
  return task


def test_the_first_records_are_shown_with_their_right_answers(tmp_path):
  task = read(tmp_path)
  example = task.examples[0]
  text = task.spec.document(example.prompts[0], example.shots)
  assert text == 'Q: shown0\nA: no\n\nQ: shown1\nA: yes\n\nQ: asked0\nA:'
  chat = read(tmp_path, chat=True, system='Be brief.')
  said = chat.spec.messages(example.prompts[0], chat.examples[0].shots)
  assert [(m['role'], m['content']) for m in said] == [
    ('system', 'Be brief.'), ('user', 'Q: shown0\nA:'), ('assistant', 'no'),
    ('user', 'Q: shown1\nA:'), ('assistant', 'yes'), ('user', 'Q: asked0\nA:'),
  ]  # fmt: skip


def test_what_is_asked_is_not_shown(tmp_path):
  task = read(tmp_path, fewshot_files='asked.jsonl')
  shown = [[text for text, _ in example.shots] for example in task.examples]
  q = [f'Q: asked{i}\nA:' for i in range(3)]
  assert shown == [[q[1], q[2]], [q[0], q[2]], [q[0], q[1]]]


def test_generated_and_cloze_answers_are_shown_as_they_are(tmp_path):
  for kind in ('generate', 'cloze'):
    task = read(tmp_path, kind=kind, doc_to_target='so {{a}}', doc_to_choice=[])
    assert task.examples[0].shots == (('Q: shown0\nA:', 'so 0'), ('Q: shown1\nA:', 'so 1'))


@pytest.mark.parametrize(
  ('changes', 'match'),
  [
    (dict(num_fewshot=4), r'shown\.jsonl: 3 records are too few for num_fewshot=4'),
    (dict(num_fewshot=0), 'num_fewshot and fewshot_files need each other'),
    (dict(fewshot_files=[]), 'num_fewshot and fewshot_files need each other'),
    (dict(num_fewshot=-1), 'num_fewshot cannot be -1'),
    (dict(num_fewshot=True), 'num_fewshot cannot be True'),
    (dict(doc_to_text=['{{q}}', '{{q}}']), 'num_fewshot needs one doc_to_text'),
  ],
)
def test_examples_that_cannot_be_shown(tmp_path, changes, match):
  with pytest.raises(UserError, match=match):
    read(tmp_path, **changes)
