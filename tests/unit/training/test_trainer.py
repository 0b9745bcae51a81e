"""The order of the loop, skipped steps, and meshes."""

import itertools
import pathlib
import time

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from paxlite.checkpointing.checkpoints import Checkpoints
from paxlite.core.errors import Interrupted, TrainingError, UserError
from paxlite.core.variable_names import path_name
from paxlite.data.positions import StreamPositions
from paxlite.experiments.demo import TinyGPT
from paxlite.experiments.registry import experiments
from paxlite.optim.optimizers import Optimizer
from paxlite.optim.transformations import skippable
from paxlite.parallel import devices, partitioning
from paxlite.programs.run import Run
from paxlite.training import reporting, save_times, trainer
from paxlite.training.callbacks import Callback
from paxlite.training.evaluation import Evaluator
from paxlite.training.train_data import TrainData
from tests.support import runs


def make(folder: pathlib.Path, **overrides) -> trainer.Trainer:
  experiment = TinyGPT(**overrides)
  experiment.validate()
  folder.mkdir(exist_ok=True)
  return Run(experiment, folder).trainer()


class Poisoned:
  """An input whose weights are NaN in some steps."""

  def __init__(self, inner, poison=()):
    self.inner, self.poison = inner, poison
    self.batch_size, self.max_token_id, self.name = inner.batch_size, inner.max_token_id, 'x'

  def train_batches(self, start, rows):
    for step, batch in enumerate(self.inner.train_batches(start, rows), start):
      if step in self.poison:
        batch = {**batch, 'weights': batch['weights'] * np.float32('nan')}
      yield batch

  def eval_batches(self, rows):
    yield next(self.inner.train_batches(0, rows))


class Recorded(Callback):
  """Notes which steps are evaluated."""

  def __init__(self, steps):
    self.steps = steps

  def on_evaluation(self, state, step, evaluations, summaries):
    self.steps.append(step)


class TwoBatches(Poisoned):
  """An input that evaluates on two batches."""

  def eval_batches(self, rows):
    yield from itertools.islice(self.inner.train_batches(0, rows), 2)


@pytest.mark.slow
def test_the_order_is_evaluate_save_draw(tmp_path, monkeypatch):
  """A checkpoint of step n is saved before batch n is drawn."""
  events = []
  monkeypatch.setattr(
    Checkpoints, 'save', lambda self, step, state, data: events.append(f'save {step}')
  )
  draw = reporting.Reporter.drawing
  monkeypatch.setattr(
    reporting.Reporter, 'drawing', lambda *a: (events.append('draw'), draw(*a))[1]
  )
  t = make(tmp_path, MAX_STEPS=4, EVAL_INTERVAL_STEPS=2, CHECKPOINT_EVERY_N_STEPS=2)
  t.evaluator = Evaluator(t.store.task, {})
  monkeypatch.setattr(t.evaluator, 'report', lambda *_: events.append('evaluate'))
  t.train(*t.store.initial())
  assert events == [
    'draw', 'draw', 'evaluate', 'save 2', 'draw', 'draw', 'evaluate', 'save 4',
  ]  # fmt: skip


@pytest.mark.slow
def test_a_run_beyond_a_lower_max_steps_is_evaluated_and_ends(tmp_path):
  t = make(tmp_path, MAX_STEPS=4)
  t.store.save(t.store.initial()[0], 4, {'unevaluated': True})
  t.store.close()
  t = make(tmp_path, MAX_STEPS=3)
  t.evaluator, evaluated = Evaluator(t.store.task, {}), []
  t.callbacks = [Recorded(evaluated)]
  t.train(*t.store.initial())
  assert evaluated == [4]


@pytest.mark.slow
def test_a_signal_ends_an_evaluation_which_the_next_start_repeats(tmp_path):
  values = dict(MAX_STEPS=2, EVAL_INTERVAL_STEPS=2)  # the next start compiles no train step
  t = make(tmp_path, **values)
  t.evaluator = Evaluator(t.store.task, {'x': TwoBatches(t.data.input)}, stops=lambda: True)
  with pytest.raises(Interrupted, match=r'asked to leave at step 2: step 2 is saved'):
    t.train(*t.store.initial())
  assert not (tmp_path / 'eval_metrics.jsonl').exists()
  t = make(tmp_path, **values)
  t.evaluator = Evaluator(t.store.task, {'x': TwoBatches(t.data.input)})
  t.train(*t.store.initial())
  assert [r['step'] for r in runs.records(tmp_path, 'eval_metrics.jsonl')] == [2]


