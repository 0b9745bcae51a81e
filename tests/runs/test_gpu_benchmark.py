"""Runs benchmarks.gpu at tiny sizes on a CPU: its tables, its JSON, and cases that cannot run."""

import argparse
import importlib
import io
import json
import re
import site
import sys
import time
from importlib.machinery import PathFinder

import pytest

from tests.support import runs

# where the processes of the benchmark look for it; tests of Transformer Engine add a folder to the
# path of this process
HAS_TE = PathFinder.find_spec('transformer_engine', site.getsitepackages()) is not None


def benchmark(*flags: str, code: int = 0, env: dict[str, str] | None = None) -> str:
  result = runs.ended(
    [sys.executable, '-m', 'benchmarks.gpu', *flags], runs.environment() | (env or {})
  )
  assert result.returncode == code, result.stdout + result.stderr
  return result.stdout if code == 0 else result.stderr


def rows(printed: str) -> dict[str, list[str]]:
  """Returns the cells of the tables' lines by case or by target."""
  lines = [line.strip('| ').split(' | ') for line in printed.splitlines() if line[:2] == '| ']
  return {cells[0]: cells[1:] for cells in lines if cells[0] not in ('case', 'work')}


@pytest.mark.exhaustive
@pytest.mark.skipif(HAS_TE, reason='Transformer Engine is installed')
def test_every_kind(tmp_path):
  """A reference, another backend, a missing backend, torch, and decoding."""
  path = tmp_path / 'result.json'
  cases = ['llama7b_wide/xla*', 'llama7b_wide/te_layer_delayed', 'llama7b_wide/torch']
  cases += ['llama7b_decode/xla']
  speeds = tmp_path / 'speeds.json'
  printed = benchmark(
    '--tiny', f'--cases={",".join(cases)}', f'--json={path}', f'--calibration={speeds}'
  )
  measured = json.loads(speeds.read_text())
  assert measured['chip'] == 'cpu'
  assert min(*measured['flops'].values(), measured['memory_bandwidth']) > 1e6
  written = json.loads(path.read_text())
  assert (written['suite'], written['platform'], written['tiny']) == ('cases', 'cpu', True)
  assert {'jax', 'jaxlib', 'flax'} <= written['versions'].keys()
  assert written['matmul']['flops'] > 0
  assert written['copy']['bandwidth'] > 0
  found = written['cases']
  assert set(found) <= rows(printed).keys()
  for kind in ('train', 'decode', 'torch', 'targets'):
    assert printed.count(f'\n{kind}\n') == 1
  assert printed.endswith(benchmark(f'--report={path}'))

  xla, fp8 = found['llama7b_wide/xla'], found['llama7b_wide/xla_fp8']
  assert xla['status'] == fp8['status'] == 'ok'
  assert (xla['backend'], fp8['backend']) == ('xla (the default)', 'xla_fp8 (USE_FP8=True)')
  # Fewer layers than the model has, because memory is small; other cases use the same number.
  assert 1 <= xla['layers'] == fp8['layers'] < 8
  assert xla['fitted'] == {'NUM_LAYERS': xla['layers']}
  assert xla['compiled_bytes'] <= 0.8 * written['memory']
  low, high = xla['quartile_seconds']
  assert 0 < low <= xla['median_seconds'] <= high
  assert len(xla['losses']) == 20
  assert xla['losses'][-1] < xla['losses'][0]
  assert xla['skipped_steps'] == 0
  assert xla['ratio'] == 1
  assert 0 < fp8['loss_differences'][-1] < 0.02

  te = found['llama7b_wide/te_layer_delayed']
  assert te['status'] == 'skipped'
  assert te['reason'].startswith('Transformer Engine is not installed')
  (cell,) = rows(printed)['llama7b_wide/te_layer_delayed']
  assert cell.startswith('skipped: Transformer Engine is not installed')

  torch = found['llama7b_wide/torch']
  assert torch['status'] == 'ok', torch
  assert (torch['layers'], torch['batch']) == (xla['layers'], xla['batch'])
  assert torch['parameters'] == xla['parameters']
  assert torch['recomputes']
  assert torch['losses'][-1] < torch['losses'][0]
  assert torch['ratio'] == pytest.approx(xla['median_seconds'] / torch['median_seconds'])
  assert 'loss_differences' not in torch

  decode = found['llama7b_decode/xla']
  assert decode['status'] == 'ok', decode
  # In bfloat16; the embedding table is not read.
  assert decode['weight_bytes'] == 2 * (decode['parameters'] - 512 * 64)
  assert decode['bandwidth'] == decode['weight_bytes'] / decode['median_seconds']
  assert decode['share_of_copy'] == decode['bandwidth'] / written['copy']['bandwidth']
  *_, verdict, _, case = rows(printed)['LLaMA7B, decoding a row, of the memory bandwidth']
  assert verdict == ('met' if decode['share_of_copy'] >= 0.82 else 'NOT met')
  assert case == 'llama7b_decode/xla'


