"""Optimizers by name: the attribute OPTIMIZER, what it reads, and that each is what optax has."""

import dataclasses
import math
import subprocess
import sys

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from paxlite.checkpointing.checkpoints import Checkpoints
from paxlite.core.errors import UserError
from paxlite.experiments.demo import TinyGPT
from paxlite.experiments.llama import LLaMA7B
from paxlite.optim import by_name, moments, partition_report
from paxlite.optim.optimizers import Optimizer
from paxlite.optim.per_layer import per_layer
from paxlite.optim.state_axes import unboxed
from paxlite.parallel.weight_dims import Weight, declared, muon_dims, weight_dims
from paxlite.tools import show
from tests.support import runs
from tests.unit.optim.test_own_optimizer import mesh_of, of_leaves, trained

NAMES = ['adam', 'adamw', 'muon', 'normuon', 'lion', 'sgd', 'adafactor', 'schedule_free']
VALUES = dict(
  LR_SCHEDULE='constant', LEARNING_RATE=0.01, WEIGHT_DECAY=0.1, ADAM_BETA1=0.9, ADAM_BETA2=0.99
)


def matrices_and_rest(*after):
  """Muon of optax's parts: Nesterov's momentum and its orthogonalization, and its Adam."""
  ema = optax.ema(0.95, debias=False)

  def nesterov(grads, state, params=None):
    mean, state = ema.update(grads, state, params)
    return jax.tree.map(lambda g, m: 0.05 * g + 0.95 * m, grads, mean), state

  kinds = lambda params: jax.tree.map(
    lambda d: 'muon' if d.is_matrix else 'rest', weight_dims(params)
  )
  momentum = optax.GradientTransformation(ema.init, nesterov)
  orthogonal = contrib.scale_by_muon(beta=0.0, nesterov=False, weight_dimension_numbers=muon_dims)
  parts = {
    'muon': optax.chain(momentum, orthogonal, *after, optax.stateless(of_adams_size)),
    'rest': optax.scale_by_adam(0.9, 0.99, 1e-8),
  }
  decay, rate = optax.add_decayed_weights(0.1), optax.scale_by_learning_rate(0.01)
  return optax.chain(optax.partition(parts, kinds), decay, rate)


def fans(x, dims):
  return [math.prod(x.shape[i] for i in group) for group in (dims.inputs, dims.outputs)]


def of_adams_size(updates, _):
  one = lambda x, d: 0.2 * math.sqrt(max(fans(x, d))) * x
  return jax.tree.map(one, updates, weight_dims(updates))


def per_neuron():
  """NorMuon's second half: see algorithm 1 of https://arxiv.org/abs/2510.05491."""

  def init(params):
    return jax.tree.map(jnp.zeros_like, params)

  def update(updates, state, params=None):
    dims = weight_dims(updates)
    mean = lambda x, d: jnp.broadcast_to(jnp.square(x).mean(d.inputs, keepdims=True), x.shape)
    state = jax.tree.map(lambda v, x, d: 0.99 * v + 0.01 * mean(x, d), state, updates, dims)
    divided = jax.tree.map(lambda x, v: x / (jnp.sqrt(v) + 1e-8), updates, state)

    def of_norm(x, d):
      matrix = d.inputs + d.outputs
      norm = jnp.sqrt(jnp.square(x).sum(matrix, keepdims=True))
      return x / norm * math.sqrt(min(fans(x, d)))

    return jax.tree.map(of_norm, divided, dims), state

  return optax.GradientTransformation(init, update)


OWN = {
  'adam': lambda: optax.adamw(0.01, 0.9, 0.99, 1e-8, weight_decay=0.1),
  'adamw': lambda: optax.adamw(0.01, 0.9, 0.99, 1e-8, weight_decay=0.1),
  'muon': lambda: matrices_and_rest(),
  'normuon': lambda: matrices_and_rest(per_neuron()),
  'lion': lambda: optax.lion(0.01, 0.9, 0.99, weight_decay=0.1),
  'sgd': lambda: optax.chain(optax.add_decayed_weights(0.0), optax.sgd(0.01, 0.9)),
  # of each layer; test_per_layer.py compares with the unrolled model
  'adafactor': lambda: per_layer(optax.adafactor(0.01, weight_decay_rate=0.001)),
  'schedule_free': lambda: contrib.schedule_free_adamw(
    0.01, b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.1
  ),
}


