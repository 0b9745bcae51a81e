"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner (https://arxiv.org/abs/2409.11321).

What a matrix is, layers say: see parallel/weight_dims.py. All other variables are trained by Adam.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from paxlite.core.trees import PyTree
from paxlite.optim.muon import merged, of_matrices, split_matrices
from paxlite.optim.transformations import Valid, scale_by_pax_adam
from paxlite.parallel.weight_dims import WeightDims, weight_dims


class SoapState(NamedTuple):
  """The state of `scale_by_soap`. Trees have None in place of variables that are not matrices."""

  # The updates so far, int32. The first one changes no matrix, and makes the bases.
  count: jax.Array  # type: ignore[assignment]
  m: PyTree  # the mean gradient of each matrix, in the basis of the variable
  v: PyTree  # the mean square of the gradient in the eigenbases
  products: PyTree  # for each matrix [I, O] the means of G·Gᵀ [I, I] and of Gᵀ·G [O, O]
  bases: PyTree  # their eigenvectors, which are columns
  adam: PyTree  # Adam's state for all other variables


def scale_by_soap(
  b1: float = 0.95,
  b2: float = 0.95,
  epsilon: float = 1e-8,
  frequency: int = 10,
  max_size: int = 10_000,
  adam: optax.GradientTransformationExtraArgs | None = None,
) -> optax.GradientTransformation:
  """Returns SOAP for matrices, and Adam for all other variables.

  The bases are those of the eigenvectors of the first products, and then, every `frequency`
  updates, of one step of power iteration. So an update never uses bases of its own gradient.

  Args:
    b1: Decay of the mean gradient.
    b2: Decay of the mean square, and of the products.
    epsilon: Added to the root of the mean square.
    frequency: Updates between two changes of the bases.
    max_size: The most inputs, or outputs, that have a basis; a side with more of them has none.
    adam: Trains the other variables, and takes `valid`; None: Pax's Adam.
  """
  rest_adam = adam or scale_by_pax_adam()

  def init(params: PyTree) -> SoapState:
    dims = weight_dims(params)
    matrices, rest = split_matrices(params, dims)
    zeros = jax.tree.map(jnp.zeros_like, matrices)
    sides = jax.tree.map(lambda x, d: _sides(_flat(x, d), max_size), *of_matrices(matrices, dims))
    count = jnp.zeros((), jnp.int32)
    bases = jax.tree.map(jnp.zeros_like, sides)
    rotated = jax.tree.map(lambda x, d: jnp.zeros_like(_flat(x, d)), *of_matrices(matrices, dims))
    return SoapState(count, zeros, rotated, sides, bases, rest_adam.init(rest))

  def update(
    updates: PyTree, state: PyTree, params: PyTree | None = None, valid: Valid = True
  ) -> tuple[PyTree, SoapState]:
    del params
    dims = weight_dims(updates)
    matrices, rest = split_matrices(updates, dims)
    others, adam_state = rest_adam.update(rest, state.adam, valid=valid)
    grads, tree = jax.tree.flatten(matrices)
    of_grads = jax.tree.leaves(
      of_matrices(matrices, dims)[1], is_leaf=lambda d: isinstance(d, WeightDims)
    )
    of_state = (state.m, state.v, state.products, state.bases)
    states = [_leaves(part, matrices) for part in of_state]
    found = [
      one(g, d, state.count, *parts) for g, d, *parts in zip(grads, of_grads, *states, strict=True)
    ]
    made, m, v, products, bases = (jax.tree.unflatten(tree, x) for x in zip(*found, strict=True))
    new = SoapState(state.count + 1, m, v, products, bases, adam_state)
    of_matrices_alone = lambda state: state._replace(adam=())
    kept = jax.tree.map(
      lambda new, old: jnp.where(valid, new, old), *map(of_matrices_alone, (new, state))
    )
    made = jax.tree.map(lambda x: jnp.where(valid, x, 0), made)
    return merged(made, others), kept._replace(adam=adam_state)

  def one(
    g: jax.Array, d: WeightDims, count: jax.Array, m: jax.Array, v: jax.Array,
    products: PyTree, bases: PyTree,
  ) -> tuple[jax.Array, jax.Array, jax.Array, PyTree, PyTree]:  # fmt: skip
    """Returns the update of a variable, and its m, v, products and bases."""
    grad = _flat(g, d).astype(jnp.float32)
    is_first = count == 0
    new_m = jnp.where(is_first, m, b1 * m + (1 - b1) * g.astype(jnp.float32))
    new_v = jnp.where(is_first, v, b2 * v + (1 - b2) * jnp.square(_rotated(grad, bases)))
    steps = jnp.maximum(count, 1).astype(jnp.float32)
    scale = jnp.sqrt(1 - b2**steps) / (1 - b1**steps)
    direction = _rotated(_flat(new_m, d), bases) / (jnp.sqrt(new_v) + epsilon)
    made = jnp.where(is_first, 0, scale * _rotated_back(direction, bases))
    outer = 'sio,sjo->sij', 'sio,sip->sop'
    lerp = lambda mean, eq: b2 * mean + (1 - b2) * jnp.einsum(eq, grad, grad)
    new_products = {k: lerp(x, outer[k == 'outputs']) for k, x in products.items()}
    begins = lambda: (_eigenbases(new_products), new_v)
    turns = lambda: _turned(new_products, bases, new_v)
    stays = lambda: (bases, new_v)
    case = jnp.where(is_first, 0, jnp.where(count % frequency == 0, 1, 2))
    new_bases, new_v = jax.lax.switch(case, (begins, turns, stays))
    return _unflat(made, g.shape, d), new_m, new_v, new_products, new_bases

  return optax.GradientTransformationExtraArgs(init, update)


