"""Muon, which gives the momentum of each matrix singular values near 1.

The method is that of https://kellerjordan.github.io/posts/muon/. What a matrix is, layers say: see
parallel/weight_dims.py. All other variables are trained by Adam.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from paxlite.core.trees import PyTree
from paxlite.optim.transformations import Valid, scale_by_pax_adam
from paxlite.parallel.partitioning import active_kind
from paxlite.parallel.spread import Spread, mesh_axes
from paxlite.parallel.weight_dims import WeightDims, weight_dims

# a, b, c of a step x ← a·x + (b·x·xᵀ + c·(x·xᵀ)²)·x, whose slope at 0 is as large as possible
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5

_Axes = tuple[tuple[str, ...], ...]


class MuonState(NamedTuple):
  """The state of `scale_by_muon`."""

  momentum: PyTree  # the mean gradient of each matrix; None for all other variables
  # NorMuon's mean square of the update of each output, with dimensions of size 1 for the inputs;
  # None for other variables, and for Muon
  neurons: PyTree
  adam: PyTree  # Adam's state for all other variables


def scale_by_muon(
  momentum: float = 0.95,
  update_rms: float = 0.2,
  split_heads: bool = False,
  neuron_decay: float | None = None,
  adam: optax.GradientTransformationExtraArgs | None = None,
  dtype: DTypeLike | None = None,
) -> optax.GradientTransformation:
  """Returns Muon with Nesterov's momentum for matrices, and Adam for all other variables.

  Args:
    momentum: Decay of the mean gradient, m ← momentum·m + (1 − momentum)·g.
    update_rms: Root mean square of the update of a whole matrix of rank min(inputs, outputs):
      update_rms · √max(inputs, outputs) multiplies it (https://arxiv.org/abs/2502.16982, with 0.2,
      the usual RMS of AdamW's updates, so that its learning rates fit). 0: √max(1, outputs/inputs),
      as Keller Jordan has it.
    split_heads: Whether each head of queries, keys and values is a matrix [inputs, head_dim].
    neuron_decay: NorMuon's decay of the mean square of each output's update, by whose root the
      update is divided (https://arxiv.org/abs/2510.05491, algorithm 1); None: Muon.
    adam: Trains the other variables, and takes `valid`; None: Pax's Adam.
    dtype: The dtype of the products; None: bfloat16, and float32 on CPUs, where it is faster.
  """
  rest_adam = adam or scale_by_pax_adam()

  def dims_of(params: PyTree) -> PyTree:
    of_heads = lambda d: by_heads(d) if split_heads else d
    return jax.tree.map(of_heads, weight_dims(params))

  def init(params: PyTree) -> MuonState:
    dims = dims_of(params)
    matrices, rest = split_matrices(params, dims)
    neurons = None
    if neuron_decay is not None:
      neurons = jax.tree.map(lambda x, d: jnp.zeros(_outputs(x, d)), *of_matrices(matrices, dims))
    return MuonState(jax.tree.map(jnp.zeros_like, matrices), neurons, rest_adam.init(rest))

  def update(
    updates: PyTree, state: PyTree, params: PyTree | None = None, valid: Valid = True
  ) -> tuple[PyTree, MuonState]:
    del params
    dims = dims_of(updates)
    matrices, rest = split_matrices(updates, dims)
    decay = jnp.where(valid, momentum, 1.0)  # of a skipped update, whose gradients are zeros
    lerp = lambda mean, x: decay * mean + (1 - decay) * x.astype(jnp.float32)
    mean = jax.tree.map(lerp, state.momentum, matrices)
    ahead = jax.tree.map(lambda g, m: (1 - momentum) * g + momentum * m, matrices, mean)
    in_dtype = dtype or (jnp.float32 if active_kind() == 'cpu' else jnp.bfloat16)
    made, neurons = orthogonalized(*of_matrices(ahead, dims), in_dtype), state.neurons
    if neuron_decay is not None:
      made, neurons = _per_neuron(made, neurons, dims, jnp.where(valid, neuron_decay, 1.0))
    scaled = jax.tree.map(
      lambda x, d: spectral_norm(x.shape, d, update_rms) * x, *of_matrices(made, dims)
    )
    others, adam_state = rest_adam.update(rest, state.adam, valid=valid)
    return merged(scaled, others), MuonState(mean, neurons, adam_state)

  return optax.GradientTransformationExtraArgs(init, update)


def by_heads(dims: WeightDims) -> WeightDims:
  """Returns dimensions in which the heads that a weight makes are separate matrices."""
  made = tuple(i for i in dims.heads if i in dims.outputs)
  rest = tuple(i for i in dims.outputs if i not in made)
  if not dims.is_matrix or not made or not rest:
    return dims
  stacked = tuple(sorted((*dims.stacked, *made)))
  return dataclasses.replace(dims, stacked=stacked, outputs=rest)


def orthogonalized(matrices: PyTree, dims: PyTree, dtype: DTypeLike) -> PyTree:
  """Returns U·Vᵀ of each matrix U·S·Vᵀ, approximately, float32.

  Matrices of one size are computed together, spread over all devices of the mesh, so that each
  device computes whole matrices, and each matrix is computed once.

  Args:
    matrices: Arrays of which each has one or more matrices.
    dims: The WeightDims of each.
    dtype: The dtype of the products.
  """
  arrays, tree = jax.tree.flatten(matrices)
  of_arrays = jax.tree.leaves(dims, is_leaf=lambda d: isinstance(d, WeightDims))
  flat = [_flat(array, d, dtype) for array, d in zip(arrays, of_arrays, strict=True)]
  groups = collections.defaultdict(list)  # the arrays with matrices of one size and sharding
  for i, (x, axes) in enumerate(flat):
    groups[x.shape[1:], axes].append(i)
  found = list(arrays)
  for (_, axes), members in groups.items():
    x = jnp.concatenate([flat[i][0] for i in members])
    ends = list(itertools.accumulate(len(flat[i][0]) for i in members))
    devices = Spread(axes)
    missing = -len(x) % devices.size
    x = jnp.pad(x, ((0, missing), (0, 0), (0, 0)))
    if missing and ends[-1] == 1:
      # on CPUs, XLA of jax 0.12 makes an invalid all-to-all of one matrix and known zeros
      x = jax.lax.optimization_barrier(x)
    x = devices.spread(x)
    x = devices.brought_back(_newton_schulz(x))
    for i, part in zip(members, jnp.split(x, ends), strict=False):
      found[i] = _unflat(part, arrays[i].shape, of_arrays[i])
  return jax.tree.unflatten(tree, found)


def _newton_schulz(x: jax.Array) -> jax.Array:
  """Returns each matrix [S, I, O] with singular values near 1; I must not be larger than O."""
  wide = x.astype(jnp.float32)
  norm = jnp.linalg.norm(wide, axis=(1, 2), keepdims=True)
  x = (wide / jnp.maximum(norm, 1e-7)).astype(x.dtype)
  a, b, c = COEFFICIENTS
  for _ in range(STEPS):
    gram = x @ x.mT
    x = a * x + (b * gram + c * (gram @ gram)) @ x
  return x


def _flat(array: jax.Array, dims: WeightDims, dtype: DTypeLike) -> tuple[jax.Array, _Axes]:
  """Returns the matrices of an array, [stacked, inputs, outputs], and their mesh axes.

  Matrices with more inputs than outputs are transposed.
  """
  of_dims = mesh_axes(array.shape, dims.names)
  groups = dims.stacked, dims.inputs, dims.outputs
  sizes = [math.prod(array.shape[i] for i in group) for group in groups]
  stacked, inputs, outputs = (tuple(a for i in group for a in of_dims[i]) for group in groups)
  x = array.astype(dtype).transpose(_order(array.shape, dims)).reshape(sizes)
  if sizes[1] > sizes[2]:
    return x.mT, (stacked, outputs, inputs)
  return x, (stacked, inputs, outputs)


def _unflat(x: jax.Array, shape: Sequence[int], dims: WeightDims) -> jax.Array:
  """Returns matrices [S, I, O], which may be transposed, as an array of this shape in float32."""
  order = _order(shape, dims)
  if x.shape[1] != math.prod(shape[i] for i in dims.inputs):
    x = x.mT
  back = [order.index(i) for i in range(len(order))]
  return x.reshape([shape[i] for i in order]).transpose(back).astype(jnp.float32)


def _per_neuron(
  made: PyTree, neurons: PyTree, dims: PyTree, decay: jax.Array
) -> tuple[PyTree, PyTree]:
  """Returns updates divided by the root mean square of each output's, of the norm before."""

  def one(x: jax.Array, mean: jax.Array, d: WeightDims) -> tuple[jax.Array, jax.Array]:
    mean = decay * mean + (1 - decay) * jnp.square(x).mean(d.inputs, keepdims=True)
    divided = x / (jnp.sqrt(mean) + 1e-8)
    matrix = (*d.inputs, *d.outputs)
    full = math.sqrt(min(_fans(x.shape, d)))  # the norm of a matrix whose singular values are all 1
    norm = jnp.sqrt(jnp.square(divided).sum(matrix, keepdims=True))
    return divided * full / jnp.maximum(norm, 1e-7), mean

  matrices, dims = of_matrices(made, dims)
  pairs = jax.tree.map(one, matrices, neurons, dims)
  return jax.tree.transpose(jax.tree.structure(matrices), jax.tree.structure((0, 0)), pairs)


def spectral_norm(shape: Sequence[int], dims: WeightDims, update_rms: float) -> float:
  """Returns the spectral norm of the update of a matrix: see update_rms of `scale_by_muon`.

  Args:
    shape: The shape of the variable.
    dims: Its dimensions; it is a matrix, or a stack of matrices.
    update_rms: The root mean square of an update; 0: Keller Jordan's scale.
  """
  inputs, outputs = _fans(shape, dims)
  if update_rms:
    return update_rms * math.sqrt(max(inputs, outputs))
  return math.sqrt(max(1, outputs / inputs))


def _fans(shape: Sequence[int], dims: WeightDims) -> tuple[int, int]:
  """The numbers of inputs and outputs of a weight's matrices."""
  size = lambda group: math.prod(shape[i] for i in group)
  return size(dims.inputs), size(dims.outputs)


def _outputs(x: jax.Array, dims: WeightDims) -> list[int]:
  return [1 if i in dims.inputs else size for i, size in enumerate(x.shape)]


def _order(shape: Sequence[int], dims: WeightDims) -> tuple[int, ...]:
  """Returns the dimensions as stacked, inputs, outputs; those that are split come first in each."""
  of_dims = mesh_axes(shape, dims.names)
  is_whole = lambda i: not of_dims[i]
  groups = dims.stacked, dims.inputs, dims.outputs
  return tuple(i for group in groups for i in sorted(group, key=is_whole))


def split_matrices(params: PyTree, dims: PyTree) -> tuple[PyTree, PyTree]:
  """Returns (matrices, all others): trees like `params`, with None where the other has the leaf."""
  choose = lambda wanted: jax.tree.map(
    lambda x, d: x if d.is_matrix == wanted else None, params, dims
  )
  return choose(True), choose(False)


def of_matrices(matrices: PyTree, dims: PyTree) -> tuple[PyTree, PyTree]:
  """Returns matrices and their WeightDims, in trees of one structure."""
  is_leaf = lambda x: x is None
  one = lambda x, d: None if x is None else d
  return matrices, jax.tree.map(one, matrices, dims, is_leaf=is_leaf)


def merged(matrices: PyTree, others: PyTree) -> PyTree:
  pick = lambda x, other: other if x is None else x
  return jax.tree.map(pick, matrices, others, is_leaf=lambda x: x is None)
