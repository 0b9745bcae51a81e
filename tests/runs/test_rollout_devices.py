"""Devices that generate beside those that train, and how old answers become."""

import concurrent.futures
import threading
import time
import types

import fiddle as fdl
import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from paxlite.core.errors import UserError
from paxlite.core.json_text import parsed
from paxlite.finetuning.distillation.on_policy import TaughtRollouts
from paxlite.finetuning.reinforcement.policy_loss import STALENESS
from paxlite.finetuning.reinforcement.rollout_devices import Generation, training_devices
from paxlite.finetuning.reinforcement.rollouts import RunFiles
from paxlite.report import tables
from paxlite.report.records import read_runs
from tests.runs import test_rollouts
from tests.runs.test_rollouts import CONFIG, experiment, flags, made
from tests.support import runs
from tests.support.processes import on_processes, start_processes

files = test_rollouts.files
ROWS = slice(0, 16)
NUMBERS = ('loss', 'reward', 'answer_tokens', 'staleness', 'importance', 'max_importance')
WAITS = ('wait_for_rollouts_seconds', 'wait_for_training_seconds')


def set_to(**values):
  return [f'--fdl.{name}={value}' for name, value in values.items()]


def numbers(folder):
  return [[r.get(name) for name in NUMBERS] for r in runs.records(folder)]


OLDER = [
  dict(MAX_STALENESS=2),
  dict(MAX_STALENESS=4, UPDATES_PER_BATCH=2, PARTIAL_ROLLOUTS=1, NUM_MICROBATCHES=4)
  | dict(PACKED_INPUT=True),
]


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize('values', [OLDER[1], {}, OLDER[0]])
def test_a_device_of_its_own_changes_no_bit(files, tmp_path, values):
  """Where as many devices generate as train, by programs of one mesh."""
  given = [*flags(files), *set_to(**values)]
  runs.run(tmp_path / 'one', *given, config=CONFIG)
  runs.run(tmp_path / 'two', *given, *set_to(ROLLOUT_DEVICES=1), config=CONFIG, devices=2)
  one, two = numbers(tmp_path / 'one'), numbers(tmp_path / 'two')
  assert one == two
  assert len(one) == 6
  last = runs.records(tmp_path / 'two')[-1]
  shown = tables.markdown(read_runs([str(tmp_path / 'two')]))
  assert ('Rollouts by older weights' in shown) == bool(values)
  if values:
    assert last['staleness'] > 0
    assert all(last[name] >= 0 for name in WAITS)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize('values', [{}, *OLDER])
def test_other_numbers_of_devices_change_rounding_alone(files, tmp_path, values):
  given = [*flags(files), *set_to(**values)]
  runs.run(tmp_path / 'one', *given, config=CONFIG)
  more = dict(ROLLOUT_DEVICES=4, ICI_MESH_SHAPE='[1,2,2]', PERCORE_BATCH_SIZE=4)
  runs.run(tmp_path / 'eight', *given, *set_to(**more), config=CONFIG, devices=8)
  np.testing.assert_allclose(
    np.array(numbers(tmp_path / 'eight'), float), np.array(numbers(tmp_path / 'one'), float),
    rtol=1e-5, atol=1e-6,
  )  # fmt: skip


@pytest.fixture(scope='module')
def whole(files, tmp_path_factory):
  folder = tmp_path_factory.mktemp('whole')
  runs.run(folder, *_killed_flags(files), config=CONFIG, devices=8)
  return numbers(folder)


def _killed_flags(files):
  values = dict(ROLLOUT_DEVICES=2, ICI_MESH_SHAPE='[1,6,1]', PERCORE_BATCH_SIZE=2, MAX_STALENESS=2)
  more = dict(PARTIAL_ROLLOUTS=2, CHECKPOINT_EVERY_N_STEPS=2, MAX_STEPS=7)
  return [*flags(files), *set_to(**values, **more)]


@pytest.mark.cases(fast=0, slow=3)
@pytest.mark.slow
@pytest.mark.parametrize('phase', ['generation:6', 'training:5', 'between:4', 'generation:2'])
def test_a_run_killed_in_a_phase_goes_on_bit_for_bit(files, tmp_path, whole, phase):
  given = _killed_flags(files)
  killed = runs.run(
    tmp_path, *given, config=CONFIG, devices=8, module='tests.support.killed_rollouts',
    env={'KILLED': phase}, code=-9,
  )  # fmt: skip
  assert killed.stdout.endswith('killed\n')
  went_on = runs.run(tmp_path, *given, config=CONFIG, devices=8)
  assert numbers(tmp_path) == whole
  assert 'are answered again' not in went_on.stdout + went_on.stderr


