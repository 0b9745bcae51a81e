"""The arrays that a forward pass keeps for its backward pass, read from the traced loss.

JAX returns the backward pass of a function as a pytree whose leaves are these arrays. Tracing it
gives their shapes and the operations that make them, and computes nothing. The compiler may keep
less: it can compute a cheap array again.
"""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import fiddle as fdl
import jax
import jax.numpy as jnp
from flax.linen import meta
from jax.sharding import Mesh

from paxlite.core.trees import PyTree
from paxlite.core.variable_names import REPEATED
from paxlite.data.base import RowArray
from paxlite.experiments.base import Experiment
from paxlite.experiments.language_model import LanguageModel
from paxlite.optim.moments import merged
from paxlite.parallel import partitioning

if TYPE_CHECKING:
  from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var


@dataclasses.dataclass(frozen=True)
class Saved:
  """An array that is kept."""

  shape: tuple[int, ...]  # for all devices together
  dtype: str
  operation: str  # of JAX, that makes it, such as 'dot_general'
  source: str  # the modules that make it, such as 'transformer/x_layers_0/self_attention/qkv'
  label: str = ''  # by which checkpoint policies know it, such as 'out_proj'
  names: tuple[str | None, ...] = ()  # the logical axis of each dimension, by its size
  on_host: bool = False


def saved_by(
  function: Callable[..., jax.Array], variables: PyTree, *others: PyTree, gradient: bool = False
) -> 'tuple[list[Saved], Jaxpr]':
  """Returns the arrays that the derivative of a function keeps, without the function's arguments.

  Args:
    function: Maps (variables, *others) to one number.
    variables: A tree of arrays or of jax.ShapeDtypeStruct, for which there is a gradient.
    *others: Further trees, for which there is none.
    gradient: Whether the jaxpr of the function, which is returned as well, has the gradient.
  """
  count = 0

  def both(variables: PyTree, *others: PyTree) -> tuple[list[jax.Array], PyTree]:
    nonlocal count
    value, backward = jax.vjp(lambda v: function(v, *others), variables)
    kept = jax.tree.leaves(backward)
    count = len(kept)
    return kept, backward(jnp.ones_like(value)) if gradient else ()

  program = jax.make_jaxpr(both)(variables, *others).jaxpr
  found = []
  for kept in dict.fromkeys(v for v in program.outvars[:count] if not hasattr(v, 'val')):
    array: Any = kept.aval  # which every version of JAX types in another way
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):  # a key of random numbers
      continue
    if (origin := _origin(program, kept)) is not None:
      on_host = getattr(array, 'memory_space', None) is jax.memory.Space.Host
      found.append(Saved(tuple(array.shape), str(array.dtype), *origin, on_host=on_host))
  return found, program


class TracedLoss(NamedTuple):
  """The loss of an experiment as a function that can be traced.

  It maps (trainable parameters, frozen ones, FP8 statistics, batch), of which there are the shapes
  and types, to a number. It is traced in the context of a mesh.
  """

  function: Callable[..., jax.Array]
  arguments: tuple[PyTree, ...]
  names: 'Names'
  context: Callable[[], contextlib.AbstractContextManager[None]]

  def saved(self, gradient: bool = False) -> 'tuple[list[Saved], Jaxpr]':
    """Returns what `saved_by` does, with the logical axes of the arrays."""
    with self.context():
      found, program = saved_by(self.function, *self.arguments, gradient=gradient)
    return [dataclasses.replace(s, names=self.names.of(s)) for s in found], program


def loss_of(experiment: Experiment, mesh: Mesh, rows: int) -> TracedLoss:
  """Returns the loss of an experiment.

  Args:
    experiment: A validated experiment.
    mesh: A mesh with the axes of the experiment and devices of the kind that it is traced for. Its
      sizes matter only where they decide which kernel computes attention.
    rows: Rows of the batch, or of a microbatch, on all devices together.
  """
  e = experiment
  task = fdl.build(e.build_task())
  boxed = jax.eval_shape(task.init, jax.random.key(0))
  state = meta.unbox(boxed)
  trainable, frozen = task.optimizer.split(state.params)

  def loss(trainable: PyTree, frozen: PyTree, fp8_state: PyTree, batch: PyTree) -> jax.Array:
    rng = jax.random.key(e.SEED)
    return task.loss_and_metrics(merged(trainable, frozen), batch, rng, fp8_state)[0]

  batch = {
    name: jax.ShapeDtypeStruct((rows, e.MAX_SEQ_LEN, *array.dims), array.dtype)
    for name, array in assumed_arrays(e).items()
  }
  arguments = trainable, frozen, state.fp8_state, batch
  context = functools.partial(partitioning.activate, mesh, e.rules)
  return TracedLoss(loss, arguments, Names(e, rows, boxed.params), context)


def assumed_arrays(e: Experiment) -> dict[str, RowArray]:
  """Returns the arrays that a batch of an experiment is taken to hold without its data."""
  found = {name: RowArray('int32') for name in ('ids', 'labels')}
  found['weights'] = RowArray('float32')
  if e.packed:
    found |= {name: RowArray('int32') for name in ('segment_ids', 'segment_pos')}
  if isinstance(e, LanguageModel):
    found |= e.further_arrays
  return found


