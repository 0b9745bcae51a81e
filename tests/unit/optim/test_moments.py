"""Moments in bfloat16 or on the host, gradients in bfloat16: what they change, and what not."""

import dataclasses
import functools

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.linen import meta
from jax.extend.core import jaxprs_in_params

from paxlite.core.errors import UserError
from paxlite.core.variable_names import path_name
from paxlite.experiments.demo import TinyGPT
from paxlite.experiments.finetuning import HuggingFaceLoRA
from paxlite.optim import moments
from paxlite.optim.transformations import scale_by_pax_adam
from paxlite.parallel.partitioning import HOST
from paxlite.programs.run import Run
from paxlite.training.step import train_step


def test_rounding_is_right_in_the_mean_and_leaves_what_fits_alone():
  fits = jnp.asarray([0.0, -1.5, 2**-100, float('inf')], jnp.float32)
  bits = jnp.full(4, 0xFFFF, jnp.uint16)
  np.testing.assert_array_equal(moments.stochastically_rounded(fits, bits), fits)
  x = 1 + 2**-9  # a quarter of the way to the next bfloat16, 1 + 2⁻⁷
  bits = jax.random.bits(jax.random.key(0), (100_000,), jnp.uint16)
  rounded = np.asarray(moments.stochastically_rounded(jnp.float32(x), bits), np.float64)
  assert set(rounded) == {1, 1 + 2**-7}
  assert abs(rounded.mean() - x) < 5 * 2**-7 * (0.25 * 0.75 / 100_000) ** 0.5


def test_a_second_moment_in_bfloat16_shrinks_at_a_decay_of_0999():
  """To the nearest, v · 0.999 would be v again, for ever."""
  adam = moments.narrow(scale_by_pax_adam(b2=0.999), 'bfloat16')
  params = {'w': jnp.zeros(1000)}
  state = adam.init(params)._replace(
    count=jnp.int32(100_000), v={'w': jnp.full(1000, 1.0, jnp.bfloat16)}
  )
  update = jax.jit(adam.update)
  for _ in range(100):
    _, state = update(params, state)
  assert state.v['w'].dtype == jnp.bfloat16
  v = np.asarray(state.v['w'], np.float64)
  assert len(set(v)) > 2
  assert v.mean() == pytest.approx(0.999**100, rel=2e-3)


def run(folder, **changes) -> Run:
  # one layer in the stack would hide a mistake in which layer is updated
  experiment = TinyGPT(USE_REPEATED_LAYER=True, NUM_LAYERS=2, **changes)
  experiment.validate()
  folder.mkdir(exist_ok=True)
  return Run(experiment, folder)


def two_steps(folder, **changes):
  """Returns the state after two steps of a new run, and the losses."""
  t = run(folder, **changes).trainer()
  state, _ = t.store.initial()
  batches, losses = t.data.batches(0, t.store.task.batch_sharding), []
  # Two programs are compared bit for bit, and what LLVM fuses depends on the program.
  step = t.store.task.lower_step(batches.shapes()).compile({'xla_backend_optimization_level': 0})
  for _ in range(2):
    state, metrics = step(state, next(batches))
    losses.append(float(metrics['Metrics/total_loss'].value))
  batches.close()
  return t, state, losses


def moments_of(state) -> dict[str, jax.Array]:
  leaves = jax.tree.leaves_with_path(state.opt_state)
  return {path_name(p): x for p, x in leaves if moments.is_moment(x)}


STORED = [
  dict(), dict(OFFLOAD_OPTIMIZER=True), dict(ADAM_MOMENTS_DTYPE='bfloat16'),
  dict(ADAM_MOMENTS_DTYPE='bfloat16', OFFLOAD_OPTIMIZER=True),
]  # fmt: skip


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  """Returns, for one of STORED: the trainer, its state after two steps, and the losses."""
  folder = tmp_path_factory.mktemp('stored')
  return functools.cache(lambda i: two_steps(folder / str(i), **STORED[i]))


def check_where_moments_are(trained, here: int, there: int) -> None:
  (_, one, losses), (_, other, same) = trained(here), trained(there)
  assert losses == same
  jax.tree.map(np.testing.assert_array_equal, one, other)
  assert {x.sharding.memory_kind for x in moments_of(other).values()} == {HOST}
  assert HOST not in {x.sharding.memory_kind for x in moments_of(one).values()}


