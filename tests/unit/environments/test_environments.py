"""Tasks of reasoning-gym and verifiers, as they are: their prompts, tools and rewards."""

import json
import os
import pathlib
import random

import pytest

from paxlite.core.errors import UserError
from paxlite.environments.sources import files_of
from paxlite.files.text_files import expanded
from paxlite.finetuning.reinforcement.episode import Episode
from paxlite.finetuning.reinforcement.judges import Judges
from paxlite.finetuning.reinforcement.prompts import Prompt
from tests.runs.test_rollouts import CONFIG, files  # noqa: F401
from tests.support import runs

GYM = 'paxlite.environments.reasoning_gym.ReasoningGym'
VERIFIERS = 'paxlite.environments.verifiers.Verifiers'


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  monkeypatch.setenv('PYTHONPATH', str(pathlib.Path(__file__).parent), prepend=os.pathsep)
  files_of.cache_clear()


def records(name):
  (file,) = expanded([name])
  return [json.loads(line) for line in open(file)]


def episode(record, *said):
  """Returns an episode in which the model and its environment take turns."""
  asked = record.get('messages', record.get('prompt'))
  found = Episode.of(Prompt(record, [1], [] if isinstance(asked, str) else asked, 'a:1'))
  for text in said:
    messages = [{'role': 'assistant', 'content': text}] if isinstance(text, str) else text
    found.append([2], isinstance(text, str), *messages)
  return found


@pytest.mark.parametrize('task', ['chain_sum', 'leg_counting', 'word_ladder'])
def test_a_task_of_reasoning_gym_scores_answers(task):
  gym = pytest.importorskip('reasoning_gym')
  name = f'reasoning_gym:{task}?size=3&seed=4'
  found = records(f'{name}&prompt=simple')
  assert [m['role'] for m in found[0]['prompt']] == ['system', 'user']
  text = records(f'{name}&prompt=text')
  assert [r['prompt'] for r in text] == [r['prompt'][1]['content'] for r in found]
  answers = [r['reasoning_gym']['entry']['answer'] for r in found]
  said = [f'<think>0</think>so <answer>{answers[0]}</answer>', answers[1], 'I do not know']
  judges = Judges([], [], environment=GYM)
  episodes = [episode(r, answer) for r, answer in zip(found, said, strict=True)]
  rewards = judges.rewards(episodes).tolist()
  own = gym.create_dataset(task, size=3, seed=4)
  assert rewards[:2] == [1.0, 1.0]
  assert rewards[2] == pytest.approx(own.score_answer(said[2], found[2]['reasoning_gym']['entry']))
  assert judges.replies(episodes) == [None] * 3


def test_entries_with_other_types_than_those_of_json_score_the_same():
  pytest.importorskip('reasoning_gym')
  (record,) = records('reasoning_gym:rearc?size=1&seed=7')
  answer = record['reasoning_gym']['entry']['answer']
  assert Judges([], [], environment=GYM).rewards([episode(record, answer)]).tolist() == [1.0]


@pytest.mark.parametrize(
  ('name', 'match'),
  [
    ('reasoning_gym:no_task', r"write for reasoning_gym:no_task raised .*'no_task' not registered"),
    ('reasoning_gym:chain_sum?sizes=3', 'raised TypeError: .*sizes'),
    ('reasoning_gym:chain_sum?size', 'options are NAME=VALUE'),
    ('reasoning_gym:chain_sum?size=3&size=4', "the option 'size' is empty, or given twice"),
    ('reasoning_gym:chain_sum?a=1&a.b.c=2', "the option 'a.b.c'"),
    ('reasoning_gym:chain_sum?a.b=2&a=1', "the option 'a'"),
    ('reasoning_gym:chain_sum?=1', "the option ''"),
    ('reasoning_gym:chain_sum?prompt=none', 'prompt=none is unknown; use text, chat'),
  ],
)
def test_a_task_that_is_not_there_is_one_line(name, match):
  pytest.importorskip('reasoning_gym')
  with pytest.raises(UserError, match=match) as e:
    files_of(name)
  assert '\n' not in str(e.value)


