"""Finds the collectives of a compiled program in its HLO text.

XLA's own cost analysis counts the body of a loop only once, and does not know the mesh. This module
counts each collective as often as it runs, and finds the mesh axes along which it runs.
"""

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

_BYTES = {
  'pred': 1, 's4': 1, 'u4': 1, 's8': 1, 'u8': 1, 's16': 2, 'u16': 2, 'bf16': 2, 'f16': 2,
  's32': 4, 'u32': 4, 'f32': 4, 's64': 8, 'u64': 8, 'f64': 8, 'c64': 8,
  'f8e4m3': 1, 'f8e4m3fn': 1, 'f8e5m2': 1, 'f8e4m3b11fnuz': 1, 'f8e8m0fnu': 1,
}  # fmt: skip

KINDS = (
  'all-gather',
  'all-reduce',
  'reduce-scatter',
  'all-to-all',
  'ragged-all-to-all',
  'collective-permute',
  'collective-broadcast',
)
BETWEEN_SLICES = 'dcn'  # the name for traffic between TPU slices, which goes through hosts

_COMPUTATION = re.compile(r'^(ENTRY )?%?([\w.\-]+) \(.*\{$')
_COLLECTIVE = re.compile(rf'^\s+(?:ROOT )?%?[\w.\-]+ = (.*?) ({"|".join(KINDS)})(-start)?\(')
_BETWEEN_SLICES = re.compile(r' = (.*?) send\(.*_xla_megascale_transfer_type="(\w+)"')
_CALL = re.compile(
  r' (?:call|async-start|conditional)\(.*(?:to_apply=|calls=|branch_computations=\{)%?([\w.\-]+)'
)
_SHAPE = re.compile(r'\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]')


@dataclasses.dataclass(frozen=True)
class Collective:
  """One collective instruction.

  Attributes:
    kind: One of KINDS.
    bytes: Bytes of the complete array on one device, which is the result of an all-gather and the
      operand of a reduce-scatter.
    axes: Mesh axes along which devices communicate.
    size: Number of devices in a group that communicates.
    count: Number of runs in one call of the program.
    shape: Shape of the result, as the text of the program has it.
  """

  kind: str
  bytes: int
  axes: tuple[str, ...]
  size: int
  count: int
  shape: str

  @property
  def sent_bytes(self) -> float:
    """Bytes that one device sends in all runs, with the usual ring algorithms."""
    share = (self.size - 1) / self.size if self.size else 1.0
    factor = {'all-reduce': 2 * share, 'collective-permute': 1.0, 'collective-broadcast': 1.0}
    return self.bytes * self.count * factor.get(self.kind, share)


def collectives(text: str, mesh_sizes: Mapping[str, int]) -> list[Collective]:
  """Returns the collectives of a program.

  Args:
    text: Optimized HLO for CPU, GPU or TPU, from `compiled.as_text()`.
    mesh_sizes: Size of each axis of the mesh that the program was compiled for.
  """
  computations, entry = _computations(text)
  found: list[Collective] = []
  seen: set[str] = set()
  for line, count, in_fusion, name in _instructions(computations, entry):
    if megascale := _BETWEEN_SLICES.search(line):
      kind = megascale[2].lower().replace('_', '-')
      size = _bytes(megascale[1])
      found.append(Collective(kind, size, (BETWEEN_SLICES,), 2, count, megascale[1]))
    if not (match := _COLLECTIVE.match(line)):
      continue
    channel = re.search(r'channel_id=(\d+)', line)
    if in_fusion and channel:  # for TPUs, a collective is repeated in fusions that overlap with it
      if channel[1] in seen:
        continue
      seen.add(channel[1])
    shape, kind = match[1], match[2]
    if match[3] and kind != 'all-reduce':  # the shape is a tuple (operands, results, …)
      shape = _elements(shape)[1]
    groups = _groups(line)
    axes, size = _axes(groups, mesh_sizes)
    if size == 1:
      continue
    total = _bytes(shape)
    if kind == 'all-reduce' and name.startswith('all-reduce-scatter'):
      kind = 'reduce-scatter'
    elif kind == 'reduce-scatter':
      total *= size
    found.append(Collective(kind, total, axes, size, count, shape))
  return found