@pytest.mark.slow
def test_where_moments_are_changes_no_bit(trained):
  check_where_moments_are(trained, 0, 1)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_where_moments_in_bfloat16_are_changes_no_bit(trained):
  check_where_moments_are(trained, 2, 3)
  assert {x.dtype.name for x in moments_of(trained(3)[1]).values()} == {'bfloat16'}
  assert trained(2)[2] == pytest.approx(trained(0)[2], rel=1e-4)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_step_without_finite_gradient_keeps_moments_in_bfloat16(trained):
  t, state, _ = trained(3)
  batch = next(t.data.batches(2, t.store.task.batch_sharding))
  bad = {**batch, 'weights': batch['weights'] * np.float32('nan')}
  with t.store.task.compiling():
    after, _ = jax.jit(lambda s, b: train_step(t.store.task.task, 0, s, b))(state, bad)
  jax.tree.map(np.testing.assert_array_equal, after.opt_state, state.opt_state)
  jax.tree.map(np.testing.assert_array_equal, after.params, state.params)


@pytest.mark.cases(fast=0, slow=2)
@pytest.mark.parametrize(
  ('source', 'target'),
  [
    (0, 1),
    *(pytest.param(a, b, marks=pytest.mark.slow) for a in range(4) for b in range(4) if a > b),
    *(pytest.param(a, b, marks=pytest.mark.slow) for a, b in ((0, 2), (0, 3), (1, 3))),
  ],
)
def test_a_checkpoint_continues_under_any_other(trained, tmp_path, source, target):
  """Moments of one type are restored bit by bit, and float32 becomes the nearest bfloat16."""
  t, state, _ = trained(source)
  t.store.save(state, 2, t.data.metadata(2)())
  t.store.checkpoints.close()
  other = run(t.folder, **STORED[target]).trainer()
  restored, step = other.store.initial()
  other.store.checkpoints.close()
  assert step == 2
  abstract = other.store.task.abstract
  for (name, x), (_, like) in zip(
    moments_of(restored).items(), moments_of(abstract).items(), strict=True
  ):
    assert (x.dtype, x.sharding) == (like.dtype, like.sharding)
    saved = np.asarray(moments_of(state)[name]).astype(like.dtype)
    np.testing.assert_array_equal(np.asarray(x), saved)
  jax.tree.map(np.testing.assert_array_equal, restored.params, state.params)


@pytest.mark.cases(fast=0, slow=2)
@pytest.mark.slow
@pytest.mark.parametrize(('before', 'after'), [('float32', 'bfloat16'), ('bfloat16', 'float32')])
def test_frozen_weights_continue_in_the_other_dtype(tmp_path, before, after):
  """Weights that LoRA freezes become the nearest bfloat16, and no bit of bfloat16 is lost."""
  make = lambda dtype: run(tmp_path / 'run', USE_LORA=True, FROZEN_DTYPE=dtype).trainer()
  t = make(before)
  state, _ = t.store.initial()
  t.store.save(state, 2, t.data.metadata(2)())
  t.store.checkpoints.close()
  other = make(after)
  restored, step = other.store.initial()
  other.store.checkpoints.close()
  assert step == 2
  for (path, x), (_, saved) in zip(
    jax.tree.leaves_with_path(restored.params), jax.tree.leaves_with_path(state.params), strict=True
  ):
    expected = 'float32' if 'lora_' in path_name(path) else after
    assert x.dtype.name == expected, path_name(path)
    np.testing.assert_array_equal(np.asarray(x), np.asarray(saved).astype(x.dtype))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_gradients_in_bfloat16(trained):
  """Each is the float32 one, rounded; the sum over microbatches is float32."""
  t, state, _ = trained(0)
  task = t.store.task.task
  batch = next(t.data.batches(2, t.store.task.batch_sharding))
  grads = lambda **changes: jax.jit(dataclasses.replace(task, **changes).grads)(
    state.params, batch, None
  )[0]
  exact = grads()
  narrow = grads(gradient_dtype='bfloat16')
  assert {x.dtype.name for x in jax.tree.leaves(narrow)} == {'bfloat16'}
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a.astype('float32'), b, rtol=2**-8, atol=1e-6),
    narrow, exact,
  )  # fmt: skip
  summed = grads(gradient_dtype='bfloat16', num_microbatches=2)
  assert {x.dtype.name for x in jax.tree.leaves(summed)} == {'float32'}
  scale = optax.tree.norm(exact)
  assert optax.tree.norm(optax.tree.sub(summed, exact)) < 2**-7 * scale


