"""Optimizers of optax: what they must keep of an experiment, and states unlike Adam's."""

import functools
import subprocess
import sys

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from optax import contrib

from paxlite.checkpointing.checkpoints import Checkpoints
from paxlite.config.templates import config
from paxlite.core.errors import UserError
from paxlite.experiments import identity
from paxlite.experiments.demo import TinyGPT
from paxlite.optim import by_name, partition_report, state_axes
from paxlite.optim.optimizers import Optimizer
from paxlite.parallel import partitioning, weight_dims
from tests.support import runs

# a stack of two layers, and variables outside of it, with the einsums that multiply them
_QKV = (2, 8, 2, 4), ('layers', 'embed', 'heads', 'head_dim'), 'BTD,DNH->BTNH'
SHAPES = {
  'transformer': {'repeat': {'qkv': {'w': _QKV}}},
  'embedding': {'w': ((16, 8), ('vocab', 'embed'), '')},
  'head': {'w': ((8, 16), ('embed', 'vocab'), 'BTD,DV->BTV'), 'b': ((16,), ('vocab',), '')},
}


def of_leaves(make):
  return jax.tree.map(make, SHAPES, is_leaf=lambda x: isinstance(x, tuple))


def labels(params):
  return jax.tree_util.tree_map_with_path(lambda p, _: 'w' if p[-1].key == 'w' else 'b', params)


OPTAX = {
  'sgd': lambda: optax.sgd(0.1),
  'momentum': lambda: optax.sgd(lambda count: 0.1, momentum=0.9, nesterov=True),
  'lion': lambda: optax.lion(0.01),
  'adafactor': lambda: optax.adafactor(0.01, min_dim_size_to_factor=4),
  'lamb': lambda: optax.lamb(0.01),
  'muon': lambda: contrib.muon(0.01),
  'partition': lambda: optax.partition({'w': optax.adamw(0.01), 'b': optax.sgd(0.1)}, labels),
  'masked': lambda: optax.masked(
    optax.adam(0.01), lambda params: jax.tree.map(lambda x: x == 'w', labels(params))
  ),
  'multi_steps': lambda: optax.MultiSteps(optax.adam(0.01), 2).gradient_transformation(),
  'inject_hyperparams': lambda: optax.inject_hyperparams(optax.adamw)(lambda count: 0.01),
  'schedule_free': lambda: contrib.schedule_free_adamw(0.01),
  'ema': lambda: optax.chain(optax.sgd(0.1), optax.ema(0.9)),
  'prodigy': lambda: contrib.prodigy(),
  'sm3': lambda: optax.sm3(0.1),
  'apply_if_finite': lambda: optax.apply_if_finite(optax.adam(0.01), 3),
}


def completed(transformation, **changes) -> Optimizer:
  return Optimizer(transformation, **{'clip_gradient_norm': 0.5, **changes})


def trained(optimizer: Optimizer, mesh: Mesh, steps: int, state=None, first: int = 0):
  """Returns parameters and state after steps from `first` on, and their shapes on the mesh."""
  rng = np.random.default_rng(1)
  value = lambda leaf: rng.normal(size=leaf[0]).astype('float32')
  boxed = of_leaves(lambda leaf: weight_dims.Weight(value(leaf), leaf[1], equation=leaf[2]))
  shapes = jax.eval_shape(lambda: (boxed, optimizer.init(boxed)))
  sharded = partitioning.sharded_shapes(shapes, mesh, partitioning.DEFAULT_RULES)
  shardings = jax.tree.map(lambda x: x.sharding, sharded)
  if state is None:
    new = lambda: state_axes.unboxed((boxed, optimizer.init(boxed)))
    make = jax.jit(new, out_shardings=shardings)
    state = make()

  @functools.partial(jax.jit, out_shardings=shardings)
  def step(params, opt_state, grads, valid):
    norm = optax.tree.norm(grads)
    with partitioning.activate(mesh), weight_dims.declared(lambda: boxed):
      return optimizer.update(grads, norm, valid, opt_state, params)

  for number in range(first, first + steps):
    grads = jax.tree.map(lambda x, number=number: jnp.sin(number + 3 * x), state[0])
    state = step(*state, grads, True)
  nothing = step(*state, jax.tree.map(lambda x: x * np.nan, state[0]), False)
  jax.tree.map(np.testing.assert_array_equal, nothing, state)
  return state, sharded


