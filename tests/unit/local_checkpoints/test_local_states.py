"""A run that ends without saving continues from the states that its host has kept."""

import dataclasses
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxlite.core.errors import UserError
from paxlite.experiments.demo import TinyGPT
from paxlite.local_checkpoints import local_states
from paxlite.local_checkpoints.branches import Branches
from paxlite.local_checkpoints.local_choice import _rounds, _Wanted
from paxlite.local_checkpoints.local_states import LocalCheckpoints
from paxlite.programs.run import Run
from tests.support import runs
from tests.support.experiments import TinyText

VALUES = dict(
  MAX_STEPS=14, SUMMARY_INTERVAL_STEPS=1, EVAL_INTERVAL_STEPS=100, DROPOUT_PROB=0.1, NUM_LAYERS=1,
  CHECKPOINT_EVERY_N_STEPS=1000, LOCAL_CHECKPOINT_EVERY_N_STEPS=6,  # a state every 3
)  # fmt: skip


class Killed(BaseException):
  """Ends a run as a kill does: nothing is saved, as it would be after an error in data."""


@dataclasses.dataclass
class Failing:
  """An input that fails at a batch, as a process fails that is killed there."""

  inner: object
  at: int
  name = 'data'

  @property
  def batch_size(self):
    return self.inner.batch_size

  @property
  def max_token_id(self):
    return self.inner.max_token_id

  def train_batches(self, start, rows):
    for step, batch in enumerate(self.inner.train_batches(start, rows), start):
      if step == self.at:
        raise Killed
      yield batch


def start(tmp_path, fails_at=None, folder='run', accept_changes=False, **values):
  """Runs until the end or the failure; returns the trainer and the step it started from."""
  values = VALUES | {'LOCAL_CHECKPOINT_DIR': str(tmp_path / 'local')} | values
  path = tmp_path / folder
  path.mkdir(exist_ok=True)
  trainer = Run(TinyGPT(**values), path, accept_changes=accept_changes).trainer()
  if fails_at is not None:
    trainer.data.input = Failing(trainer.data.input, fails_at)
  state, step = trainer.store.initial()
  if fails_at is None:
    return trainer.train(state, step), step
  with pytest.raises(Killed):
    trainer.train(state, step)
  return None, step


def names(tmp_path) -> list[int]:
  return sorted(int(p.name[:8]) for p in (tmp_path / 'local').rglob('*.state'))


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  """A run that nothing has disturbed: its losses and its last state."""
  folder = tmp_path_factory.mktemp('whole')
  state, _ = start(folder, LOCAL_CHECKPOINT_EVERY_N_STEPS=0)
  return runs.losses(folder / 'run'), state


@pytest.mark.slow
def test_a_run_continues_bit_for_bit_from_the_newest_local_state(tmp_path, whole):
  assert start(tmp_path, fails_at=8) == (None, 0)
  assert names(tmp_path) == [3, 6], 'at most two'
  assert start(tmp_path, fails_at=11) == (None, 6)
  state, step = start(tmp_path)
  assert step == 9
  assert runs.losses(tmp_path / 'run') == whole[0]
  jax.tree.map(np.testing.assert_array_equal, state, whole[1])
  assert names(tmp_path) == [], 'its last checkpoint is saved'


@pytest.mark.slow
def test_moments_on_the_host_continue_from_a_local_state(tmp_path, whole):
  start(tmp_path, fails_at=8, OFFLOAD_OPTIMIZER=True)
  _, step = start(tmp_path, OFFLOAD_OPTIMIZER=True)
  assert step == 6
  assert runs.losses(tmp_path / 'run') == whole[0]


def small_state(value: float):
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ('data',))
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  arrays = {'w': jnp.full((4, 3), value), 'b': jnp.full(5, value, jnp.bfloat16), 'n': jnp.int32(7)}
  return jax.device_put(arrays, sharding)


