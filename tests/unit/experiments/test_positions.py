"""The positions of a model are those of its weights, however long the rows of a run are."""

import json
import pathlib

import fiddle as fdl
import jax
import numpy as np
import pytest

from paxlite.checkpointing import source
from paxlite.core.errors import UserError
from paxlite.experiments.compatibility import check_function
from paxlite.experiments.description import configs_text
from paxlite.experiments.gpt import GPT2
from paxlite.experiments.llama import LLaMA
from paxlite.programs.first_start import with_positions
from paxlite.programs.launch import build_experiment
from paxlite.programs.run import Run
from paxlite.programs.weights_model import knowing_weights
from paxlite.weights.families import config_json, experiment_of

SMALL = dict(
  NUM_LAYERS=2, NUM_HEADS=2, MODEL_DIMS=16, DIMS_PER_HEAD=8, HIDDEN_DIMS=32, VOCAB_SIZE=64
)
LONGROPE = dict(
  USE_ROTARY_POSITION_EMB=True, ROPE_SCALING='longrope', ROPE_FACTOR=4.0, ROPE_ORIGINAL_LENGTH=64,
  ROPE_SHORT_FACTORS=[1.0] * 4, ROPE_LONG_FACTORS=[2.0] * 4,
)  # fmt: skip


def write(folder, **values) -> str:
  """Makes a folder that looks like weights of an experiment with these values; returns its path."""
  (folder / 'state').mkdir(parents=True)
  found = {'experiment': 'paxlite.experiments.llama.LLaMA', 'values': SMALL | values}
  (folder / 'experiment.json').write_text(json.dumps(found))
  return str(folder)


def exported(e) -> int:
  return config_json(e, 'float32', None)['max_position_embeddings']


def test_fine_tuning_keeps_the_positions_of_the_weights(tmp_path):
  weights = write(tmp_path / 'w', MAX_SEQ_LEN=8192, MAX_POSITION_EMBEDDINGS=8192)
  e = knowing_weights(LLaMA(CHECKPOINT_RESTORE_PATH=weights, MAX_SEQ_LEN=128, **SMALL))
  e.validate()
  assert (e.MAX_POSITION_EMBEDDINGS, e.num_positions, exported(e)) == (8192, 8192, 8192)
  assert not [line for line in e.warnings if 'positions' in line]
  again = LLaMA(**e.values())  # from the experiment.json of the run, wherever the weights are
  assert again.replaced(CHECKPOINT_RESTORE_PATH='').num_positions == 8192
  tuned = {'CHECKPOINT_RESTORE_PATH': weights, 'MODEL': 'SmolLM135M'}
  lora = build_experiment('HuggingFaceLoRA', [], tuned)
  assert lora.values()['MAX_SEQ_LEN'] == 512
  assert lora.values()['MAX_POSITION_EMBEDDINGS'] == 8192


def test_an_experiment_from_scratch_has_as_many_positions_as_its_rows():
  e = LLaMA(MAX_SEQ_LEN=128, **SMALL)
  assert (e.MAX_POSITION_EMBEDDINGS, e.num_positions, exported(e)) == (128, 128, 128)


def test_longer_rows_than_the_weights_have_positions_are_said_or_refused(tmp_path):
  weights = write(tmp_path / 'w', MAX_SEQ_LEN=256, MAX_POSITION_EMBEDDINGS=256)
  e = knowing_weights(LLaMA(CHECKPOINT_RESTORE_PATH=weights, MAX_SEQ_LEN=512, **SMALL))
  e.validate()
  assert exported(e) == 512
  assert "have 256 positions, but this run's model has 512" in ' '.join(e.warnings)
  stated = e.replaced(MAX_POSITION_EMBEDDINGS=256)
  with pytest.raises(UserError, match='MAX_SEQ_LEN=512 is longer than the model: it has MAX_POS'):
    stated.validate()
  stated.replaced(ROPE_FACTOR=2.0, ROPE_SCALING='linear').validate()  # which reaches 512


STRETCHED = dict(ROPE_FACTOR=4.0, ROPE_ORIGINAL_LENGTH=256, MAX_SEQ_LEN=1024)


