"""Distillation: on meshes, with microbatches and chunks, after a stop, and with a wrong teacher."""

import functools
import sys

import pytest

from paxlite.config.experiment_file import WeightsFacts
from paxlite.core.errors import UserError
from paxlite.data import packaged
from paxlite.experiments.datasets import TextFiles
from paxlite.experiments.finetuning import DistilledSFT, HuggingFaceDistillation
from paxlite.finetuning.distillation import experiment as distillation
from paxlite.finetuning.distillation.distillation_losses import DistillationLoss
from paxlite.generation.inference import load_checkpoint
from paxlite.losses.outputs import Outputs
from paxlite.programs.weights_model import knowing_weights
from tests.runs.test_preferences import Small, names
from tests.support import runs


class Teacher(Small, TextFiles):
  """Another depth, width and stack than the student's."""

  VOCAB_PATH = packaged.VOCAB
  NUM_LAYERS, MODEL_DIMS, NUM_HEADS, DIMS_PER_HEAD = 3, 64, 4, 16
  USE_REPEATED_LAYER = False


class Student(distillation.Distillation, Small, TextFiles):
  VOCAB_PATH = packaged.VOCAB
  OPTIMIZER, LEARNING_RATE, MAX_STEPS, LR_SCHEDULE = 'sgd', 0.3, 4, 'constant'


class StudentOfAnswers(Small, DistilledSFT):
  VOCAB_PATH = packaged.VOCAB
  OPTIMIZER, LEARNING_RATE, MAX_STEPS, LR_SCHEDULE = 'sgd', 0.3, 4, 'constant'


def text(folder) -> str:
  lines = [f'{i} and {i + 1} are {2 * i + 1}.' for i in range(999)]
  (folder / 'text.txt').write_text('\n'.join(lines))
  return f'--fdl.TRAIN_FILES={folder}/text.txt'


def run(folder, name, *flags, **kwargs):
  return runs.run(folder, *flags, config=f'tests.runs.test_distillation.{name}', **kwargs)


def losses(folder, *flags, name='Student', **kwargs) -> list[float]:
  run(folder, name, *flags, **kwargs)
  return list(runs.losses(folder).values())


@pytest.mark.exhaustive
def test_a_student_learns_on_every_mesh_and_after_a_stop(tmp_path):
  data = text(tmp_path)
  run(tmp_path / 'teacher', 'Teacher', data)
  flags = [data, f'--fdl.TEACHER={tmp_path}/teacher']
  one = losses(tmp_path / 'one', *flags)
  assert one[-1] < one[0]
  mesh = ['--fdl.ICI_MESH_SHAPE=[1,2,2]', '--fdl.PERCORE_BATCH_SIZE=1', '--fdl.NUM_MICROBATCHES=2']
  for name, more in (('four', []), ('chunks', ['--fdl.NUM_LOSS_CHUNKS=4'])):
    assert losses(tmp_path / name, *flags, *mesh, *more, devices=4) == pytest.approx(one, rel=1e-5)
  losses(tmp_path / 'parts', *flags, '--fdl.MAX_STEPS=2')
  assert losses(tmp_path / 'parts', *flags) == one
  same = [
    data, f'--fdl.TEACHER={tmp_path}/one', f'--fdl.CHECKPOINT_RESTORE_PATH={tmp_path}/one',
    '--fdl.TEACHER_WEIGHT=1', '--fdl.WEIGHT_DECAY=0',
  ]  # fmt: skip
  assert losses(tmp_path / 'same', *same) == pytest.approx([0] * 4, abs=1e-5)
  (tmp_path / 'teacher').rename(tmp_path / 'moved')
  load_checkpoint(str(tmp_path / 'one'))  # what generates text needs no teacher