def mesh_of(n: int, by_axis: int = 1) -> Mesh:
  shape = by_axis, n // by_axis**2, by_axis
  return Mesh(np.array(jax.devices()[:n]).reshape(shape), ('replica', 'data', 'mdl'))


@pytest.mark.cases(fast=3)
@pytest.mark.parametrize('name', OPTAX)
def test_a_state_of_optax_is_sharded_skipped_saved_and_resumed(name, tmp_path):
  optimizer = completed(OPTAX[name]())
  (params, state), sharded = trained(optimizer, mesh_of(1), 2)
  assert jax.tree.structure((params, state)) == jax.tree.structure(sharded)
  checkpoints = Checkpoints(tmp_path, max_to_keep=1)
  checkpoints.save(2, {'params': params, 'opt_state': state}, {})
  checkpoints.close()
  like = {'params': sharded[0], 'opt_state': sharded[1]}
  found, _ = Checkpoints(tmp_path, max_to_keep=1).restore(2, like, '')
  jax.tree.map(np.testing.assert_array_equal, found, {'params': params, 'opt_state': state})
  assert jax.tree.structure(found['opt_state']) == jax.tree.structure(state)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_state_of_optax_is_the_same_on_eight_devices():
  """Runs what follows in a process that has eight."""
  code = 'from tests.unit.optim.test_own_optimizer import *; check_eight_devices()'
  subprocess.run([sys.executable, '-c', code], env=runs.environment(8), cwd=runs.ROOT, check=True)


def check_eight_devices() -> None:
  for name in ('adafactor', 'muon', 'partition', 'multi_steps', 'lamb'):
    check_eight_devices_with(name)


def check_eight_devices_with(name: str) -> None:
  one, _ = trained(completed(OPTAX[name]()), mesh_of(1), 2)
  eight, sharded = trained(completed(OPTAX[name]()), mesh_of(8), 2)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), one, eight)
  specs = [x.sharding.spec for x in jax.tree.leaves(sharded[1])]
  assert any('data' in spec for spec in specs) or name == 'adafactor', specs


def test_a_state_with_a_random_key_of_its_own_type_is_refused_before_it_is_trained():
  with pytest.raises(UserError, match='rng_key of the optimizer is a typed random key'):
    trained(completed(optax.noisy_sgd(0.1, key=0)), mesh_of(1), 0)


def test_the_run_says_what_each_part_of_an_optimizer_trains():
  params = of_leaves(lambda leaf: jnp.zeros(leaf[0]))
  said = lambda t: partition_report.described(t.init(params), params)
  assert said(OPTAX['muon']()) == [
    'The parts of the optimizer train: muon 2 of 4 arrays (256 parameters), '
    'adam 2 of 4 arrays (144 parameters).'
  ]
  assert said(optax.partition({'w': optax.adam(0.1), 'b': optax.sgd(0.1)}, labels)) == [
    'The parts of the optimizer train: w 3 of 4 arrays (384 parameters), '
    'b 1 of 4 arrays (16 parameters).'
  ]
  assert said(optax.adam(0.1)) == []
  params = {'a': jnp.zeros((2, 3, 4))}
  assert 'muon 0 of 1 arrays (0 parameters)' in said(OPTAX['muon']())[0]


def test_an_optimizer_that_needs_more_than_gradients_is_refused_in_one_line():
  with pytest.raises(UserError, match=r'the optimizer cannot update .*value'):
    trained(completed(optax.polyak_sgd()), mesh_of(1), 1)
  with pytest.raises(UserError, match='makes a int, and must make an optax transf'):
    completed(3)


def test_moments_of_an_optimizer_of_ones_own_are_kept_narrow_or_refused():
  narrow = functools.partial(completed, moments_dtype='bfloat16')
  (_, state), _ = trained(narrow(optax.adamw(0.01)), mesh_of(1), 2)
  types = {x.dtype.name for x in jax.tree.leaves(state) if x.ndim}
  assert types == {'bfloat16'}
  with pytest.raises(UserError, match='z/embedding/w of the optimizer may not be a moment'):
    trained(narrow(OPTAX['schedule_free']()), mesh_of(1), 0)
  with pytest.raises(UserError, match='that counts updates in its state:'):
    trained(narrow(optax.sgd(0.1, momentum=0.9)), mesh_of(1), 0)


