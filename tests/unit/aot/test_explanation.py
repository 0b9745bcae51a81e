"""An explanation's figures are those of the compiler, and rows of it are counted by hand."""

import collections
import json
import math

import pytest

from paxlite.aot import explanation_tables, origins
from paxlite.aot.explanation_tables import dims_text, short_name, size
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
    command = ['TinyGPT', *MODEL, *SIZES, f'--json={folder / "step.json"}']
    self.text = runs.module('paxlite', 'explain', *command, devices=8).stdout
    self.data = json.loads((folder / 'step.json').read_text())


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
@pytest.mark.parametrize('width', [100, 70])
def test_tables_fit_any_terminal(explained, monkeypatch, width):
  monkeypatch.setenv('COLUMNS', str(width))
  lines = explanation_tables.text(explained.data).splitlines()
  assert max(map(len, lines)) <= width


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


def array(name: str, made_by: str = '') -> dict:
  about = dict(axes=['embed', None], mesh_axes=[['data', 'mdl'], []], bytes=24, made_by=made_by)
  return dict(name=name, shape=[6, 4], dtype='float32', **about)


def collective(**values) -> dict:
  about = dict(
    blocks=['layer/ff_layer'], passes=['forward'], kind='all-gather', axes=['data'], runs=2,
    bytes=400, near_bytes=300.0, far_bytes=0.0, asynchronous_runs=0, seconds=2.0, exposed=0.5,
  )  # fmt: skip
  return about | values


TOTALS = dict.fromkeys(
  ('parameters', 'optimizer', 'others', 'batch', 'gradients', 'activations', 'temporaries', 'code'),
  2048,
)
EXPLAINED = {
  'report': {
    'experiment': 'X', 'target': 'h100x8', 'mesh': {'data': 8, 'mdl': 1}, 'verdict': 'fits',
    'parameters': 24, 'notes': ['A note.'],
  },
  'totals': TOTALS | {'peak': 4096, 'memory': 1 << 30},
  'weights': [array(f'transformer/x_layers_{i}/ff_layer/w') for i in range(3)],
  'activations': [array('loss', 'add')],
  'collectives': [
    collective(), collective(exposed=0.0, kind='all-reduce'),
    collective(blocks=['update', 'layer/ff_layer'], passes=['update', 'backward'], exposed=2.0),
    collective(near_bytes=1.0, bytes=4),
  ],
  'products': [
    dict(block='layer', module='w', of='forward', runs=1, flops=30.0),
    dict(block='layer', module='w', of='recomputed', runs=1, flops=10.0),
  ],
  'blocks': {
    'update': dict(flops=0.0, bytes=75, predicted=None),
    'layer/ff_layer': dict(flops=9.0, bytes=25, predicted=0.25),
  },
}  # fmt: skip


def test_the_tables():
  """Equal layers are one row; blocks come in the order of the model, small collectives together."""
  memory, weights, activations, blocks, collectives, products = explanation_tables.tables(EXPLAINED)
  assert [row[0] for row in memory.rows][:2] == ['parameters', 'optimizer']
  assert weights.rows[0][0] == 'layer/ff_layer/w'
  assert weights.rows[0][2:] == ('float32', '3x', '72 B')
  assert activations.rows[0][0] == 'loss: add'
  assert [row[0] for row in blocks.rows] == ['layer/ff_layer', 'update']
  assert blocks.rows[0][1:] == ('100.0%', '25.0%', '250.0 ms')
  assert [(*row[:3], row[6]) for row in collectives.rows] == [
    ('layer/ff_layer', 'forward', 'all-gather', '25% exposed'),
    ('layer/ff_layer', 'forward', 'all-reduce', 'overlapped'),
    ('several', 'several', 'all-gather', 'exposed'),
    ('all', '', '', ''),
  ]
  assert 'sending takes 8,000.00 ms. The schedule hides 5,000.00 ms of it' in collectives.notes[0]
  assert products.title.endswith('computes again: 25.0% of all FLOPs')
  assert products.rows == [('layer/w', '1', '10')]
  text = explanation_tables.text(EXPLAINED)
  assert text.startswith('X on h100x8, mesh data 8: fits\n')
  assert text.endswith('A note.')


def test_what_is_not_known_or_not_there_is_said():
  unknown = EXPLAINED | {'collectives': [], 'products': [], 'blocks': {}}
  assert 'The program is not known' in explanation_tables.text(unknown)
  alone = explanation_tables.text(EXPLAINED | {'collectives': [], 'products': []})
  assert 'There are no collectives' in alone
  assert 'No matrix product of the forward pass runs again' in alone


def test_names_and_sizes():
  assert dims_text(array('x')).split() == ['[6', 'embed/data+mdl,', '4]']
  assert short_name('transformer/repeat/x_layers_1/ff_layer/w') == 'layer/1/ff_layer/w'
  assert short_name('transformer/first_0/ff_layer/w') == 'first_0/ff_layer/w'
  sizes = {3: '3 B', 1536: '1.50 KiB', 40 << 20: '40.0 MiB', 700 << 40: '700 TiB'}
  assert {n: size(n) for n in sizes} == sizes
