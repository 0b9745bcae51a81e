"""The memory and the time of a step, estimated from the traced model by arithmetic alone."""

import dataclasses
import math
from collections.abc import Mapping

from paxlite.aot.planning import choices
from paxlite.aot.planning.candidates import Candidate
from paxlite.aot.planning.extents import Amounts, Extent, Shares
from paxlite.aot.planning.layouts import Layout
from paxlite.aot.planning.machine import Machine
from paxlite.aot.planning.model import Model, StateBytes
from paxlite.aot.planning.traced import Work
from paxlite.aot.roofline import Links
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.parts.experts import MixtureOfExperts
from paxlite.layers.pipeline.pipeline_schedule import PipelineSchedule
from paxlite.parallel import partitioning


@dataclasses.dataclass(frozen=True)
class Estimate:
  """Bytes and seconds of a step on one device.

  Attributes:
    memory: The most bytes that are in use at a time.
    seconds: Seconds of a step.
    state: Bytes of the train state.
    saved: Bytes that the layers keep for the backward pass.
    products: Seconds of matrix multiplications.
    traffic: Seconds of all other kernels.
    sent: Seconds of collectives, hidden or not.
    copied: Seconds of copies from and to the host, hidden or not.
    logits: Bytes of the logits, their gradient and the gradient of their table, if they are in
      `memory`; else 0.
  """

  memory: float
  seconds: float
  state: float
  saved: float
  products: float
  traffic: float
  sent: float
  copied: float = 0.0
  logits: float = 0.0


@dataclasses.dataclass(frozen=True)
class _Step:
  """A candidate's step in the numbers that its estimate needs.

  Attributes:
    candidate: The candidate.
    sizes: Sizes of the mesh axes.
    state: Bytes of the train state on a device.
    unit: The work of a repeated unit of layers, for all rows and devices.
    rest: The work of all else.
    everything: All activations of a unit.
    units: Number of units of a device.
    parts: Number of microbatches.
    repeats: How often rows pass all stages of a pipeline.
    runs: How often a layer runs.
    losses: How often the loss is computed.
    inner: The shares of a device in one run of a layer.
    outer: The shares of a device in one computation of the loss.
    is_pipeline: Whether there are stages.
    gathers_once: Whether the weights of a stage are gathered once a step.
    is_loop: Whether the program has a loop over the layers.
  """

  candidate: Candidate
  sizes: Mapping[str, int]
  state: StateBytes
  unit: Work
  rest: Work
  everything: Amounts
  units: float
  parts: int
  repeats: int
  runs: float
  losses: int
  inner: Shares
  outer: Shares
  is_pipeline: bool
  gathers_once: bool
  is_loop: bool

  @property
  def saved(self) -> float:
    """Bytes that one run of a unit keeps for the backward pass."""
    return self.unit.saved.on_a_device(self.inner)

  @property
  def kept(self) -> float:
    """Bytes that all runs of a unit keep at a time."""
    return self.saved * (self.runs if self.is_pipeline else 1)

  @property
  def streams(self) -> bool:
    """Whether moments are on the host."""
    return bool(self.candidate.values.get('OFFLOAD_OPTIMIZER'))

  @property
  def state_on_device(self) -> float:
    """Bytes of the train state that are not on the host."""
    return self.state.all - (self.state.moments if self.streams else 0.0)


