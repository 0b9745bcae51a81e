"""Checkpoints of LoRA, which hold what is trained, and not the weights beside it."""

import json
import random
import re

import numpy as np
import pytest

from paxlite.checkpointing.checksums import write_checksums
from paxlite.checkpointing.source import Source, lineage
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


def test_the_lineage_has_the_weights_that_were_frozen_and_not_newer_ones(tmp_path):
  names = [f'checkpoint_{step:08d}' for step in (1, 2)]
  base = tmp_path / 'base' / 'checkpoints'
  older, newer = [write(base / name, BASE, i) for i, name in enumerate(names)]
  run = write(tmp_path / 'run', FACTORS, 2, tmp_path / 'base')
  of = lambda: [source.folder for source in lineage(tmp_path / 'run')]
  assert of() == [run.folder, newer.folder]
  (run.folder / 'data' / 'metadata').write_text(json.dumps({'frozen': older.fingerprint}))
  assert of() == [run.folder, older.folder]


def stack(is_repeated, layers, leaf='mlp.lora_a'):
  return [f't.repeat.{leaf}'] if is_repeated else [f't.x_layers_{i}.{leaf}' for i in layers]


@pytest.mark.parametrize('seed', range(12))
def test_layers_that_a_run_did_not_train_are_those_of_its_base(seed, tmp_path):
  """Of both stack layouts, in three runs, of which each goes on from the one before."""
  rng = random.Random(seed)
  of_base = [*stack(rng.random() < 0.5, (0, 1), 'mlp.w'), 't.repeat.x_layers_0.norm.scale']
  write(tmp_path / '0', of_base, 0)
  expected = dict.fromkeys((0, 1), 0.0)
  for run in (1, 2, 3):
    is_repeated = rng.random() < 0.5
    layers = (0, 1) if is_repeated or run == 1 else rng.sample((0, 1), rng.randint(1, 2))
    names = stack(is_repeated, layers)
    if run == 2:
      names.append('t.repeat.x_layers_1.norm.scale')  # a block within a layer, not a layer
    source = write(tmp_path / str(run), names, run, tmp_path / str(run - 1))
    expected |= dict.fromkeys(layers, float(run))
  found = source.unrolled_params()
  values = {i: float(found[f't/x_layers_{i}/mlp/lora_a'].whole().flat[0]) for i in (0, 1)}
  assert values == expected
  scales = [float(found[f't/x_layers_1/x_layers_{i}/norm/scale'].whole().flat[0]) for i in (0, 1)]
  assert scales == [0, 2]
  assert len(found) == 8
  assert len({re.sub('repeat|x_layers_[01]', '', n, count=1) for n in source.variables}) == 4


def test_factors_with_all_weights_need_no_base_and_others_do(tmp_path):
  whole = write(tmp_path / 'whole', BASE + FACTORS, 2, tmp_path / 'gone')
  assert len(whole.variables) == len(BASE + FACTORS)
  with pytest.raises(UserError, match='need their base weights'):
    _ = write(tmp_path / 'run', [*FACTORS, 'softmax.w'], 2, tmp_path / 'gone').variables
