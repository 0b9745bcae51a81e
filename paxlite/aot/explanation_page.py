"""An explanation of a train step as one HTML page with pictures, which needs no network."""

import collections
import html
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

from paxlite.aot import explanation_text as words
from paxlite.aot.explanation import ArrayRow, BlockCollective, Explanation
from paxlite.aot.explanation_text import block_of, block_order, size_text
from paxlite.aot.origins import BACKWARD, FORWARD, LAYER, label
from paxlite.files import html_page

_HERE = pathlib.Path(__file__).parent
_W = 1160  # the width of a picture, in its own units
_STATE = {
  'parameters': '#2f6fdb',
  'optimizer': '#6a4fc0',
  'other state': '#8a5a83',
  'batch': '#128090',
}
_GRADIENTS, _ACTIVATIONS, _REST, _CODE = '#b86a12', '#2a8a4a', '#7b8794', '#4a5560'
_SHARE = 0.4  # a step that needs more than this share of the memory is drawn beside all of it
_AXES = {
  'replica': '#2a8a4a',
  'data': '#2f6fdb',
  'mdl': '#d0701c',
  'expert': '#8450b8',
  'context': '#128090',
  'stage': '#b83a6f',
}
_SEVERAL = '#7b8794'  # the color of collectives along several axes, or between slices


def page(explanation: Explanation) -> str:
  """Returns the page."""
  x = explanation
  mesh = ' × '.join(f'{a} {n}' for a, n in x.report.mesh.items() if n > 1) or 'one device'
  title = f'{x.report.experiment} on {x.report.target}, mesh {mesh}'
  sections = [
    f'<p class="note">{html.escape(x.report.verdict)}. {x.report.parameters:,} parameters; a step '
    f'has {x.report.batch_size:,} × {x.report.seq_len:,} tokens.</p>',
    '<h2>Memory of a device</h2>',
    _memory(x),
    '<h2>Parameters and saved activations by block, on a device</h2>',
    _treemap(x),
    '<h2>One step</h2>',
    *_diagram(x),
    '<h2>Tables</h2>',
    *_tables(x),
    *(f'<p class="note">{html.escape(note)}</p>' for note in x.report.notes),
  ]
  parts = {'title': html.escape(title), 'body': '\n'.join(sections)}
  return html_page.filled(_HERE / 'explanation.html', parts)


def _memory(x: Explanation) -> str:
  """Returns two bars at the same scale: what the compiler says, and what is in its temporaries."""
  t = x.totals
  state = dict(zip(_STATE, (t.parameters, t.optimizer, t.others, t.batch), strict=True))
  parts = [(name, size, _STATE[name]) for name, size in state.items() if size]
  traced = [
    ('gradients', t.gradients, _GRADIENTS),
    ('saved activations', t.activations, _ACTIVATIONS),
  ]
  bars = [('by the compiler', [*parts, ('temporaries', t.temporaries, _REST)])]
  if t.code:
    bars[0][1].append(('program', t.code, _CODE))
  if not t.peak:
    bars = [('state', parts)]
  bars.append(('by the traced loss', traced))
  whole = max(sum(size for _, size, _ in bar) for _, bar in bars)
  if t.memory is not None and whole > _SHARE * t.memory:
    whole = max(whole, t.memory)
  scale = (_W - 130) / max(whole, 1)
  drawn = []
  for i, (name, bar) in enumerate(bars):
    y = 6 + i * 46
    drawn.append(f'<text x="0" y="{y + 21}" class="soft">{name}</text>')
    left = 130.0
    if i and t.peak:  # temporaries begin where the state ends
      left += sum(size for _, size, _ in parts) * scale
    for part, size, color in bar:
      width = size * scale
      drawn.append(_box(left, y, width, 34, color, f'{part} {size_text(size)}', part))
      left += width
  height = 6 + len(bars) * 46
  if t.memory is not None and t.memory <= whole:
    end = 130 + t.memory * scale
    drawn.append(
      f'<line x1="{end - 1:.1f}" x2="{end - 1:.1f}" y1="0" y2="{height - 6}" class="limit"/>'
    )
  every = [part for _, bar in bars for part in bar]
  legend = _legend({f'{name} {size_text(size)}': color for name, size, color in every})
  most = f'In use at most: {size_text(t.peak)}. ' if t.peak else ''
  most += f'There is {size_text(t.memory)}. ' if t.memory is not None else ''
  note = (
    f'<p class="note">{most}Temporaries hold gradients and activations, though not all at the same '
    'time; the compiler may keep fewer activations than the traced loss and compute some again.</p>'
  )
  return _svg(height, drawn, 'memory of a device') + legend + note


