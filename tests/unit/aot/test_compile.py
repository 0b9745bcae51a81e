"""Compiling ahead of time: reports, saved steps, and steps that are refused."""

import collections
import importlib.util
import json
import math
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from paxlite.aot import chips, roofline, targets
from paxlite.compilation.compiled_step import SavedStep
from paxlite.core.errors import UserError
from paxlite.parallel import devices, mesh
from paxlite.programs.launch import build_experiment
from tests.support import runs

HAS_TPU = importlib.util.find_spec('libtpu') is not None
HAS_GPU = any(importlib.util.find_spec(f'jax_cuda{n}_plugin') for n in (12, 13))


def compile_here(*flags: str, code: int = 0, devices: int = 1):
  return runs.module(
    'paxlite', 'compile', '--fdl_config=TinyGPT', '--target=here', *flags, code=code,
    devices=devices,
  )  # fmt: skip


@pytest.mark.parametrize(
  'kind',
  [
    'NVIDIA H100 80GB HBM3', 'TPU v5 lite', 'TPU v5p', 'TPU v6 lite', 'TPU7x',
    *(chip.gpu.kind for chip in chips.CHIPS.values() if chip.gpu),
  ],
)  # fmt: skip
def test_a_run_and_a_target_have_the_same_peak(kind):
  assert devices.peak_flops(kind) == chips.chip_of_kind(kind).peak_flops


@pytest.mark.parametrize(
  'kind',
  ['NVIDIA GH200 480GB', 'NVIDIA H100 PCIe', 'NVIDIA H100 NVL', 'NVIDIA A100-SXM4-40GB', 'cpu'],
)
def test_another_product_of_the_same_name_is_not_known(kind):
  assert chips.chip_of_kind(kind) is None


@pytest.mark.slow
def test_training_loads_what_was_compiled(tmp_path):
  """The losses equal those of a run that compiles, bit for bit; other steps and machines fail."""
  decay = '--fdl.WEIGHT_DECAY=0.2'
  step, report = tmp_path / 'step.bin', tmp_path / 'report.json'
  page = compile_here(f'--save={step}', f'--json={report}', decay).stdout
  assert f'The compiled step is in {step}' in page
  written = json.loads(report.read_text())
  assert written['parameters'] == 30_592
  assert written['arguments'] > 3 * 4 * 30_592
  assert step.stat().st_mode & 0o77 == 0

  same = [decay, '--fdl.SUMMARY_INTERVAL_STEPS=1']
  done = runs.run(tmp_path / 'loaded', *same, f'--compiled_step={step}')
  assert f'Loaded the train step of {step}' in done.stdout
  assert 'Compiled the train step' not in done.stdout
  runs.run(tmp_path / 'compiled', *same)
  assert runs.losses(tmp_path / 'loaded') == runs.losses(tmp_path / 'compiled')

  def refused(*flags: str, **kwargs) -> str:
    result = runs.run(tmp_path / 'refused', f'--compiled_step={step}', *flags, code=2, **kwargs)
    assert result.stderr.count('error:') == 1
    return result.stderr

  assert 'another train step. What differs: WEIGHT_DECAY 0.2 → 0.1' in refused()
  assert 'MAX_SEQ_LEN 32 → 16' in refused(decay, '--fdl.MAX_SEQ_LEN=16')
  two = ['--fdl.ICI_MESH_SHAPE=[1,2,1]', '--fdl.PERCORE_BATCH_SIZE=2']
  assert 'compiled for devices 1, not 2' in refused(decay, *two, devices=2)
  step.chmod(0o622)
  assert 'others can write' in refused(decay)
  step.chmod(0o600)
  data = bytearray(step.read_bytes())
  data[-100] ^= 1
  step.write_bytes(data)
  assert 'is damaged' in refused(decay)
  step.write_bytes(b'\x80\x04 something else')
  assert 'is not a compiled step' in refused(decay)
  step.unlink()
  assert 'No such file' in refused(decay)


GOOD = {
  'format': 'paxlite compiled step 1', 'crc32c': 0, 'program': 0, 'arguments': [], 'values': {},
}  # fmt: skip


