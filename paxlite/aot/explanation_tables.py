"""A compiled train step as tables, for the terminal and for `paxlite report`; no JAX."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from paxlite.core.json_text import JsonObject

COLLECTIVES, ELSEWHERE = 'collectives', 'elsewhere'  # blocks of their own
UNKNOWN = 'not in the program'  # measured instructions that the compiled program does not have
ALL = 'all blocks, one after the other'
BLOCK_HEADER = 'block', '#FLOPs', '#again', '#memory traffic'
_MOST = 20  # rows of a table, of which the last one has the others


class Table(NamedTuple):
  """A table."""

  title: str
  header: Sequence[str]  # the names of its columns; those of numbers begin with #
  rows: Sequence[Sequence[str]]
  notes: Sequence[str] = ()  # sentences about it


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


def tables(found: JsonObject) -> Iterator[Table]:
  """Yields the tables of a step: `report` is an analysis.Report, the rest is of an explanation."""
  report = found['report']
  yield Table('What was compiled', ('', ''), list(_about(report)))
  if report['arguments']:
    yield _memory(report, found.get('totals', {'state and batch': report['arguments']}))
  if costs := report['costs']:
    if costs['roofline']:
      yield _seconds(report)
    rows = list(block_rows(costs['blocks'], ['predicted']))
    yield Table('Kernels of a step, by block', [*BLOCK_HEADER, '#predicted'], rows)
    yield _collectives(costs['communication'])
  if found.get('activations'):
    yield _activations(found['activations'])


def text(found: JsonObject) -> str:
  """Returns the tables as a page of text, which begins with what fits."""
  r = found['report']
  mesh = ' × '.join(f'{a} {n}' for a, n in r['mesh'].items() if n > 1) or 'one device'
  lines = [f'{r["experiment"]} on {r["target"]}, mesh {mesh}: {r["verdict"]}']
  for table in tables(found):
    shown = filter(None, columns(table.header, table.rows))
    lines += ['', table.title, *shown, *(f'  {note}' for note in table.notes)]
  return '\n'.join([*lines, *([''] if r['notes'] else []), *r['notes']])


def columns(header: Sequence[str], table: Sequence[Sequence[str]]) -> Iterator[str]:
  """Yields the lines of a table; see Table."""
  rows = [[name.removeprefix('#') for name in header], *table]
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  for row in rows:
    cells = (
      cell.rjust(width) if name.startswith('#') else cell.ljust(width)
      for cell, width, name in zip(row, widths, header, strict=True)
    )
    yield f'  {"  ".join(cells)}'.rstrip()


def _about(r: JsonObject) -> Iterator[tuple[str, str]]:
  yield 'devices', f'{r["devices"]:,} × {r["device"]}'
  yield 'parameters', f'{r["parameters"]:,}'
  yield 'batch', f'{r["batch_size"]:,} × {r["seq_len"]:,} tokens'
  yield 'compiled', f'in {r["compile_seconds"]:.1f} s'
  yield 'versions', ', '.join(f'{k} {v}' for k, v in r['versions'].items())
  for name, value in r['options'].items():
    yield 'option', f'{name}={value}'
  if r['model_flops']:
    yield 'model FLOPs', f'{r["model_flops"]:.4g} in a step of all devices, attention causal'
  if costs := r['costs']:
    flops = ', '.join(f'{n:.4g} {dtype}' for dtype, n in costs['flops'].items()) or 'none'
    yield 'FLOPs', f'{flops} on a device, of matrix multiplications'
    yield 'memory traffic', f'{size(costs["traffic"])} by {costs["kernels"]:,} kernels'
    if any(costs['host_traffic']):
      read, written = map(size, costs['host_traffic'])
      yield 'host', f'{read} are read, {written} written'


def _memory(report: JsonObject, parts: Mapping[str, int]) -> Table:
  rows = [
    *parts.items(), ('temporaries, with gradients and activations', report['temporaries']),
    ('program', report['generated_code']), ('at most in use at a time', report['total']),
    ('there is', report['chip'] and report['chip']['memory']),
    ('on its host: moments and activations', report['host']),
  ]  # fmt: skip
  shown = [(name, size(count)) for name, count in rows if count]
  return Table('Memory of a device', ('part', '#bytes'), shown)


def _seconds(report: JsonObject) -> Table:
  line, chip = report['costs']['roofline'], report['chip']
  parts, rates = line['parts'], chip['rates']
  step = sum(parts.values())
  rows = [(part, milliseconds(s), f'{s / step:.1%}') for part, s in parts.items() if s]
  alone = ', '.join(f'{name} {milliseconds(s)}' for name, s in line['resources'].items() if s)
  notes = [f'Each resource by itself, by {chip["source"]}: {alone}.']
  if rates['source']:
    notes.append(
      f'A kernel reaches {rates["matmul"]:.0%} of the FLOP/s or {rates["memory"]:.0%} of the '
      f'bandwidth, and takes {rates["launch"] * 1e6:g} µs more, as measured on {rates["source"]}.'
    )
  if report['mfu']:
    how = 'predicted at' if rates['source'] else 'at most'
    low, high = report['mfu']
    notes.append(f'MFU is {how} {low:.0%}; {high:.0%} if all resources were used at a time.')
  return Table(
    'Seconds of a step, in the order of the schedule', ('waits for', '#predicted', '#share'),
    [*rows, ('a step', milliseconds(step), '100.0%')], notes,
  )  # fmt: skip


def _activations(found: Sequence[JsonObject]) -> Table:
  title = 'Saved activations: what the forward pass keeps for the backward pass, by the traced loss'
  names = lambda row: (row['module'], row['made_by'])
  sums = lambda rows: (f'{_sum(rows, "arrays"):,}', size(_sum(rows, 'bytes')))
  return Table(title, ('module', 'made by', '#arrays', '#bytes'), _largest(found, names, sums))


def _largest(
  found: Sequence[JsonObject], names: Callable[[JsonObject], tuple[str, ...]],
  sums: Callable[[Sequence[JsonObject]], tuple[str, ...]],
) -> list[tuple[str, ...]]:  # fmt: skip
  """Returns the first rows one by one, the others as one, and the sums of all."""
  rows = [(*names(row), *sums([row])) for row in found[:_MOST]]
  blank = [''] * (len(names(found[0])) - 1)
  if others := found[_MOST:]:
    rows.append(('others', *blank, *sums(others)))
  return [*rows, ('all', *blank, *sums(found))]


def _sum(rows: Sequence[JsonObject], name: str) -> float | None:
  """Returns the sum of a column; None where it is not known."""
  return None if rows[0][name] is None else sum(row[name] for row in rows)


def short_name(name: str) -> str:
  """Returns 'transformer/x_layers_3/ff_layer' as 'layer/ff_layer', however layers are stacked."""
  short = re.sub(r'^(transformer/)?(repeat|x_layers_\d+|[A-Z]\w*)(?=/|$)', 'layer', name)
  short = re.sub(r'^transformer(?=/(?!first_|last_)|$)', 'layer', short)
  return re.sub(r'^transformer/|(?<=^layer/)x_layers_', '', short)


def label(parts: Sequence[str]) -> str:
  """Returns the names of several blocks as one: those of a layer, or of parts of the model."""
  unique = list(dict.fromkeys(parts))
  if len(unique) == 1:
    return unique[0]
  heads = {part.partition('/')[0] for part in unique}
  return f'{heads.pop()} (several)' if len(heads) == 1 else 'several'


def block_rows(
  blocks: Mapping[str, JsonObject], seconds: Sequence[str]
) -> Iterator[tuple[str, ...]]:
  """Yields a row for each block, those that take most first, and one for all of them.

  It has its name, its shares of all FLOPs, of those that the backward pass computes again, and of
  the memory traffic, and its seconds: `predicted`, `measured`, or both.
  """
  names = ('flops', 'recomputed', 'bytes', *seconds)
  total = {name: sum(block[name] or 0 for block in blocks.values()) for name in names}
  order = lambda name: [blocks[name][n] or 0 for n in reversed(names)]
  for name in [*sorted(blocks, key=order, reverse=True), ALL]:
    block = blocks.get(name, total)
    shares = (('flops', 'flops'), ('recomputed', 'flops'), ('bytes', 'bytes'))
    yield (
      name, *(f'{block[n] / total[of]:.1%}' if total[of] else '–' for n, of in shares),
      *(milliseconds(block[n] or None) for n in seconds),
    )  # fmt: skip


def _collectives(found: Sequence[JsonObject]) -> Table:
  """Returns the table of collectives, the most sent first."""
  if not found:
    return Table('No collectives: one device holds the whole model.', (), ())
  title = 'Collectives of a step, by block'
  header = ('block', 'pass', 'kind', 'axes', '#runs', '#bytes', '#seconds', '#not hidden')
  names = lambda row: (row['block'], row['pass'], row['kind'], '+'.join(row['axes']))
  sums = lambda rows: (
    f'{_sum(rows, "runs"):,}', size(_sum(rows, 'bytes')),
    *(milliseconds(_sum(rows, name)) for name in ('seconds', 'exposed')),
  )  # fmt: skip
  return Table(title, header, _largest(found, names, sums))
