"""Tasks of reasoning-gym and verifiers, as they are: their prompts, tools, users and rewards.

Most tests call the environments in this process, because others would import verifiers again, which
takes seconds.
"""

import importlib
import json
import os
import pathlib
import random

import pytest

from paxlite.core.errors import UserError
from paxlite.environments import sources
from paxlite.environments.reasoning_gym import ReasoningGym
from paxlite.environments.sources import files_of
from paxlite.environments.verifiers import Verifiers
from paxlite.finetuning.reinforcement.episode import Episode
from paxlite.finetuning.reinforcement.judges import Judges
from paxlite.finetuning.reinforcement.prompts import Prompt
from tests.runs.test_rollouts import CONFIG, files  # noqa: F401
from tests.support import runs

GYM = 'paxlite.environments.reasoning_gym.ReasoningGym'
VERIFIERS = 'paxlite.environments.verifiers.Verifiers'


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  here = str(pathlib.Path(__file__).parent)
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  monkeypatch.setenv('PYTHONPATH', here, prepend=os.pathsep)
  monkeypatch.syspath_prepend(here)
  files_of.cache_clear()


@pytest.fixture
def records(tmp_path):
  """Writes the prompts of a task in this process, and returns them."""

  def written(name):
    package, task, query = sources._SOURCE.fullmatch(name).groups()
    write = importlib.import_module(f'paxlite.environments.{package}').write
    write(task, sources._options(name, query or ''), str(tmp_path / 'prompts.jsonl'))
    return [json.loads(line) for line in open(tmp_path / 'prompts.jsonl')]

  return written


def talk(record, *said):
  """Returns the messages of an episode in which the model and its environment take turns."""
  found = [*record.get('messages', record.get('prompt'))]
  for one in said:
    found += [{'role': 'assistant', 'content': one}] if isinstance(one, str) else one
  return found


def episode(record, answer):
  found = Episode.of(Prompt(record, [1], talk(record), 'a:1'))
  found.append([2], True, {'role': 'assistant', 'content': answer})
  return found


@pytest.mark.parametrize('task', ['chain_sum', 'leg_counting', 'word_ladder'])
def test_a_task_of_reasoning_gym_scores_answers(task, records):
  gym = pytest.importorskip('reasoning_gym')
  name = f'reasoning_gym:{task}?size=3&seed=4'
  found = records(f'{name}&prompt=simple')
  assert [m['role'] for m in found[0]['prompt']] == ['system', 'user']
  text = records(f'{name}&prompt=text')
  assert [r['prompt'] for r in text] == [r['prompt'][1]['content'] for r in found]
  answers = [r['reasoning_gym']['entry']['answer'] for r in found]
  said = [f'<think>0</think>so <answer>{answers[0]}</answer>', answers[1], 'I do not know']
  env = ReasoningGym()
  rewards = [env.reward(r, talk(r, answer)) for r, answer in zip(found, said, strict=True)]
  own = gym.create_dataset(task, size=3, seed=4)
  assert rewards[:2] == [1.0, 1.0]
  assert rewards[2] == pytest.approx(own.score_answer(said[2], found[2]['reasoning_gym']['entry']))
  assert env.reply(found[0], talk(found[0], 'x')) is None


def test_entries_with_other_types_than_those_of_json_score_the_same(records):
  pytest.importorskip('reasoning_gym')
  (record,) = records('reasoning_gym:rearc?size=1&seed=7')
  answer = record['reasoning_gym']['entry']['answer']
  assert ReasoningGym().reward(record, talk(record, answer)) == 1.0


def test_without_a_seed_the_tasks_are_the_same_at_each_start(records):
  pytest.importorskip('reasoning_gym')
  assert records('reasoning_gym:chain_sum?size=3') == records('reasoning_gym:chain_sum?size=3')


@pytest.mark.slow
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
    ('verifiers:my-taskset?kinds=1&limit=1', 'kinds'),
  ],
)
def test_a_task_that_cannot_run_here_is_one_line(name, match):
  pytest.importorskip(name.partition(':')[0])
  with pytest.raises(UserError, match=match) as e:
    files_of(name)
  assert '\n' not in str(e.value)


@pytest.mark.slow
def test_a_taskset_that_cannot_run_here_says_why(records):
  pytest.importorskip('verifiers')
  for name, match in (
    ('my-taskset', 'has no end: limit=N'),
    ('my-taskset?kind=boxed&limit=1', 'needs a container'),
    ('my-game?limit=two', 'limit=two is no number'),
    ('no-taskset', "'no-taskset' not found"),
  ):
    with pytest.raises(Exception, match=match):
      records(f'verifiers:{name}')


def test_a_package_that_is_missing_is_one_line(monkeypatch):
  monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
  with pytest.raises(UserError, match='needs the package verifiers: pip install'):
    files_of('verifiers:a')
  assert files_of('data/a.jsonl') == []


