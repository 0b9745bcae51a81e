"""Pairs of a chosen and a rejected answer: their formats, their rows, and what is refused."""

import json

import numpy as np
import pytest

from paxlite.chats.sft_formats import Pair
from paxlite.core.errors import UserError
from paxlite.core.fields import Fields
from paxlite.data import data_summary, packaged
from paxlite.finetuning.preferences.datasets import PreferenceFiles
from paxlite.finetuning.preferences.labelled_answers import LabelledRows, nearest_other
from paxlite.finetuning.preferences.preference_rows import PreferenceRows, RewardRows, pair_of

TEMPLATE = (
  '{% for m in messages %}[{{ m.role }}]\n{{ m.content }}{{ eos_token }}{% endfor %}'
  '{% if add_generation_prompt %}[assistant]\n{% endif %}'
)
QUESTION = dict(role='user', content='hello')
GOOD, BAD = ([dict(role='assistant', content=text)] for text in ('good day', 'go away'))


def rows(tmp_path, records, seq_len=64, cls=PreferenceRows, **kwargs) -> PreferenceRows:
  path = tmp_path / 'pairs.jsonl'
  path.write_text(''.join(json.dumps(r) + '\n' for r in records))
  return cls([str(path)], packaged.VOCAB, seq_len, 8192, chat_template=TEMPLATE, **kwargs)


def test_both_answers_of_a_pair_are_segments_of_one_row(tmp_path):
  records = [dict(prompt=f'{i} is', chosen=f' {i}', rejected=f' {i + 1}.') for i in range(9)]
  source = rows(tmp_path, records)
  assert len(source) < 9
  assert source.num_examples == 18
  batch, seen = source.read(np.arange(len(source))), []
  for r in range(len(source)):
    segments = batch['segment_ids'][r]
    assert segments.max() % 2 == 0
    for segment in range(1, segments.max() + 1):
      here = segments == segment
      assert set(batch['preferences'][r][here]) == {1 if segment % 2 else -1}
      learned = batch['labels'][r][here][batch['weights'][r][here] > 0]
      assert learned[-1] == source.tokenizer.eos_id
      text = source.tokenizer.decode(batch['ids'][r][here][1:].tolist() + learned[-1:].tolist())
      seen.append((text.strip(), source.tokenizer.decode(learned[:-1].tolist())))
    assert not batch['preferences'][r][segments == 0].any()
  expected = [(f'{r["prompt"]}{r[k]}', r[k]) for r in records for k in ('chosen', 'rejected')]
  assert seen == expected


def test_formats_of_pairs_are_the_same(tmp_path):
  chat = rows(tmp_path, [dict(prompt=[QUESTION], chosen=GOOD, rejected=BAD)]).read(np.array([0]))
  same = [
    dict(chosen=[QUESTION, *GOOD], rejected=[QUESTION, *BAD]),
    dict(prompt='hello', chosen=[QUESTION, *GOOD], rejected=[QUESTION, *BAD]),
    dict(prompt=[QUESTION], chosen=[QUESTION, *GOOD], rejected=[QUESTION, *BAD]),
    dict(prompt='hello', chosen=json.dumps(GOOD), rejected=json.dumps(BAD)),
    dict(prompt='hello', chosen=GOOD[0], rejected=BAD[0]),
    dict(question='hello', chosen='good day', rejected='go away'),
    dict(instruction='hello', input='', chosen='good day', rejected='go away'),
    dict(messages=[QUESTION], chosen='good day', rejected='go away'),
    dict(messages=[QUESTION, *GOOD], chosen=[QUESTION, *GOOD], rejected=[QUESTION, *BAD]),
    dict(question='hello', chosen=[QUESTION, *GOOD], rejected=[QUESTION, *BAD]),
    dict(
      prompt=[{'from': 'human', 'value': 'hello'}],
      chosen=[QUESTION, *GOOD],
      rejected=[QUESTION, *BAD],
    ),
    dict(
      conversations=[{'from': 'human', 'value': 'hello'}],
      chosen={'from': 'gpt', 'value': 'good day'},
      rejected={'from': 'gpt', 'value': 'go away'},
    ),
    dict(prompt=[QUESTION], chosen='good day', rejected='go away'),
    dict(prompt='hello', chosen=GOOD, rejected=BAD),
  ]
  for record in same:
    found = rows(tmp_path, [record]).read(np.array([0]))
    for key, value in chat.items():
      np.testing.assert_array_equal(found[key], value, err_msg=key)
  record = dict(
    chosen='Human: hello Assistant: good day', rejected='Human: hello Assistant: go off'
  )
  assert pair_of(Fields(record)) == [
    Pair('Human: hello Assistant: ', text) for text in ('good day', 'go off')
  ]