@pytest.mark.parametrize(
  'header',
  [
    *({k: v for k, v in GOOD.items() if k != gone} for gone in GOOD),
    GOOD | {'crc32c': 'x'},
    GOOD | {'arguments': None},
    GOOD | {'values': []},
    [GOOD],
    'text',
    None,
  ],
)
def test_headers_of_compiled_steps_that_are_none(tmp_path, header):
  path = tmp_path / 'step.bin'
  path.write_text(json.dumps(header) + '\n')
  path.chmod(0o600)
  with pytest.raises(UserError, match='is not a compiled step'):
    SavedStep(path, {}, {}).check(mesh.make_mesh([1, 1, 1], [1, 1, 1]))


def test_deep_headers_of_compiled_steps(tmp_path):
  path = tmp_path / 'step.bin'
  path.write_text('[' * 200_000)
  path.chmod(0o600)
  with pytest.raises(UserError, match='is not a compiled step'):
    SavedStep(path, {}, {}).check(mesh.make_mesh([1, 1, 1], [1, 1, 1]))


def test_a_folder_far_above_a_compiled_step_that_others_can_write(tmp_path):
  folder = tmp_path / 'open' / 'a' / 'b'
  folder.mkdir(parents=True)
  path = folder / 'step.bin'
  path.write_text(json.dumps(GOOD) + '\n')
  path.chmod(0o600)
  (tmp_path / 'open').chmod(0o777)
  with pytest.raises(UserError, match=f'others can write {tmp_path}/open, '):
    SavedStep(path, {}, {}).check(mesh.make_mesh([1, 1, 1], [1, 1, 1]))


@pytest.mark.parametrize(
  ('flags', 'message'),
  [
    (['--target=v5e-9'], 'a slice of v5e has one of 1, 4, 8, 16, 32, 64, 128, 256'),
    (['--target=v5p-12'], 'a slice of v5p has one of 8, 16'),
    (['--target=h100x12'], 'hosts have 8 GPUs'),
    (['--target=z100x8'], 'write v5e-256, 2xv5e-256'),
    (['--target=here', '--fdl.ICI_MESH_SHAPE=[1,2,1]'], 'needs 2 devices, but 1 is present'),
    (['--target=h100x8', '--fdl.DETERMINISTIC=True', '--save=x'], 'with DETERMINISTIC=False'),
    (['--target=here', '--fdl.COMPILER_OPTIONS=[fast]'], "'fast' must be xla_NAME=VALUE"),
    (['--target=here', '--fdl.COMPILER_OPTIONS=[xla_cpu_nonsense=1]'], 'xla_cpu_nonsense'),
  ],
)
def test_what_cannot_be_compiled(flags, message, capsys, monkeypatch):
  from paxlite.aot.commands import compile as tool

  monkeypatch.setattr(targets, 'prepare_environment', lambda: None)
  with pytest.raises(UserError, match=message.replace('[', r'\[')):
    tool.main(['--fdl_config=TinyGPT', *flags])


def test_options_are_those_of_the_platform():
  e = build_experiment('MaxText16B', [], {})
  assert e.compiler_options('cpu') == {}
  assert len(e.compiler_options('tpu', lambda *_: False)) == len(e.COMPILER_OPTIONS)
  options = {'COMPILER_OPTIONS': '[xla_gpu_a=2, xla_cpu_b=x]'}
  e = build_experiment('TinyGPT', [], options)
  assert e.compiler_options('cuda') == {'xla_gpu_a': 2}
  assert e.compiler_options('cpu') == {'xla_cpu_b': 'x'}
  e = build_experiment('TinyGPT', [], {'DETERMINISTIC': 'True'})
  assert e.compiler_options('cuda') == {'xla_gpu_exclude_nondeterministic_ops': True}
  assert e.compiler_options('cpu') == {}