@pytest.mark.parametrize(
  ('values', 'match'),
  [
    (
      dict(ROLLOUT_DEVICES=1, MAX_STALENESS=1),
      'beside a mesh of 1, .* needs 2 devices, of which 1 ',
    ),
    (dict(ROLLOUT_DEVICES=3, MAX_STALENESS=1), 'ROLLOUT_DEVICES=3 must divide the 16 sequences'),
    (
      dict(ROLLOUT_DEVICES=2, MESH_AXES=['stage', 'replica', 'data', 'mdl'])
      | dict(ICI_MESH_SHAPE=[2, 1, 1, 1]),
      'ROLLOUT_DEVICES=2 and a mesh with stages',
    ),
    (
      dict(PARTIAL_ROLLOUTS=5, ROLLOUTS_PER_ANSWER=2),
      'ROLLOUTS_PER_ANSWER=2 must be 3 or more with PARTIAL_ROLLOUTS=5 and 4 groups in a rollout',
    ),
  ],
)
def test_devices_that_cannot_generate_are_refused(files, values, match):
  values = {'ICI_MESH_SHAPE': [1, 1, 1]} | values
  e = experiment(files).replaced(**values)

  def refused():
    e.validate()
    fdl.build(e.train_input())

  with pytest.raises(UserError, match=match):
    refused()


def test_a_step_is_compiled_for_the_devices_that_train(files):
  e = experiment(files).replaced(ROLLOUT_DEVICES=2, ICI_MESH_SHAPE=[1, 6, 1])

  class Device(types.SimpleNamespace):
    __hash__ = object.__hash__

  devices = [Device(id=i, platform='cpu', process_index=0) for i in range(8)]
  assert [*e.mesh(devices).devices.flat] == devices[:6]


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize('values', [OLDER[0], {}, OLDER[1]])
def test_devices_of_several_processes_change_no_bit(files, tmp_path, values):
  """Each process generates with one of its devices."""
  given = [*flags(files), *set_to(ICI_MESH_SHAPE='[1,2,1]', PERCORE_BATCH_SIZE=8, **values)]
  on_processes(tmp_path / 'one', 2, *given, config=CONFIG, env=runs.environment(1))
  beside = set_to(ROLLOUT_DEVICES=2)
  on_processes(tmp_path / 'two', 2, *given, *beside, config=CONFIG, env=runs.environment(2))
  one, two = numbers(tmp_path / 'one'), numbers(tmp_path / 'two')
  assert one == two
  assert len(one) == 6


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize('phase', ['generation:3', 'training:5'])
def test_processes_killed_in_a_phase_go_on_bit_for_bit(files, tmp_path, phase):
  """Where no process has all weights that its generating devices need."""
  given, env = _killed_flags(files), runs.environment(4)
  on_processes(tmp_path / 'whole', 2, *given, config=CONFIG, env=env)
  killed = start_processes(
    tmp_path / 'parts', 2, *given, config=CONFIG, module='tests.support.killed_rollouts',
    env=env | {'KILLED': phase},
  )  # fmt: skip
  said = [process.communicate(timeout=300) for process in killed]
  assert any(process.returncode == -9 for process in killed), said
  went_on = on_processes(tmp_path / 'parts', 2, *given, config=CONFIG, env=env)
  assert numbers(tmp_path / 'parts') == numbers(tmp_path / 'whole')
  assert 'are answered again' not in ''.join(went_on)


def test_each_process_has_as_many_devices_that_generate():
  device = lambda process, i: types.SimpleNamespace(process_index=process, id=i)
  devices = [device(process, i) for process in (0, 1) for i in range(4)]
  training = training_devices(6, 2, devices)
  assert [(d.process_index, d.id) for d in training] == [(p, i) for p in (0, 1) for i in range(3)]
  with pytest.raises(UserError, match=r'=3 gives each of 2 processes 1.5 of its 4 devices'):
    training_devices(5, 3, devices)
  with pytest.raises(UserError, match='=2 gives each of 2 processes 1 of its 1 devices'):
    training_devices(1, 2, [device(0, 0), device(0, 1), device(1, 0)])


def test_several_processes_generate_when_they_draw(monkeypatch):
  """What is begun is made at the next draw, by the parameters of the one that began it."""
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  generation, made = Generation(1, True), []

  def make(number, params):
    made.append((number, int(params)))
    if number == 2:
      raise UserError('it fails')
    return number

  assert generation.draw(0, make, lambda: np.array(7)) == 0
  assert made == [(0, 7)]
  assert generation.finished() == (1, 2, {})
  assert generation.draw(1, make, lambda: np.array(8)) == 1
  assert made == [(0, 7), (1, 7)]
  generation.wait(3)
  assert made[2:] == [(2, 8)]
  assert generation.finished() == (2, 2, {})
  with pytest.raises(UserError, match='it fails'):
    generation.draw(2, make, lambda: np.array(9))
  generation.close()
  assert generation.finished() == (3, 3, {})


