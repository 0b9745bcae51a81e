"""Every sharding of a model over 8 devices gives the loss and gradients of one device.

The comparison is in float32, to 1e-5 of each gradient's largest entry. The programs must contain
the collectives of their sharding, and must not gather a whole activation. Where GPU and TPU have a
reduce-scatter, XLA's CPU compiler makes an all-reduce, unless the model asks for a reduce-scatter.
"""

import json
import re
import shlex
import subprocess
import sys

import fiddle as fdl
import jax
import numpy as np
import pytest

from paxlite.core.errors import UserError
from paxlite.experiments.gpt import GPT126M
from paxlite.experiments.llama import LLaMA
from paxlite.parallel import mesh
from tests.support import families, runs

# The collectives that the program of a mesh must contain.
MUST = {
  'dp': {'all-reduce replica'}, 'fsdp': {'all-gather data', 'all-reduce data'},
  'tp4': {'all-gather data', 'all-reduce mdl'},
  'dp_fsdp_tp': {'all-gather data', 'all-reduce mdl', 'all-reduce replica+data'},
  'dcn': {'all-gather data', 'all-reduce mdl', 'all-reduce replica+data'},
  'dcn_data': {'all-gather data', 'all-reduce mdl'},
  'sequence': {'all-gather data', 'all-gather mdl'},
  'context': {'all-gather context', 'all-reduce context'},
  'context_tp': {'all-gather context', 'all-reduce context', 'all-reduce mdl'},
  'pipeline': {'collective-permute stage'},
  'pipeline_tp': {'collective-permute stage', 'all-reduce mdl'},
  'expert_tp': {'all-to-all expert', 'all-reduce mdl'}, 'expert_fsdp': {'all-gather data'},
  'fractional': {'all-gather data', 'all-reduce mdl'},
  'pipeline_sequence': {'collective-permute stage', 'all-gather mdl'},
  'torus': {'all-gather data', 'reduce-scatter data'},
  'torus_dp': {'all-gather data', 'reduce-scatter data', 'all-reduce replica'},
  'torus_chunks': {'all-gather data', 'reduce-scatter data'},
  'torus_expert': {'all-gather data', 'reduce-scatter data', 'all-reduce expert'},
}  # fmt: skip
SMALLEST_MATRIX = 32 * 32 * 4  # bytes
# If experts are sharded over data, as in Pax, tokens move along data.
MUST_OF = {
  'glam/fsdp': {'all-to-all data'}, 'dropless/fsdp': {'all-gather data', 'reduce-scatter data'},
}  # fmt: skip

