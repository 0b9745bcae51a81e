"""Training on preferences: on meshes, with microbatches, LoRA and after a stop."""

import json
import math

import pytest

from paxlite.core.errors import UserError
from paxlite.data import packaged
from paxlite.experiments.datasets import SftFiles
from paxlite.experiments.finetuning import HuggingFacePreferences, Preference
from paxlite.experiments.llama import LLaMA
from tests.support import runs

CAPITALS = dict(
  France='Paris', Italy='Rome', Spain='Madrid', Japan='Tokyo', Peru='Lima', Cuba='Havana'
)


class Small(LLaMA):
  NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS, DIMS_PER_HEAD = 2, 32, 64, 2, 16
  VOCAB_SIZE, MAX_SEQ_LEN = 8192, 64
  ICI_MESH_SHAPE, DCN_MESH_SHAPE, PERCORE_BATCH_SIZE = [1, 1, 1], [1, 1, 1], 4
  FPROP_DTYPE = 'float32'
  SUMMARY_INTERVAL_STEPS, MAX_STEPS, EVAL_INTERVAL_STEPS = 1, 2, 100


class SmallSft(Small, SftFiles):
  VOCAB_PATH = packaged.VOCAB


class SmallPreferences(Small, Preference):
  VOCAB_PATH = packaged.VOCAB
  # Adam would make small gradients large, and with them how a mesh rounds
  OPTIMIZER, LEARNING_RATE, MAX_STEPS, LR_SCHEDULE = 'sgd', 0.3, 4, 'constant'


def names(folder) -> list[str]:
  """Returns flags of a base and of pairs."""
  pairs = [
    dict(prompt=f'The capital of {land} is', chosen=f' {town}!', rejected=f' not {town}.')
    for land, town in CAPITALS.items()
  ]
  answers = [dict(prompt=p['prompt'], completion=p['chosen']) for p in pairs]
  for name, records in (('pairs', pairs), ('answers', answers)):
    (folder / f'{name}.jsonl').write_text(''.join(json.dumps(r) + '\n' for r in records))
  runs.run(
    folder / 'base', f'--fdl.TRAIN_FILES={folder}/answers.jsonl',
    config='tests.runs.test_preferences.SmallSft',
  )  # fmt: skip
  return [f'--fdl.TRAIN_FILES={folder}/pairs.jsonl', f'--fdl.CHECKPOINT_RESTORE_PATH={folder}/base']


def losses(folder, *flags, **kwargs) -> list[float]:
  runs.run(folder, *flags, config='tests.runs.test_preferences.SmallPreferences', **kwargs)
  return list(runs.losses(folder).values())


@pytest.mark.slow
def test_preferences_are_learned_on_every_mesh_and_after_a_stop(tmp_path):
  flags = names(tmp_path)
  one = losses(tmp_path / 'one', *flags)
  assert one[0] == pytest.approx(math.log(2), rel=1e-6)
  assert one[-1] < 0.9 * one[0]
  mesh = ['--fdl.ICI_MESH_SHAPE=[1,2,2]', '--fdl.PERCORE_BATCH_SIZE=1', '--fdl.NUM_MICROBATCHES=2']
  assert losses(tmp_path / 'four', *flags, *mesh, devices=4) == pytest.approx(one, rel=1e-5)
  losses(tmp_path / 'parts', *flags, '--fdl.MAX_STEPS=2')
  assert losses(tmp_path / 'parts', *flags) == one
  lora = losses(tmp_path / 'lora', *flags, '--fdl.USE_LORA=True', '--fdl.LORA_RANK=2')
  assert lora[0] == one[0]
  assert lora[-1] < lora[0]
  last = [r for r in runs.records(tmp_path / 'one') if 'loss' in r][-1]
  assert last['rewards/accuracies'] == 1
  assert last['rewards/margins'] > 0


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['orpo', 'simpo'])
def test_losses_without_a_reference_have_no_frozen_copy(kind, tmp_path):
  flags = names(tmp_path)
  found = losses(tmp_path / 'run', *flags, f'--fdl.PREFERENCE_LOSS={kind}')
  assert found[-1] < found[0]
  assert not list((tmp_path / 'run').rglob('*reference*'))


def test_wrong_values_are_refused():
  for values, message in (
    (dict(PREFERENCE_BETA=0.0), 'nothing would be learned'),
    (dict(PREFERENCES_FLIPPED=0.5), 'must be below 0.5'),
    (dict(PREFERENCE_LOSS='dpo'), "PREFERENCE_LOSS must be one of 'sigmoid'"),
  ):
    with pytest.raises(UserError, match=message):
      HuggingFacePreferences(MODEL='LLaMA3_8B', **values).validate()
  made = HuggingFacePreferences(MODEL='LLaMA3_8B', PREFERENCES_FLIPPED=0.1)
  assert any('has no effect without' in w for w in made.warnings)
  with pytest.raises(UserError, match='CHECKPOINT_RESTORE_PATH=FOLDER is missing'):
    made.train_input()
