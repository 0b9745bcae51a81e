"""Training on preferences: on meshes, with microbatches, LoRA and after a stop."""

import functools
import json
import math
from collections import defaultdict
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from paxlite.aot.commands import compile as compile_tool
from paxlite.core.errors import UserError
from paxlite.data import packaged
from paxlite.experiments.datasets import SftFiles
from paxlite.experiments.finetuning import (
  HuggingFacePreferences,
  HuggingFaceReward,
  Preference,
  Reward,
)
from paxlite.experiments.llama import LLaMA
from paxlite.finetuning.preferences.preference_rows import RewardRows
from paxlite.finetuning.preferences.reward_loss import BradleyTerry
from paxlite.generation.commands import generate
from paxlite.layers.sown import SOWN
from paxlite.losses.outputs import Outputs
from paxlite.weights.commands import export_weights
from tests.support import runs
from tests.support.imported import loaded
from tests.support.processes import MESH, on_processes

CONFIG = 'tests.runs.test_preferences.SmallPreferences'
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


class SmallReward(Small, Reward):
  VOCAB_PATH = packaged.VOCAB
  OPTIMIZER, LEARNING_RATE, MAX_STEPS, LR_SCHEDULE = 'sgd', 0.01, 4, 'constant'


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


def losses(folder, *flags, config='SmallPreferences', **kwargs) -> list[float]:
  runs.run(folder, *flags, config=f'tests.runs.test_preferences.{config}', **kwargs)
  return list(runs.losses(folder).values())


@pytest.mark.exhaustive
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
  once = [*flags, '--fdl.PRECOMPUTE_REFERENCE=True']
  losses(tmp_path / 'once', *once, '--fdl.MAX_STEPS=2')
  assert losses(tmp_path / 'once', *once) == pytest.approx(one, rel=1e-6)
  assert not list((tmp_path / 'once').rglob('*params.reference*'))
  assert np.load(tmp_path / 'once/reference/training/reference_log_probs.npy').shape[1] == 64
  meshed = losses(tmp_path / 'once4', *once, *mesh, devices=4)
  assert meshed == pytest.approx(one, rel=1e-5)
  dora = [*flags, '--fdl.USE_LORA=True', '--fdl.LORA_RANK=2', '--fdl.USE_DORA=True']
  alone = losses(tmp_path / 'dora', *dora)
  assert alone[0] == one[0]
  assert alone[-1] < alone[0]
  meshed = losses(tmp_path / 'dora4', *dora, *mesh, devices=4)
  assert meshed == pytest.approx(alone, rel=1e-5)
  last = [r for r in runs.records(tmp_path / 'one') if 'loss' in r][-1]
  assert last['rewards/accuracies'] == 1
  assert last['rewards/margins'] > 0


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize('kind', ['orpo', 'simpo'])
def test_losses_without_a_reference_have_no_frozen_copy(kind, tmp_path):
  flags = names(tmp_path)
  found = losses(tmp_path / 'run', *flags, f'--fdl.PREFERENCE_LOSS={kind}')
  assert found[-1] < found[0]
  assert not list((tmp_path / 'run').rglob('*reference*'))