class Names:
  """Finds the logical axes of an array by the sizes of its dimensions."""

  def __init__(self, experiment: Experiment, rows: int, boxed: PyTree):
    """Takes the sizes of the model.

    Args:
      rows: Rows of the traced batch. Best is a number that no other size equals.
      boxed: Its abstract parameters, with their logical axes.
    """
    self._rows, self._length = rows, experiment.MAX_SEQ_LEN
    values = experiment.values()
    sizes = ((values.get(attribute), name) for attribute, name in reversed(_WIDTHS))
    self._widths = {size: name for size, name in sizes if isinstance(size, int) and size > 1}
    self._weights: dict[tuple[int, ...], tuple[str | None, ...]] = {}
    for leaf in jax.tree.leaves(boxed, is_leaf=lambda x: isinstance(x, meta.AxisMetadata)):
      if isinstance(leaf, meta.AxisMetadata):
        named: Any = leaf
        self._weights.setdefault(tuple(named.value.shape), tuple(named.names))

  def of(self, saved: Saved) -> tuple[str | None, ...]:
    """Returns the names; those of a weight where the array is a weight in another type."""
    if saved.shape in self._weights and saved.operation in _CASTS:
      return self._weights[saved.shape]
    names: list[str | None] = []
    left = saved.shape
    if saved.operation == 'scan' and left and left[0] != self._rows:
      names.append('layers')
      left = left[1:]
    for i, size in enumerate(left):
      is_first = i == 0 or self._rows != self._length  # where both are equal, rows come first
      if 'batch' not in names and size == self._rows and is_first:
        names.append('batch')
      elif 'length' not in names and size == self._length:
        names.append('length')
      elif size == self._length and names[-2:] == ['act_heads', 'length']:
        names.append('kv_length')
      else:
        name = self._widths.get(size, 'kv_length' if size == self._length else None)
        is_second = bool(_WIDTH_NAMES & {name} and _WIDTH_NAMES & {*names})
        names.append(None if is_second else name)  # a mesh axis splits one dimension
    return tuple(names)


# operations that give a weight another type or layout
_CASTS = ('convert_element_type', 'sharding_constraint', 'transpose', 'scan', 'name', 'copy')
# the first of two attributes with the same value names the dimension
_WIDTHS = (
  ('NUM_HEADS', 'act_heads'), ('NUM_KV_HEADS', 'act_kv_heads'), ('MODEL_DIMS', 'act_embed'),
  ('HIDDEN_DIMS', 'act_mlp'), ('EXPERT_HIDDEN_DIMS', 'act_mlp'), ('VOCAB_SIZE', 'act_vocab'),
  ('NUM_EXPERTS', 'experts'),
)  # fmt: skip
_WIDTH_NAMES = {name for _, name in _WIDTHS if name.startswith('act_')}


def _origin(traced: 'Jaxpr', value: 'Var | Literal') -> tuple[str, str, str] | None:
  """Returns (operation, source, label) of a value in a traced function; None for an argument.

  Loops and nested functions are looked into for the source and for the label, which is the name
  that `checkpoint_name` gives the value.
  """
  found = _maker(traced, value)
  if found is None:
    return None
  equation, output = found
  operation, here = equation.primitive.name, _modules(str(equation.source_info.name_stack))
  inner = equation.params.get('jaxpr')
  inner = getattr(inner, 'jaxpr', inner)  # loops have a closed one
  if inner is not None and len(getattr(inner, 'outvars', ())) == len(equation.outvars):
    result = inner.outvars[output]
    # an input that the stack of layers keeps is the input of each layer
    is_input = here == 'transformer' and any(v is result for v in inner.invars)
    given = (operation, '', 'iteration_input' if is_input else '')
    made, modules, label = _origin(inner, result) or given
    operation = operation if operation == 'scan' else made
    return operation, '/'.join(p for p in (here, modules) if p), label
  named = equation
  if operation == 'reduce_precision':  # JAX puts it behind a named value that it keeps
    named = (_maker(traced, equation.invars[0]) or found)[0]
  return operation, here, named.params['name'] if named.primitive.name == 'name' else ''


def _maker(traced: 'Jaxpr', value: 'Var | Literal') -> 'tuple[JaxprEqn, int] | None':
  """Returns the operation of a traced function that makes a value, and which result it is."""
  for equation in reversed(traced.eqns):
    for i, made in enumerate(equation.outvars):
      if made is value:
        return equation, i
  return None


def _modules(stack: str) -> str:
  """Removes methods and JAX from 'jvp(TransformerLm.losses)/TransformerLm.hidden/transformer/…'."""
  is_module = lambda p: p.replace('_', '').isalnum() and not _FUNCTIONS.fullmatch(p)
  parts = list(filter(is_module, stack.split('/')))
  return '/'.join(parts)


_FUNCTIONS = re.compile(rf'while|body|cond|branch_\d+_fun|checkpoint|remat|closed_call|{REPEATED}')
