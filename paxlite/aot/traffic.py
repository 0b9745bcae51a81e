"""Bytes that the instructions of a compiled program read from and write to main memory.

A fusion reads its operands once and writes its results once. A slice reads the slice alone, an
update in place writes the update alone. What is in a memory on the chip (VMEM, SMEM) is left out.
A grouped product reads and writes the rows of an equal load, not all that it has room for.
"""

from collections.abc import Iterable

from paxlite.aot.collectives import collective
from paxlite.aot.flops import grouped_rows
from paxlite.aot.hlo import ArrayShape, Computation, Instruction, Program

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


class Traffic:
  """The traffic of the instructions of one program."""

  def __init__(self, program: Program, gpu: bool):
    """Reads nothing yet.

    Args:
      program: The compiled program.
      gpu: Whether it is for GPUs, where memory 1 is the part of main memory that collectives use.
    """
    self.program = program
    self._main = (0, 1) if gpu else (0,)

  def moved(self, computation: Computation, instruction: Instruction) -> int:
    """Returns bytes of one run of an instruction; 0 where it moves nothing itself."""
    opcode, operands = instruction.opcode, instruction.operands
    if opcode in _FREE or opcode.endswith('-done'):
      return 0
    if instruction.quoted('custom_call_target') in _FREE_CALLS:
      return 0
    inner = self.program.offloaded(computation, instruction)
    if inner is not None and any(collective(inner, i, {}) for i in inner):
      return 0
    if opcode in ('fusion', 'fusion-start'):
      return self._moved_by_fusion(computation, instruction)
    bytes_of = lambda name: self._bytes(computation.arrays(name))
    results = self._bytes(instruction.arrays)
    if rows := grouped_rows(instruction):
      used = [a for name in operands for a in computation.arrays(name)]
      share = lambda a: rows[0] / rows[1] if rows[1] in a.dims else 1
      return round(sum(self._bytes([a]) * share(a) for a in (*used, *instruction.arrays)))
    if opcode in _ONE_READ:
      return (instruction.bytes if bytes_of(operands[0]) else 0) + results
    if opcode == 'dynamic-update-slice':
      update = sum(a.bytes for a in computation.arrays(operands[1]))
      return bytes_of(operands[1]) + (update if results else 0)
    if opcode == 'scatter':
      updates = operands[len(instruction.arrays) :]
      return sum(map(bytes_of, updates)) + 2 * bytes_of(updates[-1])
    if opcode in ('copy-start', 'slice-start'):
      target = instruction.arrays[opcode == 'slice-start']
      return (target.bytes if bytes_of(operands[0]) else 0) + self._bytes([target])
    reads = sum(map(bytes_of, dict.fromkeys(operands)))
    is_start = opcode.endswith('-start')  # its shape is (operands, results)
    return reads + (max(results - reads, 0) if is_start else results)

  def _bytes(self, arrays: Iterable[ArrayShape]) -> int:
    """Returns the bytes of the arrays that are in main memory."""
    return sum(a.bytes for a in arrays if a.space in self._main)

  def _moved_by_fusion(self, computation: Computation, fusion: Instruction) -> int:
    total = 0
    for inner in self.program.called(fusion):
      for parameter, name in zip(inner.parameters, fusion.operands, strict=False):
        if whole := self._bytes(computation.arrays(name)):
          total += min(self._read(inner, parameter.name), whole)
      outputs = inner.root.operands if inner.root.opcode == 'tuple' else (inner.root.name,)
      arrays = fusion.arrays
      if fusion.opcode == 'fusion-start':  # (operands, results, context)
        first = sum(len(computation.arrays(name)) for name in fusion.operands)
        arrays = arrays[first : first + len(outputs)]
      if len(arrays) == len(outputs):
        for name, array in zip(outputs, arrays, strict=True):
          total += self._written(inner, name) if self._bytes([array]) else 0
      elif not self._is_collective(inner.root):
        total += self._bytes(arrays)
    return total

  def _read(self, inner: Computation, name: str) -> int:
    """Returns bytes that a fusion reads of one value: slices alone where nothing else is used."""
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
    """Returns the operand that an instruction in a fusion passes on, in any layout or type."""
    if instruction.opcode in _PASSES:
      return instruction.operands[0]
    if instruction.opcode == 'fusion' and len(instruction.operands) == 1:
      for deeper in self.program.called(instruction):
        if self._origin(deeper, deeper.root).opcode == 'parameter':
          return instruction.operands[0]
    return None

  def _origin(self, inner: Computation, made: Instruction) -> Instruction:
    """Returns the instruction of a fusion that a value comes from, past those that pass it on."""
    while (name := self._passed_on(made)) is not None:
      made = inner.get(name)
    return made

  def _written(self, inner: Computation, name: str) -> int:
    """Returns bytes that a fusion writes of one result: the update alone if it is done in place."""
    made = inner.get(name)
    while made.opcode == 'bitcast':
      made = inner.get(made.operands[0])
    if made.opcode == 'parameter' or self._is_collective(made):
      return 0
    origin = self._origin(inner, made)
    if origin.opcode in ('dynamic-update-slice', 'scatter'):
      if self._origin(inner, inner.get(origin.operands[0])).opcode == 'parameter':
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
