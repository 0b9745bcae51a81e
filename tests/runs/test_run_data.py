"""The batches that are read again from the folder of a run are those that its train step got."""

import json

import numpy as np
import pytest

from paxlite.core.errors import UserError
from paxlite.data import packaged
from paxlite.data.origins import ORIGIN
from paxlite.experiments.datasets import DocumentFiles, FlatTokens, Mixture, SftFiles, TextFiles
from paxlite.experiments.demo import TinyGPT
from paxlite.programs.run import Run
from paxlite.programs.run_data import RunData
from paxlite.programs.training import train
from paxlite.tools import data as tool
from paxlite.training.callbacks import Callback, Request
from paxlite.training.trainer import Trainer
from tests.runs.test_data_changes import TEXT, flat

SENTENCE = 'once upon a time there lived the king of all rivers, who had no crown'
WORDS = SENTENCE.split(' ')
VALUES = dict(
  VOCAB_SIZE=8192, MAX_SEQ_LEN=32, NUM_LAYERS=1, MODEL_DIMS=16, PERCORE_BATCH_SIZE=4,
  EVAL_INTERVAL_STEPS=1000, MAX_EVAL_BATCHES=1, SUMMARY_INTERVAL_STEPS=1,
  CHECKPOINT_EVERY_N_STEPS=3, CHECKPOINT_MAX_TO_KEEP=1,
)  # fmt: skip


class Streamed(DocumentFiles, TinyGPT):
  pass


class Flat(FlatTokens, TinyGPT):
  EVAL_SPLIT = None


class Texts(TextFiles, TinyGPT):
  pass


class Tuned(SftFiles, TinyGPT):
  pass


class Mixed(Mixture, TinyGPT):
  EVAL_SPLIT = None


def written(path, records) -> str:
  path.write_text(''.join(json.dumps(r) + '\n' for r in records))
  return str(path)


def documents(folder, count=40) -> str:
  texts = [' '.join(WORDS[(n + i * i) % 15] for i in range(3 + n * 7 % 40)) for n in range(count)]
  return written(folder / 'docs.jsonl', [{'text': f'{n} {text}'} for n, text in enumerate(texts)])


def examples(folder) -> str:
  records = [{'prompt': f'{i} times {i}?', 'completion': f' {i * i} it is'} for i in range(30)]
  return written(folder / 'examples.jsonl', records)


def experiment(folder, kind: str, **values):
  values = VALUES | {'PACKED_INPUT': 'packed' in kind} | values
  name = {'VOCAB_PATH': packaged.VOCAB}
  match kind.split()[0]:
    case 'documents':
      more = dict(TRAIN_SOURCES=[documents(folder)], HELD_OUT_EVERY=7)
      return Streamed(**values, **name, **more)
    case 'flat':
      if not (folder / 'flat').exists():
        flat(folder / 'flat')
      return Flat(**values, DATASET_PATH=str(folder / 'flat'))
    case 'text':
      (folder / 'a.txt').write_text(TEXT[:6000])
      return Texts(**values, **name, TRAIN_FILES=[str(folder / 'a.txt')])
    case 'sft':
      return Tuned(**values, **name, TRAIN_FILES=[examples(folder)])
    case 'mixture':
      sources = [documents(folder), f'sft:{examples(folder)}']
      return Mixed(**values, **name, SOURCES=sources, WEIGHTS=[2.0, 1.0], HELD_OUT_EVERY=7)
  raise AssertionError(kind)


@pytest.fixture
def got(monkeypatch):
  """The batches that train steps got, by step; a step that is trained again replaces the first."""
  found: dict[int, dict[str, np.ndarray]] = {}
  draw = Trainer._draw

  def noted(self, state, step, batches):
    batch = draw(self, state, step, batches)
    found[step + 1] = {k: np.asarray(v) for k, v in batch.items()}
    return batch

  monkeypatch.setattr(Trainer, '_draw', noted)
  return found


