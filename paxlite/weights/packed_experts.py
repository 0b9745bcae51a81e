"""Files in which all experts of a block are one tensor, where others have a tensor for each."""

import dataclasses
import re
from collections.abc import Container, Mapping, Sequence

from paxlite.weights.tensor_entries import Entry, columns_of, swapped

_ONE = re.compile(r'(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight')
_GATE_UP, _DOWN = '.experts.gate_up_proj', '.experts.down_proj'


def with_packed(entries: Sequence[Entry], names: Container[str]) -> list[Entry]:
  """Returns the entries of the tensors that a file has, packed or not, block by block.

  A packed tensor of gates and ups is [E, 2·F, D], with all gates first, and one of downs
  [E, D, F].

  Args:
    entries: The entries of one tensor for each expert.
    names: The names in the file.
  """
  found = []
  for entry in entries:
    match = _ONE.fullmatch(entry.theirs)
    stem, role = (match[1].removesuffix('.experts'), match[3]) if match else ('', '')
    theirs = stem + (_DOWN if role == 'down' else _GATE_UP)
    if match is None or theirs not in names:
      found.append(entry)
    elif match[2] == '0':
      E, inputs, outputs = entry.our_shape
      one = Entry(theirs, (E, outputs, inputs), entry.ours, entry.our_shape, swapped, swapped)
      if role != 'down':
        rows = slice(0, outputs) if role == 'gate' else slice(outputs, 2 * outputs)
        shape = (E, 2 * outputs, inputs)
        one = dataclasses.replace(one, shape=shape, view=columns_of(rows))
      found.append(one)
  return found


def packed_tensors(shapes: Mapping[str, Sequence[int]]) -> int:
  """Returns how many tensors of single experts the packed ones of a file stand for, at least."""
  packed = (shape for name, shape in shapes.items() if name.endswith((_GATE_UP, _DOWN)))
  return sum(shape[0] for shape in packed if shape)
