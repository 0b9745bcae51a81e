"""Finds the operation that makes the first number that is not finite in the gradients of a batch.

The operations of loss and gradients are done again, one after the other. What each of them has made
of finite numbers is looked at; loops and nested functions are looked into where this is needed. A
number that is not finite has an origin, which is passed on to what is computed from it. So a mask
of infinite numbers, and a NaN that is left out of the result, are nobody's fault.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from paxlite.cli.user_code import Frame, innermost
from paxlite.core.variable_names import path_name
from paxlite.training.sharded_task import ShardedTask
from paxlite.training.train_state import TrainState

if TYPE_CHECKING:
  from jax.extend.core import Jaxpr, JaxprEqn

_FINITE, _INFINITE, _NAN = 0, 1, 2
_NAMES = {_INFINITE: 'an infinite number', _NAN: 'NaN'}
_CALLS = 'jaxpr', 'call_jaxpr', 'fun_jaxpr'  # parameters of operations that call a function
# a module in a path, with JAX's transformations around it; others are methods
_MODULE = re.compile(r'(?:(?:jvp|vmap|transpose)\()*(\w+)\)*')
_OF_JAX = re.compile(r'while|body|cond|branch_\d+_fun|checkpoint|remat\w*|closed_call|scan|pjit')


@dataclasses.dataclass(frozen=True)
class NonFiniteOrigin:
  """The origin of a non-finite number."""

  what: str  # 'NaN' or 'an infinite number'
  place: str  # the operation, the layer and the line
  cause: 'NonFiniteOrigin | None' = None  # the origin of an infinite number that NaN was made of

  def __str__(self) -> str:
    of = f', of {self.cause}' if self.cause else ''
    return f'{self.what} by {self.place}{of}'


@dataclasses.dataclass(frozen=True)
class _Value:
  array: Any
  kind: int = _FINITE
  origin: NonFiniteOrigin | None = None  # None: it is finite, or stands in the program


def origin_of(
  sharded: ShardedTask, state: TrainState, batch: Mapping[str, jax.Array], step: int
) -> NonFiniteOrigin | None:
  """Returns the origin of what is not finite in the loss or a gradient; None if all is finite.

  Args:
    state: A state with the parameters before the step.
    batch: The batch of the step.
    step: The number of the step, from 1.
  """
  key = jax.random.fold_in(jax.random.key(sharded.seed), step - 1)

  def gradients(params: Any, batch: Any, fp8_state: Any) -> Any:
    grads, _, metrics = sharded.task.grads(params, batch, key, fp8_state)
    return metrics['total_loss'].value, grads

  with sharded.compiling():
    return origin_in(gradients, state.params, dict(batch), state.fp8_state)


def origin_in(function: Callable[..., Any], *arguments: Any) -> NonFiniteOrigin | None:
  """Returns the origin of what is not finite in a result of a function; None if all is finite.

  Args:
    function: A function that JAX can trace.
    arguments: Its arguments, trees of arrays.
  """
  traced = jax.make_jaxpr(function)(*arguments)
  leaves = jax.tree_util.tree_leaves_with_path(arguments)
  inputs = [_input(path_name(path[1:]), x) for path, x in leaves]
  results = _function(traced, inputs, ())
  return next((value.origin for value in results if value.origin), None)


def _input(name: str, array: Any) -> _Value:
  kind = _kind(array)
  return _Value(array, kind, NonFiniteOrigin(_NAMES[kind], name) if kind else None)


def _function(closed: Any, inputs: Sequence[_Value], path: tuple[str, ...]) -> list[_Value]:
  """Does the operations of a function; returns its results."""
  traced: Jaxpr = getattr(closed, 'jaxpr', closed)
  constants = [_Value(x, _kind(x)) for x in getattr(closed, 'consts', ())]
  known = dict(zip([*traced.constvars, *traced.invars], [*constants, *inputs], strict=True))
  read = lambda v: _Value(v.val, _kind(v.val)) if hasattr(v, 'val') else known[v]
  last = {v: i for i, e in enumerate(traced.eqns) for v in e.invars if not hasattr(v, 'val')}
  last |= dict.fromkeys((v for v in traced.outvars if not hasattr(v, 'val')), len(traced.eqns))
  for i, equation in enumerate(traced.eqns):
    results = _operation(traced, equation, [read(v) for v in equation.invars], path)
    known |= zip(equation.outvars, results, strict=True)
    for v in [*equation.invars, *equation.outvars]:
      if not hasattr(v, 'val') and last.get(v, -1) <= i:  # memory for what is needed
        known.pop(v, None)
  return [read(v) for v in traced.outvars]


def _operation(
  traced: 'Jaxpr', equation: 'JaxprEqn', inputs: list[_Value], path: tuple[str, ...]
) -> Sequence[_Value]:
  arrays = _done(traced, equation, [x.array for x in inputs])
  kinds = [_kind(x) for x in arrays]
  worst = max((x.kind for x in inputs), default=_FINITE)
  if max(kinds, default=_FINITE) > worst:
    within = (*path, *_modules(str(equation.source_info.name_stack)))
    if looked_into := _inner(equation, inputs, within):
      return looked_into
  return [
    _Value(x, kind, _blamed(equation, kind, inputs, path))
    for x, kind in zip(arrays, kinds, strict=True)
  ]


def _blamed(
  equation: 'JaxprEqn', kind: int, inputs: Sequence[_Value], path: tuple[str, ...]
) -> NonFiniteOrigin | None:
  """Returns the origin of a result of an operation."""
  if kind == _FINITE:
    return None
  like = [x for x in inputs if x.kind >= kind]
  if like:
    return next((x.origin for x in like if x.origin), None)
  cause = next((x.origin for x in inputs if x.origin), None)
  return NonFiniteOrigin(_NAMES[kind], _place(equation, path), cause)


def _done(traced: 'Jaxpr', equation: 'JaxprEqn', operands: Sequence[Any]) -> list[Any]:
  """Returns the results of an operation."""
  from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

  given = {v: x for v, x in zip(equation.invars, operands, strict=True) if not hasattr(v, 'val')}
  alone = Jaxpr(
    [], [*given], equation.outvars, [equation], equation.effects, debug_info=traced.debug_info
  )
  return list(jaxpr_as_fun(ClosedJaxpr(alone, []))(*given.values()))


def _inner(
  equation: 'JaxprEqn', inputs: list[_Value], path: tuple[str, ...]
) -> list[_Value] | None:
  """Does the operations in a function, a branch or a loop; None for other operations."""
  name, params = equation.primitive.name, equation.params
  if name == 'scan':
    return _loop(equation, inputs, path)
  if name == 'cond':
    return _function(params['branches'][int(inputs[0].array)], inputs[1:], path)
  inner = next((params[key] for key in _CALLS if key in params), None)
  traced: Any = getattr(inner, 'jaxpr', inner)
  # kernels, and what runs on each device by itself, have another form
  if name in ('shard_map', 'pallas_call') or not hasattr(traced, 'eqns'):
    return None
  return _function(inner, inputs, path) if len(traced.invars) == len(inputs) else None


def _loop(equation: 'JaxprEqn', inputs: list[_Value], path: tuple[str, ...]) -> list[_Value]:
  """Does the iterations of a scan, and the operations of the first one that is to blame.

  An operand with one dimension more than the body has is read iteration by iteration; a result of
  the body's shape is passed on to the next one.
  """
  from jax.extend.core import jaxpr_as_fun

  body, length = equation.params['jaxpr'], equation.params['length']
  traced = getattr(body, 'jaxpr', body)
  rank = lambda v: len(getattr(v.aval, 'shape', ()))
  is_read = [rank(a) > rank(b) for a, b in zip(equation.invars, traced.invars, strict=True)]
  carried = sum(rank(a) == rank(b) for a, b in zip(equation.outvars, traced.outvars, strict=True))
  constants = len(is_read) - sum(is_read) - carried
  state, results, compiled = (
    inputs[constants : constants + carried],
    [],
    jax.jit(jaxpr_as_fun(body)),
  )
  blamed: NonFiniteOrigin | None = None
  order = range(length)[::-1] if equation.params['reverse'] else range(length)
  for i in order:
    slices = [x.array[i] for x in inputs[constants + carried :]]
    read = [_Value(x, k := _kind(x), v.origin if k else None)
            for x, v in zip(slices, inputs[constants + carried :], strict=True)]  # fmt: skip
    given = [*inputs[:constants], *state, *read]
    arrays = compiled(*(x.array for x in given))
    kinds = [_kind(x) for x in arrays]
    worst = max((x.kind for x in given), default=_FINITE)
    if max(kinds, default=_FINITE) > worst:
      found = _function(body, given, _numbered(path, i))
    else:
      passed = next((x.origin for x in given if x.kind and x.origin), None)
      found = [_Value(x, k, passed if k else None) for x, k in zip(arrays, kinds, strict=True)]
    blamed = blamed or next((x.origin for x in found if x.origin), None)
    state = found[:carried]
    results.append([x.array for x in found[carried:]])
  if equation.params['reverse']:
    results.reverse()
  stacked = [jnp.stack(each) for each in zip(*results, strict=True)]
  kept = [_Value(x, k := _kind(x), blamed if k else None) for x in stacked]
  return [*state, *kept]


def _numbered(path: tuple[str, ...], i: int) -> tuple[str, ...]:
  return (*path[:-1], f'{path[-1]}[{i}]') if path else (f'loop[{i}]',)


def _kind(array: Any) -> int:
  if not jnp.issubdtype(jnp.result_type(array), jnp.inexact):
    return _FINITE
  return int(_kind_of(array))


@jax.jit
def _kind_of(x: jax.Array) -> jax.Array:
  return jnp.where(jnp.isnan(x).any(), _NAN, jnp.where(jnp.isinf(x).any(), _INFINITE, _FINITE))


def _modules(stack: str) -> tuple[str, ...]:
  """Returns the modules in a stack such as 'jvp(Lm.losses)/Lm.hidden/transformer/x_layers_0'."""
  found = (_MODULE.fullmatch(part) for part in stack.split('/'))
  return tuple(m[1] for m in found if m and not _OF_JAX.fullmatch(m[1]))


def _place(equation: 'JaxprEqn', path: tuple[str, ...]) -> str:
  stack = str(equation.source_info.name_stack)
  layer = '/'.join([*path, *_modules(stack)])
  traceback = equation.source_info.traceback
  frames: Sequence[Any] = traceback.frames if traceback is not None else ()
  line = innermost(Frame(f.file_name, f.line_num, f.function_name) for f in frames)
  parts = [equation.primitive.name, f'in {layer}' if layer else '']
  parts += ['in the backward pass' if 'transpose(' in stack else '', f'({line})' if line else '']
  return ' '.join(filter(None, parts))
