"""Runs whose number of steps follows from their data."""

import json
import math

import pytest

from paxlite.core.errors import UserError
from paxlite.data import packaged
from paxlite.experiments.base import full_name
from paxlite.experiments.finetuning import SFT
from paxlite.experiments.identity import run_values
from paxlite.experiments.registry import find
from paxlite.programs.first_start import in_steps, with_warmup
from paxlite.programs.launch import build_experiment
from paxlite.programs.run import Run
from paxlite.programs.training import train
from tests.support import runs
from tests.support.experiments import TinyDocuments, TinyMixture, TinySft

TINY_SFT = 'tests.support.experiments.TinySft'


class Scheduled(SFT, TinySft):
  """TinySft with the schedule of fine-tuning; data are all that is asked of it."""

  MAX_SEQ_LEN = 32
  ICI_MESH_SHAPE = [1, 1, 1]
  DCN_MESH_SHAPE = [1, 1, 1]
  MAX_STEPS = 1000
  PERCORE_BATCH_SIZE = 2
  LR_SCHEDULE = 'linear_rampup_cosine_decay'
  SUMMARY_INTERVAL_STEPS = 1

  def train_input(self):
    return super(SFT, self).train_input()


def write(path, count: int, name: str = 'inputs') -> str:
  """Writes examples of which two do not fit into a row."""
  record = lambda i: {name: f'{i} is', 'targets': ' word' * 15, 'text': 'a'}
  path.write_text(''.join(json.dumps(record(i)) + '\n' for i in range(count)))
  return str(path)


@pytest.mark.slow
def test_epochs_become_steps_and_the_schedule_follows(tmp_path, capsys):
  path, folder = write(tmp_path / 'a.jsonl', 5), tmp_path / 'run'
  e = Scheduled(TRAIN_FILES=[path], NUM_EPOCHS=2)
  train(Run(e, folder))
  out = capsys.readouterr().out
  assert 'NUM_EPOCHS=2: training ends with step 5\n' in out
  assert [r['step'] for r in runs.records(folder, 'metrics.jsonl')] == [1, 2, 3, 4, 5]
  values = run_values(folder)['values']
  assert [values[k] for k in ('MAX_STEPS', 'LR_COS_WARMUP', 'LR_COS_DECAY_END')] == [5, 2, 5]
  # The run keeps its number, without reading data again; with other epochs it is counted again.
  (tmp_path / 'a.jsonl').unlink()
  kept = in_steps(Run(e, folder))
  assert (kept.experiment.MAX_STEPS, kept.data) == (5, None)
  assert kept.experiment.LR_COS_DECAY_END == 5
  write(tmp_path / 'a.jsonl', 5)
  assert in_steps(Run(e.replaced(NUM_EPOCHS=3), folder)).experiment.MAX_STEPS == 8
  assert in_steps(Run(e.replaced(NUM_EPOCHS=None), folder)).experiment.MAX_STEPS == 1000


@pytest.mark.parametrize(
  ('epochs', 'rows', 'steps'), [(1, 5, 3), (0.1, 30, 2), (0.01, 5, 1), (3, 4, 6), (2.5, 4, 5)]
)
def test_steps_are_rounded_up(tmp_path, epochs, rows, steps):
  path = write(tmp_path / 'a.jsonl', rows)
  run = in_steps(Run(Scheduled(TRAIN_FILES=[path], NUM_EPOCHS=epochs), tmp_path / 'run'))
  assert run.experiment.MAX_STEPS == steps == max(1, math.ceil(round(epochs * rows / 2, 6)))
  assert len(run.data.source) == rows
  assert run.trainer().data.input is run.data
  assert not (tmp_path / 'run').exists()


def test_a_run_of_one_step_has_a_valid_schedule(tmp_path):
  path = write(tmp_path / 'a.jsonl', 1)
  e = Scheduled(TRAIN_FILES=[path], NUM_EPOCHS=1)
  in_steps(Run(e, tmp_path / 'run')).experiment.validate()


@pytest.mark.parametrize('cls', [TinyDocuments, TinyMixture])
def test_data_of_unknown_length_are_refused(tmp_path, cls):
  path = write(tmp_path / 'a.jsonl', 5)
  names = (
    dict(TRAIN_SOURCES=[path]) if cls is TinyDocuments else dict(SOURCES=[path], WEIGHTS=[1.0])
  )
  e = cls(VOCAB_PATH=packaged.VOCAB, NUM_EPOCHS=1, **names)
  with pytest.raises(UserError, match=r'is a stream or a mixture, so its length is unknown'):
    in_steps(Run(e, tmp_path / 'run'))


def test_a_run_that_continues_with_more_steps_keeps_its_warmup(tmp_path):
  step = tmp_path / 'checkpoints' / 'checkpoint_00000002'
  step.mkdir(parents=True)
  cls, name = find('LLaMA7BSFT'), 'LR_COS_WARMUP'
  for before in (50, 500):  # 500: of an earlier version
    found = {'experiment': full_name(cls), 'values': {name: before}}
    (tmp_path / 'experiment.json').write_text(json.dumps(found))
    of = lambda **values: with_warmup(Run(cls(MAX_STEPS=200, **values), tmp_path)).experiment
    assert of().values()[name] == before
    assert of(LR_COS_WARMUP=7).LR_COS_WARMUP == 7
  step.rmdir()
  assert of().LR_COS_WARMUP == 100


def test_steps_and_epochs_together_are_refused():
  both = {'MAX_STEPS': '5', 'NUM_EPOCHS': '2'}
  with pytest.raises(UserError, match='MAX_STEPS=5 and NUM_EPOCHS=2 both set the end of training:'):
    build_experiment(TINY_SFT, [], both)
  with pytest.raises(UserError, match='NUM_EPOCHS=0 must be above 0'):
    build_experiment(TINY_SFT, [], {'NUM_EPOCHS': '0'})
  assert build_experiment(TINY_SFT, [], {**both, 'NUM_EPOCHS': 'None'}).MAX_STEPS == 5


def test_without_epochs_the_warmup_is_that_of_pax_or_half_of_a_short_run():
  small = find('HuggingFaceSFT').of_values({'MODEL': 'SmolLM135M'})
  lora = find('LLaMA7BLoRA')  # whose rate is constant
  for cls, warmups in ((find('LLaMA7BSFT'), (500, 15)), (lora, (500, 500)), (small, (50, 15))):
    for changes, warmup in zip(({}, {'MAX_STEPS': 30}), warmups, strict=True):
      e = cls(**changes)
      assert (warmup, 1000) == (e.LR_COS_WARMUP, e.LR_COS_DECAY_END)
  assert find('LLaMA7BSFT')(MAX_STEPS=100, LR_COS_WARMUP=70).LR_COS_WARMUP == 70
  assert small(NUM_EPOCHS=1, MAX_STEPS=30).LR_COS_WARMUP == 15
  assert find('LLaMA7BSFT')(NUM_EPOCHS=1, LR_COS_DECAY_END=70).LR_COS_DECAY_END == 70
