"""An explanation's figures are those of the compiler, and rows of it are counted by hand."""

import collections
import html.parser
import json
import math
import re

import pytest

from paxlite.aot import origins
from paxlite.aot.explanation import ArrayRow
from paxlite.aot.explanation_page import squares
from paxlite.aot.explanation_text import collapsed, dims_text, short_name, size_text
from paxlite.aot.hlo import Program
from paxlite.aot.origins import Origin
from tests.support import runs

# two repeated layers of which the backward pass keeps the input alone, on mesh 2 × 2 × 2
MODEL = ['USE_REPEATED_LAYER=True', 'CHECKPOINT_POLICY=SAVE_NOTHING', 'ICI_MESH_SHAPE=[2,2,2]']
SIZES = [
  'MODEL_DIMS=32',
  'HIDDEN_DIMS=96',
  'MAX_SEQ_LEN=16',
  'PERCORE_BATCH_SIZE=1',
  'NUM_LAYERS=2',
]
TOKENS = 2 * 16  # of a device: 8 rows over replica and data


class Explained:
  """What one run of the command has written."""

  def __init__(self, folder):
    files = [f'--json={folder / "step.json"}', f'--html={folder / "step.html"}']
    command = ['TinyGPT', *MODEL, *SIZES, *files]
    self.text = runs.module('paxlite', 'explain', *command, devices=8).stdout
    self.data = json.loads((folder / 'step.json').read_text())
    self.page = (folder / 'step.html').read_text()


@pytest.fixture(scope='module')
def explained(tmp_path_factory):
  return Explained(tmp_path_factory.mktemp('explained'))


def row(rows, name: str, **values) -> dict:
  (found,) = (r for r in rows if r['name'] == name and all(r[k] == v for k, v in values.items()))
  return found


@pytest.mark.slow
def test_its_bytes_are_those_of_the_compiler(explained):
  totals, report = explained.data['totals'], explained.data['report']
  assert totals['state'] + totals['batch'] == report['arguments']
  assert totals['parameters'] == sum(r['bytes'] for r in explained.data['weights'])
  assert totals['activations'] == sum(r['bytes'] for r in explained.data['activations'])
  assert totals['peak'] == report['total']
  assert sum(math.prod(r['shape']) for r in explained.data['weights']) == report['parameters']


@pytest.mark.slow
def test_its_collectives_are_those_of_the_compiled_program(explained):
  found = collections.Counter()
  for c in explained.data['collectives']:
    found[c['kind'], tuple(c['axes']), 'runs'] += c['runs']
    found[c['kind'], tuple(c['axes']), 'bytes'] += c['bytes']
  program = collections.Counter()
  for c in explained.data['report']['costs']['communication']:
    program[c['kind'], tuple(c['axes']), 'runs'] = c['runs']
    program[c['kind'], tuple(c['axes']), 'bytes'] = c['bytes']
  assert program
  assert found == program
  blocks = {block for c in explained.data['collectives'] for block in c['blocks']}
  assert {'embedding', 'layer/self_attention', 'layer/ff_layer', 'logits', 'update'} <= blocks
  assert 'elsewhere' not in blocks


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_pipeline_keeps_what_the_compiler_has_room_for(tmp_path):
  """Each of 5 ticks keeps the input of the layer of each stage, of 2 rows on each of 4 devices."""
  path = tmp_path / 'step.json'
  mesh = ['MESH_AXES=[stage,replica,data,mdl]', 'ICI_MESH_SHAPE=[2,1,4,1]', 'NUM_MICROBATCHES=4']
  model = ['TinyGPT', 'USE_REPEATED_LAYER=True', 'CHECKPOINT_POLICY=SAVE_NOTHING']
  runs.module('paxlite', 'explain', *model, *mesh, f'--json={path}', devices=8)
  found = json.loads(path.read_text())
  (kept,) = (a for a in found['activations'] if a['shape'] == [5, 2, 4, 2, 32, 32])
  assert kept['axes'] == [None, 'layers', 'batch', None, 'length', 'act_embed']
  assert kept['mesh_axes'] == [[], ['stage'], ['data'], [], [], []]
  assert kept['bytes'] == 5 * 2 * 32 * 32 * 4
  assert found['totals']['activations'] < found['totals']['temporaries']


