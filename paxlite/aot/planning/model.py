"""A model as the planner sees it: its train state, and what a layer computes and keeps.

The loss and its gradient are traced for one device, with a prime number of rows that divides no
other size. Nothing is compiled.
"""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import fiddle as fdl
import jax
import jax.numpy as jnp
from flax.linen import meta

from paxlite.aot import saved_activations
from paxlite.aot.flops import grouped_rows_in
from paxlite.aot.planning.space import Values, num_units
from paxlite.experiments.language_model import LanguageModel
from paxlite.layers.attention import attention_kernels
from paxlite.layers.attention.attention_case import KernelCall, call_name
from paxlite.layers.moe.grouped_matmul import is_call
from paxlite.optim.moments import is_moment
from paxlite.parallel import mesh, partitioning

ROWS = 1009  # of the traced batch
_HLO_TYPES = {'int8': 's8', 'float8_e4m3fn': 'f8e4m3fn', 'float8_e5m2': 'f8e5m2', 'float32': 'f32'}
_NUMBERS = ('float', 'bfloat', 'int8')  # types of the operands of products


class Array(NamedTuple):
  """Arrays of the same kind, shape, type and logical axes."""

  kind: str
  shape: tuple[int, ...]
  dtype: str
  axes: tuple[str | None, ...]

  def on_a_device(
    self, rules: partitioning.Rules, sizes: Mapping[str, int], whole: str = ''
  ) -> float:
    """Returns the bytes of one device of a mesh with these sizes, by the rules of shardings.

    If `whole` is the type of products, the array is gathered over data and context in this type.
    """
    partition = partitioning.fitting(partitioning.spec(self.axes, rules), self.shape, sizes)
    split = [a for entry in partition for a in partitioning.axes_of(entry)]
    shards = math.prod(sizes[a] for a in split if not (whole and a in ('data', 'context')))
    return math.prod(self.shape) * jnp.dtype(whole or self.dtype).itemsize / shards


@dataclasses.dataclass(frozen=True)
class Work:
  """The computation and saved memory of a part of a model in a step with ROWS sequences."""

  flops: Counter[str]  # of products, by the type of the operands in HLO
  saved: Counter[Array]  # on the device for the backward pass

  def minus(self, other: 'Work') -> 'Work':
    return Work(self.flops - other.flops, self.saved - other.saved)


class StateBytes(NamedTuple):
  """Bytes of the train state on one device."""

  all: float  # parameters, moments and counters
  trained: float  # parameters that have gradients
  layers: float  # parameters of all units in the type of products, whole over data and context
  others: float  # other parameters, in the same way
  experts: float  # those of `layers` that are experts
  moments: float
  streamed: float  # the most moments that are on the device at a time if the host keeps them


