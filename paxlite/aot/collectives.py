"""The collectives of a compiled program: how often each one runs, and along which mesh axes."""

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping

import numpy as np

from paxlite.aot.hlo import Computation, Instruction, Program, arrays_of, split

KINDS = (
  'all-gather', 'all-reduce', 'reduce-scatter', 'all-to-all', 'ragged-all-to-all',
  'collective-permute', 'collective-broadcast',
)  # fmt: skip
BETWEEN_SLICES = 'dcn'  # the name for traffic between TPU slices, which goes through hosts


@dataclasses.dataclass(frozen=True)
class Collective:
  """One collective instruction.

  Its bytes are those of the complete array on one device: the result of an all-gather, the operand
  of a reduce-scatter. The axes are those of the mesh along which devices take part together.
  """

  kind: str  # one of KINDS
  bytes: int
  axes: tuple[str, ...]
  size: int  # devices that take part together
  count: int  # runs in one call of the program
  computation: str
  instruction: str
  channel: str | None  # its copies share it: a TPU repeats a collective in several fusions

  @property
  def sent_bytes(self) -> float:
    """Bytes that one device sends in all runs, by the usual ring algorithms."""
    share = (self.size - 1) / self.size if self.size else 1.0
    factor = {'all-reduce': 2 * share, 'collective-permute': 1.0, 'collective-broadcast': 1.0}
    return self.bytes * self.count * factor.get(self.kind, share)


def collectives(program: Program, mesh_sizes: Mapping[str, int]) -> list[Collective]:
  """Returns the collectives of a program that was compiled for a mesh with these sizes."""
  found: list[Collective] = []
  seen: set[str] = set()
  waiting = [(program.entry, 1, False)]
  while waiting:
    computation, count, in_fusion = waiting.pop()
    for instruction in computation:
      trips = program.trips(computation, instruction)
      fused = instruction.opcode == 'fusion' or (in_fusion and instruction.opcode != 'while')
      waiting += [(c, count * trips, fused) for c in program.called(instruction)]
      one = collective(computation, instruction, mesh_sizes, count)
      # a TPU repeats a collective in every fusion that it overlaps with
      if one is not None and not (in_fusion and one.channel in seen):
        found.append(one)
        if in_fusion and one.channel:
          seen.add(one.channel)
  return found


def collective(
  computation: Computation, instruction: Instruction, mesh_sizes: Mapping[str, int], count: int = 1
) -> Collective | None:
  """Returns the collective that an instruction is or starts; None for other instructions."""
  where = (computation.name, instruction.name, instruction.attribute('channel_id'))
  transfer = instruction.opcode == 'send' and re.search(
    r'_xla_megascale_transfer_type="(\w+)"', instruction.attributes
  )
  if transfer:
    kind = transfer[1].lower().replace('_', '-')
    return Collective(kind, instruction.bytes, (BETWEEN_SLICES,), 2, count, *where)
  kind = instruction.opcode.removesuffix('-start')
  if kind not in KINDS:
    return None
  shape = instruction.shape
  if kind != instruction.opcode and kind != 'all-reduce':  # (operands, results, …)
    shape = split(shape[1:-1])[1]
  axes, size = _axes(_groups(instruction.attributes), mesh_sizes)
  if size == 1:
    return None
  total = sum(a.bytes for a in arrays_of(shape))
  if kind == 'ragged-all-to-all':  # either side has room for more than travels
    given = computation.arrays(instruction.operands[0])
    total = min(total, sum(a.bytes for a in given))
  if kind == 'all-reduce' and computation.name.startswith('all-reduce-scatter'):
    kind = 'reduce-scatter'
  elif kind == 'reduce-scatter':
    total *= size
  return Collective(kind, total, axes, size, count, *where)


def _groups(line: str) -> np.ndarray | None:
  """Returns device positions in the mesh, [groups, size], at least for the first group."""
  if match := re.search(r'source_target_pairs=\{\{(.*?)\}\}', line):
    return np.array([_integers(pair) for pair in match[1].split('},{')])
  if match := re.search(r'replica_groups=\{\{(.*?)\}', line):
    return np.array([_integers(match[1])])
  if match := re.search(r'replica_groups=\[([\d,]+)\](<=\[[\d,]+\](?:T\([\d,]+\))?)', line):
    return _iota(match[2]).reshape(_integers(match[1]))
  if match := re.search(r'replica_groups=mesh\[(.*?)\](?:, device_ids=\((.*?)\))? \{(.*?)\}', line):
    return _mesh_groups(*match.groups())
  return None


def _integers(text: str) -> list[int]:
  return [int(n) for n in re.findall(r'\d+', text)]


def _iota(text: str) -> np.ndarray:
  """Returns the numbers of an iota: '<=[2,4]T(1,0)' is 0 to 7 as [2, 4], transposed and flat."""
  dims, _, order = text.partition('T')
  numbers = np.arange(math.prod(_integers(dims))).reshape(_integers(dims))
  return (numbers.transpose(_integers(order)) if order else numbers).reshape(-1)


def _mesh_groups(axes: str, ids: str | None, along: str) -> np.ndarray:
  """Returns the groups of "mesh['a'=2,'b'=4] {'b'}"; {'b':(1)2} is the major half of axis b."""
  sizes = {name: int(n) for name, n in re.findall(r"'(\w+)'=(\d+)", axes)}
  wanted = re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", along)
  shape: list[int] = []
  kept: list[int] = []
  for name, size in sizes.items():
    cuts = {1, size}
    parts = [(int(before or 1), int(n or size)) for axis, before, n in wanted if axis == name]
    cuts |= {edge for before, n in parts for edge in (before, before * n)}
    edges = sorted(cuts)
    for low, high in itertools.pairwise(edges):
      if any(before <= low and high <= before * n for before, n in parts):
        kept.append(len(shape))
      shape.append(high // low)
  count = math.prod(shape)
  if ids is None:
    order = np.arange(count)
  else:
    order = _iota('<=' + ids) if ids.startswith('[') else np.array(_integers(ids))
  others = [i for i in range(len(shape)) if i not in kept]
  members = math.prod(shape[i] for i in kept)
  return order.reshape(shape).transpose(others + kept).reshape(-1, members)


def _axes(groups: np.ndarray | None, mesh_sizes: Mapping[str, int]) -> tuple[tuple[str, ...], int]:
  """Returns the mesh axes along which the members of a group differ, and the number of members."""
  shape = list(mesh_sizes.values())
  total = math.prod(shape)
  if groups is None or not groups.size:
    groups = np.arange(total)[None]
  if groups.max() >= total:
    return (), groups.shape[1]
  # a pair of a permutation may wrap around, so every pair is examined
  coordinates = np.stack(np.unravel_index(groups, shape))
  differ = (coordinates != coordinates[:, :, :1]).any((1, 2))
  return tuple(a for a, d in zip(mesh_sizes, differ, strict=True) if d), groups.shape[1]