# Cases of one model are compared with the same results of one device. A mesh with one axis is left
# out where the same model is on one with that axis and another.
CASES = [
  ['gpt/fsdp', 'gpt/tp4', 'gpt/dcn', 'gpt/sequence', 'gpt/context', 'gpt/fractional',
   'gpt/pipeline_tp', 'gpt/torus'],
  ['gpt/dcn_data', 'gpt/pipeline_sequence'],
  ['llama/fsdp', 'llama/dp_fsdp_tp', 'llama/sequence', 'llama/context_tp', 'llama/pipeline',
   'llama/torus_dp', 'llama/torus_chunks'],
  ['glam/dp', 'glam/fsdp', 'glam/expert_tp', 'glam/expert_fsdp', 'glam/context',
   'glam/fractional', 'glam/torus_expert'],
  ['moe/dp', 'moe/pipeline'],
  ['mtp/dp_fsdp_tp', 'mtp/context_tp', 'mtp/torus_chunks'],
  ['dropless/fsdp', 'dropless/expert_tp', 'dropless/pipeline', 'dropless/torus_dp',
   'dropless_6/torus_dp'],
]  # fmt: skip


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize('cases', CASES, ids=lambda c: c[0])
def test_a_mesh_changes_nothing_but_rounding(cases):
  done = runs.module('tests.support.meshes', *cases, devices=8)
  # XLA reports this if it replicates an array on every device in order to split it another way.
  whole = [x for x in done.stderr.splitlines() if 'full rematerialization' in x]
  assert not [x for x in whole if 'fake_parameter' not in x]  # only in XLA's estimates
  results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{')]
  assert [r['case'] for r in results] == cases
  for r in results:
    assert r['loss'] < 1e-5, r
    assert r['gradient'] < 1e-5, r
    assert not r['sums of scores'], r  # such as the gradient of GLaM's relative bias
    mesh = r['case'].partition('/')[2]
    if mesh == 'fsdp':  # 8 shards: no device ever holds all parameters
      assert r['init'] < 0.5, r
    must = MUST_OF.get(r['case'], MUST[mesh])
    assert must <= r['collectives'].keys(), r
    if mesh in ('torus', 'torus_dp', 'torus_chunks'):  # no matrix is summed on every device
      sums = [n for kind, n in r['collectives'].items() if re.match('all-reduce.*data', kind)]
      assert max(sums) < SMALLEST_MATRIX, r
    gathered = [size for kind, size in r['collectives'].items() if kind.startswith('all-gather')]
    assert max(gathered, default=0) < r['activation'], r


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize('case', families.ON_MESHES)
def test_a_mesh_changes_no_family(case):
  """On data 2 × mdl 2 × expert 2 where there are experts, otherwise data 2 × mdl 2 × context 2."""
  pytest.importorskip('transformers')
  has_experts = any('experts' in key for key in families.CASES[case])
  over_context = not has_experts or case in families.OVER_CONTEXT
  name = f'{case}/{"context_tp" if over_context else "expert_tp"}'
  done = runs.module('tests.support.meshes', name, devices=8)
  (result,) = (json.loads(line) for line in done.stdout.splitlines() if line.startswith('{'))
  assert result['case'] == name
  assert result['loss'] < 1e-5, result
  assert result['gradient'] < families.TOLERANCES.get(case, 1e-5), result


EXPERT = 'MESH_AXES=["replica","data","mdl","expert"]'
CONTEXT = 'MESH_AXES=["replica","data","mdl","context"]'
STAGE = 'MESH_AXES=["stage","replica","data","mdl"]'
REPEATED = ['NUM_LAYERS=2', 'USE_REPEATED_LAYER=true', 'NUM_MICROBATCHES=2']
ALL_AXES = 'MESH_AXES=["stage","replica","data","mdl","expert","context"]'
OPTIONS = [*REPEATED, 'ROWS=16', 'SLIDING_WINDOW=6']
# Of six axes, these six meshes with four axes hold every triple, and with it every pair.
GRID = {
  'fast': (8, ['2,2,2', 'gpt/128/4/tied', 'moe/16/4']),
  'three axes': (8, ['2,2,2', 'gpt/16/1', 'llama/16/4/tied', 'llama/128/1', 'moe/128/1']),
  'hosts': (8, ['1,2,2/2,1,1', 'llama/128/4']),
  'two axes': (8, ['4,2,1', '2,1,4', 'gpt/128/4/tied']),
  'fp8': (8, ['2,2,2', 'gpt/16/1', 'gpt/128/4/tied', 'llama/128/1', 'USE_FP8=true']),
  'lora': (8, ['2,2,2', 'gpt/128/1', 'USE_LORA=true']),
  'sequence': (8, ['2,2,2', 'llama/128/4', 'SEQUENCE_SHARDED_ACTIVATIONS=true']),
  'dropless': (8, ['2,2,2', 'moe/128/4', 'USE_DROPLESS_MOE=true']),
  'expert': (16, ['2,2,2,2', 'moe/16/1', EXPERT, *OPTIONS]),
  'context': (16, ['2,2,2,2', 'gpt/16/1/tied', CONTEXT, *OPTIONS]),
  'stage': (16, ['2,2,2,2', 'llama/128/4', STAGE, *OPTIONS]),
  'replica, others': (16, ['2,2,1,1,2,2', 'gpt/16/4', ALL_AXES, *OPTIONS]),
  'data, others': (16, ['2,1,2,1,2,2', 'moe/128/4', ALL_AXES, *OPTIONS]),
  'mdl, others': (16, ['2,1,1,2,2,2', 'llama/128/4', ALL_AXES, *OPTIONS]),
}


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(('devices', 'arguments'), GRID.values(), ids=GRID)
def test_no_rows_are_exchanged(devices, arguments):
  """The widths are below and above the tokens of a shard; embeddings are tied or not."""
  done = runs.module('tests.support.mesh_grid', *arguments, devices=devices)
  results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{')]
  assert results
  for r in results:
    assert r['loss'] < 1e-5, r
    assert r['gradient'] < 1e-5, r


@pytest.mark.slow
def test_the_order_of_devices_changes_no_loss():
  done = runs.module('tests.support.mesh_grid', '2,2,2', 'llama/16/4', 'ORDER=[0,1]', devices=8)
  results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{')]
  assert max(max(r['loss'], r['gradient']) for r in results) < 1e-5, results
  assert len(results) == 2
  assert results[0]['exact'] == results[1]['exact']


CHECK_MESH = """
from paxlite.parallel import partitioning
from paxlite.parallel.mesh import make_mesh
from paxlite.doctor.kernel_check import mesh_difference
mesh = make_mesh([2, 2, 2], [1, 1, 1])
print(mesh_difference(mesh))
partitioning.gathers_weights = lambda: False
print(mesh_difference(mesh))
"""


@pytest.mark.slow
def test_a_mesh_that_xla_gets_wrong_is_found():
  command = [sys.executable, '-c', CHECK_MESH]
  done = subprocess.run(
    command, capture_output=True, text=True, cwd=runs.ROOT, env=runs.environment(8), check=True
  )
  right, wrong = map(float, done.stdout.splitlines())
  assert right < 1e-5
  assert wrong > 0.1


LIMITED_ROOM = """
import jax, jax.numpy as jnp
from flax.linen import meta
from paxlite.experiments.glam import GLaM126M64E
from paxlite.layers.moe import dropless, moe
from paxlite.parallel import partitioning
e = GLaM126M64E(
  MESH_AXES=['replica', 'data', 'mdl', 'expert'], ICI_MESH_SHAPE=[1, 1, 1, 4],
  DCN_MESH_SHAPE=[1, 1, 1, 1], NUM_EXPERTS=8,
)
make = lambda room: moe.MoeFeedForward(
  16, 32, num_experts=8, num_groups=4, dispatch_tpl=lambda: dropless.DroplessDispatch(room)
)
x = jax.random.normal(jax.random.key(1), (4, 8, 16))
params = meta.unbox(jax.jit(make(0).init)(jax.random.key(0), x))['params']
params['router']['gate'] = jnp.zeros((16, 8)).at[:, 0].set(5)  # half choose expert 0 first
logits = jnp.einsum('JMD,DE->JME', x, params['router']['gate'])
routing = moe.route(logits, jnp.ones((4, 8), bool), 2)
weights = moe.Weights((params['w_in'],), params['w_out'])
experts = moe.Experts(weights, jax.nn.relu, [], None)
for room in (0, 1, 2):
  with partitioning.activate(e.mesh(), e.rules):
    y, kept = jax.jit(lambda x: dropless.DroplessDispatch(room)(x, routing, experts))(x)
  part = routing._replace(weights_JMX=routing.weights_JMX * kept)
  expected, _ = jax.jit(lambda x: dropless.DroplessDispatch()(x, part, experts))(x)
  print(int(kept.sum()), bool(jnp.abs(y - expected).max() < 1e-5))
"""


WHOLE_WEIGHTS = """
from unittest import mock
import jax, jax.numpy as jnp, numpy as np
from flax.linen import meta
from paxlite.aot.collectives import collectives
from paxlite.aot.hlo import Program
from paxlite.layers.moe import dropless, moe
from paxlite.parallel import mesh, partitioning, torus
E, D, F = 4, 64, 32
layer = moe.MoeFeedForward(
  D, F, num_experts=E, num_groups=8, gated=True, use_bias=True, activation='silu',
  dispatch_tpl=dropless.DroplessDispatch,
)
x = jax.random.normal(jax.random.key(1), (8, 8, D))
boxed = jax.jit(layer.init)(jax.random.key(0), x)['params']
host = jax.device_get(meta.unbox(boxed))
def value(params, x):
  return jnp.sin(layer.apply({'params': params}, x, mutable=['losses', 'summaries'])[0]).sum()
with jax.default_matmul_precision('highest'):
  expected = jax.device_get(jax.jit(jax.value_and_grad(value, (0, 1)))(host, x))
  for lines in (8,), (2, 4):
    rules = partitioning.DEFAULT_RULES
    on = mesh.make_mesh([1, 8, 1], [1, 1, 1])
    shapes = partitioning.sharded_shapes(boxed, on, rules)
    params = jax.tree.map(lambda a, like: jax.device_put(a, like.sharding), host, shapes)
    with partitioning.activate(on, rules), mock.patch.object(torus, 'lines', return_value=lines):
      step = jax.jit(jax.value_and_grad(value, (0, 1))).lower(params, x).compile()
      _, back = jax.vjp(value, params, x)
    ratio = lambda a, b: np.abs(a - b).max() / np.abs(b).max()
    error = jax.tree.map(ratio, step(params, x), expected)
    found = collectives(Program(step.as_text()), dict(on.shape))
    sums = [c.bytes for c in found if c.kind == 'all-reduce']
    print(
      float(max(jax.tree.leaves(error))), sum(c.kind == 'reduce-scatter' for c in found),
      max(sums) >= 4 * E * D * F, max(r.size for r in jax.tree.leaves(back)) >= 8 * E * D * F,
    )
"""


@pytest.mark.slow
def test_gradients_of_experts_are_scattered():
  """No device sums one as a whole, or keeps whole weights for it; one sum a line of the torus."""
  done = subprocess.run(
    [sys.executable, '-c', WHOLE_WEIGHTS],
    capture_output=True, text=True, cwd=runs.ROOT, env=runs.environment(8), check=True,
  )  # fmt: skip
  for line, times in zip(done.stdout.splitlines(), (1, 2), strict=True):
    error, *found = line.split()
    assert float(error) < 1e-6
    assert found == [str(4 * times), 'False', 'False']  # gate, up, down and the last bias


@pytest.mark.exhaustive
@pytest.mark.slow
def test_choices_without_room_get_nothing_and_all_others_what_they_get_alone():
  """Of 64 choices, a device has room for 16 (the mean), 32, or all; half choose one device."""
  done = subprocess.run(
    [sys.executable, '-c', LIMITED_ROOM],
    capture_output=True, text=True, cwd=runs.ROOT, env=runs.environment(4), check=True,
  )  # fmt: skip
  assert [line.split()[1] for line in done.stdout.splitlines()] == ['True'] * 3
  kept = [int(line.split()[0]) for line in done.stdout.splitlines()]
  assert kept[0] == 64
  assert 16 <= kept[1] < kept[2] < 64


@pytest.mark.slow
def test_the_report_to_xla_reproduces():
  """If this fails, XLA no longer exchanges rows, and gather_weight may be unnecessary."""
  page = (runs.ROOT / 'docs' / 'xla_row_exchange.md').read_text()
  code = re.search(r'```python fault\n(.*?)```', page, re.DOTALL)[1]
  done = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, text=True, env=runs.environment(), check=True
  )
  assert float(done.stdout) > 1


@pytest.mark.exhaustive
def test_the_longer_commands_of_the_docs(tmp_path):
  page = (runs.ROOT / 'docs' / 'scaling.md').read_text()
  lines = re.search(r'```sh slow\n(.*?)```', page, re.DOTALL)[1].splitlines()
  assert len(lines) > 1
  for i, line in enumerate(lines):
    flags, python, m, module, *words = shlex.split(line)
    assert (flags, python, m) == (
      'XLA_FLAGS=--xla_force_host_platform_device_count=8',
      'python',
      '-m',
    )
    words = [re.sub('job_log_dir=.*', f'job_log_dir={tmp_path / str(i)}', w) for w in words]
    runs.module(module, *words, devices=8)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    (dict(MESH_AXES=['replica', 'data']), 'MESH_AXES=.* must hold replica, data, mdl and may hold'),
    (dict(MESH_AXES=['replica', 'data', 'mdl', 'experts']), 'must hold replica, data, mdl'),
    (dict(MESH_AXES=['replica', 'data', 'mdl', 'stage']), 'ICI_MESH_SHAPE=.* 4 positive sizes'),
    (dict(DCN_MESH_SHAPE=[2, 2]), 'DCN_MESH_SHAPE=.* 3 positive sizes'),
    (
      dict(MESH_AXES=['replica', 'data', 'mdl', 'context'], ICI_MESH_SHAPE=[1, 1, 1, 3]),
      'MAX_SEQ_LEN=2048 is not divisible by context = 3',
    ),
    (
      dict(SEQUENCE_SHARDED_ACTIVATIONS=True, ICI_MESH_SHAPE=[1, 1, 3]),
      'MAX_SEQ_LEN=2048 is not divisible by mdl = 3',
    ),
    (
      dict(MESH_AXES=['stage', 'replica', 'data', 'mdl'], ICI_MESH_SHAPE=[2, 1, 1, 1]),
      'USE_REPEATED_LAYER=True',
    ),
    (
      dict(MESH_AXES=['stage', 'replica', 'data', 'mdl'], ICI_MESH_SHAPE=[5, 1, 1, 1]),
      "NUM_LAYERS=12 in 12 repeated layers is not divisible by the mesh's axis stage = 5",
    ),
    (dict(ICI_MESH_SHAPE=[1, 3, 1], PERCORE_BATCH_SIZE=0.5), 'global batch of 1.5'),
    (dict(ICI_MESH_SHAPE=[1, 4, 1], PERCORE_BATCH_SIZE=0.5), 'not divisible by replica × data = 4'),
  ],
)
def test_what_cannot_be(changes, message):
  with pytest.raises(UserError, match=message):
    GPT126M(**dict(ICI_MESH_SHAPE=[1, 1, 1], DCN_MESH_SHAPE=[1, 1, 1]) | changes).validate()