@pytest.mark.exhaustive
def test_labelled_answers_are_learned_on_every_mesh_and_after_a_stop(tmp_path):
  flags = [*names(tmp_path), '--fdl.PREFERENCE_LOSS=kto', '--fdl.PERCORE_BATCH_SIZE=2']
  one = losses(tmp_path / 'one', *flags)
  assert one[0] == pytest.approx(0.5, rel=1e-6)
  assert one[-1] < one[0]
  mesh = ['--fdl.ICI_MESH_SHAPE=[1,2,1]', '--fdl.PERCORE_BATCH_SIZE=1']
  assert losses(tmp_path / 'two', *flags, *mesh, devices=2) == pytest.approx(one, rel=1e-5)
  stages = [
    '--fdl.MESH_AXES=["stage","replica","data","mdl"]', '--fdl.ICI_MESH_SHAPE=[2,1,1,1]',
    '--fdl.DCN_MESH_SHAPE=[1,1,1,1]', '--fdl.PERCORE_BATCH_SIZE=1', '--fdl.NUM_MICROBATCHES=2',
    '--fdl.USE_REPEATED_LAYER=True',
  ]  # fmt: skip
  assert losses(tmp_path / 'stages', *flags, *stages, devices=2) == pytest.approx(one, rel=1e-5)
  losses(tmp_path / 'parts', *flags, '--fdl.MAX_STEPS=2')
  assert losses(tmp_path / 'parts', *flags) == one
  last = [r for r in runs.records(tmp_path / 'one') if 'loss' in r][-1]
  assert last['rewards/chosen'] > last['rewards/rejected']


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_reward_model_is_that_of_transformers_and_the_loss_that_of_trl(tmp_path):
  torch, trl = pytest.importorskip('torch'), pytest.importorskip('trl')
  from transformers import AutoModelForSequenceClassification

  flags = [*names(tmp_path), '--fdl.CENTER_REWARDS=0.1', '--fdl.ICI_MESH_SHAPE=[1,1,1]']
  one = losses(tmp_path / 'one', *flags, config='SmallReward')
  assert one[-1] < one[0]
  mesh = ['--fdl.ICI_MESH_SHAPE=[1,2,2]', '--fdl.PERCORE_BATCH_SIZE=1', '--fdl.NUM_MICROBATCHES=2']
  four = losses(tmp_path / 'four', *flags, *mesh, config='SmallReward', devices=4)
  assert four == pytest.approx(one, rel=1e-5)
  assert losses(
    tmp_path / 'more', *flags, f'--fdl.CHECKPOINT_RESTORE_PATH={tmp_path}/one', config='SmallReward'
  )[0] < one[0]  # its head is restored, too  # fmt: skip
  export = [f'--checkpoint={tmp_path}/one', '--to=hf', f'--path={tmp_path}/hf']
  export_weights.main(export)
  theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / 'hf')
  assert theirs.config.num_labels == 1
  e = SmallReward(CHECKPOINT_RESTORE_PATH=f'{tmp_path}/base', CENTER_REWARDS=0.1)
  source = RewardRows([f'{tmp_path}/pairs.jsonl'], packaged.VOCAB, 64, 8192, start_id=e.START_ID)
  pairs = [source.example(i).ids[:-1] for i in range(source.num_examples)]
  ids = np.zeros((len(pairs), max(map(len, pairs))), np.int64)
  for row, tokens in zip(ids, pairs, strict=True):
    row[: len(tokens)] = tokens
  mask = np.arange(ids.shape[1]) < np.array([len(p) for p in pairs])[:, None]
  order = [*range(0, len(pairs), 2), *range(1, len(pairs), 2)]  # the chosen ones, then the others
  theirs.config.pad_token_id = 0
  _, model, params = loaded(tmp_path / 'one')
  outputs = Outputs(
    model.bind({'params': params}, mutable=list(SOWN)),
    batch := {k: jnp.asarray(v) for k, v in source.read(np.arange(len(source))).items()},
  )
  loss = BradleyTerry(center=0.1)
  ours = float(loss(outputs, batch) / loss.weight(batch))
  with torch.no_grad():
    inputs = dict(input_ids=torch.tensor(ids[order]), attention_mask=torch.tensor(mask[order] * 1))
    trainer = trl.RewardTrainer.__new__(trl.RewardTrainer)
    trainer.model = theirs.eval().double()  # a mean of rewards of both signs is almost 0
    trainer.args = SimpleNamespace(center_rewards_coefficient=0.1)
    trainer.accelerator = SimpleNamespace(
      gather=lambda x: x, gather_for_metrics=lambda x: x, num_processes=1
    )
    trainer._metrics = {'eval': defaultdict(list)}
    trainer._total_train_tokens = 0
    expected = trl.RewardTrainer.compute_loss(trainer, theirs, inputs)
  assert ours == pytest.approx(float(expected), rel=1e-5)
  for name, value in loss.metrics(outputs, batch).items():
    logged = trainer._metrics['eval'][name][-1]
    assert float(value.value) == pytest.approx(logged, rel=1e-5, abs=1e-7), name
  with pytest.raises(UserError, match='computes rewards, not text'):
    generate.main([str(tmp_path / 'one'), 'The capital of France is'])


def test_wrong_values_are_refused():
  for values, message in (
    (dict(PREFERENCE_BETA=0.0), 'nothing would be learned'),
    (dict(PREFERENCES_FLIPPED=0.5), 'must be below 0.5'),
    (dict(PREFERENCE_LOSS='dpo'), "PREFERENCE_LOSS must be one of 'sigmoid'"),
  ):
    with pytest.raises(UserError, match=message):
      HuggingFacePreferences(MODEL='LLaMA3_8B', **values).validate()
  for cls, values, message in (
    (HuggingFaceReward, dict(USE_LORA=True), 'not train the new head of a reward model'),
    (
      HuggingFacePreferences,
      dict(PRECOMPUTE_REFERENCE=True, CHECKPOINT_IGNORE_RULES=['a'], CHECKPOINT_RESTORE_PATH='w'),
      'PRECOMPUTE_REFERENCE needs all variables|CHECKPOINT_IGNORE_RULES leaves',
    ),
  ):
    with pytest.raises(UserError, match=message):
      cls(MODEL='LLaMA3_8B', **values).validate()
  made = HuggingFacePreferences(MODEL='LLaMA3_8B', PREFERENCES_FLIPPED=0.1)
  assert any('has no effect without' in w for w in made.warnings)
  with pytest.raises(UserError, match='CHECKPOINT_RESTORE_PATH=FOLDER is missing'):
    made.train_input()


