"""The cross-entropy of each token, from logits, or without ever holding all of them."""

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from paxlite.layers.precision.scattered_gradient import scatter_of, scattered_sum
from paxlite.parallel.partitioning import active_platform, shard, shards_of

T = TypeVar('T')


class TokenLosses(NamedTuple):
  """The loss of each target token, and what belongs to it, [B, T] each."""

  xent: jax.Array  # float32, nats
  correct: jax.Array  # bool: the target has the largest logit
  log_z: jax.Array  # float32: log Σ exp(logits)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def cross_entropy(logits_BTV: jax.Array, labels_BT: jax.Array, logit_cap: float) -> TokenLosses:
  """Returns −log softmax(cap(logits))[label] in float32, and whether that logit is the largest.

  The label's logit is compared with the maximum that log-sum-exp needs anyway. A separate argmax
  would be one more pass over [B, T, V], 8 % of a 124M model's step on CPU. If two logits are the
  largest, both labels count as correct.

  The gradient is softmax − one-hot, computed in one pass over the logits in their own type. JAX's
  derivative of a gather would first write a float32 array [B, T, V] and scatter into it.

  Args:
    logits_BTV: Logits before the cap, in the type of the model's matrix multiplications.
    labels_BT: Token ids.
    logit_cap: cap · tanh(logits / cap); off if ≤ 0.
  """
  return _forward(logits_BTV, labels_BT, logit_cap)[0]


def _gradient(
  softmax: jax.Array, is_label: jax.Array, gradients: TokenLosses, capped: jax.Array, cap: float
) -> jax.Array:
  """Returns the gradient for logits [..., V] before the cap; gradients are [...]."""
  gradient = softmax - is_label
  gradient *= _last(gradients.xent, softmax)
  if not isinstance(gradients.log_z, SymbolicZero):  # as few losses read it
    gradient += softmax * gradients.log_z[..., None]
  if cap > 0:
    gradient *= 1 - (capped / cap) ** 2
  return gradient


def _last(gradient: jax.Array, like: jax.Array) -> jax.Array:
  """Returns a gradient [...] as [..., 1]; zeros where JAX knows that there is none."""
  if isinstance(gradient, SymbolicZero):
    gradient = jnp.zeros(like.shape[:-1], like.dtype)
  return gradient[..., None]


def _unmarked(forward: Callable[..., T]) -> Callable[..., T]:
  """Returns a forward pass that takes arguments with JAX's marks of what has a gradient."""
  is_marked = lambda x: isinstance(x, CustomVJPPrimal)
  value = lambda x: x.value if is_marked(x) else x
  return lambda *args: forward(*jax.tree.map(value, args, is_leaf=is_marked))


def _forward(
  logits_BTV: jax.Array, labels_BT: jax.Array, logit_cap: float
) -> tuple[TokenLosses, tuple[jax.Array, ...]]:
  # XLA on TPUs writes what a gather reads: taking from float32 would write [B, T, V] in float32
  label_logits = jnp.take_along_axis(logits_BTV, labels_BT[..., None], axis=-1)[..., 0]
  label_logits = cap_logits(label_logits.astype(jnp.float32), logit_cap)
  capped_BTV = cap_logits(logits_BTV.astype(jnp.float32), logit_cap)
  normalizer = _in_one_pass if _is_gpu() else _in_two_passes
  largest, log_z = normalizer(capped_BTV)
  losses = TokenLosses(log_z - label_logits, label_logits >= largest, log_z)
  return losses, (logits_BTV, labels_BT, log_z)


