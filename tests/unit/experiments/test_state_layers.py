"""Layers with a state: against a loop over tokens, with a cache, and in packed rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxlite.experiments.hybrid.causal_convolution import CausalConvolution
from paxlite.experiments.hybrid.decay import Steps
from paxlite.experiments.hybrid.gated_norm import GateThenRmsNorm
from paxlite.experiments.hybrid.mamba2 import Mamba2
from paxlite.experiments.kimi.layers import KimiDeltaAttention
from paxlite.experiments.lfm.layers import ShortConvolution

D, T = 12, 150  # three chunks
CONVOLUTION = functools.partial(CausalConvolution, width=3, use_bias=True)
MAMBA = Mamba2(
  D, 4, 6, 2, 5,
  convolution_tpl=CONVOLUTION,
  steps_tpl=functools.partial(Steps, least=0.3, most=0.9),
  norm_tpl=functools.partial(GateThenRmsNorm, num_groups=2),
)  # fmt: skip
KIMI = KimiDeltaAttention(D, 3, 5, convolution_tpl=CONVOLUTION)
LAYERS = {
  'convolution': ShortConvolution(D, convolution_tpl=CONVOLUTION),
  'mamba2': MAMBA,
  'kimi_delta': KIMI,
}


def made(layer):
  """Returns the input of two rows, their positions, and random parameters."""
  x = jnp.asarray(np.random.default_rng(0).normal(size=(2, T, D)), jnp.float32)
  at = jnp.broadcast_to(jnp.arange(T), (2, T))
  params = jax.tree.map(
    lambda p: p + 0.3 * jax.random.normal(jax.random.key(p.size), p.shape),
    jax.tree.map(
      lambda p: p.unbox(),
      jax.jit(layer.init)(jax.random.key(0), x, at)['params'],
      is_leaf=lambda p: hasattr(p, 'unbox'),
    ),
  )
  return x, at, params


def looped(params, x: np.ndarray) -> np.ndarray:
  """What Mamba 2 computes of a row [T, D], one token after the other, in float64."""
  p = jax.tree.map(lambda p: np.asarray(p, np.float64), params)
  silu = lambda y: y / (1 + np.exp(-y))

  def project(name, equation='td,dnh->tnh'):
    return np.einsum(equation, x, p[name]['w']) + p[name]['b']

  def convolved(name):
    w, y = p[f'{name}_convolution']['w'], project(name)
    padded = np.concatenate([np.zeros((len(w) - 1, *y.shape[1:])), y])
    b = p[f'{name}_convolution']['b']
    return silu(sum(w[j] * padded[j : j + len(y)] for j in range(len(w))) + b)

  value, key, query = (convolved(name) for name in ('value', 'key', 'query'))
  key, query = (np.repeat(y, 2, 1) for y in (key, query))
  steps = np.clip(np.logaddexp(0, project('step', 'td,dn->tn') + p['steps']['bias']), 0.3, 0.9)
  state, read = np.zeros((4, 5, 6)), []
  for t in range(len(x)):
    state *= np.exp(-np.exp(p['steps']['log_rate']) * steps[t])[:, None, None]
    state += steps[t][:, None, None] * key[t][:, :, None] * value[t][:, None]
    read.append(np.einsum('nsp,ns->np', state, query[t]) + p['skip'][:, None] * value[t])
  y = np.array(read) * silu(project('gate'))
  groups = y.reshape(len(x), 2, -1)
  groups = groups / np.sqrt(np.square(groups).mean(-1, keepdims=True) + 1e-6)
  y = groups.reshape(y.shape) * p['norm']['scale']
  return np.einsum('tnh,dnh->td', y, p['post']['w']) + p['post']['b']


@pytest.mark.slow
def test_mamba2_is_a_loop_over_tokens():
  x, at, params = made(MAMBA)
  with jax.default_matmul_precision('highest'):
    found = jax.jit(MAMBA.apply)({'params': params}, x, at)
  for row in range(2):
    expected = looped(params, np.asarray(x[row], np.float64))
    np.testing.assert_allclose(found[row], expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def looped_kimi(params, x: np.ndarray) -> np.ndarray:
  """What Kimi Delta Attention computes of a row [T, D], in float64."""
  p = jax.tree.map(lambda p: np.asarray(p, np.float64), params)
  silu, sigmoid = lambda y: y / (1 + np.exp(-y)), lambda y: 1 / (1 + np.exp(-y))
  project = lambda name, y, to: np.einsum(f'td,d{to}->t{to}', y, p[name]['w']) + p[name]['b']

  def convolved(name):
    w, y = p[f'{name}_convolution']['w'], project(name, x, 'nh')
    padded = np.concatenate([np.zeros((len(w) - 1, *y.shape[1:])), y])
    taps = sum(w[j] * padded[j : j + len(y)] for j in range(len(w)))
    return silu(taps + p[f'{name}_convolution']['b'])

  query, key, value = (convolved(name) for name in ('query', 'key', 'value'))
  unit = lambda y: y / np.sqrt(np.square(y).sum(-1, keepdims=True) + 1e-6)
  query, key = unit(query) / np.sqrt(5), unit(key)
  narrow = lambda name: project(f'{name}_up', project(f'{name}_down', x, 'r'), 'nh')
  steps = np.logaddexp(0, narrow('decay') + p['decay']['bias'])
  factors = np.exp(-np.exp(p['decay']['log_rate'])[:, None] * steps)
  beta, state, read = sigmoid(project('beta', x, 'n')), np.zeros((3, 5, 5)), []
  for t in range(len(x)):
    state *= factors[t][..., None]
    new = beta[t][:, None] * (value[t] - np.einsum('nkv,nk->nv', state, key[t]))
    state += key[t][..., None] * new[:, None]
    read.append(np.einsum('nkv,nk->nv', state, query[t]))
  y = np.array(read)
  y /= np.sqrt(np.square(y).mean(-1, keepdims=True) + 1e-6)
  y *= p['norm']['scale'] * sigmoid(narrow('gate'))
  return np.einsum('tnh,dnh->td', y, p['post']['w']) + p['post']['b']


@pytest.mark.exhaustive
@pytest.mark.slow
def test_kimi_delta_attention_is_a_loop_over_tokens():
  x, at, params = made(KIMI)
  with jax.default_matmul_precision('highest'):
    found = jax.jit(KIMI.apply)({'params': params}, x, at)
  for row in range(2):
    expected = looped_kimi(params, np.asarray(x[row], np.float64))
    np.testing.assert_allclose(found[row], expected, rtol=0, atol=2e-5 * np.abs(expected).max())


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize(
  'name', [pytest.param(n, marks=[pytest.mark.slow] if n == 'kimi_delta' else []) for n in LAYERS]
)
def test_texts_of_a_packed_row_do_not_see_each_other(name):
  layer = LAYERS[name]
  x, at, params = made(layer)
  cut = 77
  segments = jnp.where(at < cut, 1, 2)
  with jax.default_matmul_precision('highest'):
    packed = jax.jit(layer.apply)({'params': params}, x, at, segments)
    of = jax.jit(layer.apply)
    alone = [of({'params': params}, part, at) for part in (x[:, :cut], x[:, cut:])]
  np.testing.assert_allclose(packed, jnp.concatenate(alone, 1), atol=2e-5)
