"""The batches that are read again from the folder of a run are those that its train step got."""

import json
import re
import shutil

import jax
import numpy as np
import pytest

from paxlite.core.errors import UserError
from paxlite.data import packaged
from paxlite.experiments.datasets import DocumentFiles, FlatTokens, Mixture, SftFiles, TextFiles
from paxlite.experiments.demo import TinyGPT
from paxlite.programs.run import Run
from paxlite.programs.training import train
from paxlite.report.commands import report
from paxlite.run_data import data as tool
from paxlite.run_data.origins import ORIGIN, pieces, place_of
from paxlite.run_data.run_data import RunData
from paxlite.tokenization.commands import train_tokenizer
from paxlite.training.callbacks import Callback, LoopRequest
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


@pytest.mark.exhaustive
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
      return LoopRequest.ROLL_BACK
    return None


class RolledBack(Streamed):
  def callbacks(self):
    return [Spike()]


class TunedBack(Tuned):
  def callbacks(self):
    return [Spike()]


@pytest.mark.cases(fast=0, slow=1)
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
  with pytest.raises(UserError, match='changed its data after step 6,'):
    tool.main([str(folder), '--counts'])
  (tmp_path / 'more.jsonl').write_text('{"prompt": "a", "completion": " b"}\n')
  assert RunData(str(folder)).batch(8)['ids'].shape == (4, 32)
  with pytest.raises(
    UserError, match=r'more.jsonl is not the training data of .*run: its contents'
  ):
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


@pytest.mark.slow
def test_steps_of_another_run_whose_state_was_continued_are_not_told(tmp_path):
  e = experiment(tmp_path, 'sft', MAX_STEPS=3)
  train(Run(e, tmp_path / 'parent'))
  state = dict(CHECKPOINT_RESTORE_PATH=str(tmp_path / 'parent'), CHECKPOINT_RESTORE_STATE=True)
  train(Run(e.replaced(MAX_STEPS=6, SEED=5, **state), tmp_path / 'run'))
  run = RunData(str(tmp_path / 'run'))
  for step in 1, 3:
    with pytest.raises(
      UserError, match=r'of another run .* from step 3, and these steps belong to'
    ):
      run.batch(step)
  assert run.batch(4)['ids'].shape == (4, 32)


@pytest.mark.slow
def test_without_its_records_a_run_does_not_guess_what_it_left_out(tmp_path, capsys):
  e, run, path = experiment(tmp_path, 'sft', MAX_STEPS=2), tmp_path / 'run', tmp_path / 'out.txt'
  train(Run(e, run))
  path.write_text(f'{tmp_path}/examples.jsonl:3\n')
  left = e.replaced(MAX_STEPS=4, LEAVE_OUT=str(path))
  train(Run(left, run))
  assert 'Row 0' in shown(capsys, run, '--step=1')
  (run / 'data.jsonl').unlink()
  why = r'the step \(up to 4\) where this began is unknown'
  for asked in ('--step=1', '--step=4', '--counts'):
    with pytest.raises(UserError, match=why):
      shown(capsys, run, asked)
  shown(capsys, run, f'--without={tmp_path}/examples.jsonl:4', f'--output={tmp_path}/more.txt')
  values = json.loads((run / 'experiment.json').read_text())
  values['values']['LEAVE_OUT'] = ''
  (run / 'experiment.json').write_text(json.dumps(values))
  with pytest.raises(UserError, match=why):  # by the metadata of the checkpoint
    shown(capsys, run, '--step=1')
  train(Run(left.replaced(MAX_STEPS=6), run))
  assert 'Row 0' in shown(capsys, run, '--step=5')
  with pytest.raises(UserError, match=why):
    shown(capsys, run, '--step=4')
  (run / 'data.jsonl').unlink()
  (run / 'data.jsonl').mkdir()
  with pytest.raises(UserError, match=r'run/data\.jsonl cannot be read: Is a directory'):
    shown(capsys, run, '--step=5')


def poisoned(folder):
  """Returns an experiment on documents, one of which is long and repeats one character."""
  path = folder / 'docs.jsonl'
  documents(folder, 60)
  lines = path.read_text().splitlines()
  lines[29] = json.dumps({'text': '\x07' * 300})
  path.write_text('\n'.join(lines) + '\n')
  values = VALUES | dict(MODEL_DIMS=32, LEARNING_RATE=0.02, LR_COS_WARMUP=2)
  return Streamed(
    **values, TRAIN_SOURCES=[str(path)], HELD_OUT_EVERY=0, VOCAB_PATH=packaged.VOCAB,
    PACKED_INPUT=False,
  )  # fmt: skip