def test_targets():
  assert targets.parse('2xv5e-256').devices == 512
  assert targets.parse('v5p-128').devices == 64
  h100 = targets.parse('h100x256')
  assert (h100.devices, h100.slices, h100.chip.name) == (256, 1, 'h100')
  assert targets.parse('tpu7x-16').devices == 16  # the cores of 8 chips
  assert targets.parse('gb200x72').chip.domain == 72
  for name, message in (
    ('a100x12', 'hosts have 8 GPUs'),
    ('gb200x80', 'NVLink connects 72 GPUs'),
    ('tpu7x-7', 'a slice of tpu7x has one of 8, 16'),
    ('h300x8', 'The chips are v5e, v5p, v6e, tpu7x, a100, l40s, h100, h200, b200, gb200'),
  ):
    with pytest.raises(UserError, match=message):
      targets.parse(name)


def test_machines_with_more_of_the_same_devices():
  assert targets.larger('h100x4')[:3] == ['h100x8', 'h100x16', 'h100x32']
  assert targets.larger('h100x3')[:3] == ['h100x4', 'h100x8', 'h100x16']
  assert targets.larger('gb200x36')[:3] == ['gb200x64', 'gb200x72', 'gb200x144']
  assert targets.larger('v5p-2048') == ['v5p-4096', 'v5p-6144']
  assert targets.larger('2xv5e-16') == ['v5e-64', 'v5e-128', 'v5e-256']


@pytest.mark.cases(fast=0, slow=2)
@pytest.mark.slow
@pytest.mark.skipif(not HAS_GPU, reason='the extra cuda is not installed')
@pytest.mark.parametrize('target', ['a100x2', 'l40sx2', 'h200x2', 'b200x2', 'gb200x2'])
def test_every_gpu_is_compiled_for(tmp_path, target):
  report = tmp_path / 'report.json'
  flags = ['--fdl.FPROP_DTYPE=bfloat16', '--fdl.ICI_MESH_SHAPE=[1,2,1]', f'--json={report}']
  runs.module('paxlite', 'compile', '--fdl_config=TinyGPT', f'--target={target}', *flags)
  found = json.loads(report.read_text())
  assert found['fits']
  assert found['device'] == targets.parse(target).chip.gpu.kind


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TPU, reason='the extra tpu is not installed')
@pytest.mark.parametrize('target', ['v6e-4', 'tpu7x-8'])
def test_new_tpus_are_compiled_for(tmp_path, target):
  count, report = targets.parse(target).devices, tmp_path / 'report.json'
  flags = [f'--fdl.ICI_MESH_SHAPE=[1,{count},1]', f'--json={report}']
  runs.module('paxlite', 'compile', '--fdl_config=TinyGPT', f'--target={target}', *flags)
  assert json.loads(report.read_text())['fits']


def test_a_network_between_hosts():
  h100 = targets.with_network(targets.parse('h100x256'), '50')
  assert h100.chip.dcn_bandwidth == 50e9 / 8
  assert '50 GB/s a host' in h100.chip.source
  for target, network in (('h100x8', 'fast'), ('h100x8', '0'), ('v5e-16', '50')):
    with pytest.raises(UserError, match='--network'):
      targets.with_network(targets.parse(target), network)


def test_data_of_other_hosts_crosses_the_network_once_a_host():
  """An all-gather of 64 bytes over 4 hosts of 4: 60 are sent, 48 of them are of other hosts."""
  axes = dict(replica=1, data=16, mdl=1)
  links = roofline.Links(axes, axes | dict(data=4))
  assert links.split(('data',), 60.0) == (60, 48 / 4)
  assert roofline.Links(axes, axes).split(('data',), 60.0) == (60, 0)
  assert links.split(('dcn',), 60.0) == (0, 60)