@pytest.mark.exhaustive
@pytest.mark.slow
def test_likely_tokens_of_a_teacher_are_stored_once(tmp_path):
  """All of the tokens give the losses of a teacher that is computed in each step."""
  run(tmp_path / 'teacher', 'Teacher', text(tmp_path))
  _, start = names(tmp_path)
  flags = [f'--fdl.TRAIN_FILES={tmp_path}/answers.jsonl', start]
  flags += [f'--fdl.TEACHER={tmp_path}/teacher', '--fdl.TEACHER_TEMPERATURE=2']
  of = functools.partial(losses, name='StudentOfAnswers')
  whole = of(tmp_path / 'whole', *flags)
  assert whole[-1] < whole[0]
  stored = of(tmp_path / 'all', *flags, '--fdl.TEACHER_TOP_K=8192')
  assert stored == pytest.approx(whole, rel=1e-5)
  few = [*flags, '--fdl.TEACHER_TOP_K=16']
  one = of(tmp_path / 'few', *few)
  assert one[0] < whole[0]  # of fewer events
  assert not list((tmp_path / 'few').rglob('*params.reference*'))
  mesh = ['--fdl.ICI_MESH_SHAPE=[1,2,2]', '--fdl.PERCORE_BATCH_SIZE=1', '--fdl.NUM_MICROBATCHES=2']
  chunks = '--fdl.NUM_LOSS_CHUNKS=4'
  assert of(tmp_path / 'four', *few, *mesh, chunks, devices=4) == pytest.approx(one, rel=1e-5)
  of(tmp_path / 'parts', *few, '--fdl.MAX_STEPS=2')
  assert of(tmp_path / 'parts', *few) == one
  documents = [text(tmp_path), *flags[2:], '--fdl.TEACHER_TOP_K=4']
  result = run(tmp_path / 'no', 'Student', *documents, code=2)
  assert 'cannot store outputs of the frozen model' in result.stderr


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_teacher_of_other_tokens_is_refused(tmp_path):
  data = text(tmp_path)
  run(tmp_path / 'teacher', 'Teacher', data)
  file = tmp_path / 'other.model'
  command = ['train-tokenizer', f'{tmp_path}/text.txt', '--vocab_size=300', f'--output={file}']
  made = runs.ended([sys.executable, '-m', 'paxlite', *command], runs.environment(1), 60)
  assert made.returncode == 0, made.stderr
  flags = [data, f'--fdl.TEACHER={tmp_path}/teacher', f'--fdl.VOCAB_PATH={file}']
  result = run(tmp_path / 'no', 'Student', *flags, code=2)
  assert 'has another tokenizer than the run' in result.stderr
  assert not (tmp_path / 'no' / 'checkpoints').exists()
  more = losses(tmp_path / 'more', *flags[:2], '--fdl.VOCAB_SIZE=8320')  # filled up with no tokens
  assert more[-1] < more[0]


def test_wrong_values_are_refused(tmp_path):
  made = lambda **values: HuggingFaceDistillation(MODEL='LLaMA3_8B', **values)
  for values, message in (
    (dict(TEACHER_WEIGHT=0.0), 'TEACHER_WEIGHT=0: nothing would be learned'),
    (dict(TEACHER_TEMPERATURE=0.0), 'TEACHER_TEMPERATURE=0: nothing would be learned'),
    (dict(TEACHER_TOP_K=10**6), 'TEACHER_TOP_K=1000000 must be at most VOCAB_SIZE'),
    (dict(TEACHER='a', REFERENCE_RESTORE_PATH='b'), "both name the teacher's weights:"),
  ):
    with pytest.raises(UserError, match=message):
      made(**values).validate()
  for values, message in (
    ({}, 'TEACHER=FOLDER is missing'),
    (dict(TEACHER='a', NUM_LOSS_CHUNKS=3), 'NUM_LOSS_CHUNKS=3 must divide MAX_SEQ_LEN'),
  ):
    with pytest.raises(UserError, match=message):
      made(**values).train_input()
  with pytest.raises(UserError, match='a student needs a teacher'):
    DistillationLoss(num_chunks=1)(Outputs(None, {}), {})
  few = made(TEACHER='a', TEACHER_TOP_K=300).knowing(WeightsFacts('a', values={'VOCAB_SIZE': 256}))
  with pytest.raises(UserError, match='must be at most VOCAB_SIZE=256 of the teacher'):
    few.validate()
  with pytest.raises(UserError, match='is not a folder'):
    knowing_weights(made(TEACHER=str(tmp_path / 'nothing'))).reference()
