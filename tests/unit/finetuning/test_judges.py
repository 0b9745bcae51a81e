"""Judges: what an environment or a tool does wrong ends or answers one episode, in one line."""

import random

import numpy as np
import pytest

from paxlite.core.errors import UserError
from paxlite.finetuning.reinforcement import tools
from paxlite.finetuning.reinforcement.advantages import advantages, filled
from paxlite.finetuning.reinforcement.episode import Episode
from paxlite.finetuning.reinforcement.judges import Judges
from paxlite.finetuning.reinforcement.prompts import Prompt
from tests.unit.finetuning import my_rewards

PATH = 'tests.unit.finetuning.my_rewards'
OF_BOTH = 'raises', 'hangs', 'ends', 'is large'
OF_REPLIES = *OF_BOTH, 'no message', 'no role', 'a number', 'half of a pair'
OF_REWARDS = *OF_BOTH, 'is NaN', 'is a text', 'is None', 'is infinite', 'another count'
HARMLESS = 'forks', 'prints', None


def episode(record, answer='x'):
  found = Episode.of(Prompt(record, [1], [{'role': 'user', 'content': 'q'}], 'a.jsonl:1'))
  found.append([2], True, {'role': 'assistant', 'content': answer})
  return found


def judges(**values):
  return Judges([], [], seconds=2.0, **values)


@pytest.mark.parametrize('seed', [0, 1])
def test_an_environment_that_fails_ends_its_episode_alone(seed, caplog):
  draw = random.Random(seed)
  faults = [('reply', x) for x in OF_REPLIES] + [
    ('reward', x) for x in (*OF_REWARDS, 'NaN of a turn')
  ]
  faults = [*draw.sample(faults, 6), *((w, x) for w in ('reply', 'reward') for x in HARMLESS)]
  draw.shuffle(faults)
  episodes = [episode({where: fault}) for where, fault in faults]
  of = judges(environment=f'{PATH}.Faulty')
  replies = of.replies(episodes)
  rewards = of.rewards(episodes)
  for (where, fault), one, reply, reward in zip(faults, episodes, replies, rewards, strict=True):
    if fault in HARMLESS:
      assert (reply, reward, one.error) == ([{'role': 'user', 'content': 'on'}], 1.0, ''), fault
      assert one.rewards == {f'{PATH}.Faulty': 1.0}
      continue
    assert np.isnan(reward), fault
    assert (reply is None) == (where == 'reply')
    assert f'Faulty.{where} ' in f'{one.error} ' or 'Faulty returned' in one.error
    assert 'a.jsonl:1' in one.error
    assert '\n' not in one.error
    assert len(one.error) < 400
    assert one.rewards == {}
  (said,) = [r.getMessage() for r in caplog.records]
  assert said.startswith('6 of 12 episodes were ended by errors of their environment')


@pytest.mark.parametrize('seed', [0, 1, 2])
def test_a_reward_is_a_finite_number_or_one_line(seed):
  """Kinds are drawn in any order, so that one leaves nothing behind for the next."""
  of = Judges([f'{PATH}.odd'], [0.5], seconds=2.0)
  of.rewards([episode({}, 'of numpy')])  # whose import is not timed
  kinds = [*my_rewards.ODD]
  random.Random(seed).shuffle(kinds)
  for kind in kinds[seed::3]:
    expected = my_rewards.ODD[kind][1]
    one = episode({}, kind)
    if isinstance(expected, float):
      assert of.rewards([one]).tolist() == [0.5 * expected], kind
      assert one.rewards == {f'{PATH}.odd': expected}
      continue
    with pytest.raises(UserError, match=expected) as raised:
      of.rewards([episode({}, 'a number'), one])
    said = str(raised.value)
    assert f'{PATH}.odd' in said
    assert 'a.jsonl:1' in said
    assert '\n' not in said
    assert len(said) < 2400


def test_an_environment_that_always_fails_ends_the_run():
  of = judges(environment=f'{PATH}.Faulty')
  with pytest.raises(
    UserError, match=r'failed in all 3 episodes: .*raised RuntimeError: first line'
  ):
    of.rewards([episode({'reward': 'raises'}) for _ in range(3)])


def test_a_failed_episode_counts_as_its_group():
  rewards = filled(np.array([[1, np.nan, 3, np.nan], [np.nan] * 4, [1, 2, 3, 4]], np.float32))
  assert rewards.dtype == np.float32, 'so that advantages round as without failures'
  np.testing.assert_array_equal(rewards, [[1, 2, 3, 2], [0] * 4, [1, 2, 3, 4]])
  assert advantages(rewards, 'none')[0].tolist() == [-1, 0, 1, 0]


def test_rewards_of_turns_are_added():
  two = episode({})
  two.append([3], False, {'role': 'user', 'content': 'on'})
  two.append([4], True, {'role': 'assistant', 'content': 'y'})
  of = judges(environment=f'{PATH}.OfTurns')
  assert of.rewards([two, episode({})]).tolist() == [3.0, 1.0]


def test_a_tool_answers_its_calls_and_the_environment_other_answers():
  said = lambda *calls: ''.join(f'<tool_call>{call}</tool_call>' for call in calls)
  add = '{"name": "add", "arguments": {"a": 2, "b": 3}}'
  asked = [
    said(add, add.replace('2', '7')), said(add.replace('2', '100')), said(add.replace('2', '-1')),
    said(add.replace('"a"', '"c"')), said(add.replace('add', 'sub')),
    f'<think>{said(add)}</think>5',
  ]  # fmt: skip
  of = judges(environment=f'{PATH}.Faulty', tools=[f'{PATH}.add'])
  found = of.replies([episode({}, answer) for answer in asked])
  texts = [[m['content'] for m in messages] for messages in found]
  assert texts[:2] == [['5', '10'], ['error: ValueError: too large']]
  assert 'ended its process with the exit status 3' in texts[2][0]
  assert "error: TypeError: add() got an unexpected keyword argument 'c'" in texts[3][0]
  assert texts[4:] == [['on'], ['on']]
  assert {m['role'] for messages in found[:4] for m in messages} == {'tool'}
  assert judges(tools=[f'{PATH}.add']).replies([episode({}, 'no call')]) == [None]
  assert tools.message(0, 'add', 'a\ud800')['content'] == 'a?'


def test_the_schema_of_a_function():
  assert tools.schema(my_rewards.add)['function'] == {
    'name': 'add',
    'description': 'Adds numbers.',
    'parameters': {
      'type': 'object',
      'properties': {
        'a': {'type': 'integer', 'description': 'The first one.'},
        'b': {'type': 'integer', 'description': 'The other one, which may be missing.'},
      },
      'required': ['a'],
    },
  }


@pytest.mark.parametrize(
  ('names', 'match'),
  [
    (['add', 'add'], 'two TOOLS are called add'),
    (['waits'], r'my_rewards\.waits is async, which is not supported'),
    (['unnamed'], r'my_rewards\.unnamed: a has no name in a call'),
  ],
)
def test_tools_that_could_not_be_called_are_refused(names, match):
  with pytest.raises(UserError, match=match) as e:
    judges(tools=[f'{PATH}.{name}' for name in names])
  assert '\n' not in str(e.value)