def test_a_package_that_is_missing_is_one_line(monkeypatch):
  monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
  with pytest.raises(UserError, match='needs the package verifiers: pip install'):
    files_of('verifiers:a')
  assert files_of('data/a.jsonl') == []


def test_a_taskset_of_one_turn():
  pytest.importorskip('verifiers')
  found = records('verifiers:my-taskset?kind=words&limit=2&system=Be%20short')
  assert found[1]['messages'] == [
    {'role': 'system', 'content': 'Be short'}, {'role': 'user', 'content': '1 + 2'},
  ]  # fmt: skip
  assert 'tools' not in found[0]
  judges = Judges([], [], environment=VERIFIERS, seconds=60.0)
  said = [episode(found[0], '2'), episode(found[1], '3 or 4')]
  assert judges.replies(said) == [None, None]
  assert judges.rewards(said).tolist() == pytest.approx([1, 1 / 6])


def test_a_taskset_with_tools_and_a_state():
  pytest.importorskip('verifiers')
  (record,) = records('verifiers:my-taskset?limit=1')
  (tool,) = record['tools']
  assert tool['function']['name'] == 'adder_add'
  assert tool['function']['parameters']['required'] == ['a', 'b']
  call = lambda a: (
    f'<tool_call>{{"name": "adder_add", "arguments": {{"a": {a}, "b": 2}}}}</tool_call>'
  )
  judges = Judges([], [], environment=VERIFIERS, seconds=60.0)
  replies = judges.replies([episode(record, call(0)), episode(record, call(100))])
  assert [r[0]['content'] for r in replies] == ['2', 'error: ValueError: too large']
  # the first call is counted again, so that the second one is enough
  both = episode(record, call(0), replies[0], call(1) + call(2))
  assert judges.replies([both, episode(record, '2')])[1] is None
  (result,) = judges.replies([episode(record, call(0), replies[0], call(1))])
  assert (result[0]['content'], result[0]['tool_call_id']) == ('3', 'call_1')
  assert judges.replies([episode(record, call(0), replies[0], call(1), result, call(2))]) == [None]
  done = episode(record, call(0), replies[0], 'It is 2')
  assert judges.rewards([done, episode(record, 'no')]).tolist() == pytest.approx([2.1, 0.0])


@pytest.mark.parametrize('seed', range(2))
def test_a_taskset_whose_env_is_the_user(seed):
  """It opens the talk, answers each guess, and its rewards are added to those of the task."""
  pytest.importorskip('verifiers')
  found, rng = records('verifiers:my-game'), random.Random(seed)
  assert [m['role'] for m in found[0]['messages']] == ['system', 'user']
  assert 'Guess a number below' in found[0]['messages'][1]['content']
  assert records('verifiers:my-game') == found, 'what it draws is the same'
  judges = Judges([], [], environment=VERIFIERS, seconds=60.0)
  numbers = [3, 8, 5]
  said = [[] for _ in numbers]
  for _ in range(rng.randint(1, 3)):  # of them the last answer is not answered
    episodes = []
    for record, number, talk in zip(found, numbers, said, strict=True):
      talk.append(str(rng.choice([n for n in range(10) if n != number])))
      episodes.append(episode(record, *talk))
    for talk, number, reply in zip(said, numbers, judges.replies(episodes), strict=True):
      hint = 'Smaller.' if int(talk[-1]) > number else 'Larger.'
      assert reply == [{'role': 'user', 'content': hint}]
      talk.append(reply)
  cut = [episode(record, *talk[:-1]) for record, talk in zip(found, said, strict=True)]
  guesses = len(said[0]) // 2
  few = 0.5 / (1 + guesses)
  assert judges.rewards(cut).tolist() == pytest.approx([few + 0.25] * 3)
  right = [
    episode(record, *talk, str(number))
    for record, talk, number in zip(found, said, numbers, strict=True)
  ]
  assert judges.replies(right) == [None] * 3
  assert judges.rewards(right).tolist() == pytest.approx([1 + few + 0.25] * 3)
  wrong = [episode(record, 'no number') for record in found[:2]]
  assert judges.replies([*wrong, right[2]]) == [None] * 3
  assert 'invalid literal for int()' in wrong[0].error