@pytest.mark.slow
def test_a_taskset_of_one_turn(records):
  pytest.importorskip('verifiers')
  found = records('verifiers:my-taskset?kind=words&limit=2&system=Be%20short')
  assert found[1]['messages'] == [
    {'role': 'system', 'content': 'Be short'}, {'role': 'user', 'content': '1 + 2'},
  ]  # fmt: skip
  assert 'tools' not in found[0]
  env, said = Verifiers(), [talk(found[0], '2'), talk(found[1], '3 or 4')]
  assert [env.reply(r, m) for r, m in zip(found, said, strict=True)] == [None, None]
  rewards = [env.reward(r, m) for r, m in zip(found, said, strict=True)]
  assert rewards == pytest.approx([1, 1 / 6])
  judges = Judges([], [], environment=VERIFIERS, seconds=60.0)
  assert judges.rewards([episode(found[1], '3 or 4')]).tolist() == pytest.approx([1 / 6])


@pytest.mark.slow
def test_a_taskset_with_tools_and_a_state(records):
  pytest.importorskip('verifiers')
  (record,) = records('verifiers:my-taskset?limit=1')
  (tool,) = record['tools']
  assert tool['function']['name'] == 'adder_add'
  assert tool['function']['parameters']['required'] == ['a', 'b']
  call = lambda a: (
    f'<tool_call>{{"name": "adder_add", "arguments": {{"a": {a}, "b": 2}}}}</tool_call>'
  )
  env = Verifiers()
  replied = lambda *said: env.reply(record, talk(record, *said))
  first, failed = replied(call(0)), replied(call(100))
  assert (first[0]['content'], failed[0]['content']) == ('2', 'error: ValueError: too large')
  # the first call is counted again, so that the second one is enough
  assert [m['content'] for m in replied(call(0), first, call(1) + call(2))] == ['3', '4']
  assert replied('2') is None
  (result,) = replied(call(0), first, call(1))
  assert (result['content'], result['tool_call_id']) == ('3', 'call_1')
  assert replied(call(0), first, call(1), [result], call(2)) is None
  rewarded = lambda *said: env.reward(record, talk(record, *said))
  assert rewarded(call(0), first, 'It is 2') == pytest.approx(2.1)
  assert rewarded('no') == 0.0


@pytest.mark.slow
@pytest.mark.parametrize('seed', range(2))
def test_a_taskset_whose_env_is_the_user(seed, records):
  """It opens the talk, answers each guess, and its rewards are added to those of the task."""
  pytest.importorskip('verifiers')
  found, rng, env = records('verifiers:my-game'), random.Random(seed), Verifiers()
  assert [m['role'] for m in found[0]['messages']] == ['system', 'user']
  assert 'Guess a number below' in found[0]['messages'][1]['content']
  assert records('verifiers:my-game') == found, 'what it draws is the same'
  for record, number in zip(found, [3, 8, 5], strict=True):
    said = []
    guesses = rng.randint(1, 3)
    for _ in range(guesses):
      said.append(str(rng.choice([n for n in range(10) if n != number])))
      hint = 'Smaller.' if int(said[-1]) > number else 'Larger.'
      said.append([{'role': 'user', 'content': hint}])
      assert env.reply(record, talk(record, *said[:-1])) == said[-1]
    few = 0.5 / (1 + guesses)
    cut = talk(record, *said[:-1])  # at a limit: the last answer is not answered
    assert env.reward(record, cut) == pytest.approx(few + 0.25)
    right = talk(record, *said, str(number))
    assert env.reply(record, right) is None
    assert env.reward(record, right) == pytest.approx(1 + few + 0.25)
    with pytest.raises(ValueError, match='invalid literal for int'):
      env.reply(record, talk(record, 'no number'))


WRONG = [
  '', ' ', '\x00', 'None', 'null', '[]', '{}', '[[]]', "{'a': 1}", '9**9**9', '1e999', 'nan',
  '<answer></answer>', '<answer>', '</answer>', '<answer>1</answer><answer>2</answer>', '-inf',
  '\\frac{1}{0}', '1/0', 'x' * 5000, '( ' * 300, '\u202e7', '７', '0 0 0\n' * 9,
]  # fmt: skip


@pytest.mark.cases(fast=0, slow=2)
@pytest.mark.slow
@pytest.mark.parametrize('seed', range(20))
def test_any_answer_to_any_task_has_a_score(seed, records):
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
    except Exception:
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
    "--fdl.TRAIN_FILES=['reasoning_gym:chain_sum?size=4&seed=1&prompt=text']",
    '--fdl.MAX_SEQ_LEN=160', '--fdl.REWARD_TIMEOUT=60',
  ]  # fmt: skip
  runs.run(tmp_path / 'run', *given, '--fdl.MAX_STEPS=1', config=CONFIG)
  runs.run(tmp_path / 'run', *given, '--fdl.MAX_STEPS=2', config=CONFIG)
  rewards = [r['reward'] for r in runs.records(tmp_path / 'run') if 'reward' in r]
  assert len(rewards) == 2
  kept = runs.records(tmp_path / 'run', 'episodes.jsonl')
  assert {name for episode in kept for name in episode['rewards']} == {GYM}