def totals(found: Sequence[Collective]) -> list[tuple[str, tuple[str, ...], int, int, float]]:
  """Returns (kind, axes, runs, bytes, sent bytes) by kind and axes, with the most sent first."""
  groups = collections.defaultdict(list)
  for c in found:
    groups[c.kind, c.axes].append(c)
  rows = [
    (
      kind,
      axes,
      sum(c.count for c in group),
      sum(c.bytes * c.count for c in group),
      sum(c.sent_bytes for c in group),
    )
    for (kind, axes), group in groups.items()
  ]
  return sorted(rows, key=lambda row: -row[4])


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
  """Returns the lines of each computation, and the name of the computation that runs first."""
  found: dict[str, list[str]] = {}
  entry, current = '', None
  for line in text.splitlines():
    if match := _COMPUTATION.match(line):
      current = found.setdefault(match[2], [])
      entry = match[2] if match[1] else entry
    elif line.startswith('}'):
      current = None
    elif current is not None:
      current.append(line)
  return found, entry


def _instructions(
  computations: Mapping[str, list[str]], entry: str
) -> Iterator[tuple[str, int, bool, str]]:
  """Yields (line, runs, whether in a fusion, computation) of all instructions `entry` reaches."""
  waiting = [(entry, 1, False)]
  while waiting:
    name, count, in_fusion = waiting.pop()
    for line in computations.get(name, ()):
      yield line, count, in_fusion, name
      if match := re.search(r' while\(.*body=%?([\w.\-]+)', line):
        waiting.append((match[1], count * _trips(line, computations), False))
      elif match := re.search(r' fusion\(.*calls=%?([\w.\-]+)', line):
        waiting.append((match[1], count, True))
      elif match := _CALL.search(line):
        waiting.append((match[1], count, in_fusion))


def _trips(line: str, computations: Mapping[str, list[str]]) -> int:
  """Returns the number of iterations of a while loop, or 1 if it is unknown."""
  if known := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line):
    return int(known[1])
  condition = re.search(r'condition=%?([\w.\-]+)', line)
  body = '\n'.join(computations.get(condition[1], ())) if condition else ''
  limit = re.search(r'compare\([^,]+, %?([\w.\-]+)\), direction=LT', body)
  value = limit and re.search(rf'%?{re.escape(limit[1])} = \S+ constant\((\d+)\)', body)
  return int(value[1]) if value else 1


def _bytes(shape: str) -> int:
  return sum(
    _BYTES[kind] * math.prod(int(n) for n in dims.split(',') if n)
    for kind, dims in _SHAPE.findall(shape)
    if kind in _BYTES
  )


def _elements(shape: str) -> list[str]:
  """Returns the shapes of the elements of a tuple."""
  depth, parts = 0, ['']
  for c in re.sub(r'/\*.*?\*/', '', shape.strip())[1:-1]:
    depth += (c in '([{') - (c in ')]}')
    if c == ',' and depth == 0:
      parts.append('')
    else:
      parts[-1] += c
  return parts


def _groups(line: str) -> np.ndarray | None:
  """Returns positions of devices in the mesh, [groups, size]; at least those of the first group."""
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
  """Returns the numbers of an iota: <=[2,4]T(1,0) is 0 … 7 as [2, 4], transposed and flattened."""
  dims, _, order = text.partition('T')
  numbers = np.arange(math.prod(_integers(dims))).reshape(_integers(dims))
  return (numbers.transpose(_integers(order)) if order else numbers).reshape(-1)


def _mesh_groups(axes: str, ids: str | None, along: str) -> np.ndarray:
  """Returns the groups of "mesh['a'=2,'b'=4] {'b'}".

  Axes may be split: {'b':(1)2} is the major part of b, of size 2.
  """
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
  # every group is examined, because the pairs of a permutation may wrap around
  places = np.stack(np.unravel_index(groups, shape))
  differ = (places != places[:, :, :1]).any((1, 2))
  return tuple(a for a, d in zip(mesh_sizes, differ, strict=True) if d), groups.shape[1]