def test_a_step_without_finite_gradient_changes_nothing_but_the_counters(tmp_path):
  t = make(tmp_path)
  step = t.store.task.jitted_step()
  state, _ = t.store.initial()
  batch = next(t.data.batches(0, t.store.task.batch_sharding))
  state, _ = step(state, batch)
  before = jax.device_get(state)
  bad = {**batch, 'weights': batch['weights'] * np.float32('nan')}
  state, metrics = step(state, bad)
  assert not metrics['learning/is_valid_step'].value
  after = jax.device_get(state)
  jax.tree.map(np.testing.assert_array_equal, before.params, after.params)
  jax.tree.map(np.testing.assert_array_equal, before.opt_state, after.opt_state)
  assert (after.step, after.skipped, after.skipped_in_a_row) == (2, 1, 1)
  state, metrics = step(state, batch)
  assert metrics['learning/is_valid_step'].value
  assert (state.skipped, state.skipped_in_a_row) == (1, 0)


@pytest.mark.slow
@pytest.mark.parametrize('repeated', [False, True])
def test_frozen_variables_stay_and_have_no_optimizer_state(tmp_path, repeated):
  layer = 'transformer/repeat' if repeated else 'transformer/x_layers_1'
  t = make(
    tmp_path, USE_REPEATED_LAYER=repeated, TRAINABLE_VARIABLES=[f'{layer}/.*qkv.*', 'final_ln/.*']
  )
  state, _ = t.store.initial()
  before = jax.device_get(state.params)
  after = jax.device_get(t.train(state, 0).params)
  changed = {
    path_name(path)
    for (path, x), y in zip(
      jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True
    )
    if not np.array_equal(x, y)
  }
  qkv = f'{layer}/self_attention/qkv/combined'
  assert changed == {f'{qkv}/w', f'{qkv}/b', 'final_ln/scale', 'final_ln/bias'}
  moments = next(s for s in t.store.task.abstract.opt_state if hasattr(s, 'm'))
  assert len(jax.tree.leaves(moments.m)) == 4


@pytest.mark.slow
def test_skipped_steps_are_counted_and_training_goes_on(tmp_path):
  t = make(tmp_path, MAX_SKIPPED_STEPS=3)
  t.data = TrainData(Poisoned(t.data.input, poison={3, 4, 6}))
  state = t.train(*t.store.initial())
  assert (int(state.skipped), int(state.step)) == (3, 10)
  assert runs.records(tmp_path)[-1]['skipped_steps'] == 3
  assert runs.records(tmp_path)[-1]['loss'] > 0


def test_positions_are_kept_for_as_many_steps_as_may_be_skipped():
  """The last good state is saved with the position before the skipped steps."""
  with pytest.raises(UserError, match='MAX_SKIPPED_STEPS=1001 must be at most 1000'):
    TinyGPT(MAX_SKIPPED_STEPS=1001).validate()
  positions = StreamPositions('data', [np.zeros((1, 8), np.int64)])
  ahead = 10  # steps that are drawn before the first skipped step is known
  for step in range(1000 + ahead):
    positions[step] = [np.full((1, 8), step)]
  assert positions[0].max() == 0


@pytest.fixture(scope='module')
def after_five_steps(tmp_path_factory):
  other = make(tmp_path_factory.mktemp('other'), MAX_STEPS=5, CHECKPOINT_EVERY_N_STEPS=100)
  return jax.device_get(other.train(*other.store.initial()))


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.parametrize(
  'summary_interval', [7, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 100))]
)
def test_the_run_stops_after_max_skipped_steps_with_its_last_good_state(
  tmp_path, summary_interval, after_five_steps
):
  t = make(
    tmp_path, MAX_SKIPPED_STEPS=3, MAX_STEPS=20, SUMMARY_INTERVAL_STEPS=summary_interval,
    CHECKPOINT_EVERY_N_STEPS=100,
  )  # fmt: skip
  t.data = TrainData(Poisoned(t.data.input, poison={5, 6, 7}))  # good batches follow
  with pytest.raises(TrainingError, match='had a non-finite gradient, from step 5 on'):
    t.train(*t.store.initial())
  assert Checkpoints(tmp_path / 'checkpoints').steps() == [5]
  state, _ = t.store.restored(5)
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), after_five_steps)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(('mesh', 'percore'), [('[2,2,2]', 1), ('[1,1,8]', 0.5)])
def test_a_mesh_changes_rounding_alone(tmp_path, mesh, percore):
  """Compares 3 steps on 8 fake devices, in another process, with one device.

  tests/runs/test_meshes.py compares every gradient on all kinds of meshes.
  """
  size = int(percore * 8)
  flags = '--fdl.MAX_STEPS=3', '--fdl.NUM_HEADS=8', '--fdl.MODEL_DIMS=64', '--fdl.DIMS_PER_HEAD=8'
  flags += ('--noenable_checkpoint_saving',)
  runs.run(tmp_path / 'one', *flags, f'--fdl.PERCORE_BATCH_SIZE={size}')
  runs.run(
    tmp_path / 'mesh', *flags, f'--fdl.PERCORE_BATCH_SIZE={percore}',
    f'--fdl.ICI_MESH_SHAPE={mesh}', devices=8,
  )  # fmt: skip
  for one, other in zip(
    runs.records(tmp_path / 'one'), runs.records(tmp_path / 'mesh'), strict=True
  ):
    assert one['loss'] == pytest.approx(other['loss'], rel=1e-5)
    assert one['grad_norm'] == pytest.approx(other['grad_norm'], rel=1e-4)