class Lion(TinyGPT):
  NUM_LAYERS = 1
  WEIGHT_DECAY = 0.5
  CLIP_GRADIENT_NORM_TO_VALUE = 0.5

  def transformation(self):
    return config(optax.lion, learning_rate=self.schedule(), b1=self.ADAM_BETA1)


class OwnLion(Lion):
  """A function of the user's own, as in docs/library.md."""

  def transformation(self):
    return config(lion, schedule=self.schedule(), weight_decay=self.WEIGHT_DECAY)


def lion(schedule, weight_decay):
  return optax.lion(schedule, weight_decay=weight_decay)


class EditedAdam(Lion):
  def transformation(self):
    return config(by_name.adam, schedule=self.schedule())


class Constant(Lion):
  """A rate that paxlite does not know."""

  def transformation(self):
    return config(optax.sgd, learning_rate=0.1)


@pytest.mark.parametrize('cls', [Lion, OwnLion, EditedAdam, Constant])
def test_attributes_hold_for_an_optimizer_of_ones_own(cls):
  e = cls(USE_LORA=True, OFFLOAD_OPTIMIZER=True)
  task = fdl.build(e.build_task())
  optimizer = task.optimizer
  assert optimizer.clip_gradient_norm == 0.5
  assert optimizer.on_host
  state = jax.eval_shape(task.init, jax.random.key(0))
  trained, frozen = (jax.tree.leaves(x) for x in optimizer.split(state.params))
  assert 0 < len(trained) < len(frozen)
  moments = sum(x.size for x in jax.tree.leaves(state.opt_state) if x.ndim)
  assert moments in (sum(x.size for x in trained) * n for n in (0, 1, 2))
  rate = jax.eval_shape(optimizer.learning_rate, state.opt_state, state.step)
  assert (rate is None) == (cls is Constant)


def test_attributes_that_an_optimizer_does_not_read_are_said():
  unread = lambda e: [r for r in e.warnings if 'does not read' in r]
  (said,) = unread(Lion())
  assert 'WEIGHT_DECAY' in said
  assert 'ADAM_EPSILON' in said
  assert 'ADAM_BETA1' not in said
  assert 'CLIP_GRADIENT_NORM_TO_VALUE' not in said
  (said,) = unread(OwnLion())
  assert 'WEIGHT_DECAY' not in said
  assert unread(TinyGPT()) == []
  warnings = TinyGPT(LR_SCHEDULE='constant', LR_COS_WARMUP=7).warnings
  (said,) = [r for r in warnings if 'LR_COS_WARMUP' in r]
  assert said.startswith('LR_COS_WARMUP: the optimizer of TinyGPT does not read it')


def test_an_optimizer_that_is_put_in_beside_transformation_is_refused_in_one_line():
  class Replaced(TinyGPT):
    def task(self):
      task = super().task()
      task.optimizer = config(optax.sgd, learning_rate=0.1)
      return task

  class Edited(TinyGPT):
    def task(self):
      task = super().task()
      task.optimizer.clip_gradient_norm = 2.0
      return task

  for cls in (Replaced, Edited):
    with pytest.raises(UserError, match=rf'{cls.__name__}\.task\(\) changes the optimizer'):
      cls().build_task()

  class Mixin:
    def optimizer(self):
      return config(optax.sgd, learning_rate=0.1)

  class Overridden(Mixin, TinyGPT):
    pass

  with pytest.raises(
    UserError, match=r'Mixin\.optimizer is paxlite.s own: override transformation'
  ):
    Overridden().build_task()


def test_a_config_that_no_file_can_hold_is_refused_in_one_line(tmp_path):
  class Local(TinyGPT):
    def transformation(self):
      return config(optax.sgd, learning_rate=lambda count: 0.1)

  with pytest.raises(UserError, match=r'Local\.task cannot be written .* not lambdas'):
    identity.write_configuration(Local(), tmp_path)