def test_tasks_that_cannot_run_here_are_refused():
  pytest.importorskip('verifiers')
  for name, match in [
    ('my-taskset', 'has no end: limit=N'), ('my-taskset?kind=boxed&limit=1', 'needs a container'),
    ('my-taskset?kinds=1&limit=1', 'kinds'), ('my-game?limit=two', 'limit'),
    ('no-taskset', "'no-taskset' not found"),
  ]:  # fmt: skip
    with pytest.raises(UserError, match=match) as e:
      files_of(f'verifiers:{name}')
    assert '\n' not in str(e.value)


WRONG = [
  '', ' ', '\x00', 'None', 'null', '[]', '{}', '[[]]', "{'a': 1}", '9**9**9', '1e999', 'nan',
  '<answer></answer>', '<answer>', '</answer>', '<answer>1</answer><answer>2</answer>', '-inf',
  '\\frac{1}{0}', '1/0', 'x' * 5000, '( ' * 300, '\u202e7', '７', '0 0 0\n' * 9,
]  # fmt: skip


@pytest.mark.cases(fast=2, slow=2)
@pytest.mark.parametrize('seed', range(20))
def test_any_answer_to_any_task_has_a_score(seed):
  """As in https://github.com/open-thought/reasoning-gym/issues/417, where a score raised KeyError
  and ended the training, https://github.com/huggingface/Math-Verify/issues/65, where the value of
  an answer hung it, and https://github.com/PrimeIntellect-ai/prime-rl/pull/296, where JSON had made
  lists of an entry's tuples, so that right answers were wrong.
  """
  gym = pytest.importorskip('reasoning_gym')
  rng = random.Random(seed)
  known = sorted(set(gym.factory.DATASETS) - {'composite'})
  for task in rng.sample(known, 3):
    try:
      found = records(f'reasoning_gym:{task}?size=2')
    except UserError:
      continue  # needs files that are no part of the package
    judges = Judges([], [], environment=GYM, seconds=10.0)
    own = gym.create_dataset(task, size=2, seed=0)
    for i, record in enumerate(found):
      entry = own[i]
      assert record['prompt'][0]['content'] == entry['question'], task
      wrong = rng.sample(WRONG, 4)
      answers = [a for a in [entry['answer']] if a is not None]
      episodes = [episode(record, a) for a in [*answers, *wrong]]
      rewards = judges.rewards(episodes)
      for answer, reward in zip(answers, rewards, strict=False):
        assert reward == pytest.approx(own.score_answer(answer.strip(), entry)), task
      for one, reward in zip(episodes, rewards, strict=True):
        assert 0 <= reward <= 1 or 'REWARD_TIMEOUT' in one.error, (task, one)


@pytest.mark.slow
def test_a_run_learns_from_a_task_and_goes_on(files, tmp_path):  # noqa: F811
  """The prompts are written again at each start, and are the same."""
  pytest.importorskip('reasoning_gym')
  given = [
    f'--fdl.VOCAB_PATH={files}', f'--fdl.ENVIRONMENT={GYM}', '--fdl.REWARDS=[]',
    "--fdl.TRAIN_FILES=['reasoning_gym:word_ladder?size=4&seed=1&prompt=text']",
    '--fdl.MAX_SEQ_LEN=1024', '--fdl.REWARD_TIMEOUT=60',
  ]  # fmt: skip
  runs.run(tmp_path / 'run', *given, '--fdl.MAX_STEPS=1', config=CONFIG)
  runs.run(tmp_path / 'run', *given, '--fdl.MAX_STEPS=2', config=CONFIG)
  rewards = [r['reward'] for r in runs.records(tmp_path / 'run') if 'reward' in r]
  assert len(rewards) == 2
  kept = runs.records(tmp_path / 'run', 'episodes.jsonl')
  assert {name for episode in kept for name in episode['rewards']} == {GYM}
