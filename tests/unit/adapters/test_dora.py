"""DoRA beside its formula, whose weight is the sum of the weight and the product of the factors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import meta

from paxlite.adapters.dora import DoraProjection, QuantizedDoraProjection
from paxlite.adapters.factors import LowRankFactors
from paxlite.checkpointing.variables import Variable
from paxlite.experiments.llama import LLaMA
from paxlite.quantization.four_bits import Nf4
from paxlite.weights.lora import merged

CASES = {
  'BTD,DF->BTF': ((64, 24), ('embed', 'mlp')),
  'BTD,ADNH->BTANH': ((3, 64, 2, 8), ('qkv', 'embed', 'heads', 'head_dim')),
  'BTNH,DNH->BTD': ((64, 4, 16), ('embed', 'heads', 'head_dim')),
}


def expected(equation, shape, p, x, w):
  """Returns the output, from a weight that is the whole sum."""
  stacked, is_post = 'A' in equation, equation.startswith('BTNH')
  delta = jnp.einsum('...ir,...or->...io', p['lora_a'], p['lora_b'])
  whole = w + (delta.T if is_post else delta).reshape(shape)
  norm = lambda v: jnp.sqrt(jnp.square(v).sum((1, 2) if is_post else int(stacked), keepdims=True))
  lengths = norm(w) + p['lora_m'].reshape(norm(w).shape)
  product = jnp.einsum(equation, x, lengths * whole / jax.lax.stop_gradient(norm(whole)))
  return product + p['b'].reshape(p['b'].shape)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize('equation', CASES)
@pytest.mark.parametrize('scheme', [None, Nf4()])
def test_outputs_and_gradients_are_those_of_the_formula(equation, scheme):
  shape, axes = CASES[equation]
  rng = np.random.default_rng(0)
  kwargs = dict(equation=equation, shape=shape, axes=axes, rank=3)
  layer = (
    DoraProjection(**kwargs) if scheme is None else QuantizedDoraProjection(**kwargs, scheme=scheme)
  )
  inputs = equation.split(',')[0]
  x = jnp.asarray(rng.normal(size=(2, 3, *((4, 16) if inputs == 'BTNH' else (64,)))), jnp.float32)
  params = meta.unbox(layer.init(jax.random.key(0), x)['params'])
  noise = lambda v: v + jnp.asarray(0.1 * rng.normal(size=v.shape), v.dtype)
  params |= {k: noise(params[k]) for k in ('lora_a', 'lora_b', 'lora_m', 'b')}
  w = params['w'] if scheme is None else scheme.decode(params['w'], shape)
  trained = {k: v for k, v in params.items() if k != 'w'}

  def ours(p, x):
    return jnp.sin(layer.apply({'params': p | {'w': params['w']}}, x)).sum()

  def theirs(p, x):
    return jnp.sin(expected(equation, shape, p, x, w)).sum()

  with jax.default_matmul_precision('highest'):
    (found, grads), (wanted, wanted_grads) = (
      jax.value_and_grad(f, (0, 1))(trained, x) for f in (ours, theirs)
    )
  assert float(found) == pytest.approx(float(wanted), rel=1e-4)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), grads, wanted_grads)


@pytest.mark.parametrize('targets', [['q_proj'], ['q_proj', 'v_proj'], ['k_proj', 'v_proj'], []])
def test_merged_weights_compute_the_same_where_parts_have_no_factors(targets):
  """Lengths of parts without factors are stored too, and count neither here nor there."""
  equation, (shape, axes) = 'BTD,ADNH->BTANH', CASES['BTD,ADNH->BTANH']
  e = LLaMA(
    NUM_LAYERS=1, NUM_HEADS=2, NUM_KV_HEADS=2, MODEL_DIMS=64, HIDDEN_DIMS=20, VOCAB_SIZE=32,
    MAX_SEQ_LEN=8, USE_LORA=True, USE_DORA=True, LORA_RANK=3, LORA_ALPHA=4.0, LORA_TARGETS=targets,
  )  # fmt: skip
  module = 'transformer/x_layers_0/self_attention/qkv/combined'
  chosen = (('', *LowRankFactors(e).at(module)),)
  layer = DoraProjection(equation=equation, shape=shape, axes=axes, chosen=chosen, use_bias=False)
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.normal(size=(2, 3, 64)), jnp.float32)
  params = meta.unbox(layer.init(jax.random.key(0), x)['params'])
  params = {k: v + 0.1 * rng.normal(size=v.shape).astype(np.float32) for k, v in params.items()}
  read = lambda v: Variable(v.shape, v.dtype, lambda index: np.asarray(v)[index])
  whole = merged(e, {f'{module}/{k}': read(v) for k, v in params.items()})[f'{module}/w'].whole()
  with jax.default_matmul_precision('highest'):
    found, wanted = jnp.einsum(equation, x, whole), layer.apply({'params': params}, x)
  np.testing.assert_allclose(found, wanted, atol=1e-4)
  assert (np.abs(whole - params['w']).max((1, 2, 3)) > 0).tolist() == [
    not targets or name in targets for name in ('q_proj', 'k_proj', 'v_proj')
  ]


def test_it_begins_as_the_layer_without_factors():
  equation, (shape, axes) = 'BTD,DF->BTF', CASES['BTD,DF->BTF']
  layer = DoraProjection(equation=equation, shape=shape, axes=axes, rank=3)
  x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 64)), jnp.float32)
  params = meta.unbox(layer.init(jax.random.key(0), x)['params'])
  np.testing.assert_array_equal(
    layer.apply({'params': params}, x), jnp.einsum(equation, x, params['w'])
  )


@pytest.mark.parametrize('name', ['ff_layer/ffn_layer1', 'self_attention/post'])
def test_factors_that_the_experiment_does_not_have_are_not_merged(name):
  """They may be left of a run with more targets, whose factors this one ignores."""
  e = LLaMA(
    NUM_LAYERS=1, NUM_HEADS=2, NUM_KV_HEADS=2, MODEL_DIMS=8, HIDDEN_DIMS=20, VOCAB_SIZE=32,
    MAX_SEQ_LEN=8, USE_LORA=True, LORA_RANK=3, LORA_TARGETS=['q_proj'],
  )  # fmt: skip
  rng, module = np.random.default_rng(0), f'transformer/x_layers_0/{name}'
  shapes = {'w': (8, 20), 'lora_a': (8, 3), 'lora_b': (20, 3)}
  arrays = {k: rng.normal(size=shape).astype(np.float32) for k, shape in shapes.items()}
  read = lambda v: Variable(v.shape, v.dtype, lambda index: v[index])
  found = merged(e, {f'{module}/{k}': read(v) for k, v in arrays.items()})
  assert found.keys() == {f'{module}/w'}
  np.testing.assert_array_equal(found[f'{module}/w'].whole(), arrays['w'])