def test_slices_or_processes_decide_the_order_over_dcn():
  """Each copy over DCN is one slice, or otherwise one process, for any position of its axis."""

  class Device:
    platform = 'gpu'

    def __init__(self, id, process_index, slice_index):
      self.id, self.process_index, self.slice_index = id, process_index, slice_index

  # Two slices of 4 devices with two processes each, in an arbitrary order.
  devices = [Device(i, i // 2, i // 4) for i in (3, 6, 1, 4, 0, 7, 2, 5)]
  at = lambda mesh, attribute: np.vectorize(lambda d: getattr(d, attribute))(mesh)
  order = mesh.device_order
  replicas = order([1, 2, 2], [2, 1, 1], devices)
  assert at(replicas, 'slice_index').tolist() == [[[0, 0], [0, 0]], [[1, 1], [1, 1]]]
  data = order([1, 2, 2], [1, 2, 1], devices)
  assert at(data, 'slice_index').tolist() == [[[0, 0], [0, 0], [1, 1], [1, 1]]]
  four = order([1, 1, 2], [1, 4, 1], devices)
  assert at(four, 'process_index').tolist() == [[[0, 0], [1, 1], [2, 2], [3, 3]]]
  # One process per device: neighbors in the order of processes.
  single = [Device(i, i, 0) for i in range(8)]
  assert at(order([1, 1, 4], [1, 2, 1], single), 'id').tolist() == [[[0, 1, 2, 3], [4, 5, 6, 7]]]


@pytest.mark.slow
def test_parameters_of_a_pipeline_are_those_of_repeated_layers():
  values = dict(NUM_LAYERS=4, MODEL_DIMS=32, NUM_HEADS=4, VOCAB_SIZE=64, USE_REPEATED_LAYER=True)
  one = fdl.build(LLaMA(**values).build_task())
  axes = ['stage', 'replica', 'data', 'mdl']
  mesh = dict(MESH_AXES=axes, ICI_MESH_SHAPE=[2, 1, 1, 1], NUM_MICROBATCHES=2)
  two = fdl.build(LLaMA(**values, **mesh).build_task())
  found = [jax.jit(task.init_params)(jax.random.key(0)) for task in (one, two)]
  jax.tree.map(np.testing.assert_array_equal, *found)