SMALL = [
  '--fdl_config=Synthetic126M', '--fdl.NUM_LAYERS=2', '--fdl.MODEL_DIMS=256', '--fdl.NUM_HEADS=4',
  '--fdl.MAX_SEQ_LEN=256', '--fdl.USE_REPEATED_LAYER=True', '--fdl.DCN_MESH_SHAPE=[1,1,1]',
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TPU, reason='the extra tpu is not installed')
def test_v5e_256(tmp_path):
  flags = ['--target=v5e-256', '--fdl.ICI_MESH_SHAPE=[1,64,4]']
  report, step = tmp_path / 'report.json', tmp_path / 'step.bin'
  page = runs.module(
    'paxlite', 'compile', *SMALL, *flags, f'--json={report}', f'--save={step}'
  ).stdout
  r = json.loads(report.read_text())
  assert r['fits']
  assert page.startswith('Synthetic126M on v5e-256, mesh data 64 × mdl 4: fits: ')
  assert r['mesh'] == {'replica': 1, 'data': 64, 'mdl': 4}
  kinds = {(c['kind'], *c['axes']) for c in r['costs']['communication']}
  assert ('all-gather', 'data') in kinds
  assert any(k[1:] == ('mdl',) for k in kinds)
  assert 0 < r['mfu'][0] <= r['mfu'][1] < 1
  assert step.stat().st_size > 1 << 20
  large = [*flags, '--fdl.PERCORE_BATCH_SIZE=4096', f'--save={tmp_path / "none.bin"}']
  page = runs.module('paxlite', 'compile', *SMALL, *large, code=1).stdout
  assert f'{tmp_path / "none.bin"} was not written.' in page
  assert 'does not fit: ' in page.splitlines()[0]
  assert 'of 15.75 GiB' in page


@pytest.mark.parametrize(
  ('target', 'extra', 'is_there'), [('h100x8', 'cuda', HAS_GPU), ('v5e-8', 'tpu', HAS_TPU)]
)
def test_a_compiler_that_is_missing_is_named(target, extra, is_there):
  if is_there:
    pytest.skip(f'the extra {extra} is installed')
  with pytest.raises(UserError, match=rf'--target={target} needs the compiler of .*\[{extra}'):
    targets.parse(target).topology()


@pytest.mark.slow
@pytest.mark.skipif(not HAS_GPU, reason='the extra cuda is not installed')
def test_the_commands_of_the_docs(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  pathlib.Path('logs').mkdir()
  commands = []
  for page in sorted((runs.ROOT / 'docs').rglob('*.md')):
    for block in re.findall(r'```sh aot\n(.*?)```', page.read_text(), re.DOTALL):
      commands += map(shlex.split, block.splitlines())
  assert {words[1] for words in commands} == {'compile', 'explain'}
  for words in commands:
    assert words[0] == 'paxlite'
    runs.module(*words)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_GPU, reason='the extra cuda is not installed')
def test_h100x8(tmp_path):
  flags = ['--target=h100x8', '--fdl.ICI_MESH_SHAPE=[1,8,1]']
  report, step = tmp_path / 'report.json', tmp_path / 'step.bin'
  runs.module('paxlite', 'compile', *SMALL, *flags, f'--json={report}', f'--save={step}')
  r = json.loads(report.read_text())
  assert r['fits']
  kinds = {(c['kind'], *c['axes']) for c in r['costs']['communication']}
  assert {('all-gather', 'data'), ('reduce-scatter', 'data')} <= kinds
  assert step.stat().st_size > 1 << 16
  large = [*flags, '--fdl.PERCORE_BATCH_SIZE=16384']
  page = runs.module('paxlite', 'compile', *SMALL, *large, code=1).stdout
  assert 'does not fit: ' in page.splitlines()[0]


def compiled_text(dump: pathlib.Path, *flags: str) -> str:
  """Compiles a step, and returns the text of its program that XLA writes into a folder."""
  env = runs.environment()
  env['XLA_FLAGS'] += f' --xla_dump_to={dump} --xla_dump_hlo_module_re=.*step.*'
  command = [sys.executable, '-m', 'paxlite', 'compile', *flags]
  subprocess.run(command, env=env, cwd=runs.ROOT, check=True, capture_output=True)
  (path,) = dump.glob('*after_optimizations.txt')
  return path.read_text()


