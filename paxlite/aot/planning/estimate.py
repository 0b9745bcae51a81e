"""The memory and the time of a step, estimated from the traced model by arithmetic alone.

They say in which order the compiler judges candidates, and which ones it need not see. Copies from
and to the host count nothing: only the compiler's time has them.
"""

import functools
import math
from typing import NamedTuple

from paxlite.aot.planning.machine import Machine
from paxlite.aot.planning.model import ROWS, Model, Work
from paxlite.aot.planning.space import Candidate, Layout
from paxlite.aot.roofline import Links, seconds_of
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.parts.experts import MixtureOfExperts
from paxlite.parallel import partitioning
from paxlite.pipeline.pipeline_schedule import PipelineSchedule

_OVERLAP = 0.8  # share of the kernels' time in which collectives of weights run unseen
_CODE = 4e6  # bytes of a program
# of all activations of a unit: the bytes that its backward pass holds at a time, and those that
# kernels other than products read and write in each pass; fitted to programs for H100s
_BACKWARD, _FORWARD_TRAFFIC, _BACKWARD_TRAFFIC = 1.6, 1.5, 2.5


class Estimate(NamedTuple):
  """What a step needs on one device."""

  memory: float  # the most bytes that are in use at a time
  seconds: float
  state: float  # bytes of the train state that are not on the host


class Estimator:
  """Estimates candidates of one experiment on one machine, with what many of them share."""

  def __init__(self, model: Model, machine: Machine):
    self.model, self.machine = model, machine
    e = model.experiment
    once = e.GATHER_STAGES_ONCE and not e.DROPOUT_PROB  # see PipelinedTransformer
    self.gathers_once = once and not isinstance(e, MixtureOfExperts)
    self.laid_out = functools.cache(lambda layout: e.replaced(**layout.values))
    self.has_loop = functools.cache(self._has_loop)
    self._bytes = dict[tuple[int, Layout], float]()

  def estimate(self, candidate: Candidate) -> Estimate:
    """Returns the estimate of one candidate."""
    return Step(candidate, self).estimate

  def bytes(self, work: Work, layout: Layout) -> float:
    """Returns the bytes that one device saves for ROWS rows of it."""
    key = id(work), layout  # the model keeps the work
    if key not in self._bytes:
      e = self.laid_out(layout)
      of = (n * a.on_a_device(e.rules, e.mesh_sizes) for a, n in work.saved.items())
      self._bytes[key] = sum(of)
    return self._bytes[key]

  def _has_loop(self, layout: Layout, repeated: bool, policy: str) -> bool:
    """Returns whether the program has a loop over the layers."""
    values = {'USE_REPEATED_LAYER': repeated, 'CHECKPOINT_POLICY': policy}
    made: LanguageModel = self.laid_out(layout).replaced(**values)
    return made.has_loop(self.machine.platform)


