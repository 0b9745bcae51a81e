"""A model as the planner sees it: its train state, and the work of a layer and of the rest."""

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax.linen import meta

from paxlite.aot import saved_activations
from paxlite.aot.planning import choices
from paxlite.aot.planning.extents import Amounts, Sizes, sizes_of
from paxlite.aot.planning.traced import Work, read
from paxlite.experiments.language_model import LanguageModel
from paxlite.optim.moments import is_moment
from paxlite.parallel import mesh, partitioning

_Array = tuple[tuple[int, ...], str, tuple[str | None, ...]]  # shape, type, logical axes


@dataclasses.dataclass(frozen=True)
class StateBytes:
  """Bytes of the train state on one device.

  Attributes:
    all: Parameters, moments and counters.
    trained: The parameters that have gradients.
    gathered: The parameters of one repeated unit in the type of products, whole over data.
    layers: The parameters of all units in the type of products, whole over data.
    others: The other parameters, in the same way.
    moments: The optimizer's moments, which are a part of `all`.
    streamed: The most moments that are on the device at a time if they are kept on the host.
  """

  all: float
  trained: float
  gathered: float
  layers: float
  others: float
  moments: float
  streamed: float


class Model:
  """Traces an experiment for one kind of device; each combination of attributes only once."""

  def __init__(self, experiment: LanguageModel, device: jax.Device):
    """Traces nothing yet.

    Args:
      experiment: A validated experiment.
      device: A device of the target, which decides the kernels.
    """
    self.experiment = experiment
    self.sizes: Sizes = sizes_of(experiment)
    self._device = device
    self._works: dict[tuple[object, ...], Work] = {}
    self._states: dict[tuple[object, ...], StateBytes] = {}
    self._counts: dict[tuple[object, ...], tuple[collections.Counter, collections.Counter]] = {}

  def saving(self, experiment: LanguageModel) -> 'Model':
    """Returns the same model with other values of MemorySavings; traces of layers are shared."""
    found = Model(experiment, self._device)
    found._works = self._works
    return found

  @property
  def units(self) -> int:
    """Repetitions of the unit of blocks that the stack repeats."""
    return choices.num_units(self.experiment)

  def unit(self, values: Mapping[str, object]) -> Work:
    """Returns the work of one unit of the stack, with these attributes."""
    layer = {k: v for k, v in values.items() if k not in _NOT_OF_A_LAYER}
    return self._cached(('unit', layer), lambda: self._traced(1, layer).minus(self._rest(layer)))

  def rest(self, values: Mapping[str, object]) -> Work:
    """Returns the work of embeddings, logits and loss, and of blocks that are not repeated."""
    layer = {k: v for k, v in values.items() if k not in _NOT_OF_A_LAYER}
    chunks = {k: v for k, v in values.items() if k == 'NUM_LOSS_CHUNKS'}
    if not chunks:
      return self._rest(layer)
    like = _reference(layer)
    key = ('rest', like | chunks)
    return self._cached(key, lambda: self._traced(1, like | chunks).minus(self.unit(like)))

  def _rest(self, layer: Mapping[str, object]) -> Work:
    like = _reference(layer)

    def work() -> Work:
      one, two = self._traced(1, like), self._traced(2, like)
      return one.minus(two.minus(one))

    return self._cached(('rest', like), work)

  def everything_saved(self, values: Mapping[str, object]) -> Amounts:
    """Returns the activations of one unit without recomputation: memory of its backward pass."""
    return self.unit(_reference(values, 'SAVE_EVERYTHING')).saved

  def _cached(self, key: tuple[str, Mapping[str, object]], make: Callable[[], Work]) -> Work:
    what = key[0], tuple(sorted(key[1].items()))
    if what not in self._works:
      self._works[what] = make()
    return self._works[what]

  def _traced(self, units: int, values: Mapping[str, object]) -> Work:
    def trace() -> Work:
      loss = self._loss(units, values)
      return read(loss.function, self.sizes, *loss.arguments)

    return self._cached((f'traced {units}', values), trace)

  def _loss(self, units: int, values: Mapping[str, object]) -> saved_activations.TracedLoss:
    e = self.small(units, values)
    return saved_activations.loss_of(e, e.mesh([self._device]), self.sizes.rows)

  def small(self, units: int, values: Mapping[str, object]) -> LanguageModel:
    """Returns the experiment with so many units of blocks, for one device."""
    e = self.experiment
    axes = list(mesh.MESH_AXES)
    ones = [1] * len(axes)
    changes = dict(
      MESH_AXES=axes, ICI_MESH_SHAPE=ones, DCN_MESH_SHAPE=ones, PERCORE_BATCH_SIZE=1.0,
      NUM_MICROBATCHES=1, USE_REPEATED_LAYER=False,
      NUM_LAYERS=e.num_first_blocks + units * e.blocks_per_layer,
    )  # fmt: skip
    if vars(e).get('EXPERT_AXIS') is not None:
      changes['EXPERT_AXIS'] = None
    return e.replaced(**choices.attributes({**values, **changes}))

  def state(self, values: Mapping[str, object], laid_out: LanguageModel) -> StateBytes:
    """Returns the bytes of the train state on a mesh.

    Args:
      values: Attributes that decide the variables, such as USE_FP8.
      laid_out: The experiment on that mesh.
    """
    sizes, rules = laid_out.mesh_sizes, laid_out.rules
    variables = {k: v for k, v in values.items() if k in _OF_VARIABLES}
    key = tuple(sorted(variables.items())), tuple(sizes.items()), tuple(sorted(rules.items()))
    if key not in self._states:
      first, one = self._state_arrays(variables)
      self._states[key] = self._state(first, one, sizes, rules)
    return self._states[key]

  def _state_arrays(
    self, variables: Mapping[str, object]
  ) -> tuple[collections.Counter, collections.Counter]:
    """Returns the arrays of a model with one unit, and those that one more adds, by kind."""
    key = tuple(sorted(variables.items()))
    if key not in self._counts:
      one, two = (_arrays(self._loss(n, variables)) for n in (1, 2))
      self._counts[key] = one, two - one
    return self._counts[key]

  def _state(
    self,
    first: collections.Counter,
    unit: collections.Counter,
    sizes: Mapping[str, int],
    rules: partitioning.Rules,
  ) -> StateBytes:
    stages = sizes.get('stage', 1)
    others = first - unit
    computed = jnp.dtype(self.experiment.FPROP_DTYPE).itemsize

    def count(arrays: collections.Counter, kind: str, whole: bool = False) -> float:
      found = 0.0
      for (of, (shape, dtype, names)), number in arrays.items():
        if of == kind or kind == 'all':
          partition = partitioning.fitting(partitioning.spec(names, rules), shape, sizes)
          shards = math.prod(
            sizes[a]
            for entry in partition
            for a in partitioning.axes_of(entry)
            if not (whole and a in ('data', 'context'))
          )
          itemsize = computed if whole else jnp.dtype(dtype).itemsize
          found += number * math.prod(shape) * itemsize / shards
      return found

    units = self.units / stages
    moments = count(others, 'moment'), count(unit, 'moment')
    return StateBytes(
      all=count(others, 'all') + units * count(unit, 'all'),
      trained=count(others, 'trained') + units * count(unit, 'trained'),
      gathered=count(unit, 'trained', whole=True) + count(unit, 'frozen', whole=True),
      layers=units * (count(unit, 'trained', whole=True) + count(unit, 'frozen', whole=True)),
      others=count(others, 'trained', whole=True) + count(others, 'frozen', whole=True),
      moments=moments[0] + units * moments[1],
      streamed=max(moments),
    )