def _treemap(x: Explanation) -> str:
  sizes: dict[tuple[str, str], int] = collections.defaultdict(int)
  for kind, rows in (('parameters', x.weights), ('saved activations', x.activations)):
    for row in rows:
      sizes[block_of(words.short_name(row.name)), kind] += row.bytes
  colors = {'parameters': _STATE['parameters'], 'saved activations': _ACTIVATIONS}
  found = sorted(((size, key) for key, size in sizes.items() if size), reverse=True)
  height = 300
  drawn = [
    _box(left, top, width, tall, colors[kind], f'{block}, {kind}: {size_text(size)}', block, size)
    for (size, (block, kind)), (left, top, width, tall) in zip(
      found, squares([size for size, _ in found], 0, 0, _W, height), strict=True
    )
  ]
  return _svg(height, drawn, 'parameters and activations by block') + _legend(colors)


def squares(
  sizes: Sequence[float], left: float, top: float, width: float, height: float
) -> list[tuple[float, float, float, float]]:
  """Tiles a rectangle by sizes: (left, top, width, height) of each; the sizes fall.

  A tile is cut off along the shorter side together with the following ones, as long as that makes
  the worst of them squarer (Bruls, Huizing, van Wijk, "Squarified treemaps", 2000).
  """
  found: list[tuple[float, float, float, float]] = []
  rest = list(sizes)
  while rest:
    scale = width * height / sum(rest)
    side = min(width, height)
    count, best = 1, float('inf')
    for n in range(1, len(rest) + 1):
      thick = sum(rest[:n]) * scale / side
      worst = max(max(thick / long, long / thick) for long in (s * scale / thick for s in rest[:n]))
      if worst > best:
        break
      count, best = n, worst
    thick = sum(rest[:count]) * scale / side
    along = 0.0
    for size in rest[:count]:
      long = size * scale / thick
      is_column = width >= height
      found.append(
        (left, top + along, thick, long) if is_column else (left + along, top, long, thick)
      )
      along += long
    if width >= height:
      left, width = left + thick, width - thick
    else:
      top, height = top + thick, height - thick
    rest = rest[count:]
  return found


def _diagram(x: Explanation) -> Iterator[str]:
  """Yields the blocks from input to loss, with the collectives of the forward and backward pass."""
  shown, small = words.split_small(x.collectives)
  rows: dict[str, list[BlockCollective]] = collections.defaultdict(list)
  for row in shown:
    rows[label(row.blocks)].append(row)
  weights, kept = _by_block(x.weights), _by_block(x.activations)
  again: dict[str, float] = collections.defaultdict(float)
  for products in x.recomputed:
    again[products.block] += products.flops
  blocks = sorted({*rows, *weights, *kept, *again}, key=block_order)
  if x.collectives:
    colors = {name: color for name, color in _AXES.items() if x.report.mesh.get(name, 1) > 1}
    yield _legend({f'along {name}': color for name, color in colors.items()})
    yield _legend({'exposed': 'var(--exposed)', 'hidden behind kernels': 'var(--hidden)'})
  yield (
    '<div class="block head"><div style="text-align:right">forward ↓</div><div></div>'
    '<div>↑ backward, with what is recomputed</div></div>'
  )
  inside = False
  for block in blocks:
    if _is_layer(block) != inside:
      inside = not inside
      yield f'<div class="layers"><div class="head">{_layers(x)}</div>' if inside else '</div>'
    yield _block(block, rows[block], weights[block], kept[block], again[block])
  if inside:
    yield '</div>'
  if small:
    moved = size_text(sum(row.bytes for row in small))
    yield (
      f'<p class="note">{sum(r.runs for r in small):,} more collectives, {moved}, are only in the '
      'table. Sizes are those of the complete arrays, of all runs in a step.</p>'
    )


def _is_layer(block: str) -> bool:
  return block.partition('/')[0].partition(' ')[0] == LAYER


def _layers(x: Explanation) -> str:
  counts = [
    row.row.shape[0] if row.row.axes[:1] == ('layers',) else row.count
    for row in words.collapsed(x.weights)
    if row.row.name.startswith(f'{LAYER}/')
  ]
  count = max(counts, default=1)
  return f'{count} layers' if count > 1 else 'one layer'


def _by_block(rows: Iterable[ArrayRow]) -> collections.Counter[str]:
  found: collections.Counter[str] = collections.Counter()
  for row in rows:
    found[block_of(words.short_name(row.name))] += row.bytes
  return found


def _block(
  name: str, rows: Sequence[BlockCollective], weights: int, kept: int, again: float
) -> str:
  details = [f'{size_text(weights)} parameters'] if weights else []
  details += [f'{size_text(kept)} activations'] if kept else []
  details += [f'{again:.3g} FLOPs run again'] if again else []
  forward = [row for row in rows if row.passes == (FORWARD,)]
  others = [row for row in rows if row.passes != (FORWARD,)]
  short = name.removeprefix(f'{LAYER}/') if name != LAYER else 'layer'
  small = ''.join(f'<small>{part}</small>' for part in details)
  return (
    f'<div class="block"><div class="chips left">{_chips(forward)}</div>'
    f'<div class="part"><b>{html.escape(short)}</b>{small}</div>'
    f'<div class="chips">{_chips(others)}</div></div>'
  )