def test_pairs_are_held_out_as_a_whole(tmp_path):
  records = [dict(prompt=f'{i} is', chosen=f' {i}', rejected=f' {i + 1}.') for i in range(20)]
  parts = [
    rows(tmp_path, records, split=split, held_out_share=0.2) for split in ('train', 'held_out')
  ]
  assert [p.num_examples for p in parts] == [34, 6]


@pytest.mark.parametrize(
  ('record', 'message'),
  [
    (dict(prompt='a', chosen=' b', rejected=' b'), r'pairs.jsonl.*1.*are the same'),
    (dict(prompt='a', chosen=' b'), 'this record has the keys prompt, chosen'),
    (dict(prompt='a', chosen=' b', rejected=BAD), '"chosen" and "rejected" must be two answers'),
    (
      dict(prompt=[QUESTION], chosen=[QUESTION], rejected=BAD),
      'must end with a message of the role',
    ),
    (
      dict(chosen=[QUESTION, *GOOD], rejected=[QUESTION]),
      'one answer is the beginning of the other',
    ),
    (dict(prompt='a', chosen='', rejected=' b'), "'chosen' is empty"),
    (dict(chosen='b', rejected='c'), 'has no "prompt"'),
    (dict(instruction='x', chosen=[QUESTION, *GOOD], rejected=[QUESTION, *BAD]), 'is not in'),
    (dict(messages=[QUESTION, *BAD], chosen='good day', rejected='no'), 'not the chosen one'),
    (dict(prompt='a', system='s', chosen='b', rejected='c'), "'system' of this record"),
    (dict(prompt='a', margin=2, chosen='b', rejected='c'), 'margins of pairs are not supported'),
    (
      dict(prompt='a topic', chosen=[QUESTION, *GOOD], rejected=[QUESTION, *BAD]),
      r'the prompt \(prompt\) is not in',
    ),
    (dict(prompt='a', chosen=' b' * 40, rejected=' c'), 'TOO_LONG=skip'),
  ],
)
def test_wrong_pairs_are_refused_by_file_and_line(record, message, tmp_path):
  with pytest.raises(UserError, match=message):
    rows(tmp_path, [record], seq_len=32)


def test_pairs_that_are_too_long_are_left_out_as_a_whole(tmp_path, caplog):
  records = [dict(prompt='a', chosen=' b' * n, rejected=' c') for n in (2, 40)]
  source = rows(tmp_path, records, seq_len=32, too_long='skip')
  assert (source.num_examples, source.num_records, source.num_skipped) == (2, 1, 1)
  assert '1 pair of more than 32 tokens is left out, 1 stays' in caplog.text
  assert data_summary.examples(source).startswith('1 pair, ')
  for values, message in (
    (dict(TOO_LONG='truncate'), 'would compare answers that were cut:'),
    (dict(PACKED_INPUT=False), 'share'),
  ):
    with pytest.raises(UserError, match=message):
      PreferenceFiles(**values).validate()


def said(source) -> list[tuple[int, str, str]]:
  """Returns what each segment is taken for, its text, and what of it is learned."""
  found = []
  for index in range(len(source)):
    batch = {k: v[0] for k, v in source.read(np.array([index])).items()}
    for segment in range(1, batch['segment_ids'].max() + 1):
      here = batch['segment_ids'] == segment
      (kind,) = set(batch['preferences'][here])
      texts = (batch['ids'][here][1:], batch['labels'][here][batch['weights'][here] > 0])
      found.append((int(kind), *(source.tokenizer.decode(t.tolist()) for t in texts)))
  return found