def _reference(values: Mapping[str, object], policy: str = 'SAVE_NOTHING') -> dict[str, object]:
  """Returns the values with one policy for all layers, and all activations on the device."""
  offloaded = {'OFFLOAD_ACTIVATIONS': ()} if 'OFFLOAD_ACTIVATIONS' in values else {}
  return {**values, 'CHECKPOINT_POLICY': policy, **offloaded}


_NOT_OF_A_LAYER = frozenset({
  'USE_REPEATED_LAYER', 'NUM_LOSS_CHUNKS', 'NUM_PIPELINE_REPEATS', 'OFFLOAD_OPTIMIZER',
})  # fmt: skip
_OF_VARIABLES = frozenset({'USE_FP8', 'USE_LORA'})


def _arrays(loss: saved_activations.TracedLoss) -> collections.Counter:
  """Returns how many arrays of each kind, shape, type and logical axes a train state has."""
  found: collections.Counter = collections.Counter()
  is_box = lambda x: isinstance(x, meta.AxisMetadata)
  trained = {id(x) for x in jax.tree.leaves(loss.arguments[0])}

  def add(kind: str, leaf: Any) -> None:
    names: tuple[str | None, ...] = tuple(getattr(leaf, 'names', ()))
    value = leaf.value if is_box(leaf) else leaf
    kind = 'trained' if kind == 'params' and id(value) in trained else kind
    kind = 'frozen' if kind == 'params' else kind
    found[kind, (tuple(value.shape), str(value.dtype), names)] += 1

  for leaf in jax.tree.leaves(loss.state.params, is_leaf=is_box):
    add('params', leaf)
  for leaf in jax.tree.leaves(dataclasses.replace(loss.state, params=None), is_leaf=is_box):
    add('moment' if is_moment(leaf.value if is_box(leaf) else leaf) else 'other', leaf)
  return found
