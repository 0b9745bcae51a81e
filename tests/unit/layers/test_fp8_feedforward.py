"""Feed-forward layers in FP8: Pallas' interpreter runs the kernels, and they compute the same.

`python -m tests.unit.layers.test_fp8_feedforward` does so on 2 devices of a CPU.
"""

import contextlib
import functools
import json
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import fp8_ops, meta

from paxlite.layers import fp8_feedforward, fp8_hidden_kernel
from paxlite.layers.activations import ACTIVATIONS, gate_by
from paxlite.layers.einsum import Einsum
from paxlite.layers.feedforward import FeedForward, GatedFeedForward
from paxlite.layers.fp8_feedforward import Fp8FeedForward, Fp8GatedFeedForward
from paxlite.layers.fp8_product import Fp8Einsum, begin_step
from paxlite.layers.projection import Projection
from paxlite.parallel import partitioning
from paxlite.parallel.mesh import make_mesh
from tests.support import runs

STATE = fp8_ops.OVERWRITE_WITH_GRADIENT


@contextlib.contextmanager
def interpreted():
  """The kernels run in Pallas' interpreter, and layers use them on the CPU."""
  with contextlib.ExitStack() as stack:
    for name in ('hidden_units', 'gradients'):
      kernel = functools.partial(getattr(fp8_hidden_kernel, name), interpret=True)
      stack.enter_context(mock.patch.object(fp8_hidden_kernel, name, kernel))
    stack.enter_context(mock.patch.object(fp8_feedforward, 'active_platform', return_value='gpu'))
    capability = mock.patch.object(fp8_feedforward.cudnn_attention, 'capability', return_value=9.0)
    stack.enter_context(capability)
    yield


@pytest.mark.parametrize(
  'activate',
  [*ACTIVATIONS.values(), gate_by('silu'), gate_by('clamped_swiglu')],
  ids=[*ACTIVATIONS, 'gated_silu', 'clamped_swiglu'],
)
def test_kernels_quantize_what_jax_differentiates(activate):
  """To the last bit of each 8-bit number, with rows of padding."""
  rows, columns = 128, 256
  n = 2 if activate not in ACTIVATIONS.values() else 1
  dh, *args = (
    jax.random.normal(key, (rows, columns), jnp.bfloat16)
    for key in jax.random.split(jax.random.key(0), n + 1)
  )
  mask = (jnp.arange(rows) < 100).astype(jnp.float32)
  scales, h_scale = [0.01, 0.002][:n], 0.05
  up_scales = tuple(jnp.array([7.0, 7.0, scale]) for scale in scales)
  down_scales = jnp.array([h_scale, 7.0, 7.0])

  def exact(dh, args):
    wide = [x.astype(jnp.float32) for x in args]
    h, vjp = jax.vjp(lambda *args: activate(*args) * mask[:, None], *wide)
    return h, vjp(dh.astype(jnp.float32))

  h, gradients = jax.jit(exact)(dh, args)
  q_h, h_largest = fp8_hidden_kernel.hidden_units(activate, args, mask, down_scales, interpret=True)
  results, q_h_transposed = fp8_hidden_kernel.gradients(
    activate, dh, tuple(args), mask, up_scales, down_scales, interpret=True
  )
  quantize = functools.partial(fp8_ops.quantize, compute_dtype=jnp.float32)
  expected_h = quantize(h, jnp.float8_e4m3fn, jnp.float32(h_scale))
  as_numbers = lambda x: np.asarray(x, np.float32)
  # A last bit of float32 may differ, and with it the rounding of one number in thousands.
  same = lambda x, y: np.mean(as_numbers(x) == as_numbers(y)) >= 0.9995
  assert same(q_h, expected_h)
  np.testing.assert_array_equal(as_numbers(q_h_transposed), as_numbers(q_h).T)
  np.testing.assert_allclose(h_largest, jnp.abs(h).max(), rtol=1e-6)
  for result, gradient, scale in zip(results, gradients, scales, strict=True):
    assert same(result.q_RF, quantize(gradient, jnp.float8_e5m2, jnp.float32(scale)))
    np.testing.assert_array_equal(as_numbers(result.q_FR), as_numbers(result.q_RF).T)
    np.testing.assert_allclose(result.sum_F, gradient.sum(0), atol=1e-4)
    np.testing.assert_allclose(result.largest, jnp.abs(gradient).max(), rtol=1e-6)
    assert not as_numbers(result.q_RF)[100:].any()