def optimizer_of(name: str, **values) -> Optimizer:
  e = TinyGPT(OPTIMIZER=name, **{**VALUES, 'ADAM_EPSILON': 1e-8, **values})
  e.validate()
  return fdl.build(e.build_task()).optimizer


def test_all_optimizers_are_tested():
  assert list(OWN) == NAMES
  with pytest.raises(UserError, match=f'choose .*{NAMES[0]}'):
    TinyGPT(OPTIMIZER='').validate()


def boxed():
  """Parameters as layers declare them."""
  rng = np.random.default_rng(0)
  value = lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  return of_leaves(lambda leaf: Weight(value(leaf[0]), leaf[1], equation=leaf[2]))


@pytest.mark.cases(fast=2, slow=2)
@pytest.mark.parametrize('name', NAMES)
def test_an_optimizer_is_optaxs(name):
  """With the same gradients, which are small enough for no cap."""
  decay = dict(WEIGHT_DECAY=0.0) if name == 'sgd' else {}
  ours, own = optimizer_of(name, ADAM_CLIP_THRESHOLD=0.0, **decay), OWN[name]()
  params = unboxed(boxed())
  with declared(boxed):
    expected, state, own_state = params, unboxed(ours.init(boxed())), own.init(params)
    update, own_update = jax.jit(ours.update), jax.jit(own.update)
    for number in range(50):
      grads = jax.tree.map(lambda x, number=number: 0.01 * jnp.cos(number + 3 * x), expected)
      norm = optax.tree.norm(grads)
      params, state = update(grads, norm, jnp.asarray(True), state, params)
      updates, own_state = own_update(grads, own_state, expected)
      expected = optax.apply_updates(expected, updates)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7), params, expected
  )


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize('name', NAMES)
def test_a_run_that_is_resumed_equals_one_that_is_not_stopped(name, tmp_path):
  whole, sharded = trained(optimizer_of(name), mesh_of(1), 4)
  (params, state), _ = trained(optimizer_of(name), mesh_of(1), 2)
  checkpoints = Checkpoints(tmp_path, max_to_keep=1)
  checkpoints.save(2, {'params': params, 'opt_state': state}, {})
  checkpoints.close()
  like = {'params': sharded[0], 'opt_state': sharded[1]}
  found, _ = Checkpoints(tmp_path, max_to_keep=1).restore(2, like, '')
  state = found['params'], found['opt_state']
  resumed, _ = trained(optimizer_of(name), mesh_of(1), 2, state, first=2)
  jax.tree.map(np.testing.assert_array_equal, whole, resumed)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_whole_run_that_is_resumed_equals_one_that_is_not_stopped(tmp_path):
  flags = '--fdl.OPTIMIZER=schedule_free', '--fdl.CHECKPOINT_EVERY_N_STEPS=2'
  runs.run(tmp_path / 'whole', *flags, '--fdl.MAX_STEPS=4')
  for steps in (2, 4):
    runs.run(tmp_path / 'parts', *flags, f'--fdl.MAX_STEPS={steps}')
  whole = runs.losses(tmp_path / 'whole')
  assert sorted(whole) == [1, 2, 3, 4]
  assert runs.losses(tmp_path / 'parts') == whole


@pytest.mark.exhaustive
@pytest.mark.slow
def test_each_optimizer_is_the_same_on_eight_devices():
  """Runs what follows in a process that has eight."""
  code = 'from tests.unit.optim.test_by_name import *; check_eight_devices()'
  subprocess.run([sys.executable, '-c', code], env=runs.environment(8), cwd=runs.ROOT, check=True)