@pytest.mark.parametrize(
  ('weights', 'values', 'message'),
  [
    ({}, dict(ROPE_SCALING='yarn', ROPE_FACTOR=2.0), r'1024 is longer than ROPE_FACTOR=2 × ROPE'),
    ({}, dict(ROPE_SCALING='yarn', ROPE_ORIGINAL_LENGTH=8192), r'set ROPE_ORIGINAL_LENGTH=2'),
    ({}, dict(ROPE_SCALING='llama3', ROPE_ORIGINAL_LENGTH=257), r'more than the 256 positions of'),
    ({}, dict(ROPE_SCALING='ntk', ROPE_FACTOR=3.0), r'of the weights=256.*ROPE_FACTOR=4$'),
    ({}, dict(ROPE_SCALING='linear', MAX_SEQ_LEN=1025), r'set ROPE_FACTOR=4.00391$'),
    ({}, dict(ROPE_SCALING='linear', ROPE_FACTOR=0.5), r'ROPE_FACTOR=0.5 must be at least 1'),
    ({}, dict(ROPE_SCALING='longrope', ROPE_SHORT_FACTORS=[1.0] * 4), r'LONG_FACTORS must have 4'),
    ({}, dict(ROPE_SCALING='ntk', DIMS_PER_HEAD=2), r'ntk needs more than 2 rotated dimensions'),
    (dict(ROPE_FACTOR=2.0, ROPE_SCALING='linear'), dict(ROPE_SCALING='linear'), 'ROPE_FACTOR=8$'),
  ],
)  # fmt: skip
def test_rows_beyond_what_a_scaling_states_are_refused(weights, values, message, tmp_path):
  path = write(tmp_path / 'w', MAX_SEQ_LEN=256, MAX_POSITION_EMBEDDINGS=256, **weights)
  values = SMALL | STRETCHED | values
  with pytest.raises(UserError, match=message):
    knowing_weights(LLaMA(CHECKPOINT_RESTORE_PATH=path, **values)).validate()


@pytest.mark.parametrize('scaling', ['linear', 'ntk', 'yarn', 'llama3'])
def test_stretched_positions_reach_four_times_as_far(scaling, tmp_path):
  path = write(tmp_path / 'w', MAX_SEQ_LEN=256, MAX_POSITION_EMBEDDINGS=256)
  values = SMALL | STRETCHED | dict(ROPE_SCALING=scaling)
  e = knowing_weights(LLaMA(CHECKPOINT_RESTORE_PATH=path, **values))
  e.validate()
  assert e.num_positions == exported(e) == 1024
  assert 'stretch rotary' not in ' '.join(e.warnings)
  plain = knowing_weights(e.replaced(ROPE_FACTOR=1.0))
  assert 'ROPE_SCALING and ROPE_FACTOR stretch rotary positions' in ' '.join(plain.warnings)


def test_ntk_keeps_the_shortest_wave_and_stretches_the_longest_one():
  e = LLaMA(**SMALL | STRETCHED | dict(ROPE_SCALING='ntk'))
  rates = [fdl.build(x.rotary())().rates(4) for x in (e.replaced(ROPE_FACTOR=1.0), e)]
  ratios = np.asarray(rates[0] / rates[1])
  np.testing.assert_allclose(ratios[[0, -1]], [1, 4], rtol=1e-5)


def test_a_change_of_positions_is_named_without_what_derives_from_it(tmp_path):
  values = SMALL | dict(
    MAX_SEQ_LEN=256, MAX_POSITION_EMBEDDINGS=256, ATTENTION_TEMPERATURE_FLOOR=8192
  )
  path = pathlib.Path(write(tmp_path / 'w', **values))
  named = ['ROPE_FACTOR', 'ROPE_SCALING', 'ROPE_ORIGINAL_LENGTH']
  changed = dict(ROPE_SCALING='yarn', CHECKPOINT_RESTORE_CHANGES=named)
  e = LLaMA(**SMALL | STRETCHED | changed)
  found = {'experiment': 'paxlite.experiments.llama.LLaMA', 'values': LLaMA(**SMALL).values()}
  (path / 'experiment.json').write_text(json.dumps(found))
  check_function(e, path, path / 'experiment.json')
  e = e.replaced(CHECKPOINT_RESTORE_CHANGES=named[:2])
  with pytest.raises(UserError, match=r'it has ROPE_ORIGINAL_LENGTH=8192 '):
    check_function(e, path, path / 'experiment.json')