def _in_two_passes(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns the largest of the logits [..., V] and log Σ exp(logits), [...] each."""
  largest = logits.max(-1)
  return largest, largest + jnp.log(jnp.exp(logits - largest[..., None]).sum(-1))


def _in_one_pass(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns what `_in_two_passes` returns, and reads the logits once.

  A sum is scaled whenever a larger logit is met (https://arxiv.org/abs/1805.02867). This needs two
  exponentials of a logit instead of one, and GPUs wait for memory here.
  """

  def merge(
    one: tuple[jax.Array, jax.Array], other: tuple[jax.Array, jax.Array]
  ) -> tuple[jax.Array, jax.Array]:
    (a, sum_a), (b, sum_b) = one, other
    largest = jnp.maximum(a, b)
    return largest, sum_a * jnp.exp(a - largest) + sum_b * jnp.exp(b - largest)

  # the least finite number, because −inf − −inf is not a number
  start = jnp.finfo(logits.dtype).min, jnp.zeros((), logits.dtype)
  operands = logits, jnp.ones_like(logits)
  largest, total = jax.lax.reduce(operands, start, merge, [logits.ndim - 1])
  return largest, largest + jnp.log(total)


def _backward(
  logit_cap: float, res: tuple[jax.Array, ...], gradients: TokenLosses
) -> tuple[jax.Array, None]:
  logits_BTV, labels_BT, log_z_BT = res
  again_BTV = _after(log_z_BT, logits_BTV, logit_cap)
  capped_BTV = cap_logits(again_BTV.astype(jnp.float32), logit_cap)
  is_label_BTV = labels_BT[..., None] == jnp.arange(logits_BTV.shape[-1], dtype=labels_BT.dtype)
  softmax_BTV = jnp.exp(capped_BTV - log_z_BT[..., None])
  gradient_BTV = _gradient(softmax_BTV, is_label_BTV, gradients, capped_BTV, logit_cap)
  gradient_BTV = gradient_BTV.astype(logits_BTV.dtype)
  return shard(gradient_BTV, 'outer_batch', 'length', 'act_vocab'), None


cross_entropy.defvjp(_unmarked(_forward), _backward, symbolic_zeros=True)


def chunked_cross_entropy(
  x_BTD: jax.Array,
  w_VD: jax.Array,
  b_V: jax.Array | None,
  labels_BT: jax.Array,
  logit_cap: float,
  chunks: int,
) -> TokenLosses:
  """Returns cross_entropy(x · w + b, labels, logit_cap), and never holds all logits.

  A chunk has a share of the vocabulary. Its logits are computed again in the backward pass. A
  weight that is split by FSDP is gathered, and its gradient is reduced, chunk by chunk. Chunks of
  tokens would need the whole weight in each chunk, and would add up a gradient of its size.

  Args:
    x_BTD: Activations.
    w_VD: The weight of the logits, in the dtype of x.
    b_V: A bias of the logits, or None.
    labels_BT: Token ids.
    logit_cap: cap · tanh(logits / cap); off if ≤ 0.
  """
  V = w_VD.shape[0]
  M = shards_of('vocab', V)
  v = -(-V // (M * chunks))

  def in_chunks(y: jax.Array) -> jax.Array:
    y = jnp.pad(y, [(0, M * chunks * v - V)] + [(0, 0)] * (y.ndim - 1))
    return y.reshape(M, chunks, v, *y.shape[1:]).swapaxes(0, 1)

  w_IMvD = shard(in_chunks(w_VD), None, 'vocab', None, 'embed')
  b_IMv = None if b_V is None else shard(in_chunks(b_V), None, 'vocab', None)
  x_BTD = shard(x_BTD, 'outer_batch', 'length', None)
  return _chunked(x_BTD, _Head(w_IMvD, b_IMv), labels_BT, logit_cap, V)


class _Head(NamedTuple):
  """Chunks [I, M, v] of the vocabulary, in M shards, with ids after the last one to fill the last.

  Shard m has the ids from m · I · v on.
  """

  w: jax.Array  # [I, M, v, D]
  b: jax.Array | None  # [I, M, v]

  @property
  def ids(self) -> jax.Array:
    I, M, v = self.w.shape[:3]
    return jnp.arange(M * I * v).reshape(M, I, v).swapaxes(0, 1)


# the largest logits, the sums of exponentials, and the labels' logits
_Sums = tuple[jax.Array, jax.Array, jax.Array]
_Residuals = tuple[jax.Array, _Head, jax.Array, jax.Array]  # x_BTD, the head, labels_BT, log_z_BT


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _chunked(
  x_BTD: jax.Array, head: _Head, labels_BT: jax.Array, logit_cap: float, vocab_size: int
) -> TokenLosses:
  return _chunked_forward(x_BTD, head, labels_BT, logit_cap, vocab_size)[0]


def _chunked_forward(
  x_BTD: jax.Array, head: _Head, labels_BT: jax.Array, logit_cap: float, vocab_size: int
) -> tuple[TokenLosses, _Residuals]:
  # each shard of the vocabulary has its own sums, so that devices exchange them once
  def chunk(sums: _Sums, of: tuple[_Head, jax.Array]) -> tuple[_Sums, None]:
    largest, total, label_logits = sums
    head, ids_MBTv = of[0], of[1][:, None, None]
    logits_MBTv = cap_logits(_logits(x_BTD, head).astype(jnp.float32), logit_cap)
    logits_MBTv = jnp.where(ids_MBTv < vocab_size, logits_MBTv, -jnp.inf)
    new_largest = jnp.maximum(largest, logits_MBTv.max(-1))
    total *= jnp.exp(largest - new_largest)
    total += jnp.exp(logits_MBTv - new_largest[..., None]).sum(-1)
    label_logits += jnp.where(ids_MBTv == labels_BT[..., None], logits_MBTv, 0).sum(-1)
    return (new_largest, total, label_logits), None

  zeros_MBT = _shard(jnp.zeros((head.w.shape[1], *labels_BT.shape, 1), jnp.float32))[..., 0]
  # the least finite number, because −inf − −inf is not a number
  least_MBT = zeros_MBT + jnp.finfo(jnp.float32).min
  sums, _ = jax.lax.scan(chunk, (least_MBT, zeros_MBT, zeros_MBT), (head, head.ids))
  largest_MBT, total_MBT, label_logits_MBT = sums
  largest, label_logits = largest_MBT.max(0), label_logits_MBT.sum(0)
  log_z = largest + jnp.log((total_MBT * jnp.exp(largest_MBT - largest)).sum(0))
  losses = TokenLosses(log_z - label_logits, label_logits >= largest, log_z)
  return losses, (x_BTD, head, labels_BT, log_z)


def _chunked_backward(
  logit_cap: float, vocab_size: int, res: _Residuals, gradients: TokenLosses
) -> tuple[jax.Array, _Head, None]:
  x_BTD, head, labels_BT, log_z_BT = res

  def chunk(x_gradient: jax.Array, of: tuple[_Head, jax.Array]) -> tuple[jax.Array, _Head]:
    head, ids_MBTv = of[0], of[1][:, None, None]
    logits_MBTv = _logits(x_BTD, head)
    capped_MBTv = cap_logits(logits_MBTv.astype(jnp.float32), logit_cap)
    softmax = jnp.exp(capped_MBTv - log_z_BT[..., None])
    is_label = ids_MBTv == labels_BT[..., None]
    gradient = _gradient(softmax, is_label, gradients, capped_MBTv, logit_cap)
    gradient = jnp.where(ids_MBTv < vocab_size, gradient, 0)
    gradient_MBTv = _shard(gradient.astype(logits_MBTv.dtype))
    x_gradient += jnp.einsum(
      'MBTv,MvD->MBTD', gradient_MBTv, head.w, preferred_element_type=jnp.float32
    )
    w_gradient = shard(_weight_gradient(gradient_MBTv, x_BTD), *_CHUNK_AXES)
    b_gradient = None if head.b is None else shard(gradient_MBTv.sum((1, 2)), 'vocab', None)
    return x_gradient, _Head(w_gradient, b_gradient)

  zeros_MBTD = _shard(jnp.zeros((head.w.shape[1], *x_BTD.shape), jnp.float32))
  x_gradient, head_gradient = jax.lax.scan(chunk, zeros_MBTD, (head, head.ids))
  # devices add up their parts in the dtype of activations, which jnp.sum would convert to float32
  zero = jnp.zeros((), x_BTD.dtype)
  x_gradient = jax.lax.reduce(x_gradient.astype(zero.dtype), zero, jax.lax.add, [0])
  return x_gradient, head_gradient, None


_chunked.defvjp(_unmarked(_chunked_forward), _chunked_backward, symbolic_zeros=True)


_CHUNK_AXES = ('vocab', None, 'embed')  # of a chunk [M, v, D] of the head's weight


def _weight_gradient(gradient_MBTv: jax.Array, x_BTD: jax.Array) -> jax.Array:
  equation, (M, B, _, v) = 'MBTv,BTD->MvD', gradient_MBTv.shape
  if scatter := scatter_of(B, (M, v, x_BTD.shape[-1]), _CHUNK_AXES):
    return scattered_sum(equation, 'B', scatter, gradient_MBTv, x_BTD)
  return jnp.einsum(equation, gradient_MBTv, x_BTD)


def _logits(x_BTD: jax.Array, head: _Head) -> jax.Array:
  logits_MBTv = jnp.einsum('BTD,MvD->MBTv', x_BTD, head.w)
  if head.b is not None:
    logits_MBTv += head.b[:, None, None]
  return _shard(logits_MBTv)


def _shard(y_MBTx: jax.Array) -> jax.Array:
  return shard(y_MBTx, 'act_vocab', 'outer_batch', 'length', None)


def _after(value: jax.Array, logits: jax.Array, cap: float) -> jax.Array:
  """Returns logits with capped values that XLA recomputes after `value`.

  On GPUs, it would otherwise write a tanh that several kernels use: [B, T, V] in float32.
  """
  if cap <= 0 or not _is_gpu():
    return logits
  return jax.lax.optimization_barrier((logits, value))[0]


def _is_gpu() -> bool:
  return active_platform() in ('gpu', 'cuda')


def cap_logits(logits: jax.Array, cap: float) -> jax.Array:
  """Returns cap · tanh(logits / cap), or the unchanged logits if cap ≤ 0."""
  return cap * jnp.tanh(logits / cap) if cap > 0 else logits