@pytest.mark.slow
def test_evaluation_and_saves_do_not_count_as_training_time(tmp_path, monkeypatch):
  """An evaluation of 100 s between two reports does not change the reported seconds per step. Steps
  that were queued before it count as training."""
  t = make(tmp_path, MAX_STEPS=40, SUMMARY_INTERVAL_STEPS=20, EVAL_INTERVAL_STEPS=7)
  waited = []
  clock, later = time.perf_counter, []
  monkeypatch.setattr(time, 'perf_counter', lambda: clock() + 100 * len(later))
  monkeypatch.setattr(Evaluator, 'report', lambda *_: later.append(1))
  block = jax.block_until_ready
  monkeypatch.setattr(jax, 'block_until_ready', lambda x: (waited.append(1), block(x))[1])
  t.train(*t.store.initial())
  assert len(waited) >= 6, 'the device is waited for before the clock stops'
  reported = [r['step_seconds'] for r in runs.records(tmp_path)]
  assert len(reported) == 2
  # 2 or 3 evaluations were between reports; with them, a step would take at least 10 s more.
  assert max(reported) < 5


def test_weights_and_moments_are_split_over_the_mesh():
  """Computed abstractly on a fake mesh: FSDP × TP halves every large weight along both axes."""
  experiment = TinyGPT(ICI_MESH_SHAPE=[1, 2, 2])
  task = fdl.build(experiment.build_task())
  boxed = jax.eval_shape(task.init, jax.random.key(0))
  specs = partitioning.param_specs(boxed, experiment.rules)
  layer = specs.params['transformer']['x_layers_0']
  assert tuple(layer['self_attention']['qkv']['combined']['w']) == (None, 'data', 'mdl', None)
  assert tuple(layer['ff_layer']['ffn_layer1']['w']) == ('data', 'mdl')
  assert tuple(layer['ff_layer']['ffn_layer2']['w']) == ('mdl', 'data')
  assert tuple(specs.params['embedding']['emb_var']) == ('mdl', 'data')
  moments = next(s for s in specs.opt_state if hasattr(s, 'm'))
  assert moments.m == specs.params
  assert moments.v == specs.params


@pytest.mark.parametrize(
  ('kind', 'peak'),
  [
    ('NVIDIA H100 80GB HBM3', 989e12),
    ('NVIDIA H100 NVL', 835e12),
    ('NVIDIA L40S', 362e12),
    ('NVIDIA L40', None),
    ('TPU v5 lite', 197e12),
    ('TPU v5p', 459e12),
    ('cpu', None),
  ],
)
def test_peaks(kind, peak):
  assert devices.peak_flops(kind) == peak


def test_shard_raises_on_unknown_names():
  x = np.zeros((2, 3))
  with pytest.raises(ValueError, match='no sharding rule for the logical axes'):
    partitioning.shard(x, 'batch', 'lenght')
  with pytest.raises(ValueError, match='1 axis names'):
    partitioning.shard(x, 'batch')


def test_any_optax_transformation_can_be_skipped():
  adam = skippable(optax.adamw(0.1))
  params = {'w': jnp.arange(3.0)}
  grads = {'w': jnp.ones(3)}
  _, state = adam.update(grads, adam.init(params), params, valid=True)
  updates, same = adam.update(grads, state, params, valid=jnp.asarray(False))
  np.testing.assert_array_equal(updates['w'], 0)
  jax.tree.map(np.testing.assert_array_equal, same, state)
  expected, _ = optax.adamw(0.1).update(grads, state, params)
  np.testing.assert_array_equal(adam.update(grads, state, params)[0]['w'], expected['w'])