@pytest.mark.exhaustive
@pytest.mark.slow
def test_experts_and_float32(gpu):
  """A stack with experts and its dense reference, and the losses on the CPU, in this process."""
  train = importlib.import_module('benchmarks.gpu.train')
  result = DEVICE | {'platform': 'cpu', 'cases': {}}
  names = ['small/cpu', 'small/xla']
  names += ['glam64b_wide_dense/xla', 'glam64b_wide/xla', 'glam64b_wide/xla_dropless']
  for name in names:
    parts = gpu.parts(name, result, True)
    result['cases'][name] = train.measure(name, True, parts['most'], {}) | {'status': 'ok'}
    gpu.compare(name, result)
  found = result['cases']
  assert max(found['small/xla']['loss_differences']) < 1e-5
  dense = found['glam64b_wide_dense/xla']
  assert dense['experts'] is None
  for variant in ('xla', 'xla_dropless'):
    case = found[f'glam64b_wide/{variant}']
    assert case['experts'] >= 2
    assert case['layers'] == dense['layers']
    assert case['parameters'] > dense['parameters']
    assert case['ratio'] == case['model_flops'] / dense['model_flops']
    assert 'loss_differences' not in case


@pytest.mark.parametrize(
  'cases',
  [
    pytest.param('small/xla,small/two_processes,small/two_context', marks=pytest.mark.slow),
    pytest.param('', marks=pytest.mark.exhaustive),
  ],
)
def test_two_devices_learn_what_one_does(cases, tmp_path):
  """Two devices of a CPU, in one process and in two."""
  path = tmp_path / 'result.json'
  chosen = f'--cases={cases}' if cases else '--suite=two'
  env = {'JAX_NUM_CPU_DEVICES': '2'}
  printed = benchmark('--tiny', chosen, '--minutes=20', f'--json={path}', env=env)
  found = json.loads(path.read_text())['cases']
  assert {name: case['status'] for name, case in found.items()} == dict.fromkeys(found, 'ok')
  for name, case in found.items():
    if '/two_' in name:
      assert len(case['loss_differences']) == 20
      assert 0 < case['largest_difference'] < (1e-4 if name.startswith('small') else 1e-2)
      assert rows(printed)[f'{name}, losses against one GPU'][2] == 'met'


@pytest.mark.exhaustive
def test_the_second_start(gpu):
  """A process finds the programs of the one before it, and a run that fails says why."""
  start = importlib.import_module('benchmarks.gpu.start')
  case = start.measure('llama7b_start/xla', True, None, {})
  assert 0 < case['second_seconds'] < case['first_seconds']
  assert case['layers'] == 2


@pytest.mark.slow
def test_the_time_is_kept(gpu, capsys):
  """A run without time left says so without a device; a case that takes too long is stopped."""
  refused = benchmark('--tiny', '--minutes=0', code=1)
  assert refused.strip() == 'no device: the time was over'
  case = gpu.ask(gpu.Worker('gpt126m/xla'), {'tiny': True}, time.monotonic() + 60, limit=0.2)
  assert case == {
    'status': 'not run',
    'reason': 'the time of a case was over, 0 s after its turn came',
  }


class Named:
  """A worker without a process."""

  def __init__(self, name):
    self.name = name

  def close(self):
    pass


