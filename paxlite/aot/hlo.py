"""The text of a compiled program (optimized HLO) as computations and instructions.

The text comes from `compiled.as_text()` or from a file that XLA dumped. It does not say how often
the body of a loop runs, except where the compiler has noted it; `Program.trips` finds that out from
the loop's counter.
"""

import dataclasses
import functools
import math
import operator
import re
from collections.abc import Callable, Iterator

_BITS = {
  'pred': 8, 's2': 2, 'u2': 2, 's4': 4, 'u4': 4, 's8': 8, 'u8': 8, 's16': 16, 'u16': 16,
  'bf16': 16, 'f16': 16, 's32': 32, 'u32': 32, 'f32': 32, 's64': 64, 'u64': 64, 'f64': 64,
  'c64': 64, 'c128': 128, 'f4e2m1fn': 4, 'f8e4m3': 8, 'f8e4m3fn': 8, 'f8e5m2': 8,
  'f8e4m3b11fnuz': 8, 'f8e4m3fnuz': 8, 'f8e5m2fnuz': 8, 'f8e8m0fnu': 8,
}  # fmt: skip

_COMPUTATION = re.compile(r'^(ENTRY )?%?([\w.\-]+)(?: \(.*)? \{$')
_INSTRUCTION = re.compile(r'^\s+(ROOT )?%?([\w.\-]+) = (.*)$', re.S)
_ARRAY = re.compile(r'\b([a-z]+\d*[a-z0-9]*)\[([\d,<=]*)\](\{[^{}]*\})?')
_ROOT = re.compile(r'\s+ROOT %?([\w.\-]+) = ')
# a text in quotation marks, a mark that opens one without an end, or a character between parts
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|["()\[\]{},:]', re.S)
# Instructions that pass on what they are given, as far as the value of a counter goes.
_SAME_VALUE = ('copy', 'bitcast', 'convert', 'reshape', 'copy-done', 'opt-barrier', 'broadcast')


@dataclasses.dataclass(frozen=True)
class ArrayShape:
  """The shape of an array."""

  dtype: str  # in HLO's words
  dims: tuple[int, ...]
  space: int  # the memory that it is in; 0 is the device's main memory

  @property
  def size(self) -> int:
    return math.prod(self.dims)

  @property
  def bytes(self) -> int:
    return (self.size * _BITS.get(self.dtype, 0) + 7) // 8


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One instruction, as text."""

  name: str  # unique in the computation
  opcode: str  # such as fusion or all-gather-start
  shape: str  # of the result
  operands: tuple[str, ...]
  attributes: str  # the text after the operands

  @functools.cached_property
  def arrays(self) -> tuple[ArrayShape, ...]:
    """The arrays of the result, those of nested tuples in turn."""
    return arrays_of(self.shape)

  @property
  def bytes(self) -> int:
    return sum(a.bytes for a in self.arrays)

  def attribute(self, name: str) -> str | None:
    """Returns the text of an attribute up to the next comma or bracket: a name or a number."""
    found = re.search(rf'\b{name}=\{{?%?([\w.\-]+)', self.attributes)
    return found[1] if found else None

  def quoted(self, name: str) -> str:
    """Returns the text of an attribute in quotation marks; '' where it is absent."""
    found = re.search(rf'\b{name}="((?:[^"\\]|\\.)*)"', self.attributes)
    return found[1] if found else ''

  @property
  def source(self) -> str:
    """The path of JAX and Flax scopes that the instruction comes from."""
    return self.quoted('op_name')

  @functools.cached_property
  def called(self) -> tuple[str, ...]:
    """Names of the computations that the instruction runs, a loop's condition left out."""
    if branches := re.search(r'branch_computations=\{(.*?)\}', self.attributes):
      return tuple(re.findall(r'[\w.\-]+', branches[1]))
    names = (self.attribute(name) for name in _CALLED.get(self.opcode, ()))
    return tuple(name for name in names if name)


# attributes that name the computations of an opcode; the to_apply of a reduction is part of it
_CALLED = {
  'while': ('body',), 'conditional': ('true_computation', 'false_computation'),
  'call': ('calls', 'to_apply'), 'async-start': ('calls', 'to_apply'), 'fusion': ('calls',),
  'fusion-start': ('calls',), 'custom-call-start': ('called_computations',),
}  # fmt: skip
_UNKNOWN = Instruction('', 'unknown', '', (), '')


@dataclasses.dataclass(frozen=True)
class Computation:
  """A computation: its instructions in the order of the schedule, by name."""

  name: str
  instructions: dict[str, Instruction]
  root: Instruction

  def __iter__(self) -> Iterator[Instruction]:
    return iter(self.instructions.values())

  @functools.cached_property
  def parameters(self) -> list[Instruction]:
    """The parameters, in their order."""
    found = (i for i in self if i.opcode == 'parameter')
    return sorted(found, key=lambda i: int(i.operands[0]))

  @functools.cached_property
  def users(self) -> dict[str, list[Instruction]]:
    """The instructions that use the result of an instruction, by its name."""
    found: dict[str, list[Instruction]] = {}
    for instruction in self:
      for name in dict.fromkeys(instruction.operands):
        found.setdefault(name, []).append(instruction)
    return found

  def get(self, name: str) -> Instruction:
    """Returns the instruction with this name; one of opcode 'unknown' where there is none."""
    return self.instructions.get(name, _UNKNOWN)

  def arrays(self, operand: str) -> tuple[ArrayShape, ...]:
    """Returns the arrays of an operand."""
    return self.get(operand).arrays


_COMPARED = {
  'LT': operator.lt, 'LE': operator.le, 'GT': operator.gt, 'GE': operator.ge, 'EQ': operator.eq,
  'NE': operator.ne,
}  # fmt: skip
_OPERATIONS: dict[str, Callable[[int, int, str], int]] = {
  'add': lambda a, b, _: a + b,
  'subtract': lambda a, b, _: a - b,
  'compare': lambda a, b, direction: _COMPARED[direction](a, b),
}
_MOST_TRIPS = 100_000  # a loop that runs longer has a counter that is not understood
# the value of a parameter of a computation, or of an element of one
_Given = Callable[[int, int | None], int | None]


class Program:
  """A program: its computations by name, and the one that runs first."""

  def __init__(self, text: str):
    """Reads the text of optimized HLO; raises ValueError if the text holds no entry computation."""
    self.computations: dict[str, Computation] = {}
    entry = None
    for name, is_entry, lines in _computations(text):
      instructions = {i.name: i for line in lines if (i := _instruction(line))}
      if instructions:
        roots = [found[1] for line in lines if (found := _ROOT.match(line))]
        root = instructions[roots[0] if roots else next(iter(instructions))]
        self.computations[name] = Computation(name, instructions, root)
        entry = name if is_entry else entry
    if entry is None:
      raise ValueError('the text holds no entry computation of optimized HLO')
    self.entry = self.computations[entry]

  def called(self, instruction: Instruction) -> list[Computation]:
    """Returns the computations that an instruction runs."""
    return [self.computations[n] for n in instruction.called if n in self.computations]

  def offloaded(self, within: Computation, instruction: Instruction) -> Computation | None:
    """Returns what a TPU's SparseCores run, from the call that starts, updates or ends it."""
    if not instruction.opcode.startswith('custom-call-'):
      return None
    while instruction.opcode in ('custom-call-update', 'custom-call-done'):
      instruction = within.get(instruction.operands[0])
    return next(iter(self.called(instruction)), None)

  def trips(self, within: Computation, instruction: Instruction) -> int:
    """Returns how often the computations of an instruction run; 1 where that is not known."""
    if instruction.opcode != 'while':
      return 1
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', instruction.attributes):
      return int(known[1])
    condition = self.computations.get(instruction.attribute('condition') or '')
    bodies = self.called(instruction)
    if condition is None or not bodies:
      return 1
    body = bodies[0]

    @functools.cache
    def state(trip: int, index: int) -> int | None:
      """Returns a number of the loop's state after `trip` trips."""
      if trip == 0:
        return self._number(within, instruction.operands[0], index, lambda *_: None)
      return self._number(body, body.root.name, index, after(trip - 1))

    def after(trip: int) -> _Given:
      return lambda _, index: None if index is None else state(trip, index)

    for trip in range(_MOST_TRIPS):
      goes_on = self._number(condition, condition.root.name, None, after(trip))
      if not goes_on:
        return 1 if goes_on is None else trip
    return 1

  def _number(
    self, computation: Computation, name: str, index: int | None, given: _Given
  ) -> int | None:
    """Returns the number that an instruction makes, or has in its tuple; None: not known.

    Args:
      computation: That of the instruction.
      name: That of the instruction.
      index: The position in the tuple.
      given: What is known of the parameters of the computation.
    """
    i = computation.get(name)
    value = lambda operand, at=None: self._number(computation, operand, at, given)
    if i.opcode == 'parameter':
      return given(int(i.operands[0]), index)
    if i.opcode == 'copy-done':
      return value(computation.get(i.operands[0]).operands[0], index)
    if i.opcode in _SAME_VALUE:
      return value(i.operands[0], index)
    called = self.called(i)
    if i.opcode in ('fusion', 'call') and called:
      return self._number(
        called[0], called[0].root.name, index, lambda n, at: value(i.operands[n], at)
      )
    if index is not None:
      if i.opcode == 'while' and called and called[0].root.opcode == 'tuple':
        kept = called[0].get(called[0].root.operands[index])  # such as a bound
        is_kept = kept.opcode == 'get-tuple-element' and kept.attribute('index') == str(index)
        return value(i.operands[0], index) if is_kept else None
      return value(i.operands[index]) if i.opcode == 'tuple' else None
    if i.opcode == 'constant':
      return int(i.operands[0]) if re.fullmatch(r'-?\d+', i.operands[0]) else None
    if i.opcode == 'get-tuple-element':
      return value(i.operands[0], int(i.attribute('index') or 0))
    if i.opcode not in _OPERATIONS or any(a.size > 1 for a in i.arrays):
      return None
    left, right = map(value, i.operands)
    if left is None or right is None:
      return None
    return int(_OPERATIONS[i.opcode](left, right, i.attribute('direction') or ''))


def arrays_of(shape: str) -> tuple[ArrayShape, ...]:
  """Returns the arrays of a shape's text, those of nested tuples in turn."""
  return tuple(
    ArrayShape(
      dtype,
      tuple(int(n.lstrip('<=')) for n in dims.split(',') if n),
      int(space[1]) if layout and (space := re.search(r'S\((\d+)\)', layout)) else 0,
    )
    for dtype, dims, layout in _ARRAY.findall(shape)
    if dtype in _BITS
  )


def split(text: str, separator: str = ',') -> list[str]:
  """Returns the parts of a text between separators (, or :) that are in no brackets."""
  parts, start = [], 0
  for at, c, depth in _tokens(text):
    if c == separator and depth == 0:
      parts.append(text[start:at])
      start = at + 1
  return [part.strip() for part in [*parts, text[start:]] if part.strip()]


def closing(text: str, opening: int) -> int:
  """Returns the position of the bracket that closes the one at `opening`; else the last one."""
  return next((at for at, _, depth in _tokens(text, opening) if depth == 0), len(text) - 1)


def _tokens(text: str, start: int = 0) -> Iterator[tuple[int, str, int]]:
  """Yields (position, token, brackets that are open after it) of a text."""
  depth = 0
  for match in _TOKEN.finditer(text, start):
    depth += (match[0] in '([{"') - (match[0] in ')]}')
    yield match.start(), match[0], depth


def _computations(text: str) -> Iterator[tuple[str, bool, list[str]]]:
  """Yields (name, whether it is the entry, its instructions as text) of every computation.

  An instruction may take several lines: kernels of Pallas carry their own program as an attribute.
  """
  lines: list[str] | None = None
  name, is_entry, pending = '', False, ''
  for line in text.splitlines():
    if lines is None:
      if match := _COMPUTATION.match(line):
        name, is_entry, lines = match[2], bool(match[1]), []
      continue
    if not pending and line.startswith('}'):
      yield name, is_entry, lines
      lines = None
      continue
    is_whole = line.count('"') % 2 == 0 and line.count('{') == line.count('}')  # nearly all are
    pending = f'{pending}\n{line}' if pending else line
    if (pending is line and is_whole) or not _is_open(pending):
      lines.append(pending)
      pending = ''


def _is_open(text: str) -> bool:
  """Returns whether a text ends in brackets or in quotation marks."""
  return next((depth for _, _, depth in reversed([*_tokens(text)])), 0) > 0


def _instruction(line: str) -> Instruction | None:
  match = _INSTRUCTION.match(line)
  if match is None:
    return None
  rest = match[3]
  end = closing(rest, 0) + 1 if rest.startswith('(') else rest.index(' ')
  shape = rest[:end]
  called = re.match(r'\s*([\w\-]+)\(', rest[end:])
  if called is None:
    return None
  opening = end + called.end() - 1
  end = closing(rest, opening)
  inside = rest[opening + 1 : end]
  if called[1] in ('constant', 'parameter'):
    operands: tuple[str, ...] = (inside.strip(),)
  else:
    parts = split(re.sub(r'/\*.*?\*/', '', inside))
    operands = tuple(part.split()[-1].lstrip('%') for part in parts)
  return Instruction(match[2], called[1], shape, operands, rest[end + 1 :])
