"""Losses that are added from outside: on eight devices with two microbatches, and on one."""

import json
import math
import os
import sys

import pytest

from paxlite.checkpointing.source import find_source
from paxlite.core.errors import UserError
from paxlite.generation.inference import load_checkpoint
from paxlite.programs.run_checks import check_best_metric
from tests.outside.parts.preferences import Preferences
from tests.outside.trained import trained, trained_on_one
from tests.runs.test_main import tensorboard_tags
from tests.support import runs
from tests.unit.training.test_own_loss import code_of_the_page

SIXTEEN = '--fdl.PERCORE_BATCH_SIZE=2'  # rows on eight devices


def losses_agree(folder, part, *flags):
  """Returns the losses of a part; checks that the mesh and microbatches do not change them."""
  eight = trained(folder / 'eight', part, SIXTEEN, *flags)
  one = trained_on_one(folder / 'one', part, 16, *flags)
  assert list(eight.values()) == pytest.approx(list(one.values()), rel=1e-5)
  return list(eight.values())


@pytest.mark.slow
def test_a_loss_is_added_and_reported(tmp_path):
  losses = losses_agree(tmp_path, 'z_loss.WithLogSumExp')
  # log Σ exp of logits near 0 is the logarithm of their number
  assert losses[0] == pytest.approx(math.log(128) + 0.1 * math.log(128) ** 2, rel=0.02)
  assert 'Metrics/max_log_z' in tensorboard_tags(tmp_path / 'eight' / 'summaries' / 'train')


@pytest.mark.exhaustive
def test_preferences_read_the_weights_that_training_starts_from(tmp_path):
  runs.run(tmp_path / 'base', '--fdl.MAX_STEPS=2')
  start = f'--fdl.CHECKPOINT_RESTORE_PATH={tmp_path / "base"}'
  train = lambda steps: trained(
    tmp_path / 'eight', 'preferences.Preferences', SIXTEEN, start, f'--fdl.MAX_STEPS={steps}'
  )
  train(2)
  losses = train(4)
  assert losses[1] == pytest.approx(math.log(2), rel=1e-6)  # nothing is gained yet
  assert losses[4] < losses[1] - 0.01
  stored = find_source(tmp_path / 'eight').variables
  assert not [name for name in stored if 'reference' in name]  # it is in the other checkpoint
  with pytest.raises(UserError, match='tokenizer'):  # and not the rows that belong together
    load_checkpoint(str(tmp_path / 'eight'))


def test_which_reference_is_lora_s_base():
  of = lambda **values: Preferences(USE_LORA=True, **values).reference().is_base
  assert of()
  assert not of(TRAINABLE_VARIABLES=['.*'])  # the base does not stay as it is
  assert not Preferences().reference().is_base


def test_references_without_weights_are_refused():
  with pytest.raises(UserError, match='needs the weights of its reference model'):
    Preferences().validate()
  path = dict(CHECKPOINT_RESTORE_PATH='somewhere', ICI_MESH_SHAPE=[1, 1, 1], PERCORE_BATCH_SIZE=2)
  Preferences(**path).validate()
  with pytest.raises(UserError, match='leaves variables of the reference model without values'):
    Preferences(**path, CHECKPOINT_IGNORE_RULES=['.*']).validate()
  with pytest.raises(
    UserError, match='BEST_METRIC=avg_xent, the default, is not one of the losses'
  ):
    check_best_metric('avg_xent', Preferences().losses())


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_reference_of_another_function_is_refused_and_its_form_may_be_another(tmp_path):
  runs.run(tmp_path / 'base', '--fdl.MAX_STEPS=2')
  runs.run(tmp_path / 'capped', '--fdl.MAX_STEPS=2', '--fdl.ATTEN_LOGIT_CAP=5')
  of = lambda path: f'--fdl.REFERENCE_RESTORE_PATH={tmp_path / path}'
  flags = [
    f'--fdl.CHECKPOINT_RESTORE_PATH={tmp_path / "base"}', '--fdl.PERCORE_BATCH_SIZE=4',
    '--fdl.FROZEN_DTYPE=int8',
  ]  # fmt: skip
  config = 'tests.outside.parts.preferences.Preferences'
  refused = runs.run(tmp_path / 'no', *flags, of('capped'), config=config, code=2)
  assert 'ATTEN_LOGIT_CAP' in refused.stderr
  runs.run(tmp_path / 'yes', *flags, of('base'), config=config)
  losses = runs.losses(tmp_path / 'yes')
  assert losses[1] == pytest.approx(math.log(2), abs=1e-2)  # the reference alone is rounded
  assert losses[1] != pytest.approx(math.log(2), rel=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize('lora', [False, True])
def test_preferences_are_the_same_on_one_device_and_after_a_stop(tmp_path, lora):
  runs.run(tmp_path / 'base', '--fdl.MAX_STEPS=2')
  flags = [f'--fdl.CHECKPOINT_RESTORE_PATH={tmp_path / "base"}']
  if lora:
    flags += ['--fdl.USE_LORA=True', '--fdl.LORA_RANK=2']
  losses = losses_agree(tmp_path, 'preferences.Preferences', *flags)
  assert losses[0] == pytest.approx(math.log(2), rel=1e-6)
  assert losses[-1] < losses[0]
  stopped = tmp_path / 'stopped'
  one = lambda steps: trained_on_one(
    stopped, 'preferences.Preferences', 16, *flags, f'--fdl.MAX_STEPS={steps}'
  )
  one(2)
  # the base has moved on; the reference is still the state that the run began with
  runs.run(tmp_path / 'base', '--fdl.MAX_STEPS=4')
  assert one(4) == runs.losses(tmp_path / 'one')


@pytest.mark.exhaustive
@pytest.mark.slow
def test_losses_and_gradients_do_not_depend_on_mesh_and_microbatches(tmp_path):
  """Those of docs/library.md and of this folder, with 1, 2 and 4 microbatches."""
  (tmp_path / 'my_parts.py').write_text(code_of_the_page())
  parts = 'tests.outside.parts'
  names = [
    'my_parts.MyParts', f'{parts}.z_loss.WithLogSumExp', f'{parts}.preferences.Preferences',
  ]  # fmt: skip
  command = [sys.executable, '-m', 'tests.support.own_losses', *names]
  path = os.pathsep.join([str(tmp_path), str(runs.ROOT)])
  result = runs.ended(command, runs.environment(8) | {'PYTHONPATH': path}, 600)
  assert result.returncode == 0, result.stderr
  lines = [json.loads(line) for line in result.stdout.splitlines()]
  assert len(lines) == len(names) * 9
  for name, mesh, n, loss, gradient in lines:
    assert loss < 1e-6, (name, mesh, n)
    assert gradient < 5e-6, (name, mesh, n)
