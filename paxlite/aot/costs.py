"""What a compiled program does: FLOPs, memory traffic, and collectives that nothing hides.

The compiler's own cost analysis counts the body of a loop once and does not exist for GPUs. This
module reads the program's text instead. Every count is that of one device in one run.

- FLOPs are those of matrix multiplications in any form: dots, convolutions, cuBLAS, cuDNN's
  attention, and kernels that state their own cost.
- Memory traffic is what each instruction reads from and writes to the device's main memory. A
  fusion reads its operands once and writes its results once. A slice reads the slice alone, an
  update in place writes the update alone. What is in a memory on the chip (VMEM, SMEM) is left out.
- The schedule is played in the order of the text. A kernel takes the longer of its FLOPs at the
  peak and its traffic at the bandwidth. A collective takes its bytes at the bandwidth of its links,
  and what no kernel hides between its start and its end is exposed.
"""

import collections
import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

from paxlite.aot.collectives import Collective, collective
from paxlite.aot.hlo import Array, Computation, Instruction, Program

Platform = Literal['cpu', 'gpu', 'tpu']

# Instructions that move nothing.
_FREE = frozenset({
  'parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast', 'partition-id', 'replica-id',
  'after-all', 'opt-barrier', 'add-dependency', 'domain', 'send-done', 'recv', 'recv-done',
  'while', 'call', 'conditional', 'async-start', 'async-update', 'async-done', 'copy-done',
  'slice-done',
})  # fmt: skip
# Custom calls that move nothing.
_FREE_CALLS = frozenset({
  'AllocateBuffer', 'ConcatBitcast', 'AssumeGatherIndicesInBound', 'AsyncCollectiveStart',
  'AsyncCollectiveDone', 'Sharding', 'GatherScatterIndicesBitpacked', 'PartitionId',
})  # fmt: skip
_ONE_READ = ('dynamic-slice', 'slice', 'gather')
_PASSES = ('bitcast', 'reshape', 'copy', 'convert')  # as far as updates in place go


@dataclasses.dataclass(frozen=True)
class Kernel:
  """One instruction that takes time.

  Attributes:
    instruction: The instruction.
    computation: The computation that it is in.
    flops: FLOPs of one run by the type of the operands, such as bf16.
    bytes: Bytes that one run reads from and writes to main memory.
  """

  instruction: Instruction
  computation: Computation
  flops: Mapping[str, float]
  bytes: int


@dataclasses.dataclass(frozen=True)
class Speed:
  """What the device does in a second.

  Attributes:
    flops: FLOP/s at the peak by the type of the operands; '' is the type that is not listed.
    memory: Bytes/s of main memory.
    link: Seconds that a collective takes.
  """

  flops: Mapping[str, float]
  memory: float
  link: Callable[[Collective], float]

  def compute(self, flops: Mapping[str, float]) -> float:
    """Seconds for FLOPs at the peak."""
    return sum(n / self.flops.get(dtype, self.flops['']) for dtype, n in flops.items())

  def kernel(self, kernel: Kernel) -> float:
    """Seconds of one run of a kernel."""
    return max(self.compute(kernel.flops), kernel.bytes / self.memory)


@dataclasses.dataclass
class Timeline:
  """Seconds of a program, or of a part of it.

  Attributes:
    compute_bound: Seconds of kernels whose FLOPs take longer than their memory traffic.
    memory_bound: Seconds of the other kernels.
    exposed: Seconds in which only collectives run.
    collectives: Seconds of all collectives, hidden or exposed.
  """

  compute_bound: float = 0.0
  memory_bound: float = 0.0
  exposed: float = 0.0
  collectives: float = 0.0

  @property
  def kernels(self) -> float:
    return self.compute_bound + self.memory_bound

  @property
  def seconds(self) -> float:
    return self.kernels + self.exposed

  def add(self, other: 'Timeline', times: int = 1) -> None:
    for field in dataclasses.fields(self):
      value = getattr(self, field.name) + times * getattr(other, field.name)
      setattr(self, field.name, value)


