"""LoRA beside frozen weights of int8: training, resuming, evaluating, and what is refused."""

import pathlib
from typing import Any

import numpy as np
import pytest

import paxlite
from paxlite.checkpointing.structure import conversion_hint
from paxlite.checkpointing.variables import stored_variables
from paxlite.core.errors import UserError
from paxlite.weights.commands import export_weights
from tests.support.experiments import TinyText
from tests.support.runs import losses

VALUES: dict[str, Any] = dict(
  SUMMARY_INTERVAL_STEPS=1, LR_SCHEDULE='constant', LEARNING_RATE=1e-2, MAX_EVAL_BATCHES=1,
  FPROP_DTYPE='float32', NUM_LAYERS=1, PERCORE_BATCH_SIZE=1, SAMPLE_PROMPT=None,
)  # fmt: skip
W = 'params/transformer/x_layers_0/ff_layer/ffn_layer1/w'


def train(folder: pathlib.Path, steps: int, **values: object) -> dict[int, float]:
  paxlite.train(TinyText(MAX_STEPS=steps, **(VALUES | values)), folder)
  return losses(folder)


def held(folder: pathlib.Path, step: int) -> set[str]:
  return set(stored_variables(folder / f'checkpoints/checkpoint_{step:08d}/state'))


@pytest.mark.exhaustive
def test_lora_beside_int8_weights_of_a_run(tmp_path):
  train(tmp_path / 'base', 2)
  lora = dict(USE_LORA=True, LORA_RANK=4, CHECKPOINT_RESTORE_PATH=str(tmp_path / 'base'))
  exact = train(tmp_path / 'float32', 4, **lora)
  whole = train(tmp_path / 'int8', 4, FROZEN_DTYPE='int8', **lora)
  assert whole == pytest.approx(exact, rel=1e-4)
  assert whole != exact
  train(tmp_path / 'two', 2, FROZEN_DTYPE='int8', **lora)
  assert train(tmp_path / 'two', 4, FROZEN_DTYPE='int8', **lora) == whole
  assert not [name for name in held(tmp_path / 'two', 4) if name.startswith(W + '/')]
  logits = [paxlite.load(tmp_path / n).logits([1, 2, 3]) for n in ('int8', 'float32')]
  assert 0 < np.abs(logits[0] - logits[1]).max() < 0.01
  again = train(tmp_path / 'two', 5, **lora)  # float32 from here on: the base is read anew
  assert set(again) == {1, 2, 3, 4, 5}


@pytest.mark.exhaustive
@pytest.mark.slow
def test_initial_values_in_int8_are_saved_once(tmp_path):
  lora = dict(USE_LORA=True, LORA_RANK=4)
  whole = train(tmp_path / 'whole', 4, FROZEN_DTYPE='int8', **lora)
  train(tmp_path / 'two', 2, FROZEN_DTYPE='int8', **lora)
  assert train(tmp_path / 'two', 4, FROZEN_DTYPE='int8', **lora) == whole
  names = held(tmp_path / 'two', 4)
  assert {name for name in names if name.startswith(W)} == {f'{W}/values', f'{W}/scale'}
  assert np.isfinite(paxlite.load(tmp_path / 'two').logits([1, 2, 3])).all()
  for fails in (
    lambda: train(tmp_path / 'two', 6, **lora),
    lambda: paxlite.load(tmp_path / 'two', FROZEN_DTYPE='float32').params,
  ):
    with pytest.raises(UserError, match='restore the former FROZEN_DTYPE'):
      fails()
  to = ['--to=hf', f'--path={tmp_path / "hf"}', f'--checkpoint={tmp_path / "two"}']
  with pytest.raises(UserError, match='holds int8 weights, which cannot be exported:'):
    export_weights.main(to)
  with pytest.raises(UserError, match='FROZEN_DTYPE keeps it as int8, which is for frozen weights'):
    train(tmp_path / 'all', 2, FROZEN_DTYPE='int8')


def test_differences_of_a_form_have_a_hint():
  hint = 'restore the former FROZEN_DTYPE'
  assert hint in conversion_hint([f'{W} is missing', f'{W}/values is not in the model'])
  assert hint in conversion_hint([f'{W}/values is missing', f'{W} is not in the model'])
  assert conversion_hint([f'{W} is missing', 'params/b is not in the model']) == ''


@pytest.mark.exhaustive
@pytest.mark.slow
def test_lora_beside_a_stack_of_four_bits(tmp_path):
  stack = dict(NUM_LAYERS=2, USE_REPEATED_LAYER=True)
  train(tmp_path / 'base', 2, **stack)
  lora = dict(USE_LORA=True, LORA_RANK=4, CHECKPOINT_RESTORE_PATH=str(tmp_path / 'base'), **stack)
  exact = train(tmp_path / 'float32', 4, **lora)
  for form in ('nf4', 'int4'):
    whole = train(tmp_path / form, 4, FROZEN_DTYPE=form, **lora)
    assert whole == pytest.approx(exact, rel=5e-3)
    assert whole != exact
  train(tmp_path / 'two', 2, FROZEN_DTYPE='nf4', **lora)
  assert train(tmp_path / 'two', 4, FROZEN_DTYPE='nf4', **lora) == losses(tmp_path / 'nf4')
  logits = [paxlite.load(tmp_path / name).logits([1, 2, 3]) for name in ('nf4', 'float32')]
  assert 0 < np.abs(logits[0] - logits[1]).max() < 0.1
