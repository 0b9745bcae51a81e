"""The kernels, FLOPs and memory traffic of one run of a compiled program on one device.

The compiler's own cost analysis counts the body of a loop once and does not exist for GPUs. This
module reads the program's text instead, with each loop as often as it runs.
"""

import collections
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Literal

from paxlite.aot.flops import attention_call, flops_of
from paxlite.aot.hlo import Computation, Instruction, Program
from paxlite.aot.traffic import Traffic
from paxlite.layers.attention.cudnn_call import MORE_SEGMENTS

Platform = Literal['cpu', 'gpu', 'tpu']
_HOST = 5  # XLA's number of the memory of the host


@dataclasses.dataclass(frozen=True)
class DeviceKernel:
  """One instruction that takes time, in its computation."""

  instruction: Instruction
  computation: Computation
  flops: Mapping[str, float]  # of one run, by the type of the operands, such as bf16
  bytes: int  # that one run reads from and writes to main memory
  peak_share: float | None = None  # of the peak FLOP/s that a kernel of attention reaches


class Costs:
  """The costs of a program."""

  def __init__(self, program: Program, platform: Platform):
    """Reads nothing yet of a program that was compiled for a kind of device."""
    self.program = program
    self._platform = platform
    self._traffic = Traffic(program, platform == 'gpu')

  def kernels(self) -> Iterator[tuple[DeviceKernel, int]]:
    """Yields every instruction that takes time, and how often it runs."""
    for computation, instruction, count in self.instructions():
      if kernel := self.kernel(computation, instruction):
        yield kernel, count

  def instructions(self) -> Iterator[tuple[Computation, Instruction, int]]:
    """Yields each instruction that runs no computation of the program, and how often it runs."""
    waiting = [(self.program.entry, 1)]
    while waiting:
      computation, count = waiting.pop()
      for instruction in computation:
        if called := self.called(instruction):
          trips = self.program.trips(computation, instruction)
          waiting += [(c, count * trips) for c in called]
        else:
          yield computation, instruction, count

  def flops(self) -> dict[str, float]:
    """Returns FLOPs by the type of the operands."""
    found: collections.Counter[str] = collections.Counter()
    for kernel, count in self.kernels():
      found.update({dtype: count * n for dtype, n in kernel.flops.items()})
    return dict(found)

  def traffic(self) -> int:
    """Returns bytes that are read from and written to main memory."""
    return sum(kernel.bytes * count for kernel, count in self.kernels())

  def kernel(self, computation: Computation, instruction: Instruction) -> DeviceKernel | None:
    """Returns an instruction's kernel; None if it takes no time."""
    flops = flops_of(self.program, computation, instruction, self._platform == 'tpu')
    moved = self._traffic.moved(computation, instruction)
    if not flops and not moved:
      return None
    call = attention_call(instruction, computation) if flops else None
    share = None if call is None else call[0].peak_share(call[1])
    return DeviceKernel(instruction, computation, flops, moved, share)

  def called(self, instruction: Instruction) -> list[Computation]:
    """Returns the computations that run in place of an instruction, which fusions do not have."""
    if instruction.opcode == 'conditional':
      return self._usual_branch(instruction)
    is_container = instruction.opcode in ('while', 'call', 'async-start')
    return self.program.called(instruction) if is_container else []

  def _usual_branch(self, conditional: Instruction) -> list[Computation]:
    """Returns the branch of a conditional that moves most of those for usual steps."""
    branches = self.program.called(conditional)
    is_usual = lambda branch: all(MORE_SEGMENTS not in i.source for i in branch)
    branches = list(filter(is_usual, branches)) or branches
    moved = lambda branch: sum(k.bytes for i in branch if (k := self.kernel(branch, i)) is not None)
    return [max(branches, key=moved)] if branches else []


def host_copy(instruction: Instruction) -> tuple[int, bool] | None:
  """Returns (bytes, whether they go to the host) of the copy that an instruction starts, or None.

  The shape of such an instruction is a tuple of its operands, its result and a number. An
  instruction that reads a slice has (array on the host, slice, number). One that writes a slice has
  (array on the host, slice, the same array, number).
  """
  if not instruction.opcode.endswith('-start'):
    return None
  there = [a for a in instruction.arrays if a.space == _HOST]
  moved = max((a.bytes for a in instruction.arrays if a.space != _HOST and a.dims), default=0)
  if not there or not moved:
    return None
  is_copy = instruction.opcode == 'copy-start'  # (result, operand, number)
  return moved, instruction.arrays[0].space == _HOST if is_copy else len(there) > 1


def host_traffic(costs: Costs) -> tuple[int, int]:
  """Returns the bytes that a run of a program reads from the host, and those that it writes."""
  moved = [0, 0]
  for _, instruction, count in costs.instructions():
    if copy := host_copy(instruction):
      moved[copy[1]] += copy[0] * count
  return moved[0], moved[1]