@pytest.mark.parametrize('cap', [0.5, 6.0, 0.0])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_clipping_is_optaxs(cap, dtype):
  grads = {'a': jnp.asarray([3.0, -4.0], dtype), 'frozen': None, 'b': jnp.zeros((2, 2), dtype)}
  optimizer = Optimizer(optax.sgd(1.0), clip_gradient_norm=cap)
  clipped = optimizer.clip(grads, optax.tree.norm(grads), jnp.asarray(True))
  expected = grads
  if cap:
    expected, _ = optax.clip_by_global_norm(cap).update(grads, optax.EmptyState())
  assert jax.tree.structure(clipped) == jax.tree.structure(grads)
  for name in ('a', 'b'):
    assert clipped[name].dtype == dtype
    np.testing.assert_allclose(
      clipped[name].astype('float32'), expected[name].astype('float32'), rtol=1e-2
    )
  if cap != 0.5:
    np.testing.assert_array_equal(clipped['a'], grads['a'])
  else:
    assert float(optax.tree.norm(clipped)) == pytest.approx(0.5, rel=1e-2)


@pytest.mark.parametrize('bad', [np.nan, np.inf])
def test_what_is_not_finite_is_zero_after_clipping(bad):
  grads = {'a': jnp.asarray([1.0, bad])}
  optimizer = Optimizer(optax.sgd(1.0), clip_gradient_norm=1.0)
  clipped = optimizer.clip(grads, optax.tree.norm(grads), jnp.asarray(False))
  np.testing.assert_array_equal(clipped['a'], [0, 0])
  zeros = {'a': jnp.zeros(2)}
  same = optimizer.clip(zeros, optax.tree.norm(zeros), jnp.asarray(True))
  np.testing.assert_array_equal(same['a'], [0, 0])


def test_checkpoints_of_a_chain_that_clipped_fit():
  params = {'w': jnp.zeros(2)}
  optimizer = fdl.build(TinyGPT(CLIP_GRADIENT_NORM_TO_VALUE=1.0).build_task()).optimizer
  before = optax.chain(optax.clip_by_global_norm(1.0), optax.identity())
  state = optimizer.transformation.init(params)
  assert jax.tree.structure(state[0]) == jax.tree.structure(before.init(params)[0])
  assert len(state) == 4


class FakeTime:
  """A clock that the test controls."""

  def __init__(self):
    self.now = 1000.0

  def monotonic(self):
    return self.now


@pytest.mark.parametrize(
  ('step_seconds', 'expected'),
  [
    (0.1, [100, 200, 300, 400]),  # only by steps
    (10.0, [6, 12, 18, 24, 30]),  # every minute
    (100.0, [1, 2, 3, 4]),
    (7.0, [9, 18, 27, 36]),
  ],
)
def test_saves_by_steps_and_by_the_clock(monkeypatch, step_seconds, expected):
  clock = FakeTime()
  monkeypatch.setattr(save_times, 'time', clock)
  times = save_times.SaveTimes(100, 60.0)
  times.restart(0)
  saved = []
  for step in range(1, 500):
    clock.now += step_seconds
    if times.due(step):
      saved.append(step)
  assert saved[: len(expected)] == expected


def test_the_clock_is_asked_at_few_steps(monkeypatch):
  """With several processes, each query of the clock costs a collective."""
  clock, asked = FakeTime(), []
  monkeypatch.setattr(save_times, 'time', clock)
  ask = save_times.SaveTimes._ask
  monkeypatch.setattr(
    save_times.SaveTimes, '_ask', lambda self, step: (asked.append(step), ask(self, step))[1]
  )
  times = save_times.SaveTimes(10**6, 600.0)
  times.restart(0)
  for step in range(1, 10_001):
    clock.now += 0.5
    times.due(step)
  assert len(asked) < 40


@pytest.mark.slow
def test_a_save_by_the_clock_is_a_checkpoint(tmp_path):
  t = make(tmp_path, MAX_STEPS=6, CHECKPOINT_EVERY_N_STEPS=1000, CHECKPOINT_EVERY_N_MINUTES=1e-6)
  t.train(*t.store.initial())
  assert Checkpoints(tmp_path / 'checkpoints').steps() == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