class Model:
  """Traces an experiment for one kind of device; each combination of attributes only once."""

  def __init__(self, experiment: LanguageModel, device: jax.Device):
    """Traces nothing yet; a device of the target decides the kernels."""
    self.experiment = experiment
    self.units = num_units(experiment)
    self._device = device
    self._works = dict[tuple[object, ...], Work]()
    self._states = dict[tuple[object, ...], StateBytes]()

  def of(self, experiment: LanguageModel, has_same_layers: bool) -> 'Model':
    """Returns another model for this device; the traces of the same layers are shared."""
    found = Model(experiment, self._device)
    if has_same_layers:
      found._works = self._works
    return found

  def unit(self, values: Values) -> Work:
    """Returns the work of one unit of the stack."""
    return self._cached('unit', {k: v for k, v in values.items() if k != 'NUM_LOSS_CHUNKS'})

  def rest(self, values: Values) -> Work:
    """Returns the work of embeddings, logits and loss, and of blocks that are not repeated."""
    return self._cached('rest', _leanest(values))

  def everything(self, values: Values) -> Work:
    """Returns the work of one unit without recomputation, and with all activations on devices."""
    return self.unit(_leanest(values) | {'CHECKPOINT_POLICY': 'SAVE_EVERYTHING'})

  def _cached(self, part: str, values: Values) -> Work:
    """Returns a part; the difference of models of two units and of one is the leanest unit."""
    offloaded = {'OFFLOAD_ACTIVATIONS': tuple(self.experiment.OFFLOAD_ACTIVATIONS)}
    values = offloaded | {k: v for k, v in values.items() if k != 'USE_REPEATED_LAYER'}
    key = (part, *sorted(values.items()))
    if key not in self._works:
      if part == 'rest':
        self._works[key] = self._traced(1, values).minus(self.unit(values))
      elif values == (lean := _leanest(values)):
        self._works[key] = self._traced(2, lean).minus(self._traced(1, lean))
      else:
        rest = self._traced(1, lean).minus(self.unit(lean))
        self._works[key] = self._traced(1, values).minus(rest)
    return self._works[key]

  def _traced(self, units: int, values: Values) -> Work:
    key = (str(units), *sorted(values.items()))
    if key not in self._works:
      saved, program = self._loss(units, values).saved(gradient=True)
      flops = Counter[str]()
      for dtype, n in product_flops(program):
        flops[dtype] += round(n)
      arrays = (Array('saved', s.shape, s.dtype, s.names) for s in saved if not s.on_host)
      self._works[key] = Work(flops, Counter(arrays))
    return self._works[key]

  def _loss(self, units: int, values: Values) -> saved_activations.TracedLoss:
    """Returns the loss of the experiment with `units` units of blocks, for one device."""
    e = self.experiment
    ones = [1] * len(mesh.MESH_AXES)
    changes: dict[str, Any] = dict(
      MESH_AXES=list(mesh.MESH_AXES), ICI_MESH_SHAPE=ones, DCN_MESH_SHAPE=ones,
      PERCORE_BATCH_SIZE=1.0, NUM_MICROBATCHES=1, USE_REPEATED_LAYER=False,
      NUM_LAYERS=e.num_first_blocks + units * e.blocks_per_layer,
    )  # fmt: skip
    if vars(e).get('EXPERT_AXIS') is not None:
      changes['EXPERT_AXIS'] = None
    small = e.replaced(**{**values, **changes})
    return saved_activations.loss_of(small, small.mesh([self._device]), ROWS)

  def state(self, laid_out: LanguageModel) -> StateBytes:
    """Returns the bytes of the train state of an experiment that is laid out on a mesh."""
    sizes, rules = laid_out.mesh_sizes, laid_out.rules
    key = tuple(sizes.items()), tuple(sorted(rules.items()))
    if key not in self._states:
      arrays, computed = self._state_arrays, str(jnp.dtype(self.experiment.FPROP_DTYPE))

      def count(
        *kinds: str, stacked: tuple[bool, ...] = (False, True), whole: str = '', of: str = ''
      ) -> float:
        found = (a for a in arrays if a.kind in kinds and (a.axes[:1] == ('layers',)) in stacked)
        found = (a for a in found if not of or of in a.axes)
        return sum(arrays[a] * a.on_a_device(rules, sizes, whole) for a in found)

      parameters, units = ('trained', 'frozen'), self.units / sizes.get('stage', 1)
      layers, others = (count(*parameters, stacked=(s,), whole=computed) for s in (True, False))
      of_layers, of_others = (count('moment', stacked=(s,)) for s in (True, False))
      self._states[key] = StateBytes(
        count(*parameters, 'moment', 'other'), count('trained'), layers, others,
        count(*parameters, stacked=(True,), whole=computed, of='experts'),
        of_layers + of_others, max(of_layers / units, of_others),
      )  # fmt: skip
    return self._states[key]

  @functools.cached_property
  def _state_arrays(self) -> Counter[Array]:
    """The arrays of the train state; those of repeated layers are stacked."""
    task = fdl.build(self.experiment.replaced(USE_REPEATED_LAYER=True).build_task())
    boxed = jax.eval_shape(task.init, jax.random.key(0))
    trained = {id(x) for x in jax.tree.leaves(task.optimizer.split(meta.unbox(boxed.params))[0])}
    found = Counter[Array]()
    is_box = lambda x: isinstance(x, meta.AxisMetadata)
    for path, leaf in jax.tree.leaves_with_path(boxed, is_leaf=is_box):
      value: Any = leaf.value if is_box(leaf) else leaf
      kind = 'trained' if id(value) in trained else 'frozen'
      if path[0] != jax.tree_util.GetAttrKey('params'):
        kind = 'moment' if is_moment(value) else 'other'
      axes = tuple(getattr(leaf, 'names', ()))
      found[Array(kind, tuple(value.shape), str(value.dtype), axes)] += 1
    return found


def _leanest(values: Values) -> dict[str, Any]:
  """Returns the values with the least activations, all on the device."""
  return {**values, 'CHECKPOINT_POLICY': 'SAVE_NOTHING', 'OFFLOAD_ACTIVATIONS': ()}


def product_flops(
  program: Any, times: float = 1.0, scopes: str = ''
) -> Iterator[tuple[str, float]]:
  """Yields (type of operands in HLO, FLOPs) of the products and attention kernels of a jaxpr."""
  shape = lambda v: tuple(v.aval.shape)
  dtype = lambda v: str(getattr(v.aval, 'dtype', ''))
  for equation in program.eqns:
    name, params, flops = equation.primitive.name, equation.params, 0.0
    source = f'{scopes}/{equation.source_info.name_stack}'
    operands = [v for v in equation.invars if dtype(v).startswith(_NUMBERS)]
    call = call_name(name, params)
    if name == 'dot_general':
      dims = (shape(operands[0])[d] for d in params['dimension_numbers'][0][0])
      flops = 2.0 * math.prod(shape(equation.outvars[0])) * math.prod(dims)
    elif kernel := attention_kernels.of_call(call):
      configured = {key: x for key, x in params.items() if key != 'jaxpr'}
      floats = [shape(v) for v in operands if dtype(v) != 'int8' and len(shape(v)) >= 3]
      flops = kernel.flops(KernelCall(call, f'{configured} {source}', floats))
    elif is_call(name) and (rows := grouped_rows_in(source)):
      arrays = [shape(v) for v in (*operands, *equation.outvars)]
      flops = 2.0 * rows[0] * math.prod(next(s for s in arrays if len(s) == 3)[1:])
    elif name != 'pallas_call':
      for inner in _inner(params):
        yield from product_flops(inner, times * params.get('length', 1), source)
    if flops:
      yield _HLO_TYPES.get(dtype(operands[0]), 'bf16'), flops * times


def _inner(params: Mapping[str, Any]) -> Iterator[Any]:
  """Yields the jaxpr that an operation calls, or the body of a loop."""
  names = ('jaxpr', 'call_jaxpr', 'fun_jaxpr', 'body_jaxpr', 'call')
  found = [params[n] for n in names if n in params and not callable(params[n])][:1]
  for jaxpr in found or params.get('branches', ())[-1:]:
    yield getattr(jaxpr, 'jaxpr', jaxpr)