def check_eight_devices() -> None:
  narrow = dict(ADAM_MOMENTS_DTYPE='bfloat16')
  for name, values in [
    *((name, {}) for name in NAMES),
    *((name, narrow) for name in NAMES[:-1]),
    *((name, dict(CLIP_GRADIENT_NORM_TO_VALUE=0.1)) for name in NAMES),
  ]:
    one, _ = trained(optimizer_of(name, **values), mesh_of(1), 3)
    eight, _ = trained(optimizer_of(name, **values), mesh_of(8, by_axis=2), 3)
    same = lambda a, b: np.testing.assert_allclose(
      np.asarray(a, 'float32'), np.asarray(b, 'float32'), rtol=1e-5, atol=1e-6
    )
    jax.tree.map(same, one[0], eight[0])


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize('name', NAMES)
def test_a_model_trains_on_eight_devices_as_on_one(name, tmp_path):
  """With moments on the host and LoRA; what a mesh rounds differently shows in the last digits."""
  flags = [f'--fdl.OPTIMIZER={name}', '--fdl.OFFLOAD_OPTIMIZER=True', '--fdl.USE_LORA=True',
           '--fdl.USE_REPEATED_LAYER=True', '--fdl.MAX_STEPS=4']  # fmt: skip
  runs.run(tmp_path / 'one', *flags, '--fdl.PERCORE_BATCH_SIZE=16')
  mesh = '--fdl.ICI_MESH_SHAPE=[2,2,2]', '--fdl.PERCORE_BATCH_SIZE=2', '--fdl.NUM_MICROBATCHES=2'
  runs.run(tmp_path / 'eight', *flags, *mesh, devices=8)
  found = runs.losses(tmp_path / 'one')
  assert len(set(found.values())) > 2
  assert runs.losses(tmp_path / 'eight') == pytest.approx(found, rel=1e-5)


@pytest.mark.cases(fast=0, slow=2)
@pytest.mark.slow
@pytest.mark.parametrize('name', NAMES)
def test_where_moments_are_changes_nothing(name):
  """Layers of a repeated stack are updated one by one, if that is known to be the same."""
  at_once, streamed = optimizer_of(name), optimizer_of(name, OFFLOAD_OPTIMIZER=True)
  assert streamed.by_layer == (name in ('adam', 'adamw', 'lion', 'sgd'))
  found = []
  for optimizer in (at_once, streamed):
    here, state = unboxed((boxed(), optimizer.init(boxed())))
    if optimizer.on_host:
      put = lambda x: jax.device_put(x, jax.memory.Space.Host) if moments.is_moment(x) else x
      state = jax.tree.map(put, state)
    for _ in range(2):
      grads = jax.tree.map(jnp.sin, here)
      with declared(boxed):
        update = jax.jit(optimizer.update)
        here, state = update(grads, jnp.ones(()), jnp.asarray(True), state, here)
    found.append((here, state))
  same = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
  jax.tree.map(same, *found)


@pytest.mark.parametrize('name', NAMES)
def test_show_prints_what_the_optimizer_reads_alone(name):
  text = show.text('TinyGPT', {'OPTIMIZER': name}, explained=True)
  shown = {line.split(' = ')[0] for line in text.splitlines() if ' = ' in line}
  fields = {n: {f.name.upper() for f in dataclasses.fields(by_name.find(n).fields)} for n in NAMES}
  read, of_optimizers = fields[name], set().union(*fields.values())
  of_optimizers -= {'CLIP_GRADIENT_NORM_TO_VALUE'}
  assert shown & of_optimizers == read & of_optimizers
  assert {'LEARNING_RATE', 'LR_SCHEDULE', 'LR_COS_WARMUP', 'OPTIMIZER'} <= shown
  assert not any(s.startswith('LR_LRED') for s in shown)  # of the other schedule
  assert not [line for line in text.splitlines() if 'does not read' in line]


def test_what_a_user_sets_and_an_optimizer_does_not_read_is_said():
  text = show.text('TinyGPT', {'OPTIMIZER': 'lion', 'ADAM_EPSILON': '1e-3'}, explained=True)
  assert '# ADAM_EPSILON: the optimizer of TinyGPT does not read it' in text
  assert 'ADAM_EPSILON = ' not in text
  TinyGPT(OPTIMIZER='lion', ADAM_EPSILON=0.0).validate()  # Lion divides by nothing


def test_wrong_names_are_refused_in_one_line():
  with pytest.raises(UserError, match=r"OPTIMIZER='loin': choose .* Did you mean lion"):
    TinyGPT(OPTIMIZER='loin').validate()
  with pytest.raises(UserError, match="optimizer 'lion' is registered already"):
    by_name.register('lion')(lambda schedule: optax.sgd(schedule))
  with pytest.raises(UserError, match=r'Empty needs a method transformation\(schedule\)'):
    by_name.register('empty')(type('Empty', (), {}))
  with pytest.raises(UserError, match='averages variables at its own rate'):
    TinyGPT(OPTIMIZER='schedule_free', LEARNING_RATE_FACTORS=['.*=2']).validate()
  with pytest.raises(UserError, match='schedule_free needs ADAM_BETA1 above 0'):
    optimizer_of('schedule_free', ADAM_BETA1=0.0)