class Step:
  """The step of a candidate on one device.

  In a pipeline, a device computes a group of layers for a microbatch at each tick, and at the end
  the loss.

  Attributes:
    products: Seconds of matrix multiplications.
    traffic: Seconds of all other kernels.
    kept: Bytes that layers keep for the backward pass.
  """

  def __init__(self, candidate: Candidate, estimator: Estimator):
    c, model, machine = candidate, estimator.model, estimator.machine
    e = self._experiment = estimator.laid_out(c.layout)
    self._candidate, self._machine = c, machine
    sizes = self._sizes = e.mesh_sizes
    stages = sizes.get('stage', 1)
    values = dict(c.values)
    is_split = any(n % sizes.get('mdl', 1) for n in (e.NUM_HEADS, e.NUM_KV_HEADS))
    if is_split or (stages > 1 and machine.platform == 'tpu'):
      values['USE_FLASH_ATTENTION'] = False
    self._is_pipeline, parts = stages > 1, c.microbatches
    self._repeats = e.NUM_PIPELINE_REPEATS if stages > 1 else 1
    ticks = PipelineSchedule(stages, parts, self._repeats).ticks if stages > 1 else parts
    # how often a device computes a layer, and the loss; how many units of layers it has
    self._runs, self._losses = ticks / self._repeats, 1 if stages > 1 else parts
    self._units = model.units / stages
    shards = partitioning.num_shards(sizes, e.rules, 'batch')
    # rows of a device in one run of a layer, and of the loss, divided by the traced ones
    self._inner = c.rows / (shards * parts * ROWS)
    self._outer = c.rows / (shards * stages * self._losses * ROWS)
    unit, rest, all_of = model.unit(values), model.rest(values), model.everything(values)
    self._width = 2 if e.FPROP_DTYPE in ('bfloat16', 'float16') else 4  # bytes of a number
    self._saved = self._inner * estimator.bytes(unit, c.layout)
    self._all = self._inner * estimator.bytes(all_of, c.layout)
    self._all += self._free_slots
    self._rest = self._outer * estimator.bytes(rest, c.layout)
    whole = model.rest(values | {'NUM_LOSS_CHUNKS': 1})
    self._logits = self._outer * estimator.bytes(whole, c.layout)
    self.kept = self._units * self._saved * (self._runs if stages > 1 else 1)
    self._state, self._streams = model.state(e), e.OFFLOAD_OPTIMIZER
    self._gathers_once = stages > 1 and estimator.gathers_once
    policy = values['CHECKPOINT_POLICY']
    self._has_loop = estimator.has_loop(c.layout, values['USE_REPEATED_LAYER'], policy)
    # the share of a forward pass that runs again in the backward pass
    of_unit, of_all = (sum(work.flops.values()) for work in (unit, all_of))
    self._again = 3 * (of_unit / of_all - 1) if of_all else 0.0
    split = sizes.get('context', 1) * sizes.get('mdl', 1)
    flops = machine.chip.reached_flops
    self.products = self._units * self._runs * self._inner * seconds_of(unit.flops, flops)
    self.products += self._losses * self._outer * seconds_of(rest.flops, flops)
    self.products /= split
    self.traffic = self._moved() / machine.chip.reached_bandwidth

  @property
  def estimate(self) -> Estimate:
    kernels = self.products + self.traffic
    hidden, exposed = self.sent
    sent = max(hidden - _OVERLAP * kernels, 0.02 * hidden) + exposed
    state = self._state.all - (self._state.moments if self._streams else 0.0)
    return Estimate(state + self._memory(), kernels + sent, state)

  @property
  def _free_slots(self) -> float:
    """Bytes of activations in the slots that dropless experts have beyond the mean of a device."""
    e, devices = self._experiment, self._sizes.get('expert', 1)
    if not isinstance(e, MixtureOfExperts) or not e.USE_DROPLESS_MOE:
      return 0.0
    room = min(e.DROPLESS_BUFFER_FACTOR or devices, devices)
    widths = 2 * e.MODEL_DIMS + (3 if e.USE_GATED_EXPERTS else 2) * e.EXPERT_HIDDEN_DIMS
    tokens = self._inner * ROWS * e.MAX_SEQ_LEN * e.NUM_EXPERTS_PER_TOKEN
    return max(room - 1, 0) * tokens * widths * self._width

  def _moved(self) -> float:
    """Returns the bytes that all kernels but products read and write."""
    state, runs, parts = self._state, self._units * self._runs, self._candidate.microbatches
    moved = runs * self._all * (_FORWARD_TRAFFIC * (1 + self._again) + _BACKWARD_TRAFFIC)
    again = self._candidate.values['NUM_LOSS_CHUNKS'] > 1  # so are the logits of chunks
    moved += self._losses * self._logits * (_FORWARD_TRAFFIC * (1 + again) + _BACKWARD_TRAFFIC)
    if self._has_loop:
      # a loop copies what it keeps, and each layer's weights and gradients
      moved += 2 * runs * self._saved
      if not self._gathers_once:
        moved += 4 * parts * state.layers
      elif self._repeats > 1:  # one group's weights are read in place, its gradients added up
        moved += 12 * self._runs * state.layers
    # Adam reads parameters, moments and gradients, and the norm reads the gradients once more
    moved += (8 + (2 * parts if self._losses > 1 else 0)) * state.trained
    # weights in the type of products
    return moved + 1.5 * (1 if self._gathers_once else self._runs) * (state.layers + state.others)

  def _memory(self) -> float:
    """Returns the peak memory in bytes besides the state."""
    e, state, sizes = self._experiment, self._state, self._sizes
    gradients = state.trained * (0.5 if e.GRADIENT_DTYPE == 'bfloat16' else 1)
    activations = max(_BACKWARD * self._all - self._saved, 0.0)
    unit = state.layers / self._units  # its weights
    running = activations + 4 * unit  # weights and gradients of two units
    mdl, chunks = sizes.get('mdl', 1), self._candidate.values['NUM_LOSS_CHUNKS']
    tokens = self._outer * ROWS * e.MAX_SEQ_LEN / sizes.get('context', 1)
    logits = tokens * e.VOCAB_SIZE * self._width / (1 if e.VOCAB_SIZE % mdl else mdl)
    # the gradient of whole logits takes their place; that of a chunk is computed in float32
    head = logits / chunks * (1.3 if chunks == 1 else 2.4)
    head += 1.5 * e.VOCAB_SIZE * e.MODEL_DIMS * self._width / mdl  # the table's gradient
    rest = max(self._rest - (logits if chunks == 1 else 0.0), 0.0)
    start = self.kept + max(head, running)
    if self._has_loop:
      start += gradients  # a loop allocates the gradients of all layers before it runs
    end = gradients + running + self.kept / self._units
    if self._gathers_once:
      # the weights of a stage are whole over data, and so are the float32 sums of their gradients
      start = self.kept + head + state.layers
      end = self.kept + activations + unit + state.layers * (1 + 4 / self._width) - rest
    if self._streams:
      end = max(end, gradients + 3 * state.streamed)  # moments of a layer, old and new
    accumulated = state.trained if self._losses > 1 else 0.0  # their sum is in float32
    return accumulated + rest + max(start, end) + _CODE

  @property
  def sent(self) -> tuple[float, float]:
    """Seconds of collectives that kernels can hide, and of those that one waits for."""
    e, sizes, state, layout = self._experiment, self._sizes, self._state, self._candidate.layout
    links = Links(sizes, dict(zip(layout.axes, layout.near, strict=True)))

    def seconds(axes: tuple[str, ...], total: float, factor: float) -> float:
      axes = tuple(a for a in axes if sizes.get(a, 1) > 1)
      size = math.prod(sizes[a] for a in axes)
      near, far = links.split(axes, total * factor * (size - 1) / size) if size > 1 else (0.0, 0.0)
      return near / self._machine.chip.ici_bandwidth + far / self._machine.chip.dcn_bandwidth

    tokens = self._inner * ROWS * e.MAX_SEQ_LEN
    width = tokens / sizes.get('context', 1) * e.MODEL_DIMS * self._width
    # FSDP: weights are gathered forward and backward, and gradients are scattered
    # (the layers of a pipeline once a step), over the axes that split weights
    of_weights = ('data',) if 'stage' in sizes else ('data', 'context')
    gathers = 1 if self._is_pipeline else self._runs
    # a TPU hides little behind the kernels of dropless experts
    is_dropless = isinstance(e, MixtureOfExperts) and e.USE_DROPLESS_MOE
    experts = state.experts if is_dropless and self._machine.platform == 'tpu' else 0.0
    hidden = seconds(of_weights, (state.layers - experts) * gathers + state.others, 3)
    hidden += seconds(('replica',), state.trained, 2)
    # tensor parallelism: two gathers and two scatters of the width in each pass of a block
    units, again = self._units * self._runs, self._again > 0
    blocks = units * e.blocks_per_layer
    exposed = seconds(('mdl',), width * blocks, 8 + 2 * again)
    exposed += seconds(('mdl',), width, 4 * self._runs)
    kv = tokens * e.NUM_KV_HEADS * e.DIMS_PER_HEAD * self._width / sizes.get('mdl', 1)
    exposed += seconds(('context',), kv * blocks, 2 * (2 + again))
    exposed += seconds(of_weights, experts * gathers, 3)
    if isinstance(e, MixtureOfExperts):
      slots = e.NUM_EXPERTS_PER_TOKEN * (1 if e.USE_DROPLESS_MOE else e.EXPERT_CAPACITY_FACTOR)
      exposed += seconds(('expert',), width * slots * units, 4 + 2 * again)
    # rows travel to the next stage, to the first one and from the last one; some are hidden
    return hidden, exposed + seconds(('stage',), width * self._runs * self._repeats, 4)