def test_the_rest_goes_on(gpu, monkeypatch, capsys, tmp_path):
  """Cases that failed or had no time are written and printed, and the others still run."""
  device = dict(DEVICE, status='ok')
  answers = {
    'device': device,
    'gpt126m/xla': {'status': 'failed', 'reason': 'RESOURCE_EXHAUSTED: Out of memory'},
    'gpt126m_b16/xla': {'status': 'not run', 'reason': 'the time was over'},
    'gpt126m_b8/xla': TRAINED | {'tokens_per_second': 5e5},
  }
  monkeypatch.setattr(gpu, 'ask', lambda worker, *_: dict(answers[worker.name]))
  for module in (gpu, importlib.import_module('benchmarks.gpu.worker')):
    monkeypatch.setattr(module, 'Worker', Named)
  names = ['gpt126m/xla', 'gpt126m/torch', 'gpt126m_b16/xla', 'gpt126m_b8/xla']
  answers['transformers'] = {'status': 'failed', 'reason': 'No module named torch'}
  args = argparse.Namespace(
    minutes=9.0, case_minutes=3.0, tiny=True, json=str(tmp_path / 'result.json'), calibration=None
  )
  gpu.run('train', names, args)
  printed = rows(capsys.readouterr().out)
  assert printed['gpt126m/xla'] == ['failed: RESOURCE_EXHAUSTED: Out of memory']
  assert printed['gpt126m/torch'] == ['skipped: No module named torch']
  assert printed['gpt126m_b16/xla'] == ['not run: the time was over']
  assert printed['gpt126m_b8/xla'][5] == '500,000'
  *_, verdict, _, case = printed['GPT126M, 2048 tokens a row']
  assert (verdict, case) == ('met', 'gpt126m_b8/xla')
  written = json.loads((tmp_path / 'result.json').read_text())['cases']
  assert list(written) == names


DEVICE = {
  'tiny': True, 'device': 'NVIDIA H100 80GB HBM3', 'platform': 'gpu', 'capability': 9.0,
  'memory': 80 << 30, 'driver': None, 'python': '3.11', 'versions': {}, 'peak_flops': 989e12,
  'peak_bandwidth': 3.35e12, 'matmul': {'size': 8192, 'dtype': 'bfloat16', 'flops': 700e12},
  'copy': {'bytes': 2**32, 'bandwidth': 3.0e12}, 'missing': {},
}  # fmt: skip
TRAINED = {
  'status': 'ok', 'backend': 'xla', 'platform': 'gpu', 'layers': 12, 'experts': None, 'fitted': {},
  'batch': [4, 2048], 'median_seconds': 0.02, 'quartile_seconds': [0.019, 0.021],
  'queued_seconds': 0.02, 'tokens_per_second': 300_000.0, 'model_flops': 500e12,
  'compile_seconds': 10.0, 'compiled_bytes': 1 << 30, 'peak_bytes': None, 'skipped_steps': 0,
  'losses': [5.0, 4.0], 'program': {},
}  # fmt: skip


def test_targets(gpu):
  """The best case decides if a target is met; targets without a result are not measured."""
  flops = lambda n: TRAINED | {'model_flops': n}
  result = DEVICE | {
    'cases': {
      'gpt126m/xla': TRAINED | {'tokens_per_second': 499_999.0},
      'gpt126m_b16/xla': TRAINED | {'tokens_per_second': 510_000.0},
      'gpt5b_wide/xla': flops(0.59 * 989e12), 'gpt5b_wide/xla_fp8': flops(0.75 * 989e12),
      'gpt5b_wide/te_layer_delayed': flops(0.80 * 989e12), 'glam126m_dense/xla': flops(400e12),
      'glam126m/xla': flops(319e12),
      'glam64b_wide/xla': {'status': 'failed', 'reason': 'Out of memory'},
    }
  }  # fmt: skip
  for name in result['cases']:
    gpu.compare(name, result)
  printed = rows('\n'.join(gpu.tables(result)))
  best = ['≥ 500,000 tokens/s', '510,000 tokens/s', 'met', '71.4%', 'gpt126m_b16/xla']
  assert printed['GPT126M, 2048 tokens a row'] == best
  assert printed["GPT5B's width, 2048 tokens a row"][:3] == ['≥ 60.0%', '59.0%', 'NOT met']
  fp8 = ['≥ 1.35 ×', '1.36 ×', 'met', '113.0%', 'gpt5b_wide/te_layer_delayed']
  assert printed["GPT5B's width, FP8 against bf16"] == fp8
  experts = ['≥ 0.80 ×', '0.80 ×', 'NOT met', '45.6%', 'glam126m/xla']  # 0.7975
  assert printed['GLaM126M64E against its dense stack'] == experts
  failed = ['≥ 0.80 ×', '–', 'not measured: failed', '–', 'glam64b_wide/xla']
  assert printed["GLaM64B64E's width against its dense stack"] == failed
  assert 'GPT126M, against torch' not in printed  # no such case was run