class Costs:
  """The costs of a program."""

  def __init__(self, program: Program, platform: Platform, mesh_sizes: Mapping[str, int]):
    """Reads nothing yet.

    Args:
      program: The compiled program.
      platform: The kind of device that it was compiled for.
      mesh_sizes: Sizes by axis of the mesh that it was compiled for.
    """
    self.program = program
    self._platform = platform
    self._mesh_sizes = mesh_sizes

  def kernels(self) -> Iterator[tuple[Kernel, int]]:
    """Every instruction that takes time, and how often it runs."""
    waiting = [(self.program.entry, 1)]
    while waiting:
      computation, count = waiting.pop()
      for instruction in computation:
        if instruction.opcode in ('while', 'call', 'async-start'):
          trips = self._trips(computation, instruction)
          waiting += [(c, count * trips) for c in self.program.called(instruction)]
        elif instruction.opcode == 'conditional':
          waiting += [(c, count) for c in self._dearest(instruction)]
        elif kernel := self.kernel(computation, instruction):
          yield kernel, count

  def flops(self) -> dict[str, float]:
    """FLOPs by the type of the operands."""
    found: dict[str, float] = collections.defaultdict(float)
    for kernel, count in self.kernels():
      for dtype, n in kernel.flops.items():
        found[dtype] += count * n
    return dict(found)

  def traffic(self) -> int:
    """Bytes that are read from and written to main memory."""
    return sum(kernel.bytes * count for kernel, count in self.kernels())

  def traffic_by_source(self) -> dict[str, int]:
    """Bytes of main memory by the part of the model that they come from, most first."""
    found: collections.Counter[str] = collections.Counter()
    for kernel, count in self.kernels():
      found[part_of(kernel.instruction.source)] += kernel.bytes * count
    return dict(found.most_common())

  def timeline(self, speed: Speed) -> Timeline:
    """The schedule at these speeds."""
    return self._timeline(self.program.entry, speed)

  def kernel(self, computation: Computation, instruction: Instruction) -> Kernel | None:
    """The kernel that an instruction is; None where it takes no time of its own."""
    if instruction.opcode in _FREE or instruction.opcode.endswith('-done'):
      return None
    if instruction.quoted('custom_call_target') in _FREE_CALLS:
      return None
    flops = self._flops(computation, instruction)
    moved = self._moved(computation, instruction)
    return Kernel(instruction, computation, flops, moved) if flops or moved else None

  def _trips(self, computation: Computation, instruction: Instruction) -> int:
    return self.program.trips(computation, instruction) if instruction.opcode == 'while' else 1

  def _dearest(self, conditional: Instruction) -> list[Computation]:
    """The branch of a conditional that moves most."""
    branches = self.program.called(conditional)
    moved = lambda branch: sum(k.bytes for i in branch if (k := self.kernel(branch, i)) is not None)
    return [max(branches, key=moved)] if branches else []

  # Time

  def _timeline(self, computation: Computation, speed: Speed) -> Timeline:
    line = Timeline()
    clock = link_free = 0.0
    ends: dict[str, float] = {}  # of collectives that are under way, by instruction or channel
    for instruction in computation:
      if instruction.opcode in ('while', 'call', 'conditional', 'async-start'):
        is_branch = instruction.opcode == 'conditional'
        called = self._dearest(instruction) if is_branch else self.program.called(instruction)
        for inner in (self._timeline(c, speed) for c in called):
          trips = self._trips(computation, instruction)
          line.add(inner, trips)
          clock += inner.seconds * trips
        continue
      waited_for = self._end_of(computation, instruction)
      if waited_for in ends:
        end = ends.pop(waited_for)
        line.exposed += max(end - clock, 0.0)
        clock = max(clock, end)
        continue
      if kernel := self.kernel(computation, instruction):
        seconds = speed.kernel(kernel)
        if speed.compute(kernel.flops) >= kernel.bytes / speed.memory:
          line.compute_bound += seconds
        else:
          line.memory_bound += seconds
        clock += seconds
      for key, one, is_async in self._started(computation, instruction):
        if key in ends:
          continue
        seconds = speed.link(one)
        line.collectives += seconds
        end = link_free = max(clock, link_free) + seconds
        if is_async:
          ends[key] = end
        else:
          line.exposed += end - clock
          clock = end
    if ends:
      line.exposed += max(max(ends.values()) - clock, 0.0)
    return line

  def _started(
    self, computation: Computation, instruction: Instruction
  ) -> Iterator[tuple[str, Collective, bool]]:
    """(key of the end, collective, whether others run meanwhile) of what an instruction starts."""
    if one := collective(computation, instruction, self._mesh_sizes):
      starts = instruction.opcode.endswith('-start') or instruction.opcode == 'send'
      yield instruction.name, one, starts
    if instruction.opcode != 'fusion':
      return
    # a TPU starts a collective in a fusion and repeats it in those that run meanwhile
    for inner in self._inside(instruction):
      for i in inner:
        if one := collective(inner, i, self._mesh_sizes):
          has = {j.quoted('custom_call_target') for j in inner}
          if 'AsyncCollectiveStart' in has or 'AsyncCollectiveDone' not in has:
            is_async = 'AsyncCollectiveStart' in has or self._has_start(computation, i)
            if 'AsyncCollectiveStart' in has or not is_async:
              yield f'channel {i.attribute("channel_id")}', one, is_async

  def _has_start(self, computation: Computation, instruction: Instruction) -> bool:
    """Whether another fusion of the computation starts the collective of a fusion."""
    channel = instruction.attribute('channel_id')
    for other in computation:
      if other.opcode == 'fusion':
        for inner in self._inside(other):
          if any(j.quoted('custom_call_target') == 'AsyncCollectiveStart' for j in inner) and any(
            j.attribute('channel_id') == channel for j in inner
          ):
            return True
    return False

  def _end_of(self, computation: Computation, instruction: Instruction) -> str | None:
    """The key of the collective that an instruction waits for."""
    if instruction.opcode.endswith('-done') and instruction.operands:
      return instruction.operands[0]
    if instruction.opcode == 'fusion':
      for inner in self._inside(instruction):
        if any(i.quoted('custom_call_target') == 'AsyncCollectiveDone' for i in inner):
          for i in inner:
            if channel := i.attribute('channel_id'):
              return f'channel {channel}'
    return None

  def _inside(self, fusion: Instruction) -> list[Computation]:
    """The computations of a fusion, with those of fusions in it."""
    found = self.program.called(fusion)
    for inner in found:
      found = found + [c for i in inner if i.opcode == 'fusion' for c in self._inside(i)]
    return found

  # FLOPs

  def _flops(self, computation: Computation, instruction: Instruction) -> dict[str, float]:
    if instruction.opcode == 'fusion':
      found: collections.Counter[str] = collections.Counter()
      for inner in self.program.called(instruction):
        for i in inner:
          found.update(self._flops(inner, i))
      return dict(found)
    operands = [a for name in instruction.operands for a in computation.arrays(name)]
    if instruction.opcode == 'dot':
      n = _dot_flops(instruction, operands[0])
    elif instruction.opcode == 'convolution':
      n = convolution_flops(instruction, operands[0], operands[1])
    elif instruction.opcode == 'ragged-dot':
      n = 2.0 * instruction.arrays[0].size * operands[0].dims[-1]
    elif instruction.opcode == 'custom-call':
      n = _custom_call_flops(instruction, operands)
    else:
      return {}
    if not n:
      return {}
    passes = 6 if self._platform == 'tpu' and 'highest' in instruction.attributes else 1
    dtype = min(operands[:2], key=lambda a: a.bytes / max(a.size, 1)).dtype
    return {dtype: n * passes}

  # Memory

  def _in_memory(self, array: Array) -> int:
    """The bytes of an array that is in main memory; else 0."""
    main = (0, 1) if self._platform == 'gpu' else (0,)  # a GPU has its collectives' memory as 1
    return array.bytes if array.space in main else 0

  def _moved(self, computation: Computation, instruction: Instruction) -> int:
    opcode = instruction.opcode
    bytes_of = lambda name: sum(map(self._in_memory, computation.arrays(name)))
    results = sum(map(self._in_memory, instruction.arrays))
    if opcode == 'fusion':
      return self._moved_by_fusion(computation, instruction)
    if opcode in _ONE_READ:
      whole = computation.arrays(instruction.operands[0])
      read = instruction.bytes if any(map(self._in_memory, whole)) else 0
      return read + results
    if opcode == 'dynamic-update-slice':
      update = sum(a.bytes for a in computation.arrays(instruction.operands[1]))
      return bytes_of(instruction.operands[1]) + (update if results else 0)
    if opcode == 'scatter':
      updates = instruction.operands[len(instruction.arrays) :]
      return sum(map(bytes_of, updates)) + 2 * bytes_of(updates[-1])
    if opcode in ('copy-start', 'slice-start'):
      arrays = instruction.arrays
      target = arrays[0] if opcode == 'copy-start' else arrays[1]
      source = computation.arrays(instruction.operands[0])
      read = target.bytes if any(map(self._in_memory, source)) else 0
      return read + self._in_memory(target)
    reads = sum(bytes_of(name) for name in dict.fromkeys(instruction.operands))
    if opcode.endswith('-start'):  # (operands, results)
      results = max(results - reads, 0)
    return reads + results

  def _moved_by_fusion(self, computation: Computation, fusion: Instruction) -> int:
    total = 0
    for inner in self.program.called(fusion):
      for parameter, name in zip(inner.parameters, fusion.operands, strict=False):
        whole = sum(map(self._in_memory, computation.arrays(name)))
        if whole:
          total += min(self._read(inner, parameter.name), whole)
      outputs = inner.root.operands if inner.root.opcode == 'tuple' else (inner.root.name,)
      arrays = fusion.arrays
      if len(arrays) == len(outputs):
        for name, array in zip(outputs, arrays, strict=True):
          if self._in_memory(array):
            total += self._written(inner, name)
      else:
        total += 0 if self._is_collective(inner.root) else sum(map(self._in_memory, arrays))
    return total

  def _read(self, inner: Computation, name: str) -> int:
    """Bytes that a fusion reads of one value: slices alone where nothing else is used."""
    arrays = inner.arrays(name)
    whole, size = sum(a.bytes for a in arrays), sum(a.size for a in arrays)
    return min(self._elements_read(inner, name) * whole // max(size, 1), whole)

  def _elements_read(self, inner: Computation, name: str, copied: bool = False) -> int:
    total = 0
    for user in inner.users.get(name, ()):
      if self._is_collective(user):
        continue
      if user is inner.root and user.opcode == 'tuple':  # an output that is the input, or a copy
        total += sum(a.size for a in inner.arrays(name)) if copied else 0
      elif self._passed_on(user) == name:
        is_copy = copied or user.opcode != 'bitcast'
        if user is not inner.root:
          total += self._elements_read(inner, user.name, is_copy)
        elif is_copy:
          total += user.arrays[0].size
      elif user.opcode in _ONE_READ and user.operands[0] == name:
        total += user.arrays[0].size
      elif user.opcode == 'dynamic-update-slice' and user.operands[0] == name:
        continue
      elif user.opcode == 'fusion':
        for deeper in self.program.called(user):
          for parameter, operand in zip(deeper.parameters, user.operands, strict=False):
            total += self._elements_read(deeper, parameter.name) if operand == name else 0
      else:
        return sum(a.size for a in inner.arrays(name))
    return total

  def _passed_on(self, instruction: Instruction) -> str | None:
    """The operand that an instruction in a fusion passes on, perhaps in another layout or type."""
    if instruction.opcode in _PASSES:
      return instruction.operands[0]
    if instruction.opcode == 'fusion' and len(instruction.operands) == 1:
      for deeper in self.program.called(instruction):
        if self._comes_from_a_parameter(deeper, deeper.root):
          return instruction.operands[0]
    return None

  def _origin(self, inner: Computation, made: Instruction) -> Instruction:
    """The instruction of a fusion that a value comes from, past those that pass it on."""
    while (name := self._passed_on(made)) is not None:
      made = inner.get(name)
    return made

  def _comes_from_a_parameter(self, inner: Computation, made: Instruction) -> bool:
    return self._origin(inner, made).opcode == 'parameter'

  def _written(self, inner: Computation, name: str) -> int:
    """Bytes that a fusion writes of one result: the update alone where it is done in place."""
    made = inner.get(name)
    while made.opcode == 'bitcast':
      made = inner.get(made.operands[0])
    if made.opcode == 'parameter' or self._is_collective(made):
      return 0
    origin = self._origin(inner, made)
    if origin.opcode in ('dynamic-update-slice', 'scatter'):
      if self._comes_from_a_parameter(inner, inner.get(origin.operands[0])):
        updates = origin.operands[1 if origin.opcode == 'dynamic-update-slice' else -1]
        return sum(a.bytes for a in inner.arrays(updates))
    elif origin.opcode == 'fusion' and (deeper := self.program.called(origin)):
      return self._written(deeper[0], deeper[0].root.name)
    return made.bytes

  def _is_collective(self, instruction: Instruction) -> bool:
    return (
      collective(self.program.entry, instruction, {}) is not None
      or instruction.quoted('custom_call_target') in _FREE_CALLS
    )


def _dot_flops(dot: Instruction, left: Array) -> float:
  contracted = re.search(r'lhs_contracting_dims=\{([\d,]*)\}', dot.attributes)
  dims = [int(n) for n in contracted[1].split(',') if n] if contracted else []
  return 2.0 * dot.arrays[0].size * math.prod(left.dims[d] for d in dims)


def convolution_flops(convolution: Instruction, left: Array, right: Array) -> float:
  """FLOPs of a convolution, with products of padding and of holes left out.

  A TPU's matrix multiplications are convolutions: a batch dimension is a spatial one whose window
  meets one element at a time, so the size of the window alone says nothing.
  """
  labels = re.search(r'dim_labels=(\w+)_(\w+)->(\w+)', convolution.attributes)
  if labels is None:
    return 0.0
  of = lambda dims, names: dict(zip(names, dims, strict=True))
  inputs, kernel = of(left.dims, labels[1]), of(right.dims, labels[2])
  output = of(convolution.arrays[0].dims, labels[3])
  window = re.search(r'window=\{(.*?)\}', convolution.attributes)
  fields = dict(part.split('=') for part in window[1].split()) if window else {}
  split = lambda key: fields[key].split('x') if key in fields else []
  groups = int(convolution.attribute('feature_group_count') or 1)
  batches = int(convolution.attribute('batch_group_count') or 1)
  total: float = 2.0 * inputs['b'] / batches * inputs['f'] / groups * output['f']
  for i, axis in enumerate(sorted(c for c in labels[1] if c.isdigit())):
    at = lambda key, default, i=i: int(split(key)[i]) if split(key) else default
    low = int(split('pad')[i].split('_')[0]) if split('pad') else 0
    total *= _meetings(
      inputs[axis], kernel[axis], output[axis], at('stride', 1), low,
      at('lhs_dilate', 1), at('rhs_dilate', 1),
    )  # fmt: skip
  return total


def _meetings(
  size: int, kernel: int, output: int, stride: int, low: int, dilation: int, window_dilation: int
) -> int:
  """Pairs of an output and an element of the window that meet an element of the input."""
  count = 0
  end = (size - 1) * dilation
  for k in range(kernel):
    first = k * window_dilation - low
    for o in range(output) if dilation > 1 else ():
      position = first + o * stride
      count += 0 <= position <= end and position % dilation == 0
    if dilation == 1:  # outputs o with 0 ≤ first + o·stride ≤ end
      least = max(-(first // stride), 0) if first < 0 else 0
      most = min((end - first) // stride, output - 1)
      count += max(most - least + 1, 0)
  return count


def _custom_call_flops(call: Instruction, operands: list[Array]) -> float:
  target = call.quoted('custom_call_target')
  if 'fmha' in target:
    return _attention_flops(call, operands, 10 if 'Backward' in target else 4)
  if target.startswith('__cublas'):
    contracted = re.search(r'"lhs_contracting_dimensions":\["?(\d+)', call.attributes)
    inner = operands[0].dims[int(contracted[1])] if contracted else 0
    return 2.0 * call.arrays[0].size * inner
  if stated := re.search(
    r'\\?"cost_estimate\\?":\s*\{[^}]*\\?"flops\\?":\s*"?(\d+)', call.attributes
  ):
    return float(stated[1])
  return 0.0


_STATED_COST = re.compile(r'\\?"cost_estimate\\?":\s*\{[^}]*\\?"flops\\?":\s*\\?"?(\d+)')
_SCORES = re.compile(r'"intermediate_tensor_shape":\s*\{.*?"dimensions":\s*(\[.*?\])')


def _attention_flops(call: Instruction, operands: list[Array], products: int) -> float:
  """FLOPs of cuDNN's attention; a causal mask leaves out half."""
  scores = re.search(
    r'"intermediate_tensor_shape":\s*(\{.*?"dimensions":\s*(\[.*?\]))', call.attributes
  )
  if scores is None:
    return 0.0
  dims = [int(n) for n in json.loads(scores[2])]
  causal = re.search(r'"mask_type":\s*"(\w+)"', call.attributes)
  share = 0.5 if causal and 'CAUSAL' in causal[1] else 1.0
  return products * share * math.prod(dims) * operands[0].dims[-1]


_SCOPE = re.compile(
  r'^(jit|jvp|vmap|transpose|checkpoint|remat|pjit|shard_map|while|body|cond|'
  r'closed_call|rematted_computation|named_computation|custom_vjp_call|core_call)\b'
)


def part_of(source: str) -> str:
  """The part of a model that an instruction comes from: the last modules of its path.

  'jit(step)/jvp(TransformerLm.losses)/…/self_attention/rotary/mul' is 'self_attention/rotary'.
  """
  parts = [p for p in source.split('/')[:-1] if p and not _SCOPE.match(p) and '.' not in p]
  names = [p for p in parts if re.fullmatch(r'[a-z_][\w]*', p)]
  return '/'.join(names[-2:]) or 'elsewhere'
