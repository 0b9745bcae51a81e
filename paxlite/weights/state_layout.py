"""The tensors of layers that have a state instead of keys, and the variables that they become.

Families pack the same weights in different ways: each way has roles of its own in tensor_names.
"""

from collections.abc import Mapping

import numpy as np

from paxlite.experiments.parts.linear_attention import DeltaNetLayers
from paxlite.weights.layout import Entry, StateEntries, Transform


def delta_net_entries(e: DeltaNetLayers, name: Mapping[str, str], ours: str) -> list[Entry]:
  """Returns the entries of a gated delta net.

  Args:
    e: The experiment.
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
    cuts = np.array([0, shares, 2 * shares])
    for i, role in enumerate(('beta', 'decay_input')):
      entries.append(
        _grouped(name['delta_packed_gates'], D, N, cuts, i, f'{ours}/{role}/w', (D, M))
      )
  else:
    for role, heads in sizes.items():
      if 'delta_joined' in name:
        entries.append(
          _rows(name['delta_joined'], (channels, D), rows[role], f'{ours}/{role}', heads)
        )
      else:
        size = heads[0] * heads[1]
        entries.append(
          _rows(name[f'delta_{role}'], (size, D), slice(0, size), f'{ours}/{role}', heads)
        )
    entries.append(_rows(name['delta_gate'], (M * V, D), slice(0, M * V), f'{ours}/gate', (M, V)))
    for role in ('beta', 'decay_input'):
      entries.append(_rows(name[f'delta_{role}'], (M, D), slice(0, M), f'{ours}/{role}', (M,)))
  for role, heads in sizes.items():
    of_role = f'{ours}/{role}_convolution'
    if 'delta_convolution' in name:
      entries.append(_rows(name['delta_convolution'], (channels, 1, W), rows[role], of_role, heads))
    else:
      size = heads[0] * heads[1]
      theirs = name[f'delta_{role}_convolution']
      entries.append(_rows(theirs, (size, 1, W), slice(0, size), of_role, heads))
  vectors = {'delta_rate': ('decay/log_rate', M), 'delta_bias': ('decay/bias', M)}
  vectors['delta_norm'] = ('norm/scale', V)
  for role, (variable, size) in vectors.items():
    identity: Transform = lambda x: x
    entries.append(Entry(name[role], (size,), f'{ours}/{variable}', (size,), identity, identity))
  entries.append(
    Entry(
      name['delta_post'],
      (D, M * V),
      f'{ours}/post/w',
      (D, M, V),
      to_ours=lambda x: x,
      to_theirs=lambda w: w.reshape(len(w), -1),
    )
  )
  return entries


# by the kinds of ATTENTION_PATTERN
STATE_ENTRIES: dict[str, StateEntries] = {'gated_delta': delta_net_entries}


def _rows(
  theirs: str, shape: tuple[int, ...], rows: slice, ours: str, made: tuple[int, ...]
) -> Entry:
  """Returns the entry of some rows of a tensor, whose last dimension comes first in the variable.

  Args:
    theirs: The tensor.
    shape: Its shape, [rows, …, last].
    rows: The rows.
    ours: The variable, without its last name.
    made: The dimensions that the rows are in the variable.
  """
  return Entry(
    theirs,
    shape,
    f'{ours}/w',
    (shape[-1], *made),
    to_ours=lambda x: np.moveaxis(x.reshape(*made, shape[-1]), -1, 0),
    to_theirs=lambda w: np.moveaxis(w, 0, -1),
    view=lambda x: x[rows],
  )


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
    theirs,
    (groups * int(cuts[-1]), D),
    ours,
    shape,
    to_ours=lambda x: np.moveaxis(x, -1, 0),
    to_theirs=lambda w: np.moveaxis(w, 0, -1),
    view=lambda x: x.reshape(groups, -1, D)[:, cuts[i] : cuts[i + 1]],
  )