@pytest.mark.slow
@pytest.mark.skipif(not HAS_GPU, reason='the extra cuda is not installed')
def test_microbatches_are_not_pipelined_on_h100s(tmp_path):
  """The compiler does not know how many there are; the reader does, and counts all of them."""
  flops = []
  for parts in (1, 4):
    report, dump = tmp_path / f'{parts}.json', tmp_path / f'{parts}'
    flags = ['--target=h100x8', '--fdl.ICI_MESH_SHAPE=[1,8,1]', '--fdl.PERCORE_BATCH_SIZE=4']
    flags += [f'--fdl.NUM_MICROBATCHES={parts}', f'--json={report}']
    text = compiled_text(dump, *SMALL, *flags)
    flops.append(sum(json.loads(report.read_text())['costs']['flops'].values()))
  assert flops[1] == pytest.approx(flops[0], rel=0.02)
  loops = re.findall(r'^.* while\(.*op_name="jit\(step\)/while".*$', text, re.M)
  assert len(loops) == 1
  assert 'known_trip_count' not in loops[0]


@pytest.mark.slow
@pytest.mark.skipif(not HAS_GPU, reason='the extra cuda is not installed')
@pytest.mark.parametrize(
  'mesh',
  [
    ['--fdl.ICI_MESH_SHAPE=[1,8,1]'],
    ['--fdl.MESH_AXES=[stage,replica,data,mdl]', '--fdl.ICI_MESH_SHAPE=[2,1,4,1]'],
  ],
  ids=['data', 'stage'],
)
def test_moments_on_the_host_of_h100s(tmp_path, mesh):
  """They leave the device, cross the bus once each way, and only some layers are ever there."""
  reports = {}
  for offload in (False, True):
    path = tmp_path / f'{offload}.json'
    flags = ['--target=h100x8', *mesh, f'--fdl.OFFLOAD_OPTIMIZER={offload}', f'--json={path}']
    if mesh[0].endswith('mdl]'):
      flags += ['--fdl.DCN_MESH_SHAPE=[1,1,1,1]', '--fdl.NUM_MICROBATCHES=2']
    saved = [] if 'stage' in mesh[0] else [f'--save={tmp_path / "step.bin"}']
    runs.module('paxlite', 'compile', *SMALL, '--fdl.NUM_LAYERS=8', *flags, *saved)
    reports[offload] = json.loads(path.read_text())
  moments = reports[False]['arguments'] - reports[True]['arguments']
  assert reports[False]['host'] == 0
  assert reports[True]['host'] == pytest.approx(moments, rel=0.01)
  for way in reports[True]['costs']['host_traffic']:
    assert way == pytest.approx(moments, rel=0.01)
  assert reports[True]['total'] < reports[False]['total']


@pytest.mark.slow
@pytest.mark.skipif(not HAS_GPU, reason='the extra cuda is not installed')
@pytest.mark.parametrize('mesh', ['[1,8,1]', '[1,4,2]'])
def test_attention_on_h100s_is_cudnns(tmp_path, mesh):
  """cuDNN computes forward and backward of each layer, under packing; XLA alone stores scores."""
  targets = {}
  for flash in (True, False):
    dump = tmp_path / f'{flash}'
    flags = [
      '--target=h100x8', f'--fdl.ICI_MESH_SHAPE={mesh}', f'--fdl.USE_FLASH_ATTENTION={flash}',
      '--fdl.FPROP_DTYPE=bfloat16', '--fdl.NUM_LAYERS=2', '--fdl.MODEL_DIMS=256',
      '--fdl.NUM_HEADS=4', '--fdl.DIMS_PER_HEAD=64', '--fdl.PACKED_INPUT=True',
      '--fdl.MAX_SEQ_LEN=768', '--fdl.PERCORE_BATCH_SIZE=2', f'--save={tmp_path / "step.bin"}',
    ]  # fmt: skip
    text = compiled_text(dump, '--fdl_config=TinyGPT', *flags)
    targets[flash] = collections.Counter(re.findall('custom_call_target="(__cudnn.*?)"', text))
    assert bool(re.search(r'\[\d+,(?!1,)\d+,768,768\]', text)) == (not flash)
    results = re.findall(r'= \((.*?)\) custom-call.*Backward', text)
    assert not any('768,768' in r for r in results)  # nobody uses the gradient of a bias
  name = '__cudnn$fmhaScaleBiasSoftmax'
  assert targets == {True: {name: 2, f'{name}Backward': 2}, False: {}}


