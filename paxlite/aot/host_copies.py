"""Copies between the memory of a device and that of its host, in a compiled program."""

import dataclasses

from paxlite.aot.costs import Costs
from paxlite.aot.hlo import Instruction

HOST = 5  # XLA's number of the memory of the host


@dataclasses.dataclass(frozen=True)
class HostCopy:
  """One copy that runs beside kernels.

  Attributes:
    bytes: What is moved in one run.
    to_host: Whether it goes to the host.
  """

  bytes: int
  to_host: bool


def host_copy(instruction: Instruction) -> HostCopy | None:
  """Returns the copy that an instruction starts; None if it starts none.

  The shape of such an instruction is a tuple of its operands, its result and a number. An
  instruction that reads a slice has (array on the host, slice, number). One that writes a slice has
  (array on the host, slice, the same array, number).
  """
  if not instruction.opcode.endswith('-start'):
    return None
  there = [a for a in instruction.arrays if a.space == HOST]
  moved = max((a.bytes for a in instruction.arrays if a.space != HOST and a.dims), default=0)
  if not there or not moved:
    return None
  is_copy = instruction.opcode == 'copy-start'  # (result, operand, number)
  return HostCopy(moved, instruction.arrays[0].space == HOST if is_copy else len(there) > 1)


def host_traffic(costs: Costs) -> tuple[int, int]:
  """Returns the bytes that a run of a program reads from the host, and those that it writes."""
  read = written = 0
  for _, instruction, count in costs.instructions():
    if copy := host_copy(instruction):
      read += 0 if copy.to_host else copy.bytes * count
      written += copy.bytes * count if copy.to_host else 0
  return read, written
