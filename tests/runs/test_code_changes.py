"""A run whose code is edited between two starts."""

import json
import pathlib

import pytest

from tests.support import runs

MODULE = """
from paxlite.experiments.demo import TinyGPT


class Edited(TinyGPT):
  def losses(self):
    found = super().losses()
    found['avg_xent'].coefficient = 1e-3
    return found
"""
FLAGS = ['MAX_STEPS=8', 'CHECKPOINT_EVERY_N_STEPS=4', 'SUMMARY_INTERVAL_STEPS=1', 'NUM_LAYERS=1']


@pytest.mark.slow
def test_an_edit_is_named_by_start_verify_and_bisect(tmp_path, monkeypatch):
  monkeypatch.setenv('PYTHONPATH', f'{runs.ROOT}:{tmp_path}')
  module, folder = tmp_path / 'edited_losses.py', tmp_path / 'run'

  def called(command: str, *flags: str, code: int = 0) -> str:
    result = runs.module('paxlite', command, *flags, code=code)
    return result.stdout + result.stderr

  def trained(where: pathlib.Path, *flags: str, code: int = 0) -> str:
    return called('train', 'edited_losses.Edited', f'--folder={where}', *FLAGS, *flags, code=code)

  field = 'task.losses.avg_xent.coefficient'
  module.write_text(MODULE)
  trained(folder, 'MAX_STEPS=4')
  module.write_text(MODULE.replace('1e-3', '1e-1'))
  said = trained(folder, code=2)
  assert f'the code has changed since the last start of {folder}: {field} 0.001 → 0.1' in said
  trained(folder, '--accept_changes')
  records = [json.loads(line) for line in (folder / 'data.jsonl').read_text().splitlines()]
  assert [r.get('code_changes') for r in records] == [None, [f'{field} 0.001 → 0.1']]
  flags = str(folder), '--import=edited_losses'
  assert 'equal bit for bit' in called('verify', *flags)
  said = called('verify', *flags, '--from_step=0', '--to_step=4', code=2)
  assert f'the steps up to 4 were trained with other code: {field} 0.001 → 0.1.' in said
  module.write_text(MODULE)
  said = called('verify', *flags, code=2)
  assert f'{field} 0.1 → 0.001' in said
  said = called('verify', *flags, '--accept_changes', code=1)
  assert f'and so does its code: {field} 0.1 → 0.001' in said
  assert 'memory' not in said
  trained(tmp_path / 'other')
  said = called('bisect', str(folder), str(tmp_path / 'other'), '--import=edited_losses', code=2)
  assert f'{field}: 0.1 in A, 0.001 in B' in said