def check(folder, got) -> RunData:
  """Compares all batches of a run, read one after the other and one by one."""
  run = RunData(str(folder))
  steps = max(got)
  assert run.steps_done == steps
  one_by_one = {step: run.batch(step) for step in (steps, 1, steps // 2)}
  for step, batch in [*run.batches(1, steps), *one_by_one.items()]:
    assert batch.keys() - {ORIGIN} == got[step].keys()
    for name, array in got[step].items():
      np.testing.assert_array_equal(batch[name], array, err_msg=f'{name} of step {step}')
  return run


@pytest.mark.cases(fast=0, slow=6)
@pytest.mark.slow
@pytest.mark.parametrize(
  'kind',
  [
    'documents stream',
    'documents packed',
    'flat stream',
    'text packed',
    'sft packed',
    'mixture packed',
  ],
)
def test_a_run_that_was_resumed_over_epochs(tmp_path, kind, got):
  folder = tmp_path / 'run'
  train(Run(experiment(tmp_path, kind, MAX_STEPS=4), folder))
  train(Run(experiment(tmp_path, kind, MAX_STEPS=41), folder))
  found = check(folder, got)
  assert found.data_of(1) is found.data_of(41)
  again = tmp_path / 'again'
  train(Run(experiment(tmp_path, kind, MAX_STEPS=41), again))
  tool.main([str(folder), str(again)])


class Spike(Callback):
  """Rolls a run back once, after step 8."""

  def __init__(self):
    self.done = False

  def after_step(self, state, step, metrics, loop):
    if step == 8 and not self.done:
      self.done = True
      return Request.ROLL_BACK
    return None


class RolledBack(Streamed):
  def callbacks(self):
    return [Spike()]


class TunedBack(Tuned):
  def callbacks(self):
    return [Spike()]


@pytest.mark.slow
@pytest.mark.parametrize(('cls', 'kind'), [(RolledBack, 'documents packed'), (TunedBack, 'sft')])
def test_a_run_that_rolled_back_and_was_resumed(tmp_path, got, cls, kind):
  made = lambda steps: cls(**vars(experiment(tmp_path, kind, MAX_STEPS=steps)))
  folder = tmp_path / 'run'
  train(Run(made(10), folder))
  found = check(folder, got)
  assert [found.batch_number(s) for s in (6, 7, 10)] == [5, 8, 11]
  train(Run(made(13), folder))
  check(folder, got)


@pytest.mark.slow
def test_a_run_whose_seed_and_data_changed(tmp_path, got):
  folder, e = tmp_path / 'run', experiment(tmp_path, 'sft packed', MAX_STEPS=5)
  train(Run(e, folder))
  train(Run(e.replaced(MAX_STEPS=8, SEED=7), folder, accept_changes=True))
  check(folder, got)
  changed = written(tmp_path / 'more.jsonl', [{'prompt': 'a', 'completion': ' b c d'}] * 9)
  more = e.replaced(MAX_STEPS=11, SEED=7, TRAIN_FILES=[*e.TRAIN_FILES, changed])
  train(Run(more, folder, accept_changes=True))
  with pytest.raises(UserError, match='was trained on other data from step 6 on than at its end'):
    tool.main([str(folder), '--counts'])
  (tmp_path / 'more.jsonl').write_text('{"prompt": "a", "completion": " b"}\n')
  assert RunData(str(folder)).batch(8)['ids'].shape == (4, 32)
  with pytest.raises(UserError, match=r'more.jsonl is not what .*run was trained on: its contents'):
    RunData(str(folder)).batch(9)


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['documents stream', 'text packed'])
def test_a_run_from_before_there_were_records(tmp_path, kind, got):
  folder = tmp_path / 'run'
  train(Run(experiment(tmp_path, kind, MAX_STEPS=7), folder))
  (folder / 'data.jsonl').unlink()
  check(folder, got)
  train(Run(experiment(tmp_path, kind, MAX_STEPS=12), folder))
  check(folder, got)