def restored(local, above=-1):
  abstract = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), small_state(0)
  )
  found = local.restored(abstract, above)
  if found is None:
    return None
  step, state, metadata = found
  jax.tree.map(np.testing.assert_array_equal, state, small_state(step))
  assert metadata == {'batch_size': 4, 'step': step}
  return step


def kept(local, *steps):
  """Keeps a state after each of these steps."""
  for step in steps:
    local.save(small_state(step), step, lambda step=step: {'batch_size': 4, 'step': step})
    local.reported(step)


@pytest.fixture
def local(tmp_path):
  (tmp_path / 'run').mkdir()
  made = lambda run='run', experiment=1, accept_changes=False: LocalCheckpoints(
    str(tmp_path / 'local'), tmp_path / run, 6, experiment, accept_changes
  )
  return made


@pytest.fixture
def killed(local):
  """A run that was killed after it had kept the states of four steps."""
  run = local()
  assert restored(run) is None
  run.begin(0)
  kept(run, 3, 6, 9, 12)
  run._finish()
  return run


def test_two_states_are_kept_and_the_newest_is_used(killed, local, tmp_path):
  assert names(tmp_path) == [9, 12]
  assert restored(local()) == 12
  assert restored(local(), above=11) == 12
  assert restored(local(), above=12) is None, 'the checkpoint is as new'


def test_the_state_of_the_start_is_kept_until_all_have_a_newer_one(killed, local, tmp_path):
  run = local()
  assert restored(run) == 12
  run.begin(12)
  run.save(small_state(15), 15, lambda: {'batch_size': 4, 'step': 15})
  assert names(tmp_path) == [12], 'a kill at this moment loses three steps'
  run.reported(15)
  run._finish()
  assert names(tmp_path) == [12, 15]
  kept(run, 18)
  run._finish()
  assert names(tmp_path) == [15, 18]


def test_files_of_a_process_that_has_moved_are_removed(local, tmp_path, monkeypatch):
  before = local()
  before.begin(0)
  with monkeypatch.context() as patch:
    patch.setattr(jax, 'process_index', lambda: 1)
    kept(before, 9, 12)
    before._finish()
  run = local()
  assert restored(run) == 12
  run.begin(12)
  kept(run, 15)
  run._finish()
  assert names(tmp_path) == [12, 15]
  kept(run, 18, 21)
  run._finish()
  assert names(tmp_path) == [18, 21]


def test_pages_of_the_state_before_the_last_are_used_again(local, tmp_path):
  run = local()
  run.begin(0)
  numbers = {}
  for step in (3, 6, 9, 12):
    kept(run, step)
    run._finish()
    (path,) = (tmp_path / 'local').rglob(f'{step:08d}_*.state')
    numbers[step] = path.stat().st_ino
  assert numbers[9] == numbers[3] != numbers[6] == numbers[12]
  assert restored(local()) == 12


def test_an_error_of_the_metadata_is_raised(local):
  def metadata():
    raise ConnectionError('a process is gone')

  run = local()
  run.begin(0)
  run.save(small_state(3), 3, metadata)
  with pytest.raises(ConnectionError, match='gone'):
    run.save(small_state(6), 6, dict)


def test_a_damaged_state_falls_back_to_the_one_before_it(killed, local, tmp_path, caplog):
  (newest,) = (tmp_path / 'local').rglob('00000012*')
  content = bytearray(newest.read_bytes())
  content[10] ^= 1
  newest.write_bytes(content)
  assert restored(local()) == 9
  assert 'is damaged (the CRC-32C of ' in caplog.text
  assert 'the local state of step 12 is incomplete and not used: 0 of 1 devices' in caplog.text


def test_states_of_another_experiment_are_not_used(killed, local, caplog):
  assert restored(local(experiment=2)) is None
  assert 'the local state of step 12 belongs to another experiment' in caplog.text
  assert restored(local(experiment=2, accept_changes=True)) == 12


