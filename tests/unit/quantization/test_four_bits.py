"""Frozen weights of four bits: NF4 equals bitsandbytes, and what int4 and odd shapes lose."""

import json

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import meta

from paxlite.core.variable_names import path_name
from paxlite.experiments.demo import TinyGPT
from paxlite.parallel.quantized_weights import num_parameters
from paxlite.quantization.four_bits import Int4, Nf4, dynamic_code
from tests.support import runs
from tests.support.frozen_forms import compare

# of a projection of activations, of heads, of small heads, of a hidden layer, and of odd sizes
WEIGHTS = [
  ((256, 4, 24), (0,)), ((48, 4, 64), (1, 2)), ((48, 4, 32), (1, 2)), ((3, 128, 4, 8), (1,)),
  ((96, 33), (0,)), ((5, 7), (0,)), ((1, 4), (0,)), ((32, 1, 64), (1, 2)), ((2, 1, 32), (1, 2)),
]  # fmt: skip


def weight(shape) -> np.ndarray:
  return (np.random.default_rng(0).standard_t(4, size=shape) * 0.02).astype(np.float32)


def bits(scheme, w, summed=(0,)):
  """Returns the arrays of a weight, and what is made of them."""
  arrays = jax.jit(lambda w: scheme.encode(w, summed))(w)
  return arrays, np.asarray(jax.jit(lambda a: scheme.decode(a, w.shape))(arrays))


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize(('inputs', 'outputs'), [(256, 96), (512, 300), (448, 33)])
def test_nf4_is_that_of_bitsandbytes(inputs, outputs):
  torch = pytest.importorskip('torch')
  F = pytest.importorskip('bitsandbytes.functional')
  w = weight((inputs, outputs))
  w[:64, 3] = 0
  arrays, ours = bits(Nf4(), w)
  assert not ours[:64, 3].any()
  of_torch = lambda x: torch.tensor(np.ascontiguousarray(x))
  bytes_, state = F.quantize_4bit(of_torch(w.T), blocksize=64, quant_type='nf4')
  pairs = np.asarray(arrays['values']).T.ravel()
  np.testing.assert_array_equal(pairs, bytes_.numpy().ravel())
  # a mean has another last bit in torch, and its CPU kernel rounds 8-bit numbers by a table
  mean = np.asarray(arrays['mean']).item()
  assert mean == pytest.approx(state.absmax.mean().item(), rel=2e-7)
  code = F.create_dynamic_map()
  np.testing.assert_array_equal(dynamic_code(), code.numpy())
  nested, groups = F.quantize_blockwise(state.absmax - mean, code, blocksize=256)
  scales = np.asarray(arrays['scales']).T.ravel()
  differences = np.abs(scales.astype(int) - nested.numpy())
  assert differences.max() <= 1
  assert differences.mean() < 0.01
  np.testing.assert_array_equal(np.asarray(arrays['groups']).ravel(), groups.absmax.numpy())
  # what the same bits mean is the same number, to the last bit
  state.nested, state.offset, state.absmax, state.state2 = True, mean, of_torch(scales), groups
  state.offset = torch.tensor(mean)
  np.testing.assert_array_equal(ours, F.dequantize_4bit(bytes_, state).numpy().T)


@pytest.mark.cases(fast=4)
@pytest.mark.parametrize(('scheme', 'error'), [(Nf4(), 0.14), (Int4(), 0.19)])
@pytest.mark.parametrize(('shape', 'summed'), WEIGHTS)
def test_every_shape_is_kept(scheme, error, shape, summed):
  w = weight(shape)
  arrays, found = bits(scheme, w, summed)
  assert found.shape == shape
  assert all(x.ndim == len(shape) for x in arrays.values())
  halves = [-(-n // 2) if i == max(summed) else n for i, n in enumerate(shape)]
  assert list(arrays['values'].shape) == halves
  assert np.abs(found - w).max() <= 0.17 * np.abs(w).max()
  assert np.abs(found - w).mean() < error * np.abs(w).mean()
  assert not bits(scheme, np.zeros(shape, np.float32), summed)[1].any()


def test_bits_of_a_weight():
  size = lambda scheme: sum(
    x.nbytes * 8 for x in scheme.encode(jnp.ones((4096, 64)), (0,)).values()
  )
  assert size(Nf4()) / 4096 / 64 == pytest.approx(4.127, abs=1e-3)
  assert size(Int4()) / 4096 / 64 == 4.25


def test_what_a_state_holds_of_a_weight_of_four_bits():
  """As many parameters as in float32, and scales that are not rounded with other frozen ones."""
  make = lambda **values: fdl.build(TinyGPT(USE_LORA=True, **values).build_task())
  boxed = jax.eval_shape(make(FROZEN_DTYPE='nf4').init, jax.random.key(0)).params
  plain = jax.eval_shape(make().init, jax.random.key(0)).params
  assert num_parameters(boxed) == num_parameters(plain)
  arrays = {
    path_name(path): x.dtype.name for path, x in jax.tree.leaves_with_path(meta.unbox(boxed))
  }
  groups = {dtype for name, dtype in arrays.items() if name.endswith(('/groups', '/mean'))}
  assert groups == {'float32'}
  assert arrays['embedding/emb_var'] == 'bfloat16'


@pytest.mark.exhaustive
@pytest.mark.slow
def test_gradients_on_a_mesh_of_eight():
  values = 'FROZEN_DTYPE=nf4', 'FPROP_DTYPE=float32', 'ICI_MESH_SHAPE=[2,2,2]'
  done = runs.module('tests.support.frozen_forms', *values, 'USE_REPEATED_LAYER=True', devices=8)
  found = json.loads(done.stdout.splitlines()[-1])
  assert found['error'] < 1e-5
  split = {tuple(name.split('/')[-3:]): spec for name, spec in found['arrays'].items()}
  assert split['ffn_layer1', 'w', 'values'] == "P(None, 'data', 'mdl')"
  assert split['ffn_layer1', 'w', 'groups'] == 'P(None, None, None)'


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize('scheme', ['nf4', 'int4'])
def test_gradients_are_those_of_the_decoded_weights(scheme):
  found = compare(FROZEN_DTYPE=scheme, FPROP_DTYPE='float32', NUM_LAYERS=1)
  assert found['error'] < 1e-5
  assert found['losses'][0] == pytest.approx(found['losses'][1], rel=1e-6)
