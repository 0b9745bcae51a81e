"""Tasks of reasoning-gym and verifiers, as they are: their prompts, tools and rewards."""

import json
import pathlib

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
  monkeypatch.setenv('PYTHONPATH', str(pathlib.Path(__file__).parent))
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


def test_tasks_that_cannot_run_here_are_refused():
  pytest.importorskip('verifiers')
  for query, match in [
    ('', 'has no end: limit=N'), ('?kind=boxed&limit=1', 'needs a container'),
    ('?kinds=1&limit=1', 'kinds'),
  ]:  # fmt: skip
    with pytest.raises(UserError, match=match) as e:
      files_of(f'verifiers:my-taskset{query}')
    assert '\n' not in str(e.value)


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
