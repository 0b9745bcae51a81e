"""An explanation of a train step as text of 100 columns."""

import collections
import dataclasses
import math
import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from paxlite.aot.explanation import ArrayRow, BlockCollective, Explanation, added
from paxlite.aot.origins import BACKWARD, FORWARD, RECOMPUTED, UPDATE, label

_JOINED = '\N{NO-BREAK SPACE}'
_NAME, _DIMS = 35, 38  # columns on a wide screen
_WIDE = 100  # characters of the widest table
_SMALL = 0.005  # the share of the bytes below which collectives are not listed one by one
_PASSES = (FORWARD, RECOMPUTED, BACKWARD, UPDATE)
_BLOCKS = (
  'embedding', 'position_emb', 'first', 'layer', 'last', 'final_ln', 'logits', 'loss', 'update',
)  # fmt: skip
_SUBLAYERS = (
  '', 'layer_norm', 'self_attention', 'post_layer_norm', 'ff_layer_norm', 'ff_layer',
  'ff_post_layer_norm',
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Collapsed:
  """Equal arrays of several layers as one row; its bytes are those of all of them.

  Attributes:
    row: The first of the arrays, with the name 'layer/…' if it is one of a layer.
    count: Number of arrays.
  """

  row: ArrayRow
  count: int

  @property
  def bytes(self) -> int:
    return self.row.bytes * self.count


def collapsed(rows: Iterable[ArrayRow]) -> list[Collapsed]:
  """Returns one row for the equal arrays of unrolled layers, in the order of the first ones."""
  counts = collections.Counter(dataclasses.replace(row, name=short_name(row.name)) for row in rows)
  return [Collapsed(row, count) for row, count in counts.items()]


def short_name(name: str) -> str:
  """Returns 'transformer/x_layers_3/ff_layer' as 'layer/ff_layer', however layers are stacked."""
  short = re.sub(r'^(transformer/)?(repeat|x_layers_\d+|[A-Z]\w*)(?=/|$)', 'layer', name)
  short = re.sub(r'^transformer(?=/(?!first_|last_)|$)', 'layer', short)
  return re.sub(r'^transformer/|(?<=^layer/)x_layers_', '', short)


def dims_text(row: ArrayRow) -> str:
  """Returns '[2,048 embed/data, 32 heads/mdl]': sizes, logical axes, and mesh axes."""
  parts = []
  for size, name, mesh_axes in zip(row.shape, row.axes, row.mesh_axes, strict=True):
    text = f'{size}{_JOINED}{name}' if name else str(size)
    parts.append(f'{text}/{"+".join(mesh_axes)}' if mesh_axes else text)
  return f'[{", ".join(parts)}]'


def size_text(n: float) -> str:
  """Returns bytes with three digits: '1.25 GiB'."""
  units = ['B', 'KiB', 'MiB', 'GiB', 'TiB']
  while n >= 1000 and len(units) > 1:
    n /= 1024
    units.pop(0)
  digits = 0 if units[0] == 'B' or n >= 100 else 1 if n >= 10 else 2
  return f'{n:.{digits}f} {units[0]}'


def passes_text(row: BlockCollective) -> str:
  return row.passes[0] if len(row.passes) == 1 else 'several'


def schedule_text(row: BlockCollective) -> str:
  """Returns how far the schedule hides a collective behind kernels."""
  if row.seconds is None or row.exposed is None:
    return 'may overlap' if row.asynchronous_runs else 'exposed'
  if row.exposed < 0.005 * row.seconds:
    return 'overlapped'
  share = min(row.exposed / row.seconds, 1.0) if row.seconds else 1.0
  return 'exposed' if share > 0.995 else f'{share:.0%} exposed'


def ordered(rows: Iterable[BlockCollective]) -> list[BlockCollective]:
  """Returns collectives in the order of the passes and of the blocks, the most sent first."""

  def key(row: BlockCollective) -> tuple[object, ...]:
    of = row.passes[0]
    is_one = len(row.passes) == 1 and of in _PASSES
    order = _PASSES.index(of) if is_one else len(_PASSES)
    return order, block_order(label(row.blocks)), -sent(row)

  return sorted(rows, key=key)


def block_order(block: str) -> tuple[object, ...]:
  """Sorts blocks in the order of the model."""
  head, _, rest = block.partition('/')
  kind = next((i for i, name in enumerate(_BLOCKS) if head.startswith(name)), len(_BLOCKS))
  number, _, sublayer = rest.rpartition('/')
  place = _SUBLAYERS.index(sublayer) if sublayer in _SUBLAYERS else len(_SUBLAYERS)
  return kind, head, number, place, sublayer


def block_of(name: str) -> str:
  """Returns the block of an array: 'layer/self_attention' of 'layer/self_attention/qkv/query/w'."""
  parts = name.split('/')
  if parts[0] == 'softmax':
    return 'logits'
  if parts[0] != 'layer' and not parts[0].startswith(('first_', 'last_')):
    return parts[0]
  return '/'.join(parts[: 3 if parts[1:] and parts[1].isdigit() else 2])


def sent(row: BlockCollective) -> float:
  """Returns bytes that a device sends, near and far."""
  return row.near_bytes + row.far_bytes


def split_small(
  rows: Sequence[BlockCollective],
) -> tuple[list[BlockCollective], list[BlockCollective]]:
  """Returns (the collectives to list, those that are too small), in the order of the model.

  Collectives with the same names of blocks, passes, kind and axes become one.
  """
  groups = collections.defaultdict(list)
  for row in rows:
    groups[label(row.blocks), passes_text(row), row.kind, row.axes].append(row)
  rows = [added(group) for group in groups.values()]
  total = sum(map(sent, rows))
  large = lambda row: sent(row) >= _SMALL * total
  return ordered(filter(large, rows)), [row for row in rows if not large(row)]


def text(explanation: Explanation) -> str:
  """Returns the explanation as a page of text."""
  x = explanation
  mesh = ' × '.join(f'{a} {n}' for a, n in x.report.mesh.items() if n > 1) or 'one device'
  title = f'{x.report.experiment} on {x.report.target}, mesh {mesh}: {x.report.verdict}'
  return '\n'.join(
    [
      *textwrap.wrap(title, _narrowed(_WIDE, 40, 1.0)),
      '',
      *_memory(x),
      '',
      f'Weights: {x.report.parameters:,} parameters',
      *_arrays(x.weights),
      '',
      'Saved activations: what the forward pass keeps for the backward pass, by the traced loss',
      *_arrays(x.activations),
      '',
      '  [size logical axis/mesh axes that split it]; bytes are those of one device',
      '',
      *_blocks(x),
      '',
      *_collectives(x),
      '',
      *_recomputed(x),
      *(
        [
          '',
          *(
            line
            for note in x.report.notes
            for line in textwrap.wrap(note, _narrowed(_WIDE, 40, 1.0))
          ),
        ]
      ),
    ]
  )


def _memory(x: Explanation) -> Iterator[str]:
  t = x.totals
  yield 'Memory of a device'
  yield f'  parameters   {size_text(t.parameters):>10}'
  yield f'  optimizer    {size_text(t.optimizer):>10}'
  if t.others > 1024:
    yield f'  other state  {size_text(t.others):>10}'
  yield f'  batch        {size_text(t.batch):>10}'
  if t.peak:
    yield (
      f'  temporaries  {size_text(t.temporaries):>10}   by the compiler; gradients take '
      f'{size_text(t.gradients)}, saved activations {size_text(t.activations)}'
    )
    if t.code:
      yield f'  program      {size_text(t.code):>10}'
    yield f'  at most      {size_text(t.peak):>10}   in use at a time, by the compiler'
  else:
    yield f'  gradients    {size_text(t.gradients):>10}'
    yield f'  activations  {size_text(t.activations):>10}   saved for the backward pass'
  if t.memory is not None:
    yield f'  there is     {size_text(t.memory):>10}'


def _narrowed(wide: int, least: int, share: float) -> int:
  """Returns the width of a column, of which a narrow terminal takes its share of what it lacks."""
  lacking = _WIDE - shutil.get_terminal_size((_WIDE, 0)).columns
  return max(least, wide - math.ceil(max(0, lacking) * share))


def _arrays(rows: Sequence[ArrayRow]) -> Iterator[str]:
  width, dims_width = _narrowed(_NAME, 18, 0.5), _narrowed(_DIMS, 18, 0.5)
  for found in collapsed(rows):
    row = found.row
    name = f'{row.name}: {row.made_by}' if row.made_by else row.name
    names = _wrapped(row.name, width)
    if row.made_by and len(name) <= width:
      names = [name]
    elif row.made_by:
      names = [*_wrapped(f'{row.name}:', width), f'  {row.made_by}'[:width]]
    wrapped = textwrap.wrap(dims_text(row), dims_width, break_on_hyphens=False)
    dims = [line.replace(_JOINED, ' ') for line in wrapped]
    number = f'{found.count}x' if found.count > 1 else ''
    for i in range(max(len(names), len(dims))):
      part = lambda lines, i=i: lines[i] if i < len(lines) else ''
      line = f'  {part(names):{width}} {part(dims):{dims_width}}'
      if i == 0:
        line += f' {row.dtype:8} {number:>4} {size_text(found.bytes):>9}'
      yield line.rstrip()
  total, before = size_text(sum(r.bytes for r in rows)), width + dims_width + 15
  yield f'  {f"{len(rows)} arrays":{before}} {total:>9}'


def _wrapped(name: str, width: int) -> list[str]:
  """Returns a name in lines of at most `width`, which end with a slash where one is near."""
  lines = []
  while len(name) > width:
    cut = name.rfind('/', 3, width) + 1 or width
    lines.append(name[:cut])
    name = f'  {name[cut:]}'
  return [*lines, name]


def _blocks(x: Explanation) -> Iterator[str]:
  if not x.blocks:
    yield 'The program is not known, and so are its blocks.'
    return
  flops, moved = (sum(getattr(b, n) for b in x.blocks.values()) for n in ('flops', 'bytes'))
  yield 'Kernels of a step, by block'
  block = _narrowed(40, 22, 1.0)
  yield f'  {"block":{block}} {"FLOPs":>7} {"memory traffic":>15} {"foreseen":>12}'
  for name in sorted(x.blocks, key=block_order):
    b = x.blocks[name]
    seconds = '–' if b.foreseen is None else f'{1e3 * b.foreseen:,.3f} ms'
    shares = b.flops / (flops or 1.0), b.bytes / (moved or 1)
    yield f'  {_cut(name, block)} {shares[0]:7.1%} {shares[1]:15.1%} {seconds:>12}'


def _collectives(x: Explanation) -> Iterator[str]:
  rows = x.collectives
  if not rows:
    yield 'There are no collectives: one device has all of the model, or the program is not known.'
    return
  yield 'Collectives of a step, by block'
  block, axes = _narrowed(25, 11, 0.7), _narrowed(12, 6, 0.3)
  before = block + axes + 31
  yield (
    f'  {"block":{block}} {"pass":10} {"kind":18} {"axes":{axes}} {"runs":>5} {"bytes":>9}'
    '  schedule'
  )
  shown, small = split_small(rows)
  for row in shown:
    yield (
      f'  {_cut(label(row.blocks), block)} {passes_text(row):10} {row.kind:18} '
      f'{_cut("+".join(row.axes), axes)} {row.runs:5,} {size_text(row.bytes):>9}  '
      f'{schedule_text(row)}'
    )
  if small:
    runs, moved = sum(r.runs for r in small), sum(r.bytes for r in small)
    yield f'  {"others, which send less":{before}} {runs:5,} {size_text(moved):>9}'
  total = sum(r.bytes for r in rows)
  runs = sum(r.runs for r in rows)
  yield f'  {"all":{before}} {runs:5,} {size_text(total):>9}'
  if rows[0].seconds is not None:
    seconds, exposed = (sum(getattr(r, n) for r in rows) for n in ('seconds', 'exposed'))
    yield (
      f'  By the data sheet, sending takes {seconds * 1e3:,.2f} ms. The schedule hides '
      f'{max(seconds - exposed, 0) * 1e3:,.2f} ms of it.'
    )


def _cut(text: str, width: int) -> str:
  return f'{text[: width - 1]}…' if len(text) > width else f'{text:{width}}'


def _recomputed(x: Explanation) -> Iterator[str]:
  if not x.products:
    return
  if not x.recomputed:
    yield 'No matrix product of the forward pass is computed again in the backward pass.'
    return
  total, again = (sum(p.flops for p in products) for products in (x.products, x.recomputed))
  yield f'Matrix products that the backward pass computes again: {again / total:.1%} of all FLOPs'
  module = _narrowed(60, 25, 1.0)
  yield f'  {"module":{module}} {"runs":>8} {"FLOPs of a device":>20}'
  for p in x.recomputed:
    name = f'{p.block}/{p.module}' if p.module else p.block
    yield f'  {_cut(name, module)} {p.runs:8,} {p.flops:20.4g}'