def shown(capsys, *argv: str) -> str:
  capsys.readouterr()
  tool.main([str(word) for word in argv])
  return capsys.readouterr().out


@pytest.mark.slow
def test_a_poisoned_record_is_found_looked_at_left_out(tmp_path, got, capsys, monkeypatch):
  """The story of docs/data_of_a_run.md, and the batches of the run that continues."""
  e, folder, name = poisoned(tmp_path), tmp_path / 'run', f'{tmp_path}/docs.jsonl:30'
  train(Run(e.replaced(MAX_STEPS=15), folder))  # not yet an epoch
  before = dict(got)
  text = shown(capsys, folder, '--spike')
  assert re.search(r'^Spikes +step \d+: loss ', text)
  assert name in text
  found = json.loads(shown(capsys, folder, '--spike', '--json'))
  step = found['step']
  texts = [text for row in found['rows'] for text in row['texts']]
  assert any('\x07' * 20 in text['text'] for text in texts if text['place'] == name)
  for row, labels in zip(found['rows'], got[step]['labels'], strict=True):
    assert [i for text in row['texts'] for i in text['ids']] == labels.tolist()
  one = json.loads(shown(capsys, folder, f'--step={step}', '--row=2', '--json'))
  assert one['rows'] == [found['rows'][2]]
  assert one['loss'] == pytest.approx(RunData(str(folder)).losses[step])

  out = tmp_path / 'left_out.txt'
  said = shown(capsys, folder, f'--without={name}', f'--output={out}')
  assert f'LEAVE_OUT={out}' in said
  assert out.read_text() == f'{name}\n'
  row = next(row['row'] for row in found['rows'] if name in {t['place'] for t in row['texts']})
  other = tmp_path / 'other.txt'
  shown(capsys, folder, f'--without={step}:{row}', f'--output={other}')
  assert f'{name}\n' in other.read_text()
  with pytest.raises(UserError, match='exists, and names other records'):
    shown(capsys, folder, f'--without={tmp_path}/docs.jsonl:3', f'--output={out}')

  twin = tmp_path / 'twin'
  shutil.copytree(folder, twin)
  longer = e.replaced(MAX_STEPS=45)
  train(Run(longer.replaced(LEAVE_OUT=str(out)), folder))
  run = check(folder, got)
  for at, batch in run.batches(1, 45):
    places = {str(place_of(run.data_of(at), p.key)) for r in range(4) for p in pieces(batch, r)}
    assert at <= 15 or name not in places
    if at <= 15:
      np.testing.assert_array_equal(batch['labels'], before[at]['labels'])
  with pytest.raises(UserError, match='leaves these records out already'):
    shown(capsys, folder, f'--without={name}', f'--output={out}')
  train(Run(longer, twin))
  check(twin, got)
  with pytest.raises(UserError, match=r'LEAVE_OUT no longer names all .*accept_changes'):
    train(Run(longer.replaced(MAX_STEPS=46), folder))

  said = shown(capsys, folder, twin)
  assert 'but not equally often' in said
  assert name in said
  compared = json.loads(shown(capsys, folder, twin, '--json'))
  assert compared['equal'] >= 15
  assert compared['difference']['step'] == compared['equal'] + 1
  assert compared['unequal'][0] == name
  counted = json.loads(shown(capsys, twin, '--counts', '--json'))
  assert counted['never'] == 0
  assert len(counted['times']) == 60
  fewer = json.loads(shown(capsys, folder, '--counts', '--json'))
  assert fewer['times'][name] == 1.0 < counted['times'][name]
  assert 'Never     0 of 60' in shown(capsys, twin, '--counts')

  html = tmp_path / 'report.html'
  report.main([str(folder), f'--output={html}'])
  assert f'<details id="spike-0-{step}">' in html.read_text()
  assert name in html.read_text()
  out.write_text(f'{tmp_path}/docs.jsonl:31\n')
  with pytest.raises(UserError, match=r'LEAVE_OUT'):
    shown(capsys, folder, '--step=20')
  assert name in shown(capsys, folder, f'--step={step}')