def test_states_of_another_run_are_not_used(killed, local, tmp_path):
  shutil.copytree(tmp_path / 'run', tmp_path / 'copy')
  assert restored(local('copy')) is None
  shutil.rmtree(tmp_path / 'run')
  assert restored(local()) is None, 'the run was deleted'
  (tmp_path / 'run').mkdir()
  run = local()
  run.begin(0)
  assert names(tmp_path) == [], 'nothing is left of the run that was deleted'
  run.close(saved=-1)


def test_states_of_another_shape_are_not_used(killed, local, caplog):
  wanted = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct((*x.shape, 2), x.dtype, sharding=x.sharding), small_state(0)
  )
  assert local().restored(wanted, -1) is None
  assert 'the local state of step 12 is incomplete' in caplog.text


def test_a_rollback_leaves_no_state_of_the_steps_it_undoes(killed, local, tmp_path):
  files = {p: p.read_bytes() for p in (tmp_path / 'local').rglob('*.state')}
  run = local()
  assert restored(run) == 12
  run.begin(12)
  assert names(tmp_path) == [12]
  kept(run, 15)
  run.begin(10)  # back to a checkpoint
  assert names(tmp_path) == []
  for path, content in files.items():  # a host that was away comes back
    path.write_bytes(content)
  assert restored(local()) == 9, 'the run has left that history at step 10'
  kept(run, 12)
  run._finish()
  assert restored(local()) == 12
  run.close(saved=12)
  assert names(tmp_path) == []


@pytest.mark.parametrize('lose', [1, 2, 3, 4, 7, 10])
def test_a_killed_run_loses_no_more_than_it_may(tmp_path, monkeypatch, lose):
  """A disk that is so slow that each state is complete only when the next one is due."""
  written = threading.Semaphore(0)
  write = local_states.LocalFolder.write

  def slow(folder, name, shards, metadata, commit, over):
    def late() -> bool:
      complete = commit()
      written.acquire()
      return complete

    return write(folder, name, shards, metadata, late, over)

  monkeypatch.setattr(local_states.LocalFolder, 'write', slow)
  (tmp_path / 'run').mkdir()
  run = LocalCheckpoints(str(tmp_path / 'local'), tmp_path / 'run', lose, experiment=1)
  run.begin(0)
  saved = False
  for step in range(1, 25):
    newest = max(names(tmp_path), default=0)
    assert step - newest <= max(lose, 2), 'lost by a kill after this step, before it is kept'
    run.reported(step)
    if run.due(step):
      if saved:
        written.release()
      run.save(small_state(step), step, dict)
      saved = True
  written.release()
  run.close(saved=0)


def test_a_state_whose_metrics_are_not_written_is_not_kept(local, tmp_path):
  run = local()
  run.begin(0)
  kept(run, 3)
  run.save(small_state(6), 6, lambda: {})
  run.close(saved=-1)
  assert names(tmp_path) == [3]


def test_a_disk_without_room(local, monkeypatch, caplog):
  usage = shutil.disk_usage('/')
  monkeypatch.setattr(local_states.shutil, 'disk_usage', lambda _: usage._replace(free=10))
  with pytest.raises(UserError, match=r'two local states of this process need 0\.0 GiB, but '):
    restored(local())


def test_a_state_that_cannot_be_written_stops_nothing(local, monkeypatch, caplog):
  def full(*_, **__):
    raise OSError(28, 'No space left on device')

  run = local()
  run.begin(0)
  monkeypatch.setattr(local_states.LocalFolder, 'write', full)
  kept(run, 3, 6)
  run.close(saved=-1)
  assert caplog.text.count('local states cannot be written, training continues') == 1


class Spiking(Failing):
  """An input one of whose batches has random tokens, and which fails at another batch."""

  def train_batches(self, start, rows):
    for step, batch in enumerate(super().train_batches(start, rows), start):
      if step == 33:
        noise = np.random.default_rng(0).integers(0, 8192, batch['labels'].shape)
        batch = batch | {'labels': noise.astype(np.int32)}
      yield batch