def test_kernels_saturate():
  """Numbers beyond the largest of FP8 become that number, and neither infinite nor NaN."""
  x, mask = jnp.full((64, 128), 1000.0, jnp.bfloat16), jnp.ones(64)
  small = jnp.full(3, 1e-6)
  q_h, largest = fp8_hidden_kernel.hidden_units(jax.nn.relu, (x,), mask, small, interpret=True)
  (result,), _ = fp8_hidden_kernel.gradients(
    jax.nn.relu, -x, (x,), mask, (small,), small, interpret=True
  )
  np.testing.assert_array_equal(np.asarray(q_h, np.float32), 448)
  np.testing.assert_array_equal(np.asarray(result.q_RF, np.float32), -57344)
  assert largest == result.largest == 1000


CLASSES = [(FeedForward, Fp8FeedForward), (GatedFeedForward, Fp8GatedFeedForward)]


@pytest.mark.parametrize('use_bias', [True, False])
@pytest.mark.parametrize(('plain_cls', 'fp8_cls'), CLASSES)
def test_a_layer_is_that_without_kernels(plain_cls, fp8_cls, use_bias):
  """Output, state, and all gradients, in the second step, with padded tokens.

  The kernels compute hidden units in float32, and the layer without them in bfloat16. Some numbers
  are therefore rounded to another neighbor in 8 bits, which are 25% apart in gradients. Both are
  equally far from the layer in float32.
  """
  difference, ours, its = differences(plain_cls, fp8_cls, use_bias)
  assert difference <= 0.04
  assert ours <= 1.02 * its


def differences(plain_cls, fp8_cls, use_bias) -> tuple[float, float, float]:
  """Returns the largest relative difference of an output, state or gradient of both layers.

  Then those of the gradients of each layer from the gradients in float32.
  """

  def layer_of(cls, dtype, einsum_cls):
    tpl = functools.partial(Projection, dtype=dtype, use_bias=use_bias, einsum_tpl=einsum_cls)
    return cls(model_dims=64, hidden_dims=256, activation='silu', projection_tpl=tpl)

  plain, ours = (layer_of(cls, jnp.bfloat16, Fp8Einsum) for cls in (plain_cls, fp8_cls))
  key = jax.random.key(0)
  x = jax.random.normal(key, (4, 32, 64), jnp.bfloat16)
  g = jax.random.normal(jax.random.key(1), x.shape, jnp.bfloat16)
  paddings = jnp.zeros((4, 32)).at[1, 20:].set(1)
  variables = meta.unbox(plain.init(key, x, paddings))
  jax.tree.map(np.testing.assert_array_equal, variables, meta.unbox(ours.init(key, x, paddings)))
  params = jax.tree.map(lambda w: 0.1 * jax.random.normal(key, w.shape), variables['params'])

  def train(layer):
    def loss(params, state, x):
      y = layer.apply({'params': params, STATE: begin_step(state)}, x, paddings)
      return (y * g).sum().astype(jnp.float32), y

    step, state = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True)), variables[STATE]
    for _ in range(2):  # the second step has the scales of the first one
      (of_params, state, of_x), y = step(params, state, x)
    assert ('pallas_call' in str(jax.make_jaxpr(step)(params, state, x))) == (layer is ours)
    assert not np.asarray(y, np.float32)[1, 20:].any()
    return of_params, state, of_x, y

  def exact_loss(params):
    y = layer_of(plain_cls, jnp.float32, Einsum).apply({'params': params}, x, paddings)
    return (y * g).sum()

  def worst(ones, others):
    def one(one, other):
      one, other = (np.asarray(x, np.float32) for x in (one, other))
      return float(np.linalg.norm(one - other) / max(np.linalg.norm(other), 1e-6))

    return max(jax.tree.leaves(jax.tree.map(one, ones, others)))

  with interpreted():
    results = train(ours), train(plain)
  exact = jax.jit(jax.grad(exact_loss))(params)
  return worst(*results), *(worst(of_params, exact) for of_params, *_ in results)


