"""An explanation of a train step as tables, for the terminal and for `paxlite report`; no JAX."""

import collections
import itertools
import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from paxlite.core.json_text import JsonObject

COLLECTIVES, ELSEWHERE = 'collectives', 'elsewhere'  # blocks of their own
UNKNOWN = 'not in the program'  # measured instructions that the compiled program does not have
_WIDE = 100  # characters of the widest table
_SMALL = 0.005  # the share of the bytes below which collectives are not listed one by one
_PASSES = ('forward', 'recomputed', 'backward', 'update')
_BLOCKS = (
  'embedding', 'position_emb', 'first', 'layer', 'last', 'final_ln', 'logits', 'loss', 'update',
)  # fmt: skip
_SUBLAYERS = (
  '', 'layer_norm', 'self_attention', 'post_layer_norm', 'ff_layer_norm', 'ff_layer',
  'ff_post_layer_norm',
)  # fmt: skip
_JOINED = '\N{NO-BREAK SPACE}'  # no line ends at it
_TEMPORARIES = 'temporaries, by the compiler; gradients and activations are in them'


class Table(NamedTuple):
  """A table.

  Attributes:
    title: Its title.
    header: The names of its columns; those of numbers begin with #.
    rows: Its rows.
    notes: Sentences about it.
  """

  title: str
  header: Sequence[str]
  rows: Sequence[Sequence[str]]
  notes: Sequence[str] = ()


def size(count: float | None) -> str:
  """Returns bytes with three digits: '1.25 GiB'; – for None."""
  if count is None:
    return '–'
  units = ['B', 'KiB', 'MiB', 'GiB', 'TiB']
  while count >= 1000 and len(units) > 1:
    count /= 1024
    units.pop(0)
  digits = 0 if units[0] == 'B' or count >= 100 else 1 if count >= 10 else 2
  return f'{count:.{digits}f} {units[0]}'


def milliseconds(seconds: float | None) -> str:
  """Returns seconds as text: '486.7 ms', '0.0231 ms'; – for None."""
  if seconds is None:
    return '–'
  return f'{1e3 * seconds:,.1f} ms' if seconds >= 0.01 else f'{1e3 * seconds:.3g} ms'


def title(found: JsonObject) -> str:
  """Returns what is explained, and whether it fits."""
  report = found['report']
  mesh = ' × '.join(f'{a} {n}' for a, n in report['mesh'].items() if n > 1) or 'one device'
  return f'{report["experiment"]} on {report["target"]}, mesh {mesh}: {report["verdict"]}'


def tables(found: JsonObject) -> Iterator[Table]:
  """Yields the tables of an explanation, as explanation.explain returns it."""
  yield Table('Memory of a device', ('part', '#bytes'), list(_memory(found['totals'])))
  parameters = f'{found["report"]["parameters"]:,}'
  yield _arrays(f'Weights: {parameters} parameters', found['weights'])
  yield _arrays(
    'Saved activations: what the forward pass keeps for the backward pass, by the traced loss',
    found['activations'],
    ('[size logical axis/mesh axes that split it]; bytes are those of one device',),
  )
  if not found['blocks']:
    yield Table('The program is not known, and so are its blocks.', (), ())
    return
  yield _blocks(found['blocks'])
  yield _collectives(found['collectives'])
  yield _recomputed(found['products'])


def text(found: JsonObject) -> str:
  """Returns the tables as a page of text, which fits the terminal down to 60 columns."""
  width = max(60, min(_WIDE, shutil.get_terminal_size((_WIDE, 0)).columns))
  lines = textwrap.wrap(title(found), width)
  for table in tables(found):
    lines += ['', *textwrap.wrap(table.title, width), *columns(table.header, table.rows, width)]
    lines += [f'  {line}' for note in table.notes for line in textwrap.wrap(note, width - 2)]
  notes = [line for note in found['report']['notes'] for line in textwrap.wrap(note, width)]
  return '\n'.join([*lines, *([''] if notes else []), *notes])