def _chips(rows: Sequence[BlockCollective]) -> str:
  return ''.join(map(_chip, rows))


def _chip(row: BlockCollective) -> str:
  color = _AXES.get(row.axes[0], _SEVERAL) if len(row.axes) == 1 else _SEVERAL
  share = 1.0 if not row.asynchronous_runs else 0.0
  if row.seconds is not None and row.exposed is not None:
    share = min(row.exposed / row.seconds, 1.0) if row.seconds else 1.0
  bar = (
    f'linear-gradient(90deg, var(--exposed) {share:.0%}, var(--hidden) {share:.0%})'
    if 0.005 < share < 0.995
    else f'var(--{"exposed" if share >= 0.995 else "hidden"})'
  )
  of = '' if row.passes in ((FORWARD,), (BACKWARD,)) else f'{words.passes_text(row)}: '
  axes = '+'.join(row.axes)
  return (
    f'<span class="chip" style="border-left-color:{color}" title="{row.runs:,} runs, '
    f'{words.schedule_text(row)}">{of}{row.kind} {axes} · {size_text(row.bytes)}'
    f'<i style="background:{bar}"></i></span>'
  )


def _tables(x: Explanation) -> Iterator[str]:
  for title, rows in (('Weights', x.weights), ('Saved activations', x.activations)):
    yield _table(
      f'{title}: {len(rows)} arrays',
      ('name', 'shape, logical axes / mesh axes', 'type', '#arrays', '#a device'),
      (
        (
          f'{f.row.name}: {f.row.made_by}' if f.row.made_by else f.row.name,
          words.dims_text(f.row),
          f.row.dtype,
          f'{f.count:,}',
          size_text(f.bytes),
        )
        for f in words.collapsed(rows)
      ),
    )
  yield _table(
    f'Collectives: {sum(r.runs for r in x.collectives):,} runs in a step',
    ('block', 'pass', 'kind', 'axes', '#runs', '#arrays', '#sent', 'schedule'),
    (
      (
        label(r.blocks),
        ' + '.join(r.passes),
        r.kind,
        '+'.join(r.axes),
        f'{r.runs:,}',
        size_text(r.bytes),
        size_text(words.sent(r)),
        words.schedule_text(r),
      )
      for r in words.ordered(x.collectives)
    ),
  )
  yield _table(
    'Matrix products',
    ('module', 'pass', '#kernels', '#FLOPs of a device'),
    (
      (f'{p.block}/{p.module}'.rstrip('/'), p.of, f'{p.runs:,}', f'{p.flops:.4g}')
      for p in x.products
    ),
  )


def _table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
  """Returns a table that opens by a click; columns whose title begins with # hold numbers."""
  kinds = [' class="n"' if name.startswith('#') else '' for name in header]
  line = lambda tag, cells: ''.join(
    f'<{tag}{kind}>{html.escape(cell)}</{tag}>' for cell, kind in zip(cells, kinds, strict=True)
  )
  body = ''.join(f'<tr>{line("td", cells)}</tr>' for cells in rows)
  head = line('th', [name.removeprefix('#') for name in header])
  return (
    f'<details><summary>{html.escape(title)}</summary><div class="wide"><table><thead><tr>{head}'
    f'</tr></thead><tbody>{body}</tbody></table></div></details>'
  )


def _box(
  left: float,
  top: float,
  width: float,
  height: float,
  color: str,
  title: str,
  text: str,
  size: int | None = None,
) -> str:
  """Returns a rectangle that says what it is where it has room, and under the pointer."""
  name = html.escape(text)
  lines = [name] if width > 9 + 7.5 * len(text) and height > 18 else []
  if lines and size is not None and height > 36:
    lines.append(size_text(size))
  middle = top + height / 2 + 4 - 8 * (len(lines) - 1)
  texts = ''.join(
    f'<text x="{left + width / 2:.1f}" y="{middle + 16 * i:.1f}" text-anchor="middle" class="in">'
    f'{line}</text>'
    for i, line in enumerate(lines)
  )
  return (
    f'<g><title>{html.escape(title)}</title><rect x="{left:.1f}" y="{top:.1f}" '
    f'width="{max(width, 0.5):.1f}" height="{height:.1f}" fill="{color}" stroke="var(--page)"/>'
    f'{texts}</g>'
  )


def _svg(height: float, drawn: Iterable[str], name: str) -> str:
  return f'<svg viewBox="0 0 {_W} {height}" role="img" aria-label="{name}">{"".join(drawn)}</svg>'


def _legend(colors: Mapping[str, str]) -> str:
  items = ''.join(
    f'<span><span class="dot" style="background:{color}"></span>{html.escape(name)}</span>'
    for name, color in colors.items()
  )
  return f'<div class="legend">{items}</div>'
