"""The FLOPs, memory traffic and saved activations of a model, read from its traced gradient.

Nothing is compiled. Elementwise operations are fused with the operations that use them, as by XLA:
they read the arrays in memory that their operands were computed from, and write nothing. Products,
reductions and kernels read and write memory.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from paxlite.aot.flops import grouped_rows_in
from paxlite.aot.planning.extents import Amounts, Extent, Sizes, total
from paxlite.aot.saved_activations import is_literal
from paxlite.core.trees import PyTree
from paxlite.layers.attention import attention_kernels
from paxlite.layers.attention.attention_case import Call, call_name
from paxlite.layers.moe.grouped_matmul import is_call

if TYPE_CHECKING:
  from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

  Atom = Var | Literal
  _Env = dict[Atom, '_Value']


@dataclasses.dataclass
class Product:
  """Matrix multiplications of the same size.

  Attributes:
    flops: FLOPs of all of them.
    dtype: The type of their operands, as in HLO.
    extent: The dimensions along which they can be split.
    bytes: The bytes that they read and write.
  """

  flops: float
  dtype: str
  extent: Extent
  bytes: Amounts


@dataclasses.dataclass
class Work:
  """The work of a part of a model in a step, and its saved activations.

  Attributes:
    products: Matrix multiplications and kernels of attention.
    traffic: Bytes that all other operations read and write.
    saved: Bytes that a device keeps for the backward pass.
    offloaded: Bytes that its host keeps for the backward pass.
  """

  products: list[Product] = dataclasses.field(default_factory=list)
  traffic: Amounts = dataclasses.field(default_factory=Amounts)
  saved: Amounts = dataclasses.field(default_factory=Amounts)
  offloaded: Amounts = dataclasses.field(default_factory=Amounts)

  def minus(self, other: 'Work') -> 'Work':
    """Returns the work of this without that of the other: what one more layer adds."""
    left = {_key(p): p for p in _merged(self.products)}
    for product in _merged(other.products):
      if mine := left.get(_key(product)):
        share = max(1 - product.flops / mine.flops, 0.0) if mine.flops else 0.0
        left[_key(product)] = Product(
          mine.flops * share, mine.dtype, mine.extent, mine.bytes.times(share)
        )
    products = [p for p in left.values() if p.flops > 0]
    parts = ('traffic', 'saved', 'offloaded')
    return Work(products, *(getattr(self, part).minus(getattr(other, part)) for part in parts))


def _key(product: Product) -> tuple[str, Extent, float]:
  moved = sum(product.bytes.values())
  return product.dtype, product.extent, round(product.flops / max(moved, 1), 3)


def _merged(products: list[Product]) -> list[Product]:
  """Returns products with those of equal FLOPs a byte together."""
  found: dict[tuple[str, Extent, float], Product] = {}
  for p in products:
    if (same := found.get(_key(p))) is None:
      found[_key(p)] = p
    else:
      together = total([same.bytes, p.bytes])
      found[_key(p)] = Product(same.flops + p.flops, p.dtype, p.extent, together)
  return list(found.values())


@dataclasses.dataclass
class _Value:
  """An array of the traced program.

  Attributes:
    extent: The dimensions along which it can be split.
    bytes: Its bytes.
    sources: Arrays in memory that it is computed from; empty where it is in memory itself.
    varies: Whether it depends on parameters. All layers share arrays that do not, such as a mask.
  """

  extent: Extent
  bytes: float
  sources: dict[int, '_Value'] = dataclasses.field(default_factory=dict)
  varies: bool = True


_REDUCTIONS = frozenset({
  'reduce_sum', 'reduce_max', 'reduce_min', 'reduce_and', 'reduce_or', 'reduce_prod', 'argmax',
})  # fmt: skip
_KERNELS = frozenset({
  'conv_general_dilated', 'scatter', 'scatter-add', 'scatter_add', 'sort', 'cumsum', 'top_k',
  'ragged_dot', 'ragged_dot_general', 'concatenate', 'dynamic_update_slice',
})  # fmt: skip
_PARTS = frozenset({'slice', 'dynamic_slice', 'gather', 'squeeze'})
_HLO_TYPES = {
  'bfloat16': 'bf16', 'float32': 'f32', 'float16': 'f16', 'int8': 's8',
  'float8_e4m3fn': 'f8e4m3fn', 'float8_e5m2': 'f8e5m2',
}  # fmt: skip


class JaxprReader:
  """Reads the work of a traced function."""

  def __init__(self, sizes: Sizes):
    self.work = Work()
    self._sizes = sizes
    self._scopes: list[str] = []  # of the operations around the present one

  def read(self, traced: 'Jaxpr', saved: int, batch: int) -> Work:
    """Returns the work of a function.

    Args:
      traced: Its jaxpr; its first results are what it keeps, then come gradients.
      saved: Number of results that are kept.
      batch: Number of its last arguments that are no variables.
    """
    env: _Env = {v: self._fresh(v) for v in (*traced.invars, *traced.constvars)}
    for v in (*traced.invars[len(traced.invars) - batch :], *traced.constvars):
      env[v].varies = False
    arguments = set(env)
    self._run(traced, env, 1.0)
    for kept in dict.fromkeys(v for v in traced.outvars[:saved] if not is_literal(v)):
      if kept not in arguments and env[kept].varies:
        on_host = getattr(kept.aval, 'memory_space', None) is jax.memory.Space.Host
        amounts = self.work.offloaded if on_host else self.work.saved
        amounts.add(self._fresh(kept).extent, self._fresh(kept).bytes)
    for gradient in traced.outvars[saved:]:
      if not is_literal(gradient):
        self._written(env, gradient, 1.0)
    self.work.products = _merged(self.work.products)
    return self.work

  def _fresh(self, v: 'Atom') -> _Value:
    try:
      itemsize = jnp.dtype(_dtype(v)).itemsize
    except (TypeError, AttributeError):  # random keys
      itemsize = 8
    return _Value(self._sizes.extent(_shape(v)), float(math.prod(_shape(v)) * itemsize))

  def _get(self, env: '_Env', v: 'Atom') -> _Value:
    if is_literal(v):
      literal = self._fresh(v)
      literal.varies = False
      return literal
    return env[v]

  def _sources(self, env: '_Env', operands: 'Iterable[Atom]') -> dict[int, _Value]:
    found: dict[int, _Value] = {}
    for v in operands:
      if not is_literal(v):
        value = env[v]
        found |= value.sources or {id(value): value}
    return found

  def _move(self, value: _Value, times: float) -> None:
    self.work.traffic.add(value.extent, value.bytes * times)

  def _written(self, env: '_Env', v: 'Atom', times: float) -> None:
    """Puts a fused value into memory, because a product or a kernel reads it."""
    if is_literal(v) or not env[v].sources:
      return
    for source in env[v].sources.values():
      self._move(source, times)
    varies = env[v].varies
    env[v] = self._fresh(v)
    env[v].varies = varies
    self._move(env[v], times)

  def _run(self, traced: 'Jaxpr', env: '_Env', times: float) -> None:
    for equation in traced.eqns:
      self._equation(equation, env, times)

  def _equation(self, equation: 'JaxprEqn', env: '_Env', times: float) -> None:
    self._results_of(equation, env, times)
    if not any(self._get(env, v).varies for v in equation.invars):
      for v in equation.outvars:
        env[v].varies = False

  def _results_of(self, equation: 'JaxprEqn', env: '_Env', times: float) -> None:
    name = equation.primitive.name
    operands = equation.invars
    if name == 'dot_general':
      for v in operands:
        self._written(env, v, times)
      env[equation.outvars[0]] = self._fresh(equation.outvars[0])
      self._product(equation, env, times)
    elif name in _REDUCTIONS:
      for source in self._sources(env, operands).values():
        self._move(source, times)
      self._results(equation, env, times)
    elif name in _PARTS:
      for v in equation.outvars:
        part = self._fresh(v)
        env[v] = _Value(part.extent, part.bytes, {id(part): part})
    elif flops := _attention(equation, self._source(equation)):
      for v in operands:
        self._written(env, v, times)
      for v in equation.outvars:
        env[v] = self._fresh(v)
      moved = Amounts()
      for v in (*operands, *equation.outvars):
        moved.add(self._fresh(v).extent, self._fresh(v).bytes * times)
      extent = self._fresh(operands[0]).extent
      dtype = _HLO_TYPES.get(str(_dtype(operands[0])), '')
      self.work.products.append(Product(flops * times, dtype, extent, moved))
    elif is_call(name) and (rows := grouped_rows_in(self._source(equation))):
      self._grouped_product(equation, rows, env, times)
    elif name != 'pallas_call' and (inner := _inner(equation)):
      self._nested(equation, inner, env, times)
    elif name in _KERNELS or name == 'pallas_call':
      for v in operands:
        self._written(env, v, times)
        self._move(self._get(env, v), times)
      self._results(equation, env, times)
    else:
      sources = self._sources(env, operands)
      for v in equation.outvars:
        fresh = self._fresh(v)
        env[v] = _Value(fresh.extent, fresh.bytes, dict(sources) or {id(fresh): fresh})

  def _results(self, equation: 'JaxprEqn', env: '_Env', times: float) -> None:
    for v in equation.outvars:
      env[v] = self._fresh(v)
      self._move(env[v], times)

  def _product(self, equation: 'JaxprEqn', env: '_Env', times: float) -> None:
    (contracted, _), _ = equation.params['dimension_numbers']
    left, out = equation.invars[0], _shape(equation.outvars[0])
    dims = [_shape(left)[d] for d in contracted]
    moved = Amounts()
    for v in (*equation.invars, equation.outvars[0]):
      value = self._get(env, v)
      moved.add(value.extent, value.bytes * times)
    # a product is split along the dimensions of its result and those that it contracts
    extent = self._sizes.extent((*out, *dims))
    flops = 2.0 * math.prod(out) * math.prod(dims) * times
    dtype = _HLO_TYPES.get(str(_dtype(left)), '')
    self.work.products.append(Product(flops, dtype, extent, moved))

  def _source(self, equation: 'JaxprEqn') -> str:
    """Returns the scopes that an operation comes from."""
    return '/'.join([*self._scopes, _scope(equation)])

  def _grouped_product(
    self, equation: 'JaxprEqn', rows: tuple[int, int], env: '_Env', times: float
  ) -> None:
    """Adds the product of groups of rows with a matrix each; see aot.flops.grouped_rows."""
    at_equal_load, room = rows
    moved = Amounts()
    for v in equation.invars:
      self._written(env, v, times)
    for v in equation.outvars:
      env[v] = self._fresh(v)
    for v in (*equation.invars, *equation.outvars):
      moved.add(self._fresh(v).extent, self._fresh(v).bytes * times)
    x = next(v for v in equation.invars if room in _shape(v))
    shapes = (_shape(v) for v in (*equation.invars, *equation.outvars))
    matrix = next(shape for shape in shapes if len(shape) == 3)[1:]
    dtype = _HLO_TYPES.get(str(_dtype(x)), '')
    extent = self._sizes.extent((room, *matrix))
    flops = 2.0 * at_equal_load * math.prod(matrix) * times
    self.work.products.append(Product(flops, dtype, extent, moved))

  def _nested(self, equation: 'JaxprEqn', inner: 'Jaxpr', env: '_Env', times: float) -> None:
    name = equation.primitive.name
    operands = equation.invars[-len(inner.invars) :] if inner.invars else []
    within: _Env = {v: self._fresh(v) for v in inner.constvars}
    if name in ('scan', 'while'):
      times *= equation.params.get('length', 1)
      within |= {v: self._fresh(v) for v in inner.invars}
    else:
      within |= {v: self._get(env, o) for v, o in zip(inner.invars, operands, strict=False)}
    self._scopes.append(_scope(equation))
    self._run(inner, within, times)
    self._scopes.pop()
    same = len(inner.outvars) == len(equation.outvars) and name not in ('scan', 'while')
    for i, v in enumerate(equation.outvars):
      if same:
        env[v] = self._get(within, inner.outvars[i])
      else:
        env[v] = self._fresh(v)
        self._move(env[v], times)


def _shape(v: 'Atom') -> tuple[int, ...]:
  return tuple(getattr(v.aval, 'shape', ()))


def _dtype(v: 'Atom') -> np.dtype:
  aval: Any = v.aval  # JAX declares no dtype of an abstract value
  return aval.dtype


def _inner(equation: 'JaxprEqn') -> 'Jaxpr | None':
  """Returns the jaxpr that an operation calls, or the body of a loop; None for other operations."""
  params = equation.params
  for key in ('jaxpr', 'call_jaxpr', 'fun_jaxpr', 'body_jaxpr', 'call'):
    if key in params and not callable(params[key]):
      return getattr(params[key], 'jaxpr', params[key])
  if branches := params.get('branches'):
    return getattr(branches[-1], 'jaxpr', branches[-1])
  return None


def _buffers(traced: 'Jaxpr') -> Iterator[tuple[int, int]]:
  """Yields the slots of dropless experts and the tokens that take one; see Sizes.buffers."""
  for equation in traced.eqns:
    if found := grouped_rows_in(_scope(equation)):
      yield found[1], found[0]
    if inner := _inner(equation):
      yield from _buffers(inner)


def _scope(equation: 'JaxprEqn') -> str:
  return str(equation.source_info.name_stack)


def _attention(equation: 'JaxprEqn', source: str) -> float:
  """Returns FLOPs of a kernel of attention in scopes `source`; 0 for other operations."""
  name = call_name(equation.primitive.name, equation.params)
  kernel = attention_kernels.of_call(name)
  if kernel is None:
    return 0.0
  shapes = [_shape(v) for v in equation.invars if jnp.issubdtype(_dtype(v), jnp.floating)]
  configured = {key: x for key, x in equation.params.items() if key != 'jaxpr'}
  called = Call(name, f'{configured} {source}', [s for s in shapes if len(s) >= 3])
  return kernel.flops(called)


def read(function: Callable[..., jax.Array], sizes: Sizes, *arguments: PyTree) -> Work:
  """Returns the work of the gradient of a function, and the arrays that its forward pass keeps.

  Args:
    function: Maps (variables, *others) to a number.
    sizes: The sizes of the model.
    *arguments: Its arguments, as trees of jax.ShapeDtypeStruct; the last one is the batch.
  """
  count = 0

  def both(variables: PyTree, *others: PyTree) -> tuple[list[jax.Array], PyTree]:
    nonlocal count
    value, backward = jax.vjp(lambda v: function(v, *others), variables)
    kept = jax.tree.leaves(backward)
    count = len(kept)
    return kept, backward(jnp.ones_like(value))

  traced = jax.make_jaxpr(both)(*arguments).jaxpr
  sizes = dataclasses.replace(sizes, buffers=dict(_buffers(traced)))
  return JaxprReader(sizes).read(traced, count, len(jax.tree.leaves(arguments[-1])))
