"""The tensors of layers that have a state instead of keys, and the variables that they become.

Families pack the same weights in different ways: each way has roles of its own in tensor_names.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from paxlite.experiments.hybrid.delta_net_layers import DeltaNetLayers
from paxlite.experiments.hybrid.mamba2_layers import Mamba2Layers
from paxlite.weights.tensor_entries import Entry, rows_of, whole


def delta_net_entries(e: DeltaNetLayers, name: Mapping[str, str], ours: str) -> list[Entry]:
  """Returns the entries of a gated delta net.

  Args:
    name: Names of the tensors by role.
    ours: The name of the layer.
  """
  D, N, M = e.MODEL_DIMS, e.DELTA_KEY_HEADS, e.DELTA_VALUE_HEADS
  K, V, W = e.DELTA_KEY_DIMS, e.DELTA_VALUE_DIMS, e.CONVOLUTION_WIDTH
  sizes = {'query': (N, K), 'key': (N, K), 'value': (M, V)}
  rows = {'query': slice(0, N * K), 'key': slice(N * K, 2 * N * K)}
  rows['value'] = slice(2 * N * K, 2 * N * K + M * V)
  channels = rows['value'].stop
  entries = []

  if 'delta_packed' in name:  # a head of keys, and what belongs to it, after the other
    shares = M // N
    cuts = np.cumsum([0, K, K, shares * V, shares * V])
    for i, (role, heads) in enumerate({**sizes, 'gate': (M, V)}.items()):
      entries.append(_grouped(name['delta_packed'], D, N, cuts, i, f'{ours}/{role}/w', (D, *heads)))
  else:
    for role, heads in sizes.items():
      if 'delta_joined' in name:
        entries.append(
          row_entry(name['delta_joined'], (channels, D), rows[role], f'{ours}/{role}', heads)
        )
      else:
        size = heads[0] * heads[1]
        entries.append(
          row_entry(name[f'delta_{role}'], (size, D), slice(0, size), f'{ours}/{role}', heads)
        )
    entries.append(
      row_entry(name['delta_gate'], (M * V, D), slice(0, M * V), f'{ours}/gate', (M, V))
    )
  for i, role in enumerate(('beta', 'decay_input')):
    of_role = f'{ours}/{role}'
    if packed := name.get('delta_packed_gates'):
      cuts = np.array([0, M // N, 2 * (M // N)])
      entries.append(_grouped(packed, D, N, cuts, i, f'{of_role}/w', (D, M)))
    else:
      entries.append(row_entry(name[f'delta_{role}'], (M, D), slice(0, M), of_role, (M,)))
  for role, heads in sizes.items():
    of_role = f'{ours}/{role}_convolution'
    if 'delta_convolution' in name:
      entries.append(
        row_entry(name['delta_convolution'], (channels, 1, W), rows[role], of_role, heads)
      )
    else:
      size = heads[0] * heads[1]
      theirs = name[f'delta_{role}_convolution']
      entries.append(row_entry(theirs, (size, 1, W), slice(0, size), of_role, heads))
  vectors = {
    'delta_rate': ('decay/log_rate', M), 'delta_bias': ('decay/bias', M),
    'delta_norm': ('norm/scale', V),
  }  # fmt: skip
  return [
    *entries,
    *(vector_entry(name[role], f'{ours}/{of}', (size,)) for role, (of, size) in vectors.items()),
    *output_entries(name['delta_post'], f'{ours}/post', (D, M, V), has_bias=False),
  ]


def mamba2_entries(e: Mamba2Layers, name: Mapping[str, str], ours: str) -> list[Entry]:
  """Returns the entries of a layer of Mamba 2; the arguments are those of delta_net_entries."""
  D, W = e.MODEL_DIMS, e.CONVOLUTION_WIDTH
  heads, groups = (e.MAMBA_HEADS, e.MAMBA_HEAD_DIMS), (e.MAMBA_GROUPS, e.MAMBA_STATE_DIMS)
  sizes: dict[str, tuple[int, ...]] = {
    'gate': heads, 'value': heads, 'key': groups, 'query': groups, 'step': heads[:1],
  }  # fmt: skip
  inner, end, rows = math.prod(heads), 0, {}
  for role, size in sizes.items():
    rows[role] = slice(end, end := end + math.prod(size))
  convolved = [
    (
      slice(rows[role].start - inner, rows[role].stop - inner),
      f'{ours}/{role}_convolution',
      sizes[role],
    )
    for role in ('value', 'key', 'query')
  ]
  channels = convolved[-1][0].stop
  of_rows = [(rows[role], f'{ours}/{role}', size) for role, size in sizes.items()]
  vectors = {
    'mamba_rate': ('steps/log_rate', heads[:1]), 'mamba_bias': ('steps/bias', heads[:1]),
    'mamba_skip': ('skip', heads[:1]), 'mamba_norm': ('norm/scale', heads),
  }  # fmt: skip
  if e.MAMBA_NORM == 'none':
    del vectors['mamba_norm']
  return [
    *row_entries(name['mamba_in'], (end, D), of_rows, e.USE_STATE_BIAS),
    *row_entries(name['mamba_convolution'], (channels, 1, W), convolved, e.USE_CONVOLUTION_BIAS),
    *(vector_entry(name[role], f'{ours}/{of}', shape) for role, (of, shape) in vectors.items()),
    *output_entries(name['mamba_post'], f'{ours}/post', (D, *heads), e.USE_STATE_BIAS),
  ]


def row_entries(
  theirs: str,
  shape: tuple[int, ...],
  parts: Sequence[tuple[slice, str, tuple[int, ...]]],
  has_bias: bool,
) -> list[Entry]:
  """Returns the entries of a tensor that is cut into rows, and of its bias.

  Args:
    theirs: The tensor.
    shape: Its shape, [rows, …, last].
    parts: Of each part its rows, the variable without its last name, and the dimensions that the
      rows are there.
    has_bias: Whether there is a bias.
  """
  entries = [row_entry(theirs, shape, rows, ours, made) for rows, ours, made in parts]
  if not has_bias:
    return entries
  bias = theirs.removesuffix('weight') + 'bias'
  return entries + [
    vector_entry(bias, f'{ours}/b', made, rows, shape[0]) for rows, ours, made in parts
  ]


def vector_entry(
  theirs: str, ours: str, made: tuple[int, ...], rows: slice = slice(None), size: int = 0
) -> Entry:
  """Returns the entry of some elements of a tensor with one dimension.

  Args:
    theirs: The tensor.
    ours: The variable.
    made: The shape of the variable.
    rows: The elements.
    size: The size of the tensor, if it is not that of the variable.
  """
  return Entry(
    theirs, (size or math.prod(made),), ours, made, to_ours=lambda x: x.reshape(made),
    to_theirs=whole, view=rows_of(rows),
  )  # fmt: skip


def output_entries(theirs: str, ours: str, shape: tuple[int, ...], has_bias: bool) -> list[Entry]:
  """Returns the entries of a projection back to the width of the model.

  Args:
    theirs: The weight, [D, …].
    ours: The projection.
    shape: The shape of its weight, [D, …].
    has_bias: Whether there is a bias.
  """
  w = Entry(
    theirs, (shape[0], math.prod(shape[1:])), f'{ours}/w', shape,
    to_ours=lambda x: x.reshape(shape), to_theirs=lambda w: w.reshape(len(w), -1),
  )  # fmt: skip
  bias = theirs.removesuffix('weight') + 'bias'
  return [w, vector_entry(bias, f'{ours}/b', shape[:1])] if has_bias else [w]


def row_entry(
  theirs: str, shape: tuple[int, ...], rows: slice, ours: str, made: tuple[int, ...]
) -> Entry:
  """Returns the entry of some rows of a tensor, whose last dimension comes first in the variable.

  Args:
    theirs: The tensor.
    shape: Its shape, [rows, …, last].
    ours: The variable, without its last name.
    made: The dimensions that the rows are in the variable.
  """
  return Entry(
    theirs, shape, f'{ours}/w', (shape[-1], *made),
    to_ours=lambda x: np.moveaxis(x.reshape(*made, -1), -1, 0),
    to_theirs=lambda w: np.moveaxis(w, 0, -1), view=rows_of(rows),
  )  # fmt: skip


def _grouped(
  theirs: str, D: int, groups: int, cuts: np.ndarray, i: int, ours: str, shape: tuple[int, ...]
) -> Entry:
  """Returns the entry of part i of each group of a tensor [groups · width, D].

  Args:
    theirs: The tensor.
    D: The width of its rows.
    groups: Their number.
    cuts: Where the parts of a group begin and end, from 0 to its width.
    i: The part.
    ours: The variable.
    shape: The shape of the variable, whose first dimension is D.
  """
  return Entry(
    theirs, (groups * int(cuts[-1]), D), ours, shape, to_ours=lambda x: np.moveaxis(x, -1, 0),
    to_theirs=lambda w: np.moveaxis(w, 0, -1),
    view=lambda x: x.reshape(groups, -1, x.shape[-1])[:, cuts[i] : cuts[i + 1]],
  )  # fmt: skip
