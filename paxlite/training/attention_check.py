"""Compares small cases of what cuDNN computes on a GPU with the same in another way.

If MAX_TEXTS_PER_ROW is set, cuDNN gets the bounds of the texts instead of a bias. A version of JAX
was seen to pass wrong bounds for grouped heads, which gave wrong results without any error. An
extra logit and a ring read the sums of the softmax that cuDNN gives, and give it others.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from paxlite.core.errors import UserError
from paxlite.layers import cudnn_call, softmax_attention
from paxlite.layers.softmax_attention import Softmax, Visible

_TOLERANCE = 0.05  # relative to the largest entry; bfloat16 gives about 0.01, wrong bounds 1
_B, _T, _N, _K, _H = 2, 256, 4, 2, 64
_SCALE = _H**-0.5
# queries, keys, values, segment ids and logits to the context
_Attention = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def check_attention(max_texts: int, uses_sums: bool, mesh: Mesh) -> None:
  """Compares small attentions and their gradients, if a run computes them by cuDNN on GPUs.

  Every process has to call this.

  Args:
    max_texts: MAX_TEXTS_PER_ROW of the run; 0 needs no check.
    uses_sums: Whether the run reads cuDNN's sums of the softmax.
    mesh: The mesh of the run.

  Raises:
    UserError: They differ.
  """
  device = mesh.local_devices[0]
  if device.platform != 'gpu':
    return
  with jax.default_device(device):
    if max_texts and float(device.compute_capability) >= 9:
      wrong = largest_difference(_by_bounds, _by_bias)
      _check(wrong, f'within the texts of MAX_TEXTS_PER_ROW={max_texts}', 'MAX_TEXTS_PER_ROW=0')
    if uses_sums:
      wrong = largest_difference(_with_logits, _plain_with_logits)
      _check(wrong, 'from its sums of the softmax', 'USE_FLASH_ATTENTION=False')


def _check(wrong: float, what: str, way_out: str) -> None:
  if not wrong <= _TOLERANCE:
    raise UserError(
      f'cuDNN of jax {jax.__version__} computes attention {what}, and the result differs from the '
      f'same in another way by {wrong:.1g} of the largest entry. Leave it out: --fdl.{way_out}'
    )


def largest_difference(one: _Attention, other: _Attention) -> float:
  """Returns the largest difference of results and gradients, relative to each one's largest entry.

  The rows have different numbers of texts, and grouped heads.
  """
  rng = np.random.default_rng(0)
  arrays = [jnp.asarray(rng.normal(size=(_B, _T, n, _H)), jnp.bfloat16) for n in (_N, _K, _K, _N)]
  logit_N = jnp.asarray([4.0, -2.0, 0.0, 2.0])
  ids_BT = np.ones((_B, _T), np.int32)
  ids_BT[0, 100:] = 2
  ids_BT[1, 37:101], ids_BT[1, 101:229], ids_BT[1, 229:] = 2, 3, 0

  def results(attend: _Attention) -> list[jax.Array]:
    def value(
      q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, logit_N: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
      context = attend(q_BTNH, k_BTKH, v_BTKH, jnp.asarray(ids_BT), logit_N)
      return (context * arrays[3]).astype(jnp.float32).sum(), context

    of = jax.jit(jax.grad(value, argnums=(0, 1, 2, 3), has_aux=True))
    return jax.tree.leaves(of(*arrays[:3], logit_N))

  both = zip(results(one), results(other), strict=True)
  return max(_difference(*pair) for pair in both)


def _difference(got: jax.Array, expected: jax.Array) -> float:
  found, right = (np.asarray(x.astype(jnp.float32)) for x in (got, expected))
  largest = np.abs(right).max()  # 0 for the gradient of logits that are not used
  return float(np.abs(found - right).max() / (largest or 1))


def _by_cudnn(
  options: cudnn_call.Options,
  q_BTNH: jax.Array,
  k_BTKH: jax.Array,
  v_BTKH: jax.Array,
  ids_BT: jax.Array,
  _: jax.Array,
) -> jax.Array:
  return cudnn_call.attend(q_BTNH, k_BTKH, v_BTKH, ids_BT, None, options)


_by_bias = functools.partial(_by_cudnn, cudnn_call.Options(_SCALE))
_by_bounds = functools.partial(_by_cudnn, cudnn_call.Options(_SCALE, max_segments=4))


def _with_logits(
  q_BTNH: jax.Array,
  k_BTKH: jax.Array,
  v_BTKH: jax.Array,
  ids_BT: jax.Array,
  logit_N: jax.Array,
) -> jax.Array:
  logit_BN = jnp.broadcast_to(logit_N, (_B, _N))
  options = cudnn_call.Options(_SCALE)
  return cudnn_call.attend(q_BTNH, k_BTKH, v_BTKH, ids_BT, logit_BN, options)


def _plain_with_logits(
  q_BTNH: jax.Array,
  k_BTKH: jax.Array,
  v_BTKH: jax.Array,
  ids_BT: jax.Array,
  logit_N: jax.Array,
) -> jax.Array:
  mask = Visible(segments=(ids_BT, ids_BT)).mask(_T, _T)
  softmax = Softmax(_SCALE, extra_logit=logit_N)
  return softmax_attention.attend(q_BTNH, k_BTKH, v_BTKH, mask, None, softmax)
