"""Attention to a part of the keys, and how the results of several parts are merged.

The attention of a query to one part of its keys has two results: a context, and the logarithm of
the sum of the exponentials of its scores, called the log-sum. The results of all parts together are
computed from those of each part. The backward pass of a part needs the results of all parts. See
https://arxiv.org/abs/2112.05682 and https://arxiv.org/abs/2310.01889.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from paxlite.layers.attention.softmax_attention import Segments, Softmax

_Arrays = TypeVar('_Arrays')
QKV = tuple[jax.Array, jax.Array, jax.Array]  # queries, keys and values, or their gradients
RESULTS = 'attention_results'  # the checkpoint name of what a backward kernel reads


class Partial(NamedTuple):
  """The results of attention to a part of the keys: contexts [B, T, N, H] and log-sums [B, N, T].

  Log-sums are float32.
  """

  context: jax.Array
  lse: jax.Array


class PartialKernel(Protocol):
  """Computes the attention of queries [B, T, N, H] to a part of their keys, [B, S, K, H].

  A query sees every key of the part, or those up to its own index if `causal`; and only keys of its
  own segment.
  """

  def forward(self, qkv: QKV, segments: Segments | None, causal: bool) -> Partial:
    """Returns the context and the log-sums of the part."""

  def backward(
    self, qkv: QKV, segments: Segments | None, causal: bool, whole: Partial, gradient: jax.Array
  ) -> QKV:
    """Returns the gradients of q, k and v.

    Args:
      qkv: Queries, keys and values.
      segments: Segments of the queries and of the keys.
      causal: See the class.
      whole: The context and the log-sums of all parts together.
      gradient: The gradient of the context of all parts together.
    """


def merged_by_lse(one: Partial, other: Partial) -> Partial:
  """Returns the context and the log-sums of two parts; contexts are float32."""
  lse = jnp.logaddexp(one.lse, other.lse)
  share = lambda part: jnp.exp(part.lse - lse).swapaxes(1, 2)[..., None]
  return Partial(one.context * share(one) + other.context * share(other), lse)


def sink_logits(softmax: Softmax, heads: int) -> jax.Array | None:
  """Returns the logit of the attention sink of each head, [N] float32; None if there is none."""
  if softmax.sink_logit is None:
    return None
  return jnp.broadcast_to(jnp.asarray(softmax.sink_logit, jnp.float32), (heads,))


def with_sink_logit(part: Partial, logit: jax.Array | None) -> Partial:
  """Adds the attention sink, a virtual key with value 0, to a part.

  Args:
    logit: The logit of that key for each head [N], or for each row and head [B, N]; None adds
      nothing.
  """
  if logit is None:
    return part
  lse = jnp.logaddexp(part.lse, logit[..., None])
  share = jnp.exp(part.lse - lse).swapaxes(1, 2)[..., None]
  return Partial(part.context * share, lse)


def sink_logit_gradient(
  whole: Partial, gradient_BTNH: jax.Array, logit: jax.Array | None
) -> jax.Array | None:
  """Returns the gradient of the logit of the attention sink; None if there is none."""
  if logit is None:
    return None
  product_BTNH = whole.context.astype(jnp.float32) * gradient_BTNH.astype(jnp.float32)
  share_BNT = jnp.exp(logit[..., None] - whole.lse)
  gradient_BN = -(share_BNT * product_BTNH.sum(-1).swapaxes(1, 2)).sum(2)
  return gradient_BN if logit.ndim == 2 else gradient_BN.sum(0)


def part_of(x: jax.Array, number: ArrayLike) -> jax.Array:
  """Returns one of the parts [parts, …] of an array."""
  return jax.lax.dynamic_index_in_dim(x, number, 0, keepdims=False)


def updated(arrays: _Arrays, number: ArrayLike, change: Callable[[_Arrays], _Arrays]) -> _Arrays:
  """Returns arrays [parts, …] in which one part is changed."""
  new = change(jax.tree.map(lambda x: part_of(x, number), arrays))
  put = lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, number, 0)
  return jax.tree.map(put, arrays, new)