@pytest.mark.parametrize('ahead', [1, 2])
def test_a_save_waits_for_generation_and_a_step_does_not(files, tmp_path, ahead):
  """Also where a rollout has several steps; each is generated once it may be."""
  values = dict(MAX_STALENESS=2 * ahead, UPDATES_PER_BATCH=2)
  e = experiment(files, **values)
  rollouts, may, fails = fdl.build(e.train_input()), threading.Semaphore(0), threading.Event()

  def go_on(params, episodes, judges, seed, is_enough):
    assert may.acquire(timeout=20), 'training waits for it'
    assert not fails.is_set(), 'it fails'
    for episode in episodes:
      episode.append([5, 2], True, {'role': 'assistant', 'content': ''})
      episode.is_over = True

  zeros = lambda params, arrays: np.zeros(arrays['ids'].shape, np.float32)
  rollouts._actor = types.SimpleNamespace(go_on=go_on, placed=lambda params: params, check=None)
  rollouts._behaviour = rollouts._log_probs = zeros
  rollouts._judges = types.SimpleNamespace(begin=lambda episodes: lambda: np.ones(len(episodes)))
  rollouts._generation = Generation(ahead, True)
  rollouts.run_files = RunFiles(tmp_path / 'rollouts', True, lambda: 0)
  batches = rollouts.device_batches(NamedSharding(e.mesh(), PartitionSpec()), 0)
  for number in range(2 * ahead):
    if number % 2 == 0:
      may.release()
    batches.draw(None)  # the rollouts after it are not made yet
  with concurrent.futures.ThreadPoolExecutor(1) as thread:
    save = thread.submit(batches.state, 2 * ahead)
    assert concurrent.futures.wait([save], 0.2).not_done
    may.release(ahead)
    saved = parsed(save.result())
  assert saved['next'] == saved['begun'] == 2 * ahead
  assert saved['position'] == 2 * ahead * 4
  assert len([*(tmp_path / 'rollouts').glob('*.episodes')]) == 2 * ahead
  fails.set()
  may.release()
  batches.draw(None)
  failed = parsed(batches.state(2 * ahead + 1))
  assert [failed[key] for key in ('begun', 'position')] == [2 * ahead, 2 * ahead * 4]
  batches.close()


class Endless:
  """An engine whose answers do not end."""

  tokenizer = sampling = params = None
  ends = ()

  def __init__(self):
    self.began, self.canceled, self.steps = threading.Event(), [], 0

  def add(self, request):
    return types.SimpleNamespace(answer=None)

  def step(self, **_):
    self.began.set()
    self.steps += 1
    assert self.steps < 5000, 'nothing ends it'
    time.sleep(0.01)

  def cancel(self, job):
    self.canceled.append(job)


def test_the_end_of_a_run_ends_what_is_generated(files):
  options = fdl.build(experiment(files).train_input().options)
  rollouts = TaughtRollouts(options, ahead=1, beside=True)
  engine = options.actor.engine = Endless()
  taught = lambda number, params: rollouts._answered(params, number) if number else []
  generation = rollouts._generation
  assert generation.draw(0, taught, lambda: None) == []
  assert engine.began.wait(20)
  rollouts.close()
  assert engine.steps < 5000
  assert len(engine.canceled) == 16
  assert generation.finished() == (1, 1, {})
  assert generation.draw(5, lambda *_: generation.check(), lambda: None) is None, 'a new run'
  rollouts.close()


@pytest.mark.cases(fast=2, slow=1)
@pytest.mark.parametrize('most', [3, 4, 8])
@pytest.mark.parametrize('ahead', [0, 2])
def test_no_answer_is_written_in_more_rollouts_than_it_may(files, most, ahead):
  """Lengths are drawn: most answers are short, and some are written for very long."""
  values = dict(MAX_STALENESS=ahead, PARTIAL_ROLLOUTS=6, MAX_SEQ_LEN=512, MAX_NEW_TOKENS=500)
  _, rollouts, params = made(files, ROLLOUTS_PER_ANSWER=most, **values)
  random, left, oldest = np.random.default_rng(most), {}, 0

  def go_on(params, episodes, judges, seed, is_enough):
    while not is_enough():
      for episode in episodes:
        key = id(episode)
        left.setdefault(key, (random.choice([2, 400], p=[0.9, 0.1]), episode))
        length, _ = left[key]
        if not episode.is_over:
          episode.append(
            [5], True, *([{'role': 'assistant', 'content': ''}] if length == 1 else [])
          )
          left[key] = length - 1, episode
          episode.is_over = length == 1

  rollouts._actor = types.SimpleNamespace(go_on=go_on, placed=lambda params: params, check=None)
  rollouts._behaviour = lambda params, arrays: np.zeros(arrays['ids'].shape)
  rollouts._judges = types.SimpleNamespace(begin=lambda episodes: lambda: np.ones(len(episodes)))
  for number in range(40):
    oldest = max(oldest, rollouts.next_batch(params, number, ROWS)[STALENESS].max())
  assert oldest <= ahead + most - 1
  assert oldest >= ahead + min(most, 4) - 1, 'some would take longer'
