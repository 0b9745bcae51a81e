"""Moments in eight bits beside bitsandbytes, and in runs."""

import functools

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.linen import meta

from paxlite.core.errors import UserError
from paxlite.core.variable_names import path_name
from paxlite.experiments.demo import TinyGPT
from paxlite.parallel.weight_dims import declared
from paxlite.quantization.eight_bits import (
  block_of,
  code_values,
  decode,
  encode,
  kept_in_eight_bits,
)
from tests.support import runs

RATE, BETAS, EPSILON, DECAY = 1e-2, (0.9, 0.99), 1e-8, 0.1


def test_blocks_lie_in_the_last_dimension():
  shapes = {(64, 512): 256, (3, 64, 2, 128): 128, (64, 11008): 256, (64, 67): 67, (8, 64): 0}
  assert {shape: block_of(shape) for shape in shapes} == shapes
  assert block_of((4096, 2 * 263)) == 0  # blocks of two numbers


@pytest.mark.parametrize('signed', [True, False])
def test_values_come_back_with_the_error_of_their_code(signed):
  x = jnp.asarray(np.random.default_rng(0).normal(size=(64, 512)), jnp.float32)
  x = x if signed else x**2
  back = decode(*encode(x, signed), signed)
  largest = np.abs(np.asarray(x).reshape(64, 2, 256)).max(-1, keepdims=True)
  error = np.abs(np.asarray(back - x)).reshape(64, 2, 256) / largest
  assert error.max() <= np.diff(code_values(signed)).max() / 2 + 1e-6
  again = encode(back, signed)[0]
  assert np.mean(np.asarray(again) != np.asarray(encode(x, signed)[0])) < 0.02
  zeros = encode(jnp.zeros((64, 512)), signed)
  assert not np.asarray(decode(*zeros, signed)).any()


@pytest.mark.slow
@pytest.mark.parametrize('signed', [True, False])
def test_codes_are_as_near_as_those_of_bitsandbytes(signed):
  torch = pytest.importorskip('torch')
  bnb = pytest.importorskip('bitsandbytes')
  theirs = bnb.functional.create_dynamic_map(signed=signed)
  np.testing.assert_allclose(code_values(signed), theirs.numpy(), rtol=0, atol=6e-8)
  x = np.random.default_rng(0).normal(size=(64, 512)).astype(np.float32)
  x = x if signed else x**2
  codes, absmax = bnb.functional.quantize_blockwise(torch.tensor(x), code=theirs, blocksize=256)
  wanted = bnb.functional.dequantize_blockwise(codes, absmax).numpy()
  error = lambda back: np.abs(np.asarray(back) - x)
  found = error(decode(*encode(jnp.asarray(x), signed), signed))
  # its kernel for CPUs looks codes up in a table, and so misses the nearest one here and there
  smallest = code_values(signed=False)[1] * np.abs(x).max()  # in place of 0
  assert (found <= error(wanted) + (1e-6 if signed else smallest)).all()
  assert (np.abs(found - error(wanted)) > 1e-6).mean() < 0.05


@pytest.mark.slow
def test_fifty_steps_are_those_of_bitsandbytes():
  """The first step differs by rounding; later ones where a number lies between two codes."""
  torch = pytest.importorskip('torch')
  bnb = pytest.importorskip('bitsandbytes')
  first = np.random.default_rng(0).normal(size=(64, 512)).astype(np.float32)
  plain = optax.adamw(RATE, *BETAS, EPSILON, weight_decay=DECAY)
  ours, exact = (
    steps(t, first) for t in (kept_in_eight_bits(optax.with_extra_args_support(plain)), plain)
  )
  parameter = torch.nn.Parameter(torch.tensor(first))
  theirs = bnb.optim.AdamW8bit(
    [parameter], lr=RATE, betas=BETAS, eps=EPSILON, weight_decay=DECAY, min_8bit_size=0
  )
  for number, gradient in enumerate(gradients(first.shape)):
    parameter.grad = torch.tensor(gradient)
    theirs.step()
    found = parameter.detach().numpy()
    if not number:
      np.testing.assert_allclose(ours[0], found, atol=1e-6)
  distance = lambda a, b: float(np.abs(a - b).mean())
  assert distance(ours[-1], found) < 0.15 * distance(ours[-1], exact[-1])


def gradients(shape):
  rng = np.random.default_rng(1)
  return [rng.normal(size=shape).astype(np.float32) for _ in range(50)]