@pytest.mark.slow
def test_gradients_of_layers_are_collected_in_bfloat16(trained):
  """The loop over layers carries no float32 stack of gradients, which would take the memory."""
  t, state, _ = trained(0)
  task = dataclasses.replace(t.store.task.task, gradient_dtype='bfloat16')
  batch = next(t.data.batches(2, t.store.task.batch_sharding))
  weight = state.params['transformer']['repeat']['ff_layer']['ffn_layer1']['w']

  def types_of_stacks(jaxpr) -> set[str]:
    found = set()
    for equation in jaxpr.eqns:
      if equation.primitive.name == 'scan':
        results = [v.aval for v in equation.outvars]
        found |= {x.dtype.name for x in results if x.shape == weight.shape}
      for inner in jaxprs_in_params(equation.params):
        found |= types_of_stacks(inner)
    return found

  gradients = lambda task: jax.make_jaxpr(lambda p, b: task.grads(p, b, None))(state.params, batch)
  assert types_of_stacks(gradients(t.store.task.task)) == {'float32'}
  assert types_of_stacks(gradients(task)) == {'bfloat16'}

  class OwnNorm(nn.Module):
    @nn.compact
    def __call__(self, x):
      return x * self.param('own', nn.initializers.ones, x.shape[-1:])

  own = dataclasses.replace(task, model=task.model.clone(norm_tpl=OwnNorm))
  params = meta.unbox(jax.eval_shape(own.init_params, jax.random.key(0)))
  with pytest.raises(UserError, match='final_ln/own are declared otherwise'):
    jax.eval_shape(lambda p, b: own.grads(p, b, None), params, batch)


def residuals_on_host(policy: str, names: list[str], repeated: bool) -> int:
  """Returns the number of arrays on the host in the program of a model's gradients."""
  e = TinyGPT(
    USE_REPEATED_LAYER=repeated, NUM_LAYERS=2, CHECKPOINT_POLICY=policy, OFFLOAD_ACTIVATIONS=names
  )
  e.validate()
  task = fdl.build(e.build_task())
  params = meta.unbox(jax.eval_shape(task.init_params, jax.random.key(0)))
  like = lambda dtype: jax.ShapeDtypeStruct((2, 8), dtype)
  batch = {'ids': like('int32'), 'labels': like('int32'), 'weights': like('float32')}
  return str(jax.make_jaxpr(lambda p, b: task.grads(p, b, None)[0])(params, batch)).count('<host>')


@pytest.mark.cases(fast=0, slow=2)
@pytest.mark.parametrize('repeated', [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
  'policy', ['SAVE_NOTHING', pytest.param('SAVE_EVERYTHING', marks=pytest.mark.slow)]
)
def test_named_activations_are_on_the_host(policy, repeated):
  assert residuals_on_host(policy, [], repeated) == 0
  assert residuals_on_host(policy, ['context'], repeated) > 0
  # where everything is kept, so is the input of a layer, which has no name
  expected = policy == 'SAVE_NOTHING'
  assert (residuals_on_host(policy, ['iteration_input'], repeated) > 0) == expected


@pytest.mark.parametrize('name', ['combined_qkv_proj', 'out_proj'])
def test_nothing_on_the_device_stands_for_what_is_on_the_host(name):
  """Policies of products keep what is computed from these, unless they are on the host."""
  assert residuals_on_host('SAVE_DOT_WITH_NO_BATCH_DIM', [name], True) > 0


@pytest.mark.slow
def test_activations_on_the_host_change_nothing_but_rounding(trained, tmp_path):
  _, state, losses = two_steps(tmp_path / 'run', OFFLOAD_ACTIVATIONS=['iteration_input', 'context'])
  assert losses == pytest.approx(trained(0)[2], rel=1e-6)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), state, trained(0)[1])


def test_frozen_weights_in_bfloat16_and_what_is_refused():
  sizes = dict(NUM_LAYERS=1, MODEL_DIMS=32, NUM_HEADS=4, NUM_KV_HEADS=2, VOCAB_SIZE=64)
  e = HuggingFaceLoRA(MODEL='SmolLM135M', **sizes, FROZEN_DTYPE='bfloat16')
  shapes = jax.eval_shape(fdl.build(e.build_task()).init, jax.random.key(0)).params
  types = {path_name(p): x.dtype.name for p, x in jax.tree.leaves_with_path(shapes)}
  assert {t for n, t in types.items() if 'lora_' in n} == {'float32'}
  assert {t for n, t in types.items() if 'lora_' not in n} == {'bfloat16'}

  with pytest.raises(UserError, match='needs a mesh without stages'):
    TinyGPT(
      MESH_AXES=['stage', 'replica', 'data', 'mdl'], ICI_MESH_SHAPE=[2, 1, 1, 1],
      DCN_MESH_SHAPE=[1, 1, 1, 1], USE_REPEATED_LAYER=True, NUM_LAYERS=2,
      GRADIENT_DTYPE='bfloat16',
    ).validate()  # fmt: skip