@pytest.mark.parametrize('is_function', [False, True])
def test_an_optimizer_of_ones_own_reads_attributes_of_ones_own(is_function, monkeypatch, caplog):
  """It is a class; until 0.4 it may be a function, which is said."""
  monkeypatch.setattr(by_name, 'NAMED', dict(by_name.NAMED))

  class own:
    trust: float
    momentum: float = 0.7

    def transformation(self, schedule):
      return optax.chain(optax.scale(self.trust), optax.sgd(schedule, self.momentum))

  def function(schedule, trust, momentum=0.7):
    return optax.chain(optax.scale(trust), optax.sgd(schedule, momentum))

  by_name.register('own')(function if is_function else own)
  assert ('OPTIMIZER=own is a function, which 0.4 refuses' in caplog.text) == is_function

  with pytest.raises(UserError, match='OPTIMIZER=own needs the attribute TRUST, which TinyGPT'):
    TinyGPT(OPTIMIZER='own').validate()

  class Trusting(TinyGPT):
    OPTIMIZER = 'own'
    TRUST: float = 0.5

  made = Trusting().build_task().optimizer.transformation
  assert isinstance(fdl.build(made), optax.GradientTransformation)
  assert (made.trust, 'momentum' in made.__arguments__) == (0.5, False)
  assert 'TRUST' not in Trusting().unread_attributes


def test_the_learning_rate_of_every_optimizer_is_known():
  for name in NAMES:
    optimizer = optimizer_of(name)
    state = optimizer.init(boxed())
    assert float(optimizer.learning_rate(state, jnp.zeros(()))) == pytest.approx(0.01)


@pytest.mark.slow
def test_muon_is_that_of_torch():
  """50 steps of a matrix. The products of torch are in bfloat16, and these in float32."""
  torch = pytest.importorskip('torch')
  start = np.random.default_rng(0).normal(size=(16, 48)).astype(np.float32)
  box = lambda: {'w': Weight(jnp.asarray(start), ('embed', 'mlp'), equation='BTD,DF->BTF')}
  theirs = torch.nn.Parameter(torch.tensor(start.T.copy()))
  optimizer = torch.optim.Muon(
    [theirs], lr=0.01, weight_decay=0.1, momentum=0.95, adjust_lr_fn='match_rms_adamw'
  )
  ours = optimizer_of('muon')
  with declared(box):
    params, state = unboxed((box(), ours.init(box())))
    update = jax.jit(ours.update)
    for number in range(50):
      theirs.grad = torch.cos(number + 3 * theirs.detach())
      optimizer.step()
      grads = jax.tree.map(lambda x, number=number: jnp.cos(number + 3 * x), params)
      params, state = update(grads, jnp.ones(()), jnp.asarray(True), state, params)
  expected = theirs.detach().numpy().T
  np.testing.assert_allclose(params['w'], expected, atol=2e-3 * np.abs(expected).max())


def test_moments_of_normuon_beside_a_vector_of_the_same_shape():
  """The means of outputs stay in float32, also where a weight has their shape."""
  box = lambda: {'w': Weight(jnp.ones((1, 8)), ('lora_rank', 'mlp'), equation='BTD,DF->BTF')}
  with declared(box):
    state = unboxed(optimizer_of('normuon', ADAM_MOMENTS_DTYPE='bfloat16').init(box()))
  assert {x.dtype.name for x in jax.tree.leaves(state) if x.ndim} == {'bfloat16', 'float32'}


def test_what_muon_trains_is_said():
  with declared(boxed):
    state = unboxed(optimizer_of('muon').init(boxed()))
  assert partition_report.described(state, unboxed(boxed())) == [
    'The parts of the optimizer train: Muon 1 of 4 arrays (128 parameters), '
    'Adam 3 of 4 arrays (272 parameters).'
  ]


def test_the_weights_that_a_schedule_free_run_evaluates_are_said():
  params = {'w': jnp.ones((2, 2))}
  said = partition_report.described(optimizer_of('schedule_free').init(params), params)
  assert len(said) == 1
  assert said[0].startswith('Evaluation and export use the weights of the gradients,')
  assert partition_report.described(optimizer_of('adam').init(params), params) == []


def test_values_of_a_family_are_not_said():
  e = LLaMA7B(OPTIMIZER='lion')
  assert [r for r in e.warnings if 'does not read' in r] == []  # its values are the family's own
