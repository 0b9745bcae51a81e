"""Runs `make demo` twice as on a fresh machine: a copy of the files and a new environment."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.support import runs


@pytest.mark.slow
@pytest.mark.timeout(1800)  # other tests run at the same time
def test_make_demo(tmp_path):
  left_out = '.git', '.venv*', 'logs', '__pycache__', '*.egg-info', '.*_cache'
  shutil.copytree(runs.ROOT, tmp_path, ignore=shutil.ignore_patterns(*left_out), dirs_exist_ok=True)

  # modules are compiled when they are imported, as most are not
  environment = os.environ | {'XLA_FLAGS': '', 'PIP_NO_COMPILE': '1'}

  def make() -> str:
    command = [
      'make', 'demo', f'PYTHON={sys.executable}',
      'FLAGS=--fdl.MAX_STEPS=25 --fdl.MAX_EVAL_BATCHES=4',
    ]  # fmt: skip
    result = subprocess.run(
      command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout

  output = make()
  assert 'A sample at temperature 0.8, continuing' in output
  assert 'Logs, metrics and checkpoints are in' in output
  records = (tmp_path / 'logs' / 'demo' / 'eval_metrics.jsonl').read_text().splitlines()
  last = json.loads(records[-1])
  assert last['bits_per_byte'] < 3.3  # 1.98 after 60 steps, 1.81 after all 500
  packages = subprocess.run(
    [tmp_path / '.venv' / 'bin' / 'python', '-m', 'pip', 'list', '--format=freeze'],
    capture_output=True, text=True, check=True,
  ).stdout  # fmt: skip
  installed = {line.split('==')[0].lower() for line in packages.splitlines()}
  assert not {'tensorflow', 'torch', 'seqio', 'transformer-engine', 'pytest'} & installed

  assert 'Training is complete' in make()
