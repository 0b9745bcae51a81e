"""Checkpoints of LoRA, which hold what is trained, and not the weights beside it."""

import json

import numpy as np
import pytest

from paxlite.checkpointing.checksums import write_checksums
from paxlite.checkpointing.source import Source
from paxlite.checkpointing.variables import write_variable
from paxlite.core.errors import UserError

BASE = ['embedding.emb_var', 'softmax.w', 'a.qkv.w', 'a.qkv.b', 'repeat.mlp.w']
FACTORS = ['a.qkv.lora_a', 'a.qkv.lora_b', 'repeat.mlp.lora_a', 'repeat.mlp.lora_b']


def write(folder, names, value, restored=''):
  sums = dict(
    write_variable(folder / 'state', f'params.{name}', np.full((2, 2), value, np.float32))
    for name in names
  )
  (folder / 'data').mkdir()
  (folder / 'data' / 'metadata').write_text('{}')
  values = {'CHECKPOINT_RESTORE_PATH': str(restored)} if restored else {}
  (folder / 'experiment.json').write_text(json.dumps({'experiment': 'a.B', 'values': values}))
  write_checksums(folder, sums)
  return Source(folder, folder / 'experiment.json')


@pytest.mark.parametrize('trained', [[], ['embedding.emb_var'], ['softmax.w', 'a.qkv.b']])
def test_what_a_run_trained_beside_its_factors_replaces_what_the_base_has(trained, tmp_path):
  write(tmp_path / 'base', BASE, 1)
  own = write(tmp_path / 'run', FACTORS + trained, 2, tmp_path / 'base')
  found = {name: float(x.whole()[0, 0]) for name, x in own.variables.items()}
  of = lambda name: 'params/' + name.replace('.', '/')
  expected = {of(name): 1.0 for name in BASE} | {of(name): 2.0 for name in FACTORS + trained}
  assert found == expected


def test_factors_with_all_weights_need_no_base_and_others_do(tmp_path):
  whole = write(tmp_path / 'whole', BASE + FACTORS, 2, tmp_path / 'gone')
  assert len(whole.variables) == len(BASE + FACTORS)
  with pytest.raises(UserError, match='need their base weights'):
    _ = write(tmp_path / 'run', [*FACTORS, 'softmax.w'], 2, tmp_path / 'gone').variables
