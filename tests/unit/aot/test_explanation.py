"""An explanation's figures are those of the compiler, and rows of it are counted by hand."""

import json

import pytest

from paxlite.aot import explanation_tables, origins
from paxlite.aot.explanation_tables import short_name, size
from paxlite.aot.hlo import Program
from paxlite.aot.origins import Origin
from tests.support import runs

# two repeated layers of which the backward pass keeps the input alone, on mesh 2 × 2 × 2
MODEL = ['USE_REPEATED_LAYER=True', 'CHECKPOINT_POLICY=SAVE_NOTHING', 'ICI_MESH_SHAPE=[2,2,2]']
SIZES = [
  'MODEL_DIMS=32', 'HIDDEN_DIMS=96', 'MAX_SEQ_LEN=16', 'PERCORE_BATCH_SIZE=1', 'NUM_LAYERS=2',
]  # fmt: skip
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


@pytest.mark.slow
def test_its_bytes_are_those_of_the_compiler(explained):
  totals, report = explained.data['totals'], explained.data['report']
  state = ('parameters', 'moments', 'other state', 'batch')
  assert totals.keys() == {*state, 'gradients', 'saved activations'}
  assert sum(totals[name] for name in state) == report['arguments']
  assert totals['gradients'] == totals['parameters'] == totals['moments'] / 2
  assert totals['saved activations'] == sum(r['bytes'] for r in explained.data['activations'])


@pytest.mark.slow
def test_its_collectives_are_those_of_the_blocks(explained):
  """Layers gather their weights once for each pass, split 2 × 2; the update moves nothing large."""
  found = explained.data['report']['costs']['communication']
  blocks = {c['block'] for c in found}
  assert {'embedding', 'layer/self_attention', 'layer/ff_layer', 'logits', 'update'} <= blocks
  assert 'elsewhere' not in blocks
  assert all(c['runs'] > 0 and c['bytes'] > 0 and c['exposed'] is None for c in found)


@pytest.mark.slow
def test_activations_counted_by_hand(explained):
  """The inputs of two layers, [8, 16, 32], are split over all three axes."""
  (kept,) = (a for a in explained.data['activations'] if a['made_by'] == 'iteration_input')
  assert kept == {
    'module': 'layer', 'made_by': 'iteration_input', 'arrays': 1, 'bytes': 4 * 2 * 8 * 16 * 32 // 8
  }  # fmt: skip
  of_bytes = [a['bytes'] for a in explained.data['activations']]
  assert of_bytes == sorted(of_bytes, reverse=True)


@pytest.mark.slow
def test_products_that_run_again(explained):
  """All of a layer's but the last, whose result no derivative needs; mdl halves them."""
  blocks = explained.data['report']['costs']['blocks']
  assert {name: b['recomputed'] for name, b in blocks.items() if b['recomputed']} == {
    'layer/self_attention': (
      2 * (2 * TOKENS * 32 * 3 * 32) / 2  # queries, keys and values
      + 2 * 2 * (2 * TOKENS * 16 * 32) / 2  # attention
      + 2 * (2 * TOKENS * 32 * 32) / 2  # the output projection
    ),
    'layer/ff_layer': 2 * (2 * TOKENS * 32 * 96) / 2,
  }


@pytest.mark.slow
def test_the_text(explained):
  lines = explained.text.splitlines()
  assert lines[0].startswith('TinyGPT on here, mesh replica 2 × data 2 × mdl 2')
  (line,) = (line for line in lines if line.startswith('  layer ') and 'iteration_input' in line)
  assert line.split() == ['layer', 'iteration_input', '1', '4.00', 'KiB']


ONE = 'jit(step)/transpose(jvp(Lm.losses))/Lm.hidden/transformer/transformer.layers/x_layers_3'