@pytest.mark.slow
@pytest.mark.skipif(not HAS_GPU, reason='the extra cuda is not installed')
@pytest.mark.parametrize('most', [16, None])
def test_packed_rows_on_h100s_need_no_bias(tmp_path, most):
  """cuDNN gets the bounds of the segments. With their number, no array is [T, T]."""
  flags = [
    '--target=h100x8', '--fdl.ICI_MESH_SHAPE=[1,4,2]', f'--fdl.MAX_SEGMENTS_PER_SEQ={most}',
    '--fdl.FPROP_DTYPE=bfloat16', '--fdl.NUM_LAYERS=2', '--fdl.MODEL_DIMS=256',
    '--fdl.NUM_HEADS=4', '--fdl.DIMS_PER_HEAD=64', '--fdl.PACKED_INPUT=True',
    '--fdl.MAX_SEQ_LEN=768', '--fdl.PERCORE_BATCH_SIZE=2', f'--save={tmp_path / "step.bin"}',
  ]  # fmt: skip
  text = compiled_text(tmp_path / 'dump', '--fdl_config=TinyGPT', *flags)
  targets = collections.Counter(re.findall('custom_call_target="(__cudnn.*?)"', text))
  expected = {'__cudnn$fmhaSoftmax': 2, '__cudnn$fmhaSoftmaxBackward': 2}
  if most is None:  # the other branch of a conditional
    expected |= {'__cudnn$fmhaScaleBiasSoftmax': 2, '__cudnn$fmhaScaleBiasSoftmaxBackward': 2}
  assert targets == expected
  assert ('768,768]' in text) == (most is None)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_GPU, reason='the extra cuda is not installed')
def test_a_step_for_an_h100_moves_no_activations(tmp_path):
  """No transpose or copy is as large as [B, T, D]; temporaries are bounded by the logits' size."""
  rows, length, width, vocabulary = 8, 768, 256, 8192
  flags = [
    '--target=h100x1', '--fdl.ICI_MESH_SHAPE=[1,1,1]', '--fdl.FPROP_DTYPE=bfloat16',
    '--fdl.NUM_LAYERS=2', f'--fdl.MODEL_DIMS={width}', '--fdl.NUM_HEADS=4',
    '--fdl.DIMS_PER_HEAD=64', '--fdl.PACKED_INPUT=True', f'--fdl.MAX_SEQ_LEN={length}',
    f'--fdl.PERCORE_BATCH_SIZE={rows}', f'--fdl.VOCAB_SIZE={vocabulary}',
    f'--json={tmp_path / "report.json"}',
  ]  # fmt: skip
  text = compiled_text(tmp_path / 'dump', '--fdl_config=TinyGPT', *flags)
  moved = re.findall(r' = \w+\[([\d,]+)\]\S* (?:copy|transpose)\(', text)
  sizes = [math.prod(map(int, dims.split(','))) for dims in moved]
  assert sizes  # transposes and copies of weights
  assert max(sizes) < rows * length * width
  temporaries = json.loads((tmp_path / 'report.json').read_text())['temporaries']
  logits = 4 * rows * length * vocabulary
  assert temporaries < 2.5 * logits


@pytest.mark.slow
@pytest.mark.skipif(not HAS_GPU, reason='the extra cuda is not installed')
@pytest.mark.parametrize('rows', [1, 8])
def test_a_token_moves_no_weight(rows):
  """On an H100, and at the width of LLaMA 7B, its bytes are those of the weights and the cache."""
  done = runs.module('benchmarks.decode_program', f'--rows={rows}', 'NUM_LAYERS=2')
  found = json.loads(done.stdout.splitlines()[-1])
  assert found['of_weights_and_cache'] < 1.1, found
  assert found['kernels'] <= {1: 43, 8: 40}[rows], found  # one more a layer, if it were apart
