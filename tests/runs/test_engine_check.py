"""Rollouts notice an engine that computes something else than training does."""

import fiddle as fdl
import jax
import numpy as np
import pytest
from flax.linen import meta

from paxlite.experiments.identity import write_configuration
from paxlite.experiments.mixtral import Mixtral
from paxlite.generation.engine import Engine
from paxlite.programs.run import Run
from tests.runs import test_rollouts
from tests.runs.test_rollouts import Letters
from tests.support import runs

files = test_rollouts.files
ONE = dict(ICI_MESH_SHAPE=[1, 1, 1], DCN_MESH_SHAPE=[1, 1, 1])


class Experts(Letters, Mixtral):
  """The same with experts."""

  NUM_EXPERTS, NUM_EXPERTS_PER_TOKEN, USE_DROPLESS_MOE = 8, 2, True
  MAX_STEPS = 3


def gap_of(e):
  """Returns what is found for a batch."""
  e.validate()
  model = fdl.build(e.build_task()).model
  params = meta.unbox(jax.jit(model.init)(jax.random.key(1), np.zeros((1, 1), np.int32)))['params']
  rollouts = fdl.build(e.train_input())
  batch = rollouts.next_batch(params, 0, slice(0, 16))
  assert not any('drawn' in name for name in batch)
  (found,) = rollouts.engine_check.found
  assert found.tokens == batch['weights'][: 16 // e.NUM_MICROBATCHES].sum()
  return found


def experiment(files, cls, **values):
  data = f'{files}/prompts.jsonl'
  return cls(VOCAB_PATH=str(files), TRAIN_FILES=[data], **ONE, **values)


@pytest.mark.slow
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('cls', [Letters, Experts])
@pytest.mark.parametrize(
  'values', [{}, dict(NUM_MICROBATCHES=2, UPDATES_PER_BATCH=2, ROLLOUT_TEMPERATURE=0.7)]
)
def test_generation_and_training_agree(files, cls, dtype, values):
  e = experiment(files, cls, FPROP_DTYPE=dtype, **values)
  found = gap_of(e)
  assert found.mean <= found.largest < e.ENGINE_TOLERANCE / 10
  assert found.has_experts == (cls is Experts)
  assert found.experts <= e.ENGINE_EXPERTS_TOLERANCE


@pytest.mark.slow
def test_an_engine_with_other_parameters_raises_an_alarm(files, tmp_path, monkeypatch, capsys):
  """Noise in the output head changes log-probabilities, and in routers the experts."""
  plain = Engine.params

  def changed(params, part):
    noise = lambda x: x + jax.random.normal(jax.random.key(3), x.shape, x.dtype)
    one = lambda path, x: noise(x) if part in jax.tree_util.keystr(path) else x
    return jax.tree_util.tree_map_with_path(one, params)

  for part in ('router', 'never', 'softmax'):
    setter = lambda self, params, part=part: plain.fset(self, params and changed(params, part))
    monkeypatch.setattr(Engine, 'params', property(plain.fget, setter))
    folder = tmp_path / part
    folder.mkdir()
    e = experiment(files, Experts, ENGINE_CHECK_INTERVAL=2)
    write_configuration(e, folder)
    trainer = Run(e, folder).trainer()
    trainer.train(*trainer.store.initial())
    said = capsys.readouterr().out
    found = [r for r in runs.records(folder, 'eval_metrics.jsonl') if r['input'] == 'engine']
    assert [r['step'] for r in found] == [1, 3], 'of the rollouts 0 and 2'
    assert all(r['log_prob_gap'] <= r['max_log_prob_gap'] for r in found)
    counts = [said.count(f'ALARM: at step 1 generation {x} ') for x in ('and training', 'chose')]
    # all tokens have other experts where routers differ, so that none is left to be compared
    assert counts == {'never': [0, 0], 'router': [0, 1], 'softmax': [1, 0]}[part]
    assert all((r['other_experts'] == 1) == (part == 'router') for r in found)
    assert all((r['other_experts'] > 0.01) == (part == 'router') for r in found)
    assert 'eval engine at step 1: log-probabilities differ from training by' in said