class LeftOut(Failing):
  """An input without the batches from a checkpoint to a spike."""

  def train_batches(self, start, rows):
    for step, batch in enumerate(self.inner.train_batches(start, rows), start):
      if not 30 <= step <= 33:
        yield batch


@pytest.mark.slow
def test_a_rollback_is_remembered(tmp_path):
  """A run is killed after a rollback, before a checkpoint holds it."""

  def run(folder, make_input):
    e = TinyText(
      LOSS_SPIKE_WINDOW=5, LOSS_SPIKE_FACTOR=1.15, CHECKPOINT_EVERY_N_STEPS=10, MAX_STEPS=40,
      LEARNING_RATE=0.02, LR_SCHEDULE='constant', EVAL_INTERVAL_STEPS=100, NUM_LAYERS=1,
      SUMMARY_INTERVAL_STEPS=1, LOCAL_CHECKPOINT_EVERY_N_STEPS=4,
      LOCAL_CHECKPOINT_DIR=str(tmp_path / 'local'),
    )  # fmt: skip
    (tmp_path / folder).mkdir(exist_ok=True)
    trainer = Run(e, tmp_path / folder).trainer()
    trainer.data.input = make_input(trainer.data.input)
    state, step = trainer.store.initial()
    try:
      trainer.train(state, step)
    except Killed:
      assert names(tmp_path) == [34, 36]
    return step, trainer.rollbacks.count

  assert run('run', lambda inner: Spiking(inner, at=41)) == (0, 1)
  assert run('run', lambda inner: Spiking(inner, at=100)) == (36, 1)
  run('clean', lambda inner: LeftOut(inner, at=100))
  assert runs.losses(tmp_path / 'run') == runs.losses(tmp_path / 'clean')


@pytest.mark.slow
def test_a_newer_checkpoint_is_used_and_a_complete_run_has_one(tmp_path):
  start(tmp_path, fails_at=8, CHECKPOINT_EVERY_N_STEPS=7)
  assert names(tmp_path) == [], 'the checkpoint of step 7 is newer'
  assert start(tmp_path, fails_at=11, CHECKPOINT_EVERY_N_STEPS=7)[1] == 7
  assert names(tmp_path) == [9]
  assert start(tmp_path, MAX_STEPS=8)[1] == 9, 'nothing is left to do'
  assert (tmp_path / 'run' / 'checkpoints' / 'checkpoint_00000009').is_dir()
  assert start(tmp_path)[1] == 9


def test_the_history_of_a_run():
  history = Branches([('a', 0), ('b', 10), ('c', 8), ('d', 20)])
  held = {branch: [s for s in (0, 8, 9, 10, 11, 20, 21) if history.hold(branch, s)]
          for branch in 'abcdx'}  # fmt: skip
  assert held == {
    'a': [0, 8],
    'b': [0, 8],
    'c': [0, 8, 9, 10, 11, 20],
    'd': [0, 8, 9, 10, 11, 20, 21],
    'x': [],
  }
  assert Branches.decoded(history.encoded()).hold('c', 20)
  many = Branches()
  for step in range(100):
    many = many.begun(step)
  assert many.hold(many.current, 200)
  assert len(many.encoded()) < 3000


def test_devices_get_their_parts_from_replicas():
  wanted = object.__new__(_Wanted)
  wanted._keys = [['left'], ['right']] * 3
  assert wanted.donors(np.array([1, 1, 0, 0, 1, 0])) == [0, 1, 0, 1, 4, 1]
  assert wanted.donors(np.array([1, 0, 1, 0, 1, 0])) is None
  rounds = _rounds([0, 1, 0, 1, 0, 1])
  assert rounds == [[(0, 2), (1, 3)], [(0, 4), (1, 5)]]
  assert _rounds([0, 1]) == []