@pytest.mark.exhaustive
def test_values_of_a_reference_are_computed_once(tmp_path):
  """They are read after a restart, and computed again for other rows or weights, or if damaged."""
  flags = [*names(tmp_path), '--fdl.PRECOMPUTE_REFERENCE=True', '--fdl.EVAL_FRACTION=0.3']
  lora = [*flags, '--fdl.USE_LORA=True', '--fdl.LORA_RANK=2', '--fdl.EVAL_INTERVAL_STEPS=2']
  said = "Computing the frozen model's outputs for"
  run = functools.partial(runs.run, tmp_path / 'run', config=CONFIG)
  first = run(*lora, '--fdl.MAX_STEPS=2')
  assert (first.stdout + first.stderr).count(said) == 2
  evaluated = [r for r in runs.records(tmp_path / 'run') if 'held_out/dpo' in str(r)]
  assert all(math.isfinite(v) for r in evaluated for v in r.values() if isinstance(v, float))
  again = run(*lora)
  assert said not in again.stdout + again.stderr
  stored = losses(tmp_path / 'plain', *lora, '--fdl.PRECOMPUTE_REFERENCE=False')
  assert list(runs.losses(tmp_path / 'run').values()) == pytest.approx(stored, rel=1e-6)
  file = tmp_path / 'run/reference/training/reference_log_probs.npy'
  for count, damaged in enumerate((file.read_bytes()[:-4] + b'\0\0\0\0', b'x'), 3):
    file.write_bytes(damaged)
    third = run(*lora, f'--fdl.MAX_STEPS={2 * count}')
    assert (third.stdout + third.stderr).count(said) == 1
  longer = run(*lora, '--fdl.MAX_STEPS=10', '--fdl.MAX_SEQ_LEN=40', '--accept_changes')
  assert (longer.stdout + longer.stderr).count(said) == 2
  few = ['--fdl.EVAL_BATCH_SIZE=2', '--fdl.NUM_MICROBATCHES=4', '--fdl.MAX_STEPS=1']
  runs.run(tmp_path / 'few', *flags, *few, config=CONFIG)


@pytest.mark.exhaustive
def test_two_processes_compute_a_reference_once_as_one_does(tmp_path):
  flags = [*names(tmp_path), '--fdl.PACKED_INPUT=True']
  one = losses(tmp_path / 'one', *MESH, *flags, devices=4)
  for steps in (2, 4):  # the second start reads what the first has kept
    more = [*flags, '--fdl.PRECOMPUTE_REFERENCE=True', f'--fdl.MAX_STEPS={steps}']
    printed = on_processes(tmp_path / 'two', 2, *more, config=CONFIG)
    assert ("Computing the frozen model's outputs for" in printed[0]) == (steps == 2)
  assert list(runs.losses(tmp_path / 'two').values()) == pytest.approx(one, rel=1e-5)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_stored_values_are_those_of_the_weights_that_a_run_began_with(tmp_path):
  """The run that they come from may go on, or be moved away."""
  flags = [*names(tmp_path), '--fdl.PRECOMPUTE_REFERENCE=True']
  whole = losses(tmp_path / 'whole', *flags)
  losses(tmp_path / 'parts', *flags, '--fdl.MAX_STEPS=2')
  answers = f'--fdl.TRAIN_FILES={tmp_path}/answers.jsonl'
  base = 'tests.runs.test_preferences.SmallSft'
  runs.run(tmp_path / 'base', answers, '--fdl.MAX_STEPS=4', config=base)
  (tmp_path / 'parts/reference/training/reference_log_probs.npy').unlink()
  assert losses(tmp_path / 'parts', *flags) == whole
  (tmp_path / 'base').rename(tmp_path / 'moved')
  assert losses(tmp_path / 'parts', *flags, '--fdl.MAX_STEPS=5')[:4] == whole


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize('flags', [
  ['HuggingFaceReward'], ['HuggingFacePreferences', 'PRECOMPUTE_REFERENCE=True'],
  ['HuggingFacePreferences', 'PREFERENCE_LOSS=kto'],
])  # fmt: skip
def test_a_step_compiles_without_data_and_weights(flags, capsys):
  compile_tool.main([*flags, 'MODEL=SmolLM135M', 'NUM_LAYERS=2', '--target=here'])
  assert 'The step assumes batches with' in capsys.readouterr().out
