"""Compares two ways in which a GPU computes attention within the texts of packed rows.

If MAX_TEXTS_PER_ROW is set, cuDNN gets the bounds of the texts instead of a bias. A version of JAX
was seen to pass wrong bounds for grouped heads, which gave wrong results without any error.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from paxlite.core.errors import UserError
from paxlite.layers import cudnn_call

_TOLERANCE = 0.05  # relative to the largest entry; bfloat16 gives about 0.01, wrong bounds 1


def check_packing(max_texts: int, mesh: Mesh) -> None:
  """Compares a small attention and its gradients by the bounds of its texts with those by a bias.

  Only GPUs compute attention by bounds, and others are not checked. Every process has to call this.

  Args:
    max_texts: MAX_TEXTS_PER_ROW of the run; 0 needs no check.
    mesh: The mesh of the run.

  Raises:
    UserError: They differ.
  """
  device = mesh.local_devices[0]
  if not max_texts or device.platform != 'gpu' or float(device.compute_capability) < 9:
    return
  with jax.default_device(device):
    wrong = largest_difference()
  if not wrong <= _TOLERANCE:
    raise UserError(
      f'MAX_TEXTS_PER_ROW={max_texts}: cuDNN of jax {jax.__version__} computes attention within '
      f'texts that differs from the same with a bias by {wrong:.1g} of the largest entry. Leave it '
      'out: --fdl.MAX_TEXTS_PER_ROW=0'
    )


def largest_difference() -> float:
  """Returns the largest difference of results and gradients, relative to each one's largest entry.

  The rows have different numbers of texts, and grouped heads.
  """
  B, T, N, K, H = 2, 256, 4, 2, 64
  rng = np.random.default_rng(0)
  arrays = [jnp.asarray(rng.normal(size=(B, T, n, H)), jnp.bfloat16) for n in (N, K, K, N)]
  ids_BT = np.ones((B, T), np.int32)
  ids_BT[0, 100:] = 2
  ids_BT[1, 37:101], ids_BT[1, 101:229], ids_BT[1, 229:] = 2, 3, 0

  def results(options: cudnn_call.Options) -> tuple[jax.Array, ...]:
    def value(
      q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
      context = cudnn_call.attend(q_BTNH, k_BTKH, v_BTKH, jnp.asarray(ids_BT), None, options)
      return (context * arrays[3]).astype(jnp.float32).sum(), context

    gradients, context = jax.jit(jax.grad(value, argnums=(0, 1, 2), has_aux=True))(*arrays[:3])
    return *gradients, context

  scale = H**-0.5
  bias = results(cudnn_call.Options(scale))
  bounds = results(cudnn_call.Options(scale, max_segments=4))
  return max(_difference(*pair) for pair in zip(bounds, bias, strict=True))


def _difference(got: jax.Array, expected: jax.Array) -> float:
  found, right = (np.asarray(x.astype(jnp.float32)) for x in (got, expected))
  return float(np.abs(found - right).max() / np.abs(right).max())