def steps(transformation, first):
  """Returns the parameters after each of 50 steps."""
  params, found = {'w': jnp.asarray(first)}, []
  state, update = transformation.init(params), jax.jit(transformation.update)
  for gradient in gradients(first.shape):
    updates, state = update({'w': jnp.asarray(gradient)}, state, params)
    params = optax.apply_updates(params, updates)
    found.append(np.asarray(params['w']))
  return found


def test_a_skipped_update_changes_no_code():
  transformation = kept_in_eight_bits(optax.with_extra_args_support(optax.adam(RATE)))
  params = {'w': jnp.asarray(np.random.default_rng(0).normal(size=(64, 512)), jnp.float32)}
  update = functools.partial(transformation.update, params=params)
  _, state = update(params, transformation.init(params), valid=True)
  _, after = update({'w': jnp.zeros((64, 512))}, state, valid=False)
  jax.tree.map(np.testing.assert_array_equal, after, state)
  assert state.codes[0].mu['w'].dtype == jnp.uint8
  assert state.scales[0].nu['w'].shape == (64, 2)


@pytest.mark.cases(fast=2)
@pytest.mark.parametrize('name', ['adamw', 'lion', 'muon', 'normuon', 'soap'])
def test_variables_that_are_not_trained_have_no_moments(name):
  """Their places in a state are empty, as those of matrices in Adam's part of Muon."""
  e = TinyGPT(
    OPTIMIZER=name, ADAM_MOMENTS_DTYPE='int8', TRAINABLE_VARIABLES=['transformer/.*'],
    WEIGHT_DECAY=0.0,
  )  # fmt: skip
  task = fdl.build(e.build_task())
  state = meta.unbox(jax.jit(task.init)(jax.random.key(0)))
  trainable, _ = task.optimizer.split(state.params)
  step = lambda state: task.optimizer.update(trainable, jnp.ones(()), True, state, trainable)[1]
  with declared(task.boxed_params):
    after = jax.eval_shape(step, jax.eval_shape(step, state.opt_state))
  assert jax.tree.structure(after) == jax.tree.structure(state.opt_state)


def test_a_mean_square_that_is_not_0_stays_above_0():
  """Otherwise the update of a small number among large ones would be divided by nearly nothing."""
  x = jnp.ones((64, 512)).at[:, 1::2].set(1e-12)
  assert np.asarray(decode(*encode(x, signed=False), signed=False)).min() > 0


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_run_is_the_same_on_four_devices_and_after_a_stop(tmp_path):
  flags = ['--fdl.ADAM_MOMENTS_DTYPE=int8', '--fdl.USE_REPEATED_LAYER=True', '--fdl.MAX_STEPS=6']
  runs.run(tmp_path / 'one', *flags, '--fdl.PERCORE_BATCH_SIZE=4')
  whole = runs.losses(tmp_path / 'one')
  assert len(set(whole.values())) > 2
  mesh = '--fdl.ICI_MESH_SHAPE=[1,2,2]', '--fdl.PERCORE_BATCH_SIZE=1', '--fdl.NUM_MICROBATCHES=2'
  runs.run(tmp_path / 'four', *flags, *mesh, devices=4)
  assert runs.losses(tmp_path / 'four') == pytest.approx(whole, rel=1e-4)
  parts = [*flags[:2], '--fdl.PERCORE_BATCH_SIZE=4']
  runs.run(tmp_path / 'parts', *parts, '--fdl.MAX_STEPS=3')
  runs.run(tmp_path / 'parts', *parts, '--fdl.MAX_STEPS=6')
  assert runs.losses(tmp_path / 'parts') == whole
  wide = [*parts[1:], '--fdl.MAX_STEPS=8']
  result = runs.run(tmp_path / 'parts', *wide, code=2)
  assert 'ADAM_MOMENTS_DTYPE=float32: the moments in' in result.stderr


def test_scales_are_split_over_the_mesh_as_their_weights():
  e = TinyGPT(ADAM_MOMENTS_DTYPE='int8')
  task = fdl.build(e.build_task())
  state = jax.eval_shape(task.init, jax.random.key(0))
  is_box = lambda x: hasattr(x, 'names')
  found = {
    path_name(p): x
    for p, x in jax.tree_util.tree_leaves_with_path(state.opt_state, is_leaf=is_box)
    if 'scales' in path_name(p)
  }
  assert found
  assert all(is_box(x) and len(x.names) == x.value.ndim for x in found.values())


def test_moments_on_the_host_are_not_of_eight_bits():
  with pytest.raises(UserError, match='OFFLOAD_OPTIMIZER supports float32'):
    TinyGPT(ADAM_MOMENTS_DTYPE='int8', OFFLOAD_OPTIMIZER=True).validate()
