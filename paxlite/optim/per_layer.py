"""Transformations that treat each layer of a repeated stack as a separate variable.

A repeated stack keeps its layers in one array [L, …]. A transformation that takes norms or means of
whole variables, such as Adafactor and LAMB, would take those of all layers together.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from paxlite.core.trees import PyTree
from paxlite.core.variable_names import REPEATED, path_name
from paxlite.parallel.weight_dims import of_one_layer


def per_layer(
  transformation: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
  """Returns a transformation that treats a stack of L layers as one of L models' layers.

  The transformation is mapped over the layers, and sees arrays without their dimension. What it
  computes of no layer alone, such as a count of updates, is computed once. One that combines
  variables, such as a clip by the global norm, cannot be mapped, and one that draws random numbers
  would draw the same ones for all layers. These get the layers as separate arrays, 'repeat/0/…',
  which takes copies of the updates and the state, and longer to compile.

  The state has the layers as the first dimension of its arrays for a stack, as the parameters have.
  """
  plain = optax.with_extra_args_support(transformation)

  def init(params: PyTree) -> PyTree:
    if not _layers(params):
      return plain.init(params)
    first = jax.eval_shape(lambda tree: _layer(tree, 0), params)

    def mapped() -> PyTree:
      out_axes = _axes(jax.eval_shape(plain.init, first))
      return jax.vmap(plain.init, in_axes=(_axes(params),), out_axes=out_axes)(params)

    separate = lambda: _restacked(plain.init(_unstacked(params, _layers(params))))
    return _either(mapped, separate, lambda: _two_apart(plain.init, params))

  def update(
    updates: PyTree, state: PyTree, params: PyTree | None = None, **extra: Any
  ) -> tuple[PyTree, PyTree]:
    if not _layers(updates):
      return plain.update(updates, state, params, **extra)
    call = lambda *trees: plain.update(*trees, **extra)
    trees = updates, state, params

    def mapped() -> tuple[PyTree, PyTree]:
      axes = tuple(map(_axes, trees))
      return jax.vmap(call, in_axes=axes, out_axes=axes[:2])(*trees)

    separate = lambda: _restacked(call(*(_unstacked(tree, _layers(updates)) for tree in trees)))
    return _either(mapped, separate, lambda: _two_apart(call, *trees))

  return optax.GradientTransformationExtraArgs(init, update)


def _either(
  mapped: Callable[[], PyTree], separate: Callable[[], PyTree], apart: Callable[[], object]
) -> PyTree:
  """Returns what the first function computes; the second one's, if layers cannot be mapped.

  They cannot where it combines variables, of which `mapped` or `apart` fails, or draws random
  numbers.
  """
  with of_one_layer():
    try:
      apart()
      if not _is_random(jax.make_jaxpr(mapped)()):
        return mapped()
    except ValueError as e:
      if 'out_axes' not in str(e):  # an output that should have no axis depends on the layers
        raise
    return separate()


def _two_apart(call: Callable[..., PyTree], *trees: PyTree) -> None:
  """Raises a ValueError on out_axes if what is computed of a layer depends on another layer.

  Mapping alone shows it only by variables outside of the stack, and there may be none. Here the
  second of two layers is mapped, and nothing else.
  """
  two = jax.eval_shape(lambda *trees: tuple(_unstacked(tree, 2) for tree in trees), *trees)
  try:
    out_axes = _axes(jax.eval_shape(call, *two), f'{REPEATED}/1')
  except Exception:  # it knows variables by their names in the stack: `mapped` shows what is wrong
    return
  in_axes = tuple(_axes(tree, f'{REPEATED}/1') for tree in two)
  more = lambda x, axis: x if axis is None else jax.ShapeDtypeStruct((1, *x.shape), x.dtype)
  mapped = tuple(jax.tree.map(more, tree, axes) for tree, axes in zip(two, in_axes, strict=True))
  jax.eval_shape(jax.vmap(call, in_axes=in_axes, out_axes=out_axes), *mapped)


def _is_random(traced: Any) -> bool:
  """Whether a jaxpr has operations of random keys or numbers, in the functions it calls too."""
  inner = lambda e: (x for x in jax.tree.leaves(list(e.params.values())) if hasattr(x, 'eqns'))
  return any(
    e.primitive.name.startswith(('random_', 'rng_', 'threefry')) or any(map(_is_random, inner(e)))
    for e in traced.eqns
  )


def _layers(tree: PyTree) -> int:
  """Returns L; 0 if a tree has no repeated stack."""
  stacks = (x for path, x in jax.tree_util.tree_leaves_with_path(tree) if _is_stacked(path))
  first = next(stacks, None)
  return 0 if first is None else first.shape[0]


def _is_stacked(path: jax.tree_util.KeyPath, within: str = REPEATED) -> bool:
  return f'/{within}/' in f'/{path_name(path)}/'


def _axes(tree: PyTree, within: str = REPEATED) -> PyTree:
  """Returns the axis of the layers of each array: 0 in a stack, and otherwise None."""
  one = lambda path, _: 0 if _is_stacked(path, within) else None
  return jax.tree_util.tree_map_with_path(one, tree)


def _layer(tree: PyTree, i: int) -> PyTree:
  """Returns a tree in which each stack is layer i."""
  one = lambda path, x: x[i] if _is_stacked(path) else x
  return jax.tree_util.tree_map_with_path(one, tree)


def _is_stack(node: object) -> bool:
  return isinstance(node, dict) and REPEATED in node


def _unstacked(tree: PyTree, layers: int) -> PyTree:
  """Returns a tree in which the layers of a stack are separate, by their numbers."""

  def one(node: PyTree) -> PyTree:
    if not _is_stack(node):
      return node
    parts = {str(i): jax.tree.map(lambda x, i=i: x[i], node[REPEATED]) for i in range(layers)}
    return {**node, REPEATED: parts}

  return jax.tree.map(one, tree, is_leaf=_is_stack)


def _restacked(tree: PyTree) -> PyTree:
  def one(node: PyTree) -> PyTree:
    if not _is_stack(node):
      return node
    parts = [node[REPEATED][str(i)] for i in range(len(node[REPEATED]))]
    return {**node, REPEATED: jax.tree.map(lambda *layers: jnp.stack(layers), *parts)}

  return jax.tree.map(one, tree, is_leaf=_is_stack)