class Estimator:
  """Estimates candidates of one experiment on one machine.

  Args:
    model: The model, traced for a device of the machine.
    machine: The machine.
  """

  def __init__(self, model: Model, machine: Machine):
    self.model = model
    self._machine = machine
    self._laid_out: dict[Layout, LanguageModel] = {}
    self._loops: dict[tuple[object, ...], bool] = {}
    self._gathers_once = _gathers_once(model.experiment)

  def estimate(self, candidate: Candidate) -> Estimate:
    """Returns the estimate of one candidate."""
    step = self._step(candidate)
    products, traffic = self._kernels(step)
    kernels = products + traffic
    hidden, exposed = self._sent(candidate, step.sizes, step.state, step.inner, step.runs)
    sent = max(hidden - _OVERLAP * kernels, 0.02 * hidden) + exposed
    copied, waits = self._copied(step, kernels)
    memory, logits = self._memory(step)
    seconds = kernels + sent + waits
    return Estimate(
      memory, seconds, step.state_on_device, step.units * step.kept, products, traffic,
      hidden + exposed, copied, logits,
    )  # fmt: skip

  def _step(self, c: Candidate) -> '_Step':
    model = self.model
    laid_out = self.laid_out(c.layout)
    sizes = laid_out.mesh_sizes
    stages, context, mdl = (sizes.get(a, 1) for a in ('stage', 'context', 'mdl'))
    shards = partitioning.num_shards(sizes, laid_out.rules, 'batch')
    experts = partitioning.num_shards(sizes, laid_out.rules, 'experts')
    values = self._traced_values(c, sizes)
    # a pipeline computes a group of layers for a microbatch at each tick, and at the end the loss
    is_pipeline = stages > 1
    parts = c.microbatches
    repeats = choices.pipeline_repeats(c.values) if is_pipeline else 1
    ticks = PipelineSchedule(stages, parts, repeats).ticks if is_pipeline else parts
    losses = 1 if is_pipeline else parts
    share = lambda rows: Shares(rows / model.sizes.rows, context, mdl, experts)
    return _Step(
      candidate=c,
      sizes=sizes,
      state=model.state(c.values, laid_out),
      unit=model.unit(values),
      rest=model.rest(values),
      everything=model.everything_saved(values),
      units=model.units / stages,
      parts=parts,
      repeats=repeats,
      runs=ticks / repeats,
      losses=losses,
      inner=share(c.rows / (shards * parts)),
      outer=share(c.rows / (shards * stages * losses)),
      is_pipeline=is_pipeline,
      gathers_once=is_pipeline and self._gathers_once,
      is_loop=self._is_loop(c),
    )

  def _kernels(self, step: '_Step') -> tuple[float, float]:
    """Returns seconds of matrix multiplications, and of all other kernels."""
    units, runs, state = step.units, step.runs, step.state
    products = units * runs * self._products(step.unit, step.inner)
    products += step.losses * self._products(step.rest, step.outer)
    moved = units * runs * step.unit.traffic.on_a_device(step.inner)
    moved += step.losses * step.rest.traffic.on_a_device(step.outer)
    if step.is_loop:
      # a loop copies what it keeps, and each layer's weights and gradients
      moved += 2 * units * runs * step.saved
      if not step.gathers_once:
        moved += 4 * step.parts * state.layers
      elif step.repeats > 1:  # one group's weights are read in place, its gradients added up
        moved += 12 * runs * state.layers
    # Adam reads parameters, moments and gradients, and the norm reads the gradients once more
    moved += 8 * state.trained + (2 * step.parts * state.trained if step.losses > 1 else 0)
    # weights in the type of products
    moved += 1.5 * (1 if step.gathers_once else runs) * (state.layers + state.others)
    return products, moved / self._machine.bandwidth

  def _copied(self, step: '_Step', kernels: float) -> tuple[float, float]:
    """Returns seconds of copies from and to the host, and those of them that one waits for."""
    if not self._machine.host:
      return 0.0, 0.0
    # an update reads moments, computes, and writes them in turn; kernels hide copies of activations
    moments = 2 * step.state.moments if step.streams else 0.0
    activations = 2 * step.units * step.runs * step.unit.offloaded.on_a_device(step.inner)
    copied = (moments + activations) / self._machine.host
    waits = copied * moments / (moments + activations) if copied else 0.0
    return copied, waits + max(copied - waits - _OVERLAP * kernels, 0.0)

  def _memory(self, step: '_Step') -> tuple[float, float]:
    """Returns the most bytes in use at a time, and those of the logits if they are among them."""
    e, state, units = self.model.experiment, step.state, step.units
    gradients = state.trained * (0.5 if e.GRADIENT_DTYPE == 'bfloat16' else 1)
    saved = step.kept
    everything = step.everything.on_a_device(step.inner)
    activations_of_a_unit = max(_BACKWARD * everything - step.saved, 0.0)
    running = activations_of_a_unit + 4 * state.gathered  # weights and gradients of two units
    head = self._head(step.candidate, step.outer)
    kept = step.rest.saved.minus(_logits(step.rest, e.VOCAB_SIZE)).on_a_device(step.outer)
    accumulated = state.trained if step.losses > 1 else 0.0  # their sum is in float32
    start = units * saved + max(head, running)
    if step.is_loop:
      start += gradients  # a loop allocates the gradients of all layers before it runs
    end = gradients + running + saved
    if step.gathers_once:
      # the weights of a stage are whole over data, and so are the float32 sums of their gradients
      sums = state.layers * (2 if e.FPROP_DTYPE in ('bfloat16', 'float16') else 1)
      start = units * saved + head + state.layers
      end = units * saved + activations_of_a_unit + state.gathered + state.layers + sums - kept
    if step.streams:
      end = max(end, gradients + 3 * state.streamed)  # moments of a layer, old and new
    memory = step.state_on_device + accumulated + kept + max(start, end) + _CODE
    return memory, head if start > end and head > running else 0.0

  def _head(self, c: Candidate, outer: Shares) -> float:
    """Returns bytes of the logits that exist at a time, of their gradients and their table's."""
    e = self.model.experiment
    itemsize = 2 if e.FPROP_DTYPE in ('bfloat16', 'float16') else 4
    tokens = outer.rows * self.model.sizes.rows * e.MAX_SEQ_LEN / outer.context
    chunks = choices.loss_chunks(c.values)
    share = outer.of(Extent(width=e.VOCAB_SIZE)) / chunks
    table = 1.5 * e.VOCAB_SIZE * e.MODEL_DIMS * itemsize / outer.mdl
    # the gradient of whole logits takes their place; that of a chunk is computed in float32
    return tokens * e.VOCAB_SIZE * itemsize * share * (1.3 if chunks == 1 else 2.4) + table

  def laid_out(self, layout: Layout) -> LanguageModel:
    """Returns the experiment on a mesh."""
    if layout not in self._laid_out:
      self._laid_out[layout] = self.model.experiment.replaced(**layout.values)
    return self._laid_out[layout]

  def _is_loop(self, c: Candidate) -> bool:
    """Returns whether the program has a loop over the layers."""
    names = ('USE_REPEATED_LAYER', 'CHECKPOINT_POLICY', 'OFFLOAD_ACTIVATIONS')
    values = {name: c.values[name] for name in names if name in c.values}
    key = (c.layout, *values.items())
    if key not in self._loops:
      made = self.laid_out(c.layout).replaced(**choices.attributes(values))
      self._loops[key] = made.has_loop(self._machine.platform)
    return self._loops[key]

  def _traced_values(self, c: Candidate, sizes: Mapping[str, int]) -> dict[str, object]:
    """Returns the attributes that the traced program depends on."""
    e = self.model.experiment
    split = sizes.get('stage', 1) > 1 and self._machine.platform == 'tpu'
    split |= any(n % sizes.get('mdl', 1) for n in (e.NUM_HEADS, e.NUM_KV_HEADS))
    return {**c.values, 'USE_FLASH_ATTENTION': False} if split else dict(c.values)

  def _products(self, work: Work, shares: Shares) -> float:
    """Returns seconds of products, each the longer of its FLOPs and its traffic."""
    flops, bandwidth = self._machine.flops, self._machine.bandwidth
    found = 0.0
    for p in work.products:
      peak = flops.get(p.dtype, flops[''])
      share = shares.of(p.extent)
      found += max(p.flops * share / peak, p.bytes.on_a_device(shares) / bandwidth)
    return found

  def _sent(
    self,
    c: Candidate,
    sizes: Mapping[str, int],
    state: StateBytes,
    shares: Shares,
    runs: float,
  ) -> tuple[float, float]:
    """Returns seconds of collectives that kernels can hide, and of those that one waits for."""
    machine, model = self._machine, self.model
    e = model.experiment
    near = dict(zip(c.layout.axes, c.layout.near, strict=True))
    links = Links(sizes, near)

    def seconds(axes: str | tuple[str, ...], total: float, factor: float = 1.0) -> float:
      axes = (axes,) if isinstance(axes, str) else axes
      axes = tuple(a for a in axes if sizes.get(a, 1) > 1)
      size = math.prod(sizes[a] for a in axes)
      if size == 1:
        return 0.0
      inside, between = links.split(axes, total * factor * (size - 1) / size)
      return inside / machine.ici + between / machine.dcn

    policy = c.values.get('CHECKPOINT_POLICY', '')
    again = 0 if policy == 'SAVE_EVERYTHING' else 1
    itemsize = 2 if e.FPROP_DTYPE in ('bfloat16', 'float16') else 4
    tokens = shares.rows * model.sizes.rows * e.MAX_SEQ_LEN / shares.context
    width = tokens * e.MODEL_DIMS * itemsize
    # FSDP: weights are gathered forward and backward, and gradients are scattered
    # (the layers of a pipeline once a step), over the axes that split weights
    of_weights = ('data',) if 'stage' in sizes else ('data', 'context')
    gathers = 1 if sizes.get('stage', 1) > 1 else runs
    hidden = seconds(of_weights, state.layers * gathers + state.others, 3)
    hidden += seconds('replica', state.trained, 2)
    # tensor parallelism: two gathers and two scatters of the width in each pass of a block
    blocks = model.units / sizes.get('stage', 1) * e.blocks_per_layer * runs
    exposed = seconds('mdl', width * blocks, 8 + 2 * again)
    exposed += seconds('mdl', width, 4 * runs)
    kv = tokens * shares.context * e.NUM_KV_HEADS * e.DIMS_PER_HEAD * itemsize / shares.mdl
    exposed += seconds('context', kv * blocks, 2 * (2 + again))
    if isinstance(e, MixtureOfExperts):
      slots = e.NUM_EXPERTS_PER_TOKEN * e.EXPERT_CAPACITY_FACTOR
      exposed += seconds('expert', width * slots * blocks / e.blocks_per_layer, 6)
    # rows travel to the next stage, to the first one and from the last one; some are hidden
    exposed += seconds('stage', width * runs * choices.pipeline_repeats(c.values), 4)
    return hidden, exposed


def _gathers_once(e: LanguageModel) -> bool:
  """Returns whether a pipeline gathers weights over data once a step; see PipelinedTransformer."""
  values = e.values()
  once = values.get('GATHER_STAGES_ONCE') and not values.get('DROPOUT_PROB')
  return bool(once) and not isinstance(e, MixtureOfExperts)


_OVERLAP = 0.8  # share of the kernels' time in which collectives of weights run unseen
_CODE = 4e6  # bytes of a program
# what a unit holds in its backward pass, divided by all of its activations; fitted to programs for
# H100s
_BACKWARD = 1.6


def _logits(rest: Work, vocabulary: int) -> Amounts:
  """Returns the saved activations that have the vocabulary as a dimension, as the logits do."""
  return Amounts({x: n for x, n in rest.saved.items() if x.width == vocabulary and x.rows})