def _leaves(tree: PyTree, like: PyTree) -> list[PyTree]:
  """Returns the subtrees that `tree` has where `like` has leaves."""
  found: list[PyTree] = []
  jax.tree.map(lambda _, part: found.append(part), like, tree)
  return found


def _sides(x: jax.Array, max_size: int) -> dict[str, jax.Array]:
  """Returns zeros for the product of each side of matrices [S, I, O] that has a basis."""
  sizes = {'inputs': x.shape[1], 'outputs': x.shape[2]}
  return {k: jnp.zeros((x.shape[0], n, n)) for k, n in sizes.items() if n <= max_size}


def _rotated(x: jax.Array, bases: PyTree) -> jax.Array:
  """Returns matrices [S, I, O] in the eigenbases."""
  x = jnp.einsum('sio,sij->sjo', x, bases['inputs']) if 'inputs' in bases else x
  return jnp.einsum('sio,sop->sip', x, bases['outputs']) if 'outputs' in bases else x


def _rotated_back(x: jax.Array, bases: PyTree) -> jax.Array:
  x = jnp.einsum('sjo,sij->sio', x, bases['inputs']) if 'inputs' in bases else x
  return jnp.einsum('sip,sop->sio', x, bases['outputs']) if 'outputs' in bases else x


def _eigenbases(products: PyTree) -> dict[str, jax.Array]:
  """Returns the eigenvectors of each product, by descending eigenvalues."""
  return {k: jnp.linalg.eigh(x)[1][..., ::-1] for k, x in products.items()}


def _turned(products: PyTree, bases: PyTree, v: jax.Array) -> tuple[PyTree, jax.Array]:
  """Returns bases after a step of power iteration, and v in their order."""
  found = {}
  for side, product in products.items():
    q = bases[side]
    values = jnp.einsum('sij,sik,skj->sj', q, product, q)
    order = jnp.argsort(-values, axis=-1)
    of_side = (order[:, :, None], 1) if side == 'inputs' else (order[:, None], 2)
    v = jnp.take_along_axis(v, *of_side)
    q = jnp.take_along_axis(q, order[:, None], -1)
    found[side] = jnp.linalg.qr(product @ q)[0]
  return found, v


def _order(d: WeightDims) -> tuple[int, ...]:
  return (*d.stacked, *d.inputs, *d.outputs)


def _flat(x: jax.Array, d: WeightDims) -> jax.Array:
  """Returns the matrices of a variable, [stacked, inputs, outputs]."""
  sizes = [math.prod(x.shape[i] for i in group) for group in (d.stacked, d.inputs, d.outputs)]
  return x.transpose(_order(d)).reshape(sizes)


def _unflat(x: jax.Array, shape: tuple[int, ...], d: WeightDims) -> jax.Array:
  order = _order(d)
  back = [order.index(i) for i in range(len(order))]
  return x.reshape([shape[i] for i in order]).transpose(back)