@pytest.mark.parametrize(
  ('path', 'expected'),
  [
    (
      f'{ONE}/self_attention/qkv/combined/combined.product/einsum/BTD,ADNH->BTANH/dot_general',
      [Origin('layer/self_attention', 'backward')],
    ),
    (
      f'{ONE}/(ff_layer/ffn_layer1/dot:checkpoint/rematted_computation/layer_norm/(mul:reduce_sum))',
      [Origin('layer/ff_layer', 'backward'), Origin('layer/layer_norm', 'recomputed')],
    ),
    (
      'jit(step)/jvp(Lm.losses)/Lm.hidden/transformer/while/body/closed_call/repeat.step/repeat/'
      'x_layers_1/ff_layer/router/dot_general',
      [Origin('layer/1/ff_layer', 'forward')],
    ),
    (
      'jit(step)/jvp(Lm.losses)/Lm.hidden/transformer/first_0/ff_layer/dot_general',
      [Origin('first_0/ff_layer', 'forward')],
    ),
    (
      'jit(step)/(jvp(Lm.losses)/Lm._uncapped_logits/embedding.attend/dot:jvp(Lm.losses)/sum:sum)',
      [Origin('logits', 'forward'), Origin('loss', 'forward'), Origin('update', 'update')],
    ),
    ('jit(step)/jvp(Lm.losses)/Lm.hidden/embedding/gather', [Origin('embedding', 'forward')]),
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


def collective(**values) -> dict:
  about = {
    'block': 'layer/ff_layer', 'pass': 'forward', 'kind': 'all-gather', 'axes': ['data'], 'runs': 2,
    'bytes': 400, 'ici_bytes': 300.0, 'dcn_bytes': 0.0, 'seconds': 2.0, 'exposed': 0.5,
  }  # fmt: skip
  return about | values


COSTS = {
  'flops': {'bf16': 12.0}, 'traffic': 100, 'kernels': 3, 'host_traffic': [2048, 0],
  'blocks': {
    'update': dict(flops=0.0, recomputed=0.0, bytes=75, predicted=None),
    'layer/ff_layer': dict(flops=9.0, recomputed=3.0, bytes=25, predicted=0.25),
  },
  'communication': [
    collective(), collective(**{'exposed': 0.0, 'kind': 'all-reduce', 'pass': 'several'}),
    *[collective(block='update', bytes=4) for _ in range(20)],
  ],
  'roofline': {
    'resources': {'compute': 0.25, 'memory': 0.125, 'host': 0.0},
    'parts': {'matrix multiplications': 0.75, 'collectives': 0.25, 'memory traffic': 0.0},
  },
}  # fmt: skip
REPORT = {
  'experiment': 'X', 'target': 'h100x8', 'device': 'H100', 'devices': 8,
  'mesh': {'data': 8, 'mdl': 1}, 'parameters': 24, 'batch_size': 8, 'seq_len': 16,
  'versions': {'jax': '1'}, 'options': {'xla_a': True}, 'compile_seconds': 1.0, 'verdict': 'fits',
  'arguments': 2048, 'temporaries': 1024, 'generated_code': 0, 'total': 4096, 'host': 0,
  'model_flops': 100.0, 'mfu': [0.25, 0.5], 'notes': ['A note.'],
  'chip': {
    'memory': 1 << 30, 'source': 'its sheet',
    'rates': {'source': 'one', 'matmul': 0.5, 'memory': 0.75, 'launch': 2e-6},
  },
  'costs': COSTS,
}  # fmt: skip
EXPLAINED = {
  'report': REPORT,
  'totals': {'parameters': 2048, 'batch': 1536},
  'activations': [dict(module=f'm{i}', made_by='add', arrays=2, bytes=3072) for i in range(22)],
}


def test_the_tables():
  """Blocks that take most come first, and what is small comes together."""
  _, memory, seconds, blocks, sent, kept = explanation_tables.tables(EXPLAINED)
  assert dict(memory.rows) == {
    'parameters': '2.00 KiB', 'batch': '1.50 KiB', 'at most in use at a time': '4.00 KiB',
    'temporaries, with gradients and activations': '1.00 KiB', 'there is': '1.00 GiB',
  }  # fmt: skip
  assert seconds.rows == [
    ('matrix multiplications', '750.0 ms', '75.0%'),
    ('collectives', '250.0 ms', '25.0%'),
    ('a step', '1,000.0 ms', '100.0%'),
  ]
  assert seconds.notes[0].endswith('by its sheet: compute 250.0 ms, memory 125.0 ms.')
  assert 'reaches 50% of the FLOP/s or 75% of the bandwidth, and takes 2 µs' in seconds.notes[1]
  assert seconds.notes[2].startswith('MFU is predicted at 25%; 50% if')
  assert kept.rows[0] == ('m0', 'add', '2', '3.00 KiB')
  assert kept.rows[-2:] == [('others', '', '4', '6.00 KiB'), ('all', '', '44', '66.0 KiB')]
  assert blocks.rows == [
    ('layer/ff_layer', '100.0%', '33.3%', '25.0%', '250.0 ms'),
    ('update', '0.0%', '0.0%', '75.0%', '–'),
    (explanation_tables.ALL, '100.0%', '33.3%', '100.0%', '250.0 ms'),
  ]
  assert len(sent.rows) == 22
  assert sent.rows[0][:4] == ('layer/ff_layer', 'forward', 'all-gather', 'data')
  assert sent.rows[1][4:] == ('2', '400 B', '2,000.0 ms', '0 ms')
  assert sent.rows[-2:] == [
    ('others', '', '', '', '4', '8 B', '4,000.0 ms', '1,000.0 ms'),
    ('all', '', '', '', '44', '880 B', '44,000.0 ms', '10,500.0 ms'),
  ]
  text = explanation_tables.text(EXPLAINED)
  assert text.startswith('X on h100x8, mesh data 8: fits\n')
  assert '2.00 KiB are read, 0 B written' in text
  assert text.endswith('A note.')


def test_what_is_not_known_or_not_there_is_left_out():
  alone = REPORT | {'costs': COSTS | {'communication': [], 'roofline': None}}
  titles = [table.title for table in explanation_tables.tables({'report': alone})]
  assert titles[1:3] == ['Memory of a device', 'Kernels of a step, by block']
  assert 'No collectives' in titles[3]
  too_large = REPORT | {'costs': None, 'arguments': 0}
  assert len(list(explanation_tables.tables({'report': too_large}))) == 1


def test_names_and_sizes():
  assert short_name('transformer/repeat/x_layers_1/ff_layer/w') == 'layer/1/ff_layer/w'
  assert short_name('transformer/first_0/ff_layer/w') == 'first_0/ff_layer/w'
  sizes = {3: '3 B', 1536: '1.50 KiB', 40 << 20: '40.0 MiB', 700 << 40: '700 TiB'}
  assert {n: size(n) for n in sizes} == sizes