@pytest.mark.slow
def test_rows_counted_by_hand(explained):
  """A weight [2 layers, 32, 96], split by data and mdl; the inputs of two layers, [8, 16, 32]."""
  weight = row(explained.data['weights'], 'transformer/repeat/ff_layer/ffn_layer1/w')
  assert weight['shape'] == [2, 32, 96]
  assert weight['axes'] == ['layers', 'embed', 'mlp']
  assert weight['mesh_axes'] == [[], ['data'], ['mdl']]
  assert (weight['dtype'], weight['bytes']) == ('float32', 4 * 2 * 32 * 96 // 4)
  kept = row(explained.data['activations'], 'transformer')
  assert kept['shape'] == [2, 8, 16, 32]
  assert kept['axes'] == ['layers', 'batch', 'length', 'act_embed']
  assert kept['mesh_axes'] == [[], ['replica', 'data'], [], ['mdl']]
  assert (kept['bytes'], kept['made_by']) == (4 * 2 * 8 * 16 * 32 // 8, 'iteration_input')


@pytest.mark.slow
def test_products_that_run_again(explained):
  """All of a layer's but the last, whose result no derivative needs; mdl halves them."""
  again = {
    (p['block'], p['module']): p['flops']
    for p in explained.data['products']
    if p['of'] == 'recomputed'
  }
  assert again == {
    ('layer/self_attention', 'qkv/combined'): 2 * (2 * TOKENS * 32 * 3 * 32) / 2,
    ('layer/self_attention', 'dot_product'): 2 * 2 * (2 * TOKENS * 16 * 32) / 2,
    ('layer/self_attention', 'post'): 2 * (2 * TOKENS * 32 * 32) / 2,
    ('layer/ff_layer', 'ffn_layer1'): 2 * (2 * TOKENS * 32 * 96) / 2,
  }


@pytest.mark.slow
def test_the_text_fits_a_terminal(explained):
  lines = explained.text.splitlines()
  assert max(map(len, lines)) <= 100
  assert lines[0].startswith('TinyGPT on here, mesh replica 2 × data 2 × mdl 2')
  (line,) = (line for line in lines if line.startswith('  layer/ff_layer/ffn_layer1/w '))
  shape = '[2 layers, 32 embed/data, 96 mlp/mdl]'
  assert line.split(maxsplit=1)[1].split() == [*shape.split(), 'float32', '6.00', 'KiB']


@pytest.mark.slow
def test_the_page_is_complete_and_needs_no_network(explained):
  class Reader(html.parser.HTMLParser):
    opened, closed = collections.Counter(), collections.Counter()

    def handle_starttag(self, tag, attributes):
      self.opened[tag] += 1

    def handle_endtag(self, tag):
      self.closed[tag] += 1

  reader = Reader()
  reader.feed(explained.page)
  for tag in ('div', 'svg', 'g', 'table', 'details', 'span'):
    assert reader.opened[tag] == reader.closed[tag] > 0, tag
  assert not re.search(r'https?://|src=|<link|<script', explained.page)
  assert '2 layers' in explained.page
  assert 'embed/data' in explained.page


ONE = 'jit(step)/transpose(jvp(Lm.losses))/Lm.hidden/transformer/transformer.layers/x_layers_3'


@pytest.mark.parametrize(
  ('path', 'expected'),
  [
    (
      f'{ONE}/self_attention/qkv/combined/combined.product/einsum/BTD,ADNH->BTANH/dot_general',
      [Origin('layer/self_attention', 'qkv/combined', 'backward')],
    ),
    (
      f'{ONE}/(ff_layer/ffn_layer1/dot:checkpoint/rematted_computation/layer_norm/(mul:reduce_sum))',
      [
        Origin('layer/ff_layer', 'ffn_layer1', 'backward'),
        Origin('layer/layer_norm', '', 'recomputed'),
      ],
    ),
    (
      'jit(step)/jvp(Lm.losses)/Lm.hidden/transformer/while/body/closed_call/repeat.step/repeat/'
      'x_layers_1/ff_layer/router/dot_general',
      [Origin('layer/1/ff_layer', 'router', 'forward')],
    ),
    (
      'jit(step)/jvp(Lm.losses)/Lm.hidden/transformer/first_0/ff_layer/dot_general',
      [Origin('first_0/ff_layer', '', 'forward')],
    ),
    (
      'jit(step)/(jvp(Lm.losses)/Lm._uncapped_logits/embedding.attend/dot:jvp(Lm.losses)/sum:sum)',
      [
        Origin('logits', '', 'forward'),
        Origin('loss', '', 'forward'),
        Origin('update', '', 'update'),
      ],
    ),
    ('jit(step)/jvp(Lm.losses)/Lm.hidden/embedding/gather', [Origin('embedding', '', 'forward')]),
  ],
)
def test_where_an_instruction_comes_from(path, expected):
  assert origins.origins(path) == tuple(expected)


GATHERED = """
%fused (p: f32[4], q: f32[8]) -> f32[8] {
  %p = f32[4] parameter(0)
  %q = f32[8] parameter(1)
  %inside = f32[8] all-gather(%p), channel_id=1, replica_groups={}, dimensions={0}
  ROOT %sum = f32[8] add(%inside, %q)
}

ENTRY %main (a: f32[4], b: f32[4]) -> f32[8] {
  %a = f32[4] parameter(0)
  %b = f32[4] parameter(1)
  %gather = f32[8] all-gather(%a), channel_id=2, replica_groups={}, dimensions={0}
  %copy = f32[8] copy(%gather)
  %used = f32[8] negate(%copy), metadata={op_name="jit(step)/use"}
  %made = f32[4] negate(%b), metadata={op_name="jit(step)/make"}
  %reduced = f32[4] all-reduce(%made), channel_id=3, replica_groups={}, to_apply=%add
  %far = f32[4] negate(%reduced), metadata={op_name="jit(step)/far"}
  ROOT %out = f32[8] fusion(%far, %used), calls=%fused, metadata={op_name="jit(step)/out"}
}
"""


def test_collectives_without_a_path():
  """A gather has the path of its user, a reduction that of its operand, through fusions too."""
  program = Program(GATHERED)
  paths = origins.Paths(program)
  path = lambda computation, name: paths.path(computation, computation.get(name))
  assert path(program.entry, 'gather') == 'jit(step)/use'
  assert path(program.entry, 'reduced') == 'jit(step)/make'
  assert path(program.computations['fused'], 'inside') == 'jit(step)/out'


def test_equal_layers_are_one_row():
  one = lambda name: ArrayRow(name, (6, 4), 'float32', ('embed', None), (('data', 'mdl'), ()), 24)
  rows = [one(f'transformer/x_layers_{i}/ff_layer/w') for i in range(3)]
  (found,) = collapsed(rows)
  assert (found.row.name, found.count, found.bytes) == ('layer/ff_layer/w', 3, 72)
  assert dims_text(found.row).split() == ['[6', 'embed/data+mdl,', '4]']
  assert short_name('transformer/repeat/x_layers_1/ff_layer/w') == 'layer/1/ff_layer/w'
  assert short_name('transformer/first_0/ff_layer/w') == 'first_0/ff_layer/w'
  sizes = {3: '3 B', 1536: '1.50 KiB', 40 << 20: '40.0 MiB', 700 << 40: '700 TiB'}
  assert {n: size_text(n) for n in sizes} == sizes


def test_a_treemap_fills_its_rectangle():
  sizes = [50, 20, 20, 7, 2, 1]
  tiles = squares(sizes, 0, 0, 200, 100)
  for size, (left, top, width, height) in zip(sizes, tiles, strict=True):
    assert width * height == pytest.approx(200 * 100 * size / sum(sizes))
    assert left + width <= 200 + 1e-6
    assert top + height <= 100 + 1e-6
  centers = [(left + w / 2, top + h / 2) for left, top, w, h in tiles]
  for i, (x, y) in enumerate(centers):  # no tile covers another one's center
    covering = [n for n, (le, to, w, h) in enumerate(tiles) if le < x < le + w and to < y < to + h]
    assert covering == [i]