def test_a_table_of_positions_is_that_of_the_model(tmp_path):
  weights = write(tmp_path / 'w', MAX_SEQ_LEN=256, MAX_POSITION_EMBEDDINGS=256)
  e = knowing_weights(GPT2(CHECKPOINT_RESTORE_PATH=weights, MAX_SEQ_LEN=32, **SMALL))
  e.validate()
  shapes = jax.eval_shape(
    fdl.build(e.plain.build_task()).model.init, jax.random.key(0), np.zeros((1, 1), np.int32)
  )
  assert jax.tree.leaves(shapes['params']['position_emb'])[0].shape == (256, 16)
  assert config_json(e, 'float32', None)['n_positions'] == 256
  with pytest.raises(UserError, match='=256, each with a learned embedding'):
    e.replaced(MAX_SEQ_LEN=512).validate()


def test_the_factors_of_longrope_bound_a_text():
  long = dict(MAX_POSITION_EMBEDDINGS=256, **LONGROPE, **SMALL)
  assert LLaMA(MAX_SEQ_LEN=64, **long).num_positions == 64
  assert LLaMA(MAX_SEQ_LEN=65, **long).num_positions == 256


def test_a_published_config_says_the_positions():
  config = dict(
    model_type='llama', num_hidden_layers=2, hidden_size=16, num_attention_heads=2,
    intermediate_size=32, vocab_size=64, max_position_embeddings=8192, rms_norm_eps=1e-5,
    hidden_act='silu',
  )  # fmt: skip
  assert experiment_of(config, 'config.json').MAX_POSITION_EMBEDDINGS == 8192


def test_a_run_that_continues_keeps_its_positions_without_the_weights(tmp_path):
  folder = tmp_path / 'run'
  values = SMALL | dict(MAX_POSITION_EMBEDDINGS=8192)
  step = folder / 'checkpoints' / 'checkpoint_00000002'
  step.mkdir(parents=True)
  found = {'experiment': 'paxlite.experiments.llama.LLaMA', 'values': values}
  (folder / 'experiment.json').write_text(json.dumps(found))
  e = LLaMA(CHECKPOINT_RESTORE_PATH=str(tmp_path / 'gone'), MAX_SEQ_LEN=64, **SMALL)
  assert with_positions(Run(e, folder)).experiment.values()['MAX_POSITION_EMBEDDINGS'] == 8192


def test_a_checkpoint_is_found_and_read_once_when_an_experiment_is_built(tmp_path, monkeypatch):
  weights = write(tmp_path / 'w', MAX_SEQ_LEN=256, MAX_POSITION_EMBEDDINGS=256)
  calls = []
  for module, name in ((source, '_checkpoint_folders'), (source, 'read_experiment')):
    original = getattr(module, name)
    counted = lambda path, name=name, original=original: calls.append(name) or original(path)
    monkeypatch.setattr(module, name, counted)
  e = build_experiment('HuggingFaceSFT', [], {'CHECKPOINT_RESTORE_PATH': weights})
  configs_text(e)
  assert (e.MODEL, e.MODEL_DIMS, e.MAX_POSITION_EMBEDDINGS) == ('LLaMA', 16, 256)
  changed = Run(e.replaced(MAX_SEQ_LEN=64), tmp_path / 'run').experiment
  assert changed.weights is e.weights
  assert calls == ['_checkpoint_folders', 'read_experiment']
  assert e.replaced(CHECKPOINT_RESTORE_PATH='other').weights.positions is None
  build_experiment('LLaMA7BSFT', [], {'CHECKPOINT_RESTORE_PATH': weights})
  assert len(calls) == 4  # once more for another experiment


def test_weights_that_are_gone_are_a_problem_of_whoever_needs_them(tmp_path):
  gone = {'CHECKPOINT_RESTORE_PATH': str(tmp_path / 'gone')}
  e = build_experiment('HuggingFaceSFT', [], gone | {'MODEL': 'SmolLM135M'})
  with pytest.raises(UserError, match=r'the source of the tokenizer .*gone is not a folder'):
    e.train_input()
  with pytest.raises(UserError, match='gone is not a folder: it must be a job_log_dir'):
    build_experiment('HuggingFaceSFT', [], gone)
  (tmp_path / 'gone' / 'state').mkdir(parents=True)
  with pytest.raises(UserError, match=r'is missing, so the model of .*gone is unknown'):
    build_experiment('HuggingFaceSFT', [], gone)