def columns(
  header: Sequence[str], table: Sequence[Sequence[str]], width: int = 1 << 20
) -> Iterator[str]:
  """Yields the lines of a table; see Table. Texts are wrapped to the width that numbers leave."""
  is_number = [name.startswith('#') for name in header]
  rows = [[name.removeprefix('#') for name in header], *table]
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  texts = sorted((i for i, number in enumerate(is_number) if not number), key=lambda i: widths[i])
  left = width - 2 * len(widths) - sum(widths) + sum(widths[i] for i in texts)
  for n, i in enumerate(texts):  # the narrow ones leave their room to the others
    widths[i] = min(widths[i], max(left // (len(texts) - n), 8))
    left -= widths[i]
  for row in rows:
    cells = [
      [cell.rjust(w)] if number else _wrapped(cell, w)
      for cell, w, number in zip(row, widths, is_number, strict=True)
    ]
    for line in itertools.zip_longest(*cells, fillvalue=''):
      parts = (part.ljust(w) for part, w in zip(line, widths, strict=True))
      yield f'  {"  ".join(parts)}'.replace(_JOINED, ' ').rstrip()


def _wrapped(cell: str, width: int) -> list[str]:
  """Returns a cell in lines, which end with a space or a slash where one is near."""
  lines = []
  while len(cell) > width:
    cut = max(cell.rfind(' ', 3, width + 1), cell.rfind('/', 3, width) + 1)
    cut = cut if cut > width // 2 else width
    lines.append(cell[:cut].rstrip())
    cell = f' {cell[cut:].lstrip()}'
  return [*lines, cell]


def _memory(totals: Mapping[str, int | None]) -> Iterator[tuple[str, str]]:
  names = {'parameters': 'parameters', 'optimizer': 'optimizer', 'others': 'other state'}
  names |= {'batch': 'batch', 'gradients': 'gradients', 'activations': 'saved activations'}
  if totals['peak']:
    names |= {'temporaries': _TEMPORARIES, 'code': 'program'}
    names |= {'peak': 'at most in use at a time, by the compiler'}
  for key, name in (names | {'memory': 'there is'}).items():
    if (count := totals[key]) and not (key == 'others' and count <= 1024):
      yield name, size(count)


def _arrays(title: str, rows: Sequence[JsonObject], notes: Sequence[str] = ()) -> Table:
  """Returns a table of arrays, with one row for equal arrays of unrolled layers."""
  found: dict[tuple[str, ...], list[int]] = {}
  for row in rows:
    name = short_name(row['name'])
    name = f'{name}: {row["made_by"]}' if row['made_by'] else name
    found.setdefault((name, dims_text(row), row['dtype']), []).append(row['bytes'])
  lines = [(*key, f'{len(n)}x' if len(n) > 1 else '', size(sum(n))) for key, n in found.items()]
  total = (f'{len(rows)} arrays', '', '', '', size(sum(row['bytes'] for row in rows)))
  return Table(title, ('name', 'shape', 'type', '#', '#bytes'), [*lines, total], notes)


def short_name(name: str) -> str:
  """Returns 'transformer/x_layers_3/ff_layer' as 'layer/ff_layer', however layers are stacked."""
  short = re.sub(r'^(transformer/)?(repeat|x_layers_\d+|[A-Z]\w*)(?=/|$)', 'layer', name)
  short = re.sub(r'^transformer(?=/(?!first_|last_)|$)', 'layer', short)
  return re.sub(r'^transformer/|(?<=^layer/)x_layers_', '', short)


def dims_text(row: JsonObject) -> str:
  """Returns '[2,048 embed/data, 32 heads/mdl]': sizes, logical axes, and mesh axes."""
  parts = []
  for number, name, mesh_axes in zip(row['shape'], row['axes'], row['mesh_axes'], strict=True):
    text = f'{number}{_JOINED}{name}' if name else str(number)
    parts.append(f'{text}/{"+".join(mesh_axes)}' if mesh_axes else text)
  return f'[{", ".join(parts)}]'


def block_order(block: str) -> tuple[object, ...]:
  """Sorts blocks in the order of the model."""
  head, _, rest = block.partition('/')
  kind = next((i for i, name in enumerate(_BLOCKS) if head.startswith(name)), len(_BLOCKS))
  number, _, sublayer = rest.rpartition('/')
  place = _SUBLAYERS.index(sublayer) if sublayer in _SUBLAYERS else len(_SUBLAYERS)
  return kind, head, number, place, sublayer


def label(parts: Sequence[str]) -> str:
  """Returns the names of several blocks as one: those of a layer, or of parts of the model."""
  unique = list(dict.fromkeys(parts))
  if len(unique) == 1:
    return unique[0]
  heads = {part.partition('/')[0] for part in unique}
  return f'{heads.pop()} (several)' if len(heads) == 1 else 'several'


def _blocks(blocks: Mapping[str, JsonObject]) -> Table:
  sums = {n: sum(b[n] for b in blocks.values()) or 1 for n in ('flops', 'bytes')}
  rows = [
    (
      name,
      *(f'{blocks[name][n] / total:.1%}' for n, total in sums.items()),
      milliseconds(blocks[name]['predicted']),
    )
    for name in sorted(blocks, key=block_order)
  ]
  header = ('block', '#FLOPs', '#memory traffic', '#predicted')
  return Table('Kernels of a step, by block', header, rows)


def _collectives(found: Sequence[JsonObject]) -> Table:
  """Returns the table of collectives in the order of the passes and of the model."""
  if not found:
    return Table('There are no collectives: one device has all of the model.', (), ())
  sent = lambda rows: sum(row['near_bytes'] + row['far_bytes'] for row in rows)
  groups = collections.defaultdict(list)
  for row in found:
    passes = row['passes'][0] if len(row['passes']) == 1 else 'several'
    groups[label(row['blocks']), passes, row['kind'], '+'.join(row['axes'])].append(row)

  def order(item: tuple[tuple[str, ...], list[JsonObject]]) -> tuple[object, ...]:
    (block, passes, *_), rows = item
    of = _PASSES.index(passes) if passes in _PASSES else len(_PASSES)
    return of, block_order(block), -sent(rows)

  large, small = list[tuple[str, ...]](), list[JsonObject]()
  for key, rows in sorted(groups.items(), key=order):
    if sent(rows) >= _SMALL * sent(found):
      large.append((*key, *_sums(rows), schedule_text(rows)))
    else:
      small += rows
  if small:
    large.append(('others, which send less', '', '', '', *_sums(small), ''))
  large.append(('all', '', '', '', *_sums(found), ''))
  notes = []
  if found[0]['seconds'] is not None:
    seconds, exposed = (1e3 * sum(row[n] for row in found) for n in ('seconds', 'exposed'))
    notes = [
      f'By the data sheet, sending takes {seconds:,.2f} ms. The schedule hides '
      f'{max(seconds - exposed, 0):,.2f} ms of it.'
    ]
  header = ('block', 'pass', 'kind', 'axes', '#runs', '#bytes', 'schedule')
  return Table('Collectives of a step, by block', header, large, notes)


def _sums(rows: Iterable[JsonObject]) -> tuple[str, str]:
  runs, moved = zip(*((row['runs'], row['bytes']) for row in rows), strict=True)
  return f'{sum(runs):,}', size(sum(moved))


def schedule_text(rows: Sequence[JsonObject]) -> str:
  """Returns how far the schedule hides collectives behind kernels."""
  if rows[0]['seconds'] is None:
    return 'may overlap' if any(row['asynchronous_runs'] for row in rows) else 'exposed'
  seconds, exposed = (sum(row[name] for row in rows) for name in ('seconds', 'exposed'))
  if exposed < 0.005 * seconds:
    return 'overlapped'
  share = min(exposed / seconds, 1.0) if seconds else 1.0
  return 'exposed' if share > 0.995 else f'{share:.0%} exposed'


def _recomputed(products: Sequence[JsonObject]) -> Table:
  again = [p for p in products if p['of'] == 'recomputed']
  if not again:
    return Table('No matrix product of the forward pass runs again in the backward pass.', (), ())
  share = sum(p['flops'] for p in again) / sum(p['flops'] for p in products)
  rows = [
    (f'{p["block"]}/{p["module"]}'.rstrip('/'), f'{p["runs"]:,}', f'{p["flops"]:.4g}')
    for p in again
  ]
  title = f'Matrix products that the backward pass computes again: {share:.1%} of all FLOPs'
  return Table(title, ('module', '#runs', '#FLOPs of a device'), rows)