# rows of 32 tokens, hidden units, dtype, mesh, activation, and whether the kernels fit
MESHES = [
  (4, 256, 'bfloat16', [1, 2, 1], 'gelu', True),
  (4, 256, 'float16', [2, 1, 1], 'gelu', True),
  (4, 256, 'bfloat16', [1, 1, 2], 'gelu', False),  # the hidden units are split
  (4, 200, 'bfloat16', [1, 2, 1], 'gelu', False),
  (2, 256, 'bfloat16', [1, 2, 1], 'gelu', False),  # 32 tokens on a device
  (4, 256, 'float32', [1, 2, 1], 'gelu', False),
  (4, 256, 'bfloat16', [1, 2, 1], 'gelu_exact', False),  # Triton has no error function
]


def uses_kernels(rows, hidden_dims, dtype, mesh, activation) -> bool:
  tpl = functools.partial(Projection, dtype=dtype, einsum_tpl=Fp8Einsum)
  layer = Fp8FeedForward(64, hidden_dims, activation, projection_tpl=tpl)
  x = jnp.ones((rows, 32, 64), dtype)
  variables = meta.unbox(layer.init(jax.random.key(0), x))
  variables[STATE] = begin_step(variables[STATE])
  with partitioning.activate(make_mesh(mesh, [1, 1, 1], partitioning.MESH_AXES)), interpreted():
    return 'pallas_call' in str(jax.make_jaxpr(layer.apply)(variables, x))


def test_layers_of_two_devices():
  """The batch is split: the same numbers. Anything else is split, or does not fit: no kernel."""
  done = runs.module('tests.unit.layers.test_fp8_feedforward', devices=2)
  found, fits = json.loads(done.stdout.splitlines()[-1])
  assert max(found) <= 0.04
  assert fits == [expected for *_, expected in MESHES]


def test_kernels_keep_nan():
  """A step whose gradients are not finite is skipped."""
  x = jnp.ones((128, 128), jnp.bfloat16).at[70, 3].set(jnp.nan)
  mask, scales = jnp.ones(128), jnp.ones(3)
  q_h, largest = fp8_hidden_kernel.hidden_units(jax.nn.silu, (x,), mask, scales, interpret=True)
  (result,), _ = fp8_hidden_kernel.gradients(
    jax.nn.silu, x, (x,), mask, (scales,), scales, interpret=True
  )
  for numbers in (q_h, result.q_RF, result.q_FR.T):
    np.testing.assert_array_equal(np.argwhere(np.isnan(np.asarray(numbers, np.float32))), [[70, 3]])
  assert jnp.isnan(largest)
  assert jnp.isnan(result.largest)


FUNCTIONS = {name: f for name, f in ACTIVATIONS.items() if name != 'gelu_exact'}


@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
  'activate',
  [*FUNCTIONS.values(), *map(gate_by, [*FUNCTIONS, 'clamped_swiglu'])],
  ids=[*FUNCTIONS, *(f'gate_{name}' for name in [*FUNCTIONS, 'clamped_swiglu'])],
)
def test_kernels_are_lowered_for_cuda(activate, dtype):
  n = 1 if activate in FUNCTIONS.values() else 2
  arrays = jnp.ones((64, 128), dtype)
  mask, scales = jnp.ones(64), jnp.ones(3)

  def both(x):
    args = (x,) * n
    results = fp8_hidden_kernel.gradients(activate, x, args, mask, (scales,) * n, scales)
    return results, fp8_hidden_kernel.hidden_units(activate, args, mask, scales)

  # JAX 0.12 asks for the device that a kernel is for.
  device = jax.sharding.AbstractDevice('NVIDIA H100 80GB HBM3', None, 'gpu')
  automatic = (jax.sharding.AxisType.Auto,)
  mesh = jax.sharding.AbstractMesh((1,), ('data',), automatic, abstract_device=device)
  with jax.sharding.use_abstract_mesh(mesh):
    text = jax.jit(both).trace(arrays).lower(lowering_platforms=('cuda',)).as_text()
  assert 'fp8_gradients' in text
  assert 'fp8_hidden_units' in text


if __name__ == '__main__':
  two = partitioning.activate(make_mesh([1, 2, 1], [1, 1, 1], partitioning.MESH_AXES))
  with two:
    found = [differences(*classes, use_bias=True)[0] for classes in CLASSES]
  print(json.dumps([found, [uses_kernels(*case) for *case, _ in MESHES]]))