@pytest.mark.exhaustive
@pytest.mark.slow
def test_records_of_any_name_are_planned_and_some_must_be_left(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  names = ['a.jsonl', 'b:1,c:2.jsonl', '#d.jsonl']
  for name in names:
    shutil.copy(documents(tmp_path, 12), tmp_path / name)
  e = Streamed(**VALUES, TRAIN_SOURCES=names, HELD_OUT_EVERY=0, VOCAB_PATH=packaged.VOCAB)
  run = tmp_path / 'run'
  train(Run(e.replaced(MAX_STEPS=1), run))
  asked = f'a.jsonl:3, {names[1]}:2,./a.jsonl:3,{tmp_path}/{names[1]}:4,#d.jsonl:12'
  said = shown(capsys, run, f'--without={asked}')
  out = tmp_path / 'left_out.txt'
  lines = ['a.jsonl:3', f'{names[1]}:2', f'{tmp_path}/{names[1]}:4', './#d.jsonl:12']
  assert out.read_text().splitlines() == lines
  assert said.count('jsonl') == 4
  train(Run(e.replaced(MAX_STEPS=25, LEAVE_OUT=str(out)), run))
  data = RunData(str(run))
  seen = {
    str(place_of(data.data_of(step), p.key))
    for step, batch in data.batches(2, 25)
    for r in range(4)
    for p in pieces(batch, r)
  }
  assert {f'{names[1]}:3', 'a.jsonl:2', '#d.jsonl:11'} <= seen
  assert seen.isdisjoint({'a.jsonl:3', f'{names[1]}:2', f'{names[1]}:4', '#d.jsonl:12'})
  with pytest.raises(UserError, match='leaves these records out already'):
    shown(capsys, run, f'--without={tmp_path}/a.jsonl:3')
  everything = ','.join(f'{name}:{i + 1}' for name in names for i in range(12))
  with pytest.raises(UserError, match=r'--without: too little is left to train on: .*LEAVE_OUT'):
    shown(capsys, run, f'--without={everything}')


@pytest.mark.slow
def test_the_file_that_a_run_reads_is_not_overwritten(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  e, run, name = experiment(tmp_path, 'sft', MAX_STEPS=2), tmp_path / 'run', 'examples.jsonl'
  train(Run(e, run))
  path = tmp_path / 'left_out.txt'
  assert f'LEAVE_OUT={path} ' in shown(capsys, run, f'--without={name}:3')
  train(Run(e.replaced(MAX_STEPS=4, LEAVE_OUT='left_out.txt'), run))
  (tmp_path / 'link.txt').symlink_to(path)
  for other, free in (('left_out.txt', 'left_out_2.txt'), (tmp_path / 'link.txt', 'link_2.txt')):
    with pytest.raises(UserError, match=f'is the LEAVE_OUT file of .* need: .*{free}'):
      shown(capsys, run, f'--without={name}:4', f'--output={other}')
  second = tmp_path / 'left_out_2.txt'
  assert f'LEAVE_OUT={second} ' in shown(capsys, run, f'--without={name}:4')
  assert second.read_text() == f'{name}:3\n{name}:4\n'
  assert 'Row 0' in shown(capsys, run, '--step=4')
  train(Run(e.replaced(MAX_STEPS=6, LEAVE_OUT='left_out_2.txt'), run))
  with pytest.raises(UserError, match='is the LEAVE_OUT file'):  # of the steps 3 and 4
    shown(capsys, run, f'--without={name}:5', '--output=left_out.txt')
  assert f'LEAVE_OUT={tmp_path}/left_out_3.txt ' in shown(capsys, run, f'--without={name}:5')
  for step in (2, 4, 6):
    assert 'Row 0' in shown(capsys, run, f'--step={step}')


@pytest.mark.exhaustive
@pytest.mark.slow
def test_runs_that_saw_the_same_and_other_things(tmp_path, capsys):
  e = experiment(tmp_path, 'sft', MAX_STEPS=8)  # 30 rows, of which 32 are seen
  for name, values in {
    'one': {},
    'same': {'LEARNING_RATE': 1e-5, 'NUM_HEADS': 2},
    'order': {'SEED': 5},
    'length': {'MAX_SEQ_LEN': 24},
  }.items():
    train(Run(e.replaced(**values), tmp_path / name))
  said = shown(capsys, tmp_path / 'one', tmp_path / 'same')
  assert re.match(r'Same .* in all 8 steps .*\(checksum [0-9a-f]{8}\)', said)
  said = shown(capsys, tmp_path / 'one', tmp_path / 'order')
  assert re.match(r'Different .* differ at step 1; it is the first', said)
  assert 'examples.jsonl:' in said
  assert 'both saw the same 30 ' in said
  assert 'another shape' in shown(capsys, tmp_path / 'one', tmp_path / 'length')


@pytest.fixture(scope='module')
def small_run(tmp_path_factory):
  folder = tmp_path_factory.mktemp('small')
  train(Run(experiment(folder, 'sft packed', MAX_STEPS=2), folder / 'run'))
  values = json.loads((folder / 'run' / 'experiment.json').read_text())
  (folder / 'other').mkdir()
  values['values']['VOCAB_PATH'] = str(folder / 'vocab.model')
  (folder / 'text.txt').write_text(TEXT[:40_000])
  train_tokenizer.main([f'{folder}/text.txt', '--vocab_size=400', f'--output={folder}/vocab.model'])
  (folder / 'other' / 'experiment.json').write_text(json.dumps(values))
  (folder / 'other' / 'metrics.jsonl').write_text('{"step": 1, "loss": 1.0}\n')
  return folder


WRONG = [
  ('RUN --step=3', r'--step=3: .*/run trained steps 1 to 2'),
  ('RUN --step=0', r'--step=0: .*/run trained steps 1 to 2'),
  ('RUN --step=-1', r'--step=-1: .*/run trained steps'),
  ('RUN --step=x', r'--step=x must be a whole number'),
  ('RUN --step=1 --row=4', r'--row=4: the batch has rows 0 to 3'),
  ('RUN --step=1 --row=-1', r'--row=-1: the batch has rows'),
  ('RUN --row=1', '--row is for --step and --spike: leave'),
  ('RUN --json', '--json is for --step, --spike, --counts or two runs'),
  ('RUN --step=1 --spike', '--step and --spike: leave one of them out'),
  ('RUN --step=1 MAX_STEPS=3', "a run's values are in its folder"),
  ('RUN --spike', r'no loss of the \d recorded steps'),
  ('FOLDER --step=1', r'is not the folder of a run: it holds no experiment.json'),
  ('FOLDER/nothing --counts', r'is not the folder of a run'),
  ('--step=1', r'--step is for one run, and 0 names are given'),
  ('RUN RUN --step=1', r'--step is for one run, and 2 names are given'),
  ('RUN RUN --row=1', r'--row is for --step and --spike'),
  ('RUN OTHER', r'have different tokenizers, .*text8k.model and .*vocab.model, so their ids'),
  ('RUN RUN RUN', r'two runs are compared, and 3 names are given'),
  ('RUN --without=', 'names no record'), ('RUN --without=a', 'a must be FILE:RECORD or STEP:ROW'),
  ('RUN --without=1:0,a', 'a must be FILE:RECORD or STEP:ROW'),
  ('RUN --without=a,b.jsonl:3,1:0', 'a,b.jsonl:3 is not a record of'),
  ('RUN --without=9:1', '--step=9'), ('RUN --without=1:9', '--row=9'),
  ('RUN --without=FOLDER/examples.jsonl:31', 'examples.jsonl:31 is not a record of'),
]  # fmt: skip


@pytest.mark.cases(fast=0, slow=2)
@pytest.mark.slow
@pytest.mark.parametrize(('line', 'why'), WRONG)
def test_wrong_questions_have_one_line(small_run, line, why):
  places = {'RUN': small_run / 'run', 'FOLDER': small_run, 'OTHER': small_run / 'other'}
  words = [re.sub('RUN|FOLDER|OTHER', lambda m: str(places[m[0]]), w) for w in line.split(' ')]
  with pytest.raises(UserError, match=why) as caught:
    tool.main(words)
  assert '\n' not in str(caught.value)


@pytest.mark.slow
def test_what_may_not_be_read_is_said_in_one_line(small_run, monkeypatch):
  def denied(*_):
    raise PermissionError(13, 'Permission denied', 'examples.jsonl')

  run, words = str(small_run / 'run'), ['--step=2', '--without=1:0', '--counts']
  for name in ('identity', 'run_values'):
    with monkeypatch.context() as patch:
      patch.setattr(f'paxlite.run_data.run_data.{name}', denied)
      for word in words:
        with pytest.raises(UserError, match=r'run cannot be read.*Permission denied'):
          tool.main([run, word])
  monkeypatch.setattr('paxlite.finetuning.chats.example_reader.open_records', denied)
  for word in [*words, '--without=examples.jsonl:1']:
    with pytest.raises(
      UserError, match=r"the data of .*run .*Permission denied: 'examples.jsonl'\)"
    ):
      tool.main([run, word])


@pytest.mark.slow
def test_a_run_alone_is_shown_as_its_data(small_run, capsys):
  text = shown(capsys, small_run / 'run', '--examples=1')
  assert 'Format    prompt and completion (30)' in text


@pytest.mark.slow
def test_neither_devices_nor_parameters_are_needed(small_run, monkeypatch, capsys):
  shutil.rmtree(small_run / 'run' / 'checkpoints')
  monkeypatch.setattr(jax, 'devices', lambda *_: pytest.fail('asks for devices'))
  monkeypatch.setattr(jax, 'local_devices', lambda *_: pytest.fail('asks for devices'))
  assert 'Row 3' in shown(capsys, small_run / 'run', '--step=2')
