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
    c, model, machine = candidate, self.model, self._machine
    e = model.experiment
    laid_out = self.laid_out(c.layout)
    sizes = laid_out.mesh_sizes
    stages, context, mdl = (sizes.get(a, 1) for a in ('stage', 'context', 'mdl'))
    shards = partitioning.num_shards(sizes, laid_out.rules, 'batch')
    experts = partitioning.num_shards(sizes, laid_out.rules, 'experts')
    values = self._traced_values(c, sizes)
    unit, rest = model.unit(values), model.rest(values)
    state = model.state(c.values, laid_out)
    units = model.units / stages
    # a pipeline computes a group of layers for a microbatch at each tick, and at the end the loss
    is_pipeline = stages > 1
    parts = c.microbatches
    repeats = choices.pipeline_repeats(c.values) if is_pipeline else 1
    ticks = PipelineSchedule(stages, parts, repeats).ticks if is_pipeline else parts
    runs = ticks / repeats  # of each layer
    losses = 1 if is_pipeline else parts
    share = lambda rows: Shares(rows / model.sizes.rows, context, mdl, experts)
    inner, outer = share(c.rows / (shards * parts)), share(c.rows / (shards * stages * losses))

    products = units * runs * self._products(unit, inner)
    products += losses * self._products(rest, outer)
    moved = units * runs * unit.traffic.on_a_device(inner)
    moved += losses * rest.traffic.on_a_device(outer)
    saved = unit.saved.on_a_device(inner)
    gathers_once = is_pipeline and self._gathers_once
    is_loop = self._is_loop(c)
    if is_loop:
      # a loop copies what it keeps, and each layer's weights and gradients
      moved += 2 * units * runs * saved
      if not gathers_once:
        moved += 4 * parts * state.layers
      elif repeats > 1:  # one group's weights are read in place, its gradients added up
        moved += 12 * runs * state.layers
    gradients = state.trained * (0.5 if e.GRADIENT_DTYPE == 'bfloat16' else 1)
    # Adam reads parameters, moments and gradients, and the norm reads the gradients once more
    moved += 8 * state.trained + (2 * parts * state.trained if losses > 1 else 0)
    # weights in the type of products
    moved += 1.5 * (1 if gathers_once else runs) * (state.layers + state.others)
    traffic = moved / machine.bandwidth
    kernels = products + traffic
    hidden, exposed = self._sent(c, sizes, state, inner, runs)
    sent = max(hidden - _OVERLAP * kernels, 0.02 * hidden) + exposed
    # an update reads moments, computes, and writes them in turn; kernels hide copies of activations
    streams = bool(c.values.get('OFFLOAD_OPTIMIZER'))
    moments = 2 * state.moments if streams else 0.0
    activations = 2 * units * runs * unit.offloaded.on_a_device(inner)
    copied = (moments + activations) / machine.host if machine.host else 0.0
    waits = copied * moments / (moments + activations) if copied else 0.0
    waits += max(copied - waits - _OVERLAP * kernels, 0.0)

    saved *= runs if is_pipeline else 1
    everything = model.everything_saved(values).on_a_device(inner)
    activations_of_a_unit = max(_BACKWARD * everything - unit.saved.on_a_device(inner), 0.0)
    running = activations_of_a_unit + 4 * state.gathered  # weights and gradients of two units
    head = self._head(c, outer)
    kept = rest.saved.minus(_logits(rest, e.VOCAB_SIZE)).on_a_device(outer)
    accumulated = state.trained if losses > 1 else 0.0  # their sum is in float32
    start = units * saved + max(head, running)
    if is_loop:
      start += gradients  # a loop allocates the gradients of all layers before it runs
    end = gradients + running + saved
    if gathers_once:
      # the weights of a stage are whole over data, and so are the float32 sums of their gradients
      sums = state.layers * (2 if e.FPROP_DTYPE in ('bfloat16', 'float16') else 1)
      start = units * saved + head + state.layers
      end = units * saved + activations_of_a_unit + state.gathered + state.layers + sums - kept
    on_device = state.all
    if streams:
      on_device -= state.moments
      end = max(end, gradients + 3 * state.streamed)  # moments of a layer, old and new
    memory = on_device + accumulated + kept + max(start, end) + _CODE
    seconds = kernels + sent + waits
    logits = head if start > end and head > running else 0.0
    return Estimate(
      memory, seconds, on_device, units * saved, products, traffic, hidden + exposed, copied, logits
    )

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