@pytest.mark.slow
def test_dry_run():
  """All suites; only sizes are computed, so no device is opened and no device memory is taken."""
  printed = benchmark('--dry_run', env={'JAX_PLATFORMS': 'none'})
  for suite in ('all', 'train', 'experts', 'decode', 'start', 'peers', 'backends'):
    assert f'\n{suite}\n' in printed
  for case in ('gpt126m/xla', 'llama7b_wide/te_gemm_mxfp8', 'small/cpu', 'glam64b_wide/xla'):
    assert f'\n{case} ' in printed
  assert 'needs transformer_engine, compute capability 10' in printed
  assert 'none of gpt126m_b16/xla' in benchmark('--dry_run', '--cases=nothing', code=2)


@pytest.fixture
def gpu():
  return importlib.import_module('benchmarks.gpu.__main__')


def test_what_the_device_rules_out(gpu):
  h100 = {'missing': {'qwix': 'No module named qwix'}, 'capability': 9.0, 'cases': {}}
  assert gpu.skipped('gpt126m/te_layer_delayed', h100) is None
  assert gpu.skipped('gpt126m/int8_forward', h100)['reason'] == 'No module named qwix'
  mxfp8 = gpu.skipped('llama7b_wide/te_gemm_mxfp8', h100)
  assert mxfp8 == {'status': 'skipped', 'reason': 'needs compute capability 10, this is 9'}
  assert gpu.skipped('gpt126m/torch', h100) is None
  alone = gpu.skipped('small/two_data', h100 | {'devices': 1})
  assert alone == {'status': 'skipped', 'reason': 'needs 2 devices, here is 1'}
  assert gpu.skipped('small/two_data', h100 | {'devices': 2}) is None
  torch = gpu.skipped('llama7b_wide/torch', h100)
  assert torch['reason'] == 'NUM_LAYERS is that of llama7b_wide/xla, which there is no result of'


def test_a_case_that_fails_is_told(gpu, monkeypatch, capsys):
  def fail(*_):
    raise RuntimeError('RESOURCE_EXHAUSTED: Out of memory\nand more')

  monkeypatch.setattr(importlib.import_module('benchmarks.gpu.train'), 'measure', fail)
  monkeypatch.setattr('sys.stdin', io.StringIO('{"tiny": true}'))
  gpu.serve('gpt126m/xla')
  case = json.loads(capsys.readouterr().out.removeprefix('@'))
  assert case == {'status': 'failed', 'reason': 'RuntimeError: RESOURCE_EXHAUSTED: Out of memory'}
  assert importlib.import_module('benchmarks.gpu.report').row('gpt126m/xla', case) == (
    '| gpt126m/xla | failed: RuntimeError: RESOURCE_EXHAUSTED: Out of memory |'
  )


def test_every_case_is_an_experiment(gpu):
  """This holds for both sizes; each has its own backend, and its reference runs before it."""
  sizes = importlib.import_module('benchmarks.gpu.sizes')
  for cases in gpu.SUITES.values():
    assert len(set(cases)) == len(cases)
    for i, name in enumerate(cases):
      assert gpu.reference_name(name) in cases[: i + 1]
  for name in {name: None for cases in gpu.SUITES.values() for name in cases}:
    for tiny in (True, False):
      e = sizes.experiment(name, tiny)
      if gpu.kind(name) == 'train':
        variant = name.partition('/')[2]
        prefix = variant.partition('_')[0]
        assert e.backend.name.partition('_')[0] == {'cpu': 'xla', 'two': 'xla'}.get(prefix, prefix)
      assert e.num_devices == (2 if '/two_' in name else 1)
      assert e.batch_size == sizes.experiment(gpu.reference_name(name), tiny).batch_size


def test_every_target_is_of_cases(gpu):
  cases = importlib.import_module('benchmarks.gpu.cases')
  known = {name for names in cases.SUITES.values() for name in names}
  for target in cases.TARGETS:
    assert set(target.cases) <= known
    often = {*cases.SUITES['all'], *cases.SUITES['questions']}
    assert set(target.cases) & often or re.search('GLaM64B|losses against', target.work)


def test_parameters(gpu):
  """The estimate from sizes equals the model's count, except for vectors and positions."""
  import fiddle as fdl
  import jax

  sizes = importlib.import_module('benchmarks.gpu.sizes')
  for name in ('glam126m/xla', 'glam64b_wide/xla', 'glam64b_wide_dense/xla', 'llama7b_wide/xla'):
    e = sizes.experiment(name, tiny=True)
    init = fdl.build(e.build_task()).init_params
    made = sum(x.size for x in jax.tree.leaves(jax.eval_shape(init, jax.random.key(0))))
    assert sizes.parameters(e) == pytest.approx(made, rel=0.02)