@pytest.mark.parametrize(('line_seconds', 'lines'), [(0.0, [*range(1, 9)]), (1e9, [1, 8])])
def test_a_line_at_the_latest_after_some_seconds(
  tmp_path, capsys, monkeypatch, line_seconds, lines
):
  """The first step has a line too, for any interval of reports; the records do not change."""
  monkeypatch.setattr(reporting, '_LOG_SECONDS', line_seconds)
  t = make(tmp_path, MAX_STEPS=8, SUMMARY_INTERVAL_STEPS=8)
  t.train(*t.store.initial())
  said = [x for x in capsys.readouterr().out.splitlines() if x.startswith('step ')]
  assert [int(x.split()[1].split('/')[0]) for x in said] == lines
  assert [r['step'] for r in runs.records(tmp_path)] == [8]
  assert all(' loss ' in x and ' lr ' in x for x in said)


@pytest.mark.slow
def test_skipped_steps_are_told_a_few_times(tmp_path, capsys):
  t = make(tmp_path, SUMMARY_INTERVAL_STEPS=100)
  t.data = TrainData(Poisoned(t.data.input, poison={1, 3, 5, 6, 7}))
  t.train(*t.store.initial())
  said = capsys.readouterr().out
  assert said.count('has a non-finite gradient or loss: it changes nothing.') == 3
  assert 'Step 2 has a non-finite gradient' in said
  assert 'Further such steps are counted' in said


@pytest.mark.slow
def test_a_run_that_skipped_most_steps_ends_with_an_error(tmp_path):
  """The same holds after a restart, and the state is saved."""
  t = make(tmp_path)
  t.data = TrainData(Poisoned(t.data.input, poison={2, 3, 4, 6, 7, 9}))
  message = '6 of 10 steps had a non-finite gradient or loss and changed nothing'
  with pytest.raises(TrainingError, match=message):
    t.train(*t.store.initial())
  assert Checkpoints(tmp_path / 'checkpoints').steps()[-1] == 10
  again = make(tmp_path)
  with pytest.raises(TrainingError, match=message):
    again.train(*again.store.initial())


@pytest.mark.parametrize(
  ('name', 'value', 'message'),
  [
    *((name, -1e-9, 'must not be negative') for name in
      ('LEARNING_RATE', 'WEIGHT_DECAY', 'ADAM_EPSILON', 'ADAM_EPSILON_ROOT', 'LR_COS_MAX')),
    ('LR_COS_WARMUP', -1, 'must not be negative'),
    ('LR_COS_MIN_RATIO', -0.1, 'must be from 0 to 1'),
    ('LR_LRED_MIN_RATIO', 1.1, 'must be from 0 to 1'),
    ('ADAM_BETA1', -0.1, 'must be at least 0 and below 1'),
    ('ADAM_EPSILON', 0.0, 'is not a number; one of them must be positive'),
    ('CHECKPOINT_EVERY_N_MINUTES', -1.0, 'must not be negative'),
  ],
)  # fmt: skip
def test_rates_and_decays_out_of_range_are_refused(name, value, message):
  with pytest.raises(UserError, match=message) as told:
    TinyGPT(**{name: value}).validate()
  assert str(told.value).startswith(f'{name}=')


def test_what_is_odd_and_no_mistake_is_said():
  assert TinyGPT().warnings == []
  assert TinyGPT(LEARNING_RATE=0.0).warnings == ['LEARNING_RATE=0: no step changes a variable.']
  assert TinyGPT(MAX_STEPS=2).warnings == [
    'MAX_STEPS=2 ends within the warmup (LR_COS_WARMUP=2): the learning rate never reaches '
    'LEARNING_RATE.'
  ]
  assert TinyGPT(MAX_STEPS=3).warnings == [
    'MAX_STEPS=3 ends before the learning rate decays (LR_COS_DECAY_START=3).'
  ]
  assert TinyGPT(MAX_STEPS=2, LR_SCHEDULE='constant').warnings == []


def test_a_run_of_600_steps_saves_and_prints_often():
  """Fine-tuning experiments save by steps; all others save by the clock."""
  found = {n: c() for n, c in experiments().items()}
  assert {n for n, e in found.items() if not 0 < e.CHECKPOINT_EVERY_N_MINUTES <= 10} == set()
  tuned = {n: e for n, e in found.items() if n.endswith(('SFT', 'LoRA'))}
  assert len(tuned) == 8  # of any model, and of LLaMA 7B, 13B and 70B
  assert {e.CHECKPOINT_EVERY_N_STEPS for e in tuned.values()} == {100}
  assert {e.SUMMARY_INTERVAL_STEPS for e in tuned.values()} == {10}