def test_a_labelled_answer_has_beside_it_the_answer_to_another_prompt(tmp_path):
  records = [
    dict(prompt='one is', completion=' 1', label=True),
    dict(prompt='one is', completion=' 2', label=False),
    dict(prompt='two is', chosen=' 2', rejected=' 1'),
  ]
  source = rows(tmp_path, records, cls=LabelledRows)
  assert source.num_records == 4
  assert said(source) == [
    (1, 'one is 1', ' 1'), (2, 'one is 1', ' 1'),
    (-1, 'one is 2', ' 2'), (-2, 'one is 1', ' 1'),
    (1, 'two is 2', ' 2'), (2, 'two is 2', ' 2'),
    (-1, 'two is 1', ' 1'), (-2, 'two is 2', ' 2'),
  ]  # fmt: skip
  assert [nearest_other([5, 5, 6, 6, 5], i) for i in range(5)] == [3, 3, 1, 1, 3]
  assert nearest_other([5, 6, 7], 0, lambda i, other: other == 1) == 1
  assert nearest_other([5, 5], 0) is None
  relabelled = rows(tmp_path, [records[0] | dict(label=False), *records[1:]], cls=LabelledRows)
  assert relabelled.fingerprint != source.fingerprint
  assert relabelled.tokens_fingerprint != source.tokens_fingerprint


def test_labelled_conversations_are_those_of_prompt_and_completion(tmp_path):
  other = dict(prompt=[dict(role='user', content='bye')], completion=BAD, label=0)
  found = [
    said(rows(tmp_path, [first, other], 128, LabelledRows))
    for first in (
      dict(prompt=[QUESTION], completion=GOOD, label=True),
      dict(messages=[QUESTION, *GOOD], label='True'),
    )
  ]
  assert found[0] == found[1]
  assert [kind for kind, *_ in found[0]] == [1, 2, -1, -2]
  assert [learned for *_, learned in found[0]] == ['good day', 'go away', 'go away', 'good day']


@pytest.mark.parametrize(
  ('record', 'message'),
  [
    (dict(prompt='a', completion=' b'), r'pairs.jsonl.*1.*this record has no label'),
    (dict(prompt='a', completion=' b', label='good'), "is 'good'; it must be true"),
    (dict(prompt='a', completion=' b', label=0.5), 'is 0.5; it must be true'),
    (dict(messages=[QUESTION], label=True), 'must end with an answer to a message of the user'),
    (dict(prompt='a', completion=' b', label=True), 'no other record has another prompt'),
    (dict(prompt='a', chosen=' b', rejected=' b'), 'are the same'),
  ],
)
def test_wrong_labelled_answers_are_refused(record, message, tmp_path):
  with pytest.raises(UserError, match=message):
    rows(tmp_path, [record], cls=LabelledRows)


def test_few_bad_answers_are_warned_of(tmp_path):
  records = [dict(prompt=f'{i} is', completion=f' {i}', label=i > 0) for i in range(5)]
  source = rows(tmp_path, records, cls=LabelledRows)
  assert any('Of 5 labelled answers 4 are good' in w for w in source.warnings)
  with pytest.raises(UserError, match=r"another record's answer.*a sequence holds 8"):
    rows(tmp_path, records, seq_len=8, cls=LabelledRows)


def test_a_reward_model_reads_the_last_token_of_an_answer(tmp_path):
  record = dict(prompt='one is', chosen=' 1', rejected=' 2')
  source = rows(tmp_path, [record], cls=RewardRows)
  batch = {k: v[0] for k, v in source.read(np.array([0])).items()}
  ends = np.flatnonzero(batch['weights'])
  assert len(ends) == 2
  assert set(batch['ids'][ends]) == {source.tokenizer.eos_id}
  assert batch['segment_ids'][ends].tolist() == [1, 2]
  assert batch['segment_ids'][ends + 1].tolist() == [2, 0]
