"""benchmarks/gpu.py with tiny sizes on a CPU: its table, its JSON, and what cannot run."""

import importlib.util
import json
import subprocess
import sys

import pytest

from tests import runs

HAS_TE = importlib.util.find_spec('transformer_engine') is not None


def benchmark(*flags: str, code: int = 0) -> str:
  result = subprocess.run(
    [sys.executable, str(runs.ROOT / 'benchmarks' / 'gpu.py'), *flags],
    capture_output=True,
    text=True,
    cwd=runs.ROOT,
    env=runs.environment(),
    timeout=300,
    check=False,
  )
  assert result.returncode == code, result.stdout + result.stderr
  return result.stdout if code == 0 else result.stderr


def rows(printed: str) -> dict[str, list[str]]:
  """Cells of the table's lines by case."""
  lines = [line.strip('| ').split(' | ') for line in printed.splitlines() if line[:2] == '| ']
  return {cells[0]: cells[1:] for cells in lines if cells[0] != 'case'}


@pytest.mark.skipif(HAS_TE, reason='Transformer Engine is installed')
def test_backends(tmp_path):
  """A reference, another backend beside it, one that is not there, and the CPU's own losses."""
  path = tmp_path / 'result.json'
  cases = 'llama7b_wide/xla*,llama7b_wide/te_layer_delayed,small/*'
  printed = benchmark('--suite=backends', '--tiny', f'--cases={cases}', f'--json={path}')
  written = json.loads(path.read_text())
  assert (written['suite'], written['platform'], written['tiny']) == ('backends', 'cpu', True)
  assert {'jax', 'jaxlib', 'flax'} <= written['versions'].keys()
  assert written['matmul']['flops'] > 0
  found = written['cases']
  assert list(rows(printed)) == list(found)

  xla, fp8 = found['llama7b_wide/xla'], found['llama7b_wide/xla_fp8']
  assert xla['status'] == fp8['status'] == 'ok'
  assert (xla['backend'], fp8['backend']) == (
    'xla (nothing else was asked for)',
    'xla_fp8 (USE_FP8=True)',
  )
  # fewer than there are, as the memory is small; others take those of the reference
  assert 1 <= xla['layers'] == fp8['layers'] < 8
  assert xla['compiled_bytes'] <= 0.8 * written['memory']
  low, high = xla['quartile_seconds']
  assert 0 < low <= xla['median_seconds'] <= high
  assert len(xla['losses']) == 30
  assert xla['losses'][-1] < xla['losses'][0]
  assert xla['skipped_steps'] == 0
  assert xla['ratio'] == 1
  assert 0 < fp8['loss_differences'][-1] < 0.02

  small = found['small/xla']
  assert max(small['loss_differences']) < 1e-5
  assert small['backend'] == 'xla (nothing else was asked for)'

  te = found['llama7b_wide/te_layer_delayed']
  assert te['status'] == 'skipped'
  assert te['reason'].startswith('Transformer Engine is not installed')
  (cell,) = rows(printed)['llama7b_wide/te_layer_delayed']
  assert cell.startswith('skipped: Transformer Engine is not installed')


def test_the_time_is_kept():
  """What there is no time for is told, without a device."""
  refused = benchmark('--tiny', '--minutes=0', code=1)
  assert refused.strip() == 'no device: the time was over'


def test_dry_run():
  printed = benchmark('--suite=all', '--dry_run')
  for case in ('gpt126m/xla', 'llama7b_wide/te_gemm_mxfp8', 'small/cpu'):
    assert f'\n{case} ' in printed
  assert 'needs transformer_engine, compute capability 10' in printed
  assert 'none of llama7b_wide/xla' in benchmark('--dry_run', '--cases=nothing', code=2)


@pytest.fixture
def gpu(monkeypatch):
  monkeypatch.syspath_prepend(runs.ROOT / 'benchmarks')
  return importlib.import_module('gpu')


def test_what_the_device_rules_out(gpu):
  h100 = {'missing': {'qwix': 'No module named qwix'}, 'capability': 9.0}
  assert gpu.skipped('gpt126m/te_layer_delayed', h100) is None
  assert gpu.skipped('gpt126m/int8_forward', h100)['reason'] == 'No module named qwix'
  mxfp8 = gpu.skipped('llama7b_wide/te_gemm_mxfp8', h100)
  assert mxfp8 == {'status': 'skipped', 'reason': 'needs compute capability 10, this is 9'}


def test_a_case_that_fails_is_told(gpu, monkeypatch, capsys):
  def fail(*_):
    raise RuntimeError('RESOURCE_EXHAUSTED: Out of memory\nand more')

  monkeypatch.setattr(gpu, 'measure', fail)
  gpu.serve('gpt126m/xla', tiny=True, layers=None)
  case = json.loads(capsys.readouterr().out.removeprefix('@'))
  assert case == {
    'status': 'failed',
    'reason': 'RuntimeError: RESOURCE_EXHAUSTED: Out of memory',
  }
  assert gpu.row('gpt126m/xla', case) == (
    '| gpt126m/xla | failed: RuntimeError: RESOURCE_EXHAUSTED: Out of memory |'
  )


def test_every_case_is_an_experiment(gpu):
  """Of both sizes, with its backend and no other."""
  for cases in gpu.SUITES.values():
    assert len(set(cases)) == len(cases)
    for name in cases:
      for tiny in (True, False):
        e = gpu.experiment(name, tiny)
        variant = name.partition('/')[2]
        assert e.backend.name.partition('_')[0] == variant.replace('cpu', 'xla').partition('_')[0]
        assert e.num_devices == 1
      assert gpu.reference_name(name) in cases
