"""`paxlite recipe`: what it runs, what it takes as it is, and what is left after any end."""

import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.support import runs

RECIPE = """
import os
import pathlib
import signal

from paxlite.experiments.datasets import TextFiles
from paxlite.experiments.gpt import GPT126M
from paxlite.recipes import Files, Recipe, Stage

ADDED = 1


def write_text(folder, count, source):
  if os.path.exists('kill'):  # as a machine that goes down while files are written
    pathlib.Path('kill').unlink()
    (folder / 'half.txt').write_text('half')
    os.kill(os.getpid(), signal.SIGKILL)
  sums = ''.join(f'The sum of {i} and {ADDED} is {i + ADDED}.\\n\\n' for i in range(count))
  (folder / 'a.txt').write_text(sums + pathlib.Path(source).read_text())


class Small(TextFiles, GPT126M):
  NUM_LAYERS = 1
  NUM_HEADS = 4
  MODEL_DIMS = 32
  VOCAB_SIZE = 512
  MAX_SEQ_LEN = 32
  FPROP_DTYPE = 'float32'
  PACKED_INPUT = False
  DROPOUT_PROB = 0.1
  ICI_MESH_SHAPE = [1, 1, 1]
  DCN_MESH_SHAPE = [1, 1, 1]
  MAX_STEPS = 4
  SUMMARY_INTERVAL_STEPS = 1
  CHECKPOINT_EVERY_N_STEPS = 2
  MAX_EVAL_BATCHES = 1
  LR_COS_WARMUP = 1


class More(Small):
  LEARNING_RATE = 1e-4

  def task(self):
    return super().task()


READ = {'TRAIN_FILES': ['{data}/a.txt'], 'VOCAB_PATH': '{tokenizer}/tok.model'}
TRAIN = ['train-tokenizer', '{data}/a.txt', '--vocab_size=320', '--output={tokenizer}/tok.model']
RECIPE = Recipe([
  Files('data', write_text, {'count': 300, 'source': 'further.txt'}),
  Files('tokenizer', TRAIN),
  Stage('base', Small, READ, holds='held_out: avg_xent <= 9'),
  Stage('more', More, {**READ, 'SEED': 7}, starts_from='base'),
  Stage('other', Small, {**READ, 'TRAIN_FILES': ['further.txt']}),
])
"""
STAGES = ['data', 'tokenizer', 'base', 'more', 'other']
ENVIRONMENT = runs.environment() | {'PYTHONPATH': str(runs.ROOT)}
FURTHER = 'The end of all is the beginning of another. ' * 400


def written(folder: pathlib.Path) -> pathlib.Path:
  """Writes the recipe into a new folder; returns that."""
  folder.mkdir()
  (folder / 'mine.py').write_text(RECIPE)
  (folder / 'further.txt').write_text(FURTHER)
  return folder


def command(*arguments: str) -> list[str]:
  return [sys.executable, '-m', 'paxlite', 'recipe', 'mine.py', '--folder=all', *arguments]


def recipe(folder: pathlib.Path, *arguments: str, code: int = 0) -> str:
  """Runs the recipe in a folder; returns what it printed."""
  done = runs.ended(command(*arguments), ENVIRONMENT, cwd=folder)
  assert done.returncode == code, f'{done.stdout}\n{done.stderr}'
  return done.stdout if code == 0 else done.stderr


def outcomes(folder: pathlib.Path) -> dict[str, str | None]:
  found = json.loads((folder / 'all' / 'recipe.json').read_text())['stages']
  return {name: entry['outcome'] for name, entry in found.items()}


def states(folder: pathlib.Path, *arguments: str) -> dict[str, str]:
  """Returns what the command says of each stage before it starts."""
  lines = recipe(folder, '--dry_run', *arguments).splitlines()[1:]
  pattern = re.compile(r'(\w+).*?  (done|continues|runs again: .*|runs)$')
  return dict(pattern.fullmatch(line).groups() for line in lines)


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  """The folder of a recipe that nothing has disturbed, and what it printed."""
  folder = written(tmp_path_factory.mktemp('recipes') / 'whole')
  return folder, recipe(folder)


@pytest.mark.slow
def test_it_runs_all_stages_and_prints_one_table(whole):
  folder, said = whole
  assert re.findall(r'^Stage \d of 5: (\w+)$', said, re.MULTILINE) == STAGES
  rows = [line.split() for line in said[said.rindex('\nstage ') :].splitlines()[2:]]
  assert [(row[0], row[1]) for row in rows] == [(n, 'held_out') for n in ('base', 'more', 'other')]
  assert all('nats per byte' in ' '.join(row) for row in rows)
  assert all((folder / 'all' / name / 'command.txt').is_file() for name in STAGES[2:])
  evaluate = [sys.executable, '-m', 'paxlite', 'eval', 'all/more', '--import=mine']
  evaluated = runs.ended(evaluate, ENVIRONMENT, cwd=folder)
  assert 'eval held_out at step 4' in evaluated.stdout, evaluated.stderr


@pytest.mark.slow
def test_what_is_done_is_taken_as_it_is(whole):
  folder, _ = whole
  before = outcomes(folder)
  assert states(folder) == dict.fromkeys(STAGES, 'done')
  assert 'Stage ' not in recipe(folder)
  assert outcomes(folder) == before


# An edit, what is said of it, and the stages that it is about.
EDITS = [
  (('mine.py', "'count': 300", "'count': 301"), 'count 300 → 301', {'data'}),
  (('mine.py', 'ADDED = 1', 'ADDED = 2'), 'the code of mine.ADDED', {'data'}),
  (('mine.py', 'The sum of', 'The true sum of'), 'the code of mine.write_text', {'data'}),
  (('mine.py', '--vocab_size=320', '--vocab_size=330'), 'makes ', {'tokenizer'}),
  (('mine.py', "'SEED': 7", "'SEED': 8"), 'SEED 7 → 8', {'more'}),
  (('mine.py', 'LEARNING_RATE = 1e-4', 'LEARNING_RATE = 2e-4'), 'LEARNING_RATE', {'more'}),
  (
    ('mine.py', 'return super().task()', 'x = super().task(); x.max_skipped_steps = 50; return x'),
    'task.', {'more'},
  ),
  (('further.txt', 'The end', 'An end'), 'further.txt', {'data', 'other'}),
  (('mine.py', 'MAX_STEPS = 4', 'MAX_STEPS = 5'), 'MAX_STEPS 4 → 5', {'base', 'more', 'other'}),
  (('mine.py', 'CHECKPOINT_EVERY_N_STEPS = 2', 'CHECKPOINT_EVERY_N_STEPS = 3'), '', set()),
  (('mine.py', '<= 9', '<= 8'), '', set()),
  (('mine.py', 'ADDED = 1', 'ADDED = 1  # one'), '', set()),
]  # fmt: skip
NEEDS = {'tokenizer': {'data'}, 'base': {'data', 'tokenizer'}, 'other': {'tokenizer'}}
NEEDS['more'] = {'base', 'data', 'tokenizer'}


@pytest.mark.slow
@pytest.mark.parametrize('seed', range(6))
def test_what_has_changed_runs_again_with_all_that_need_it(seed, whole):
  """Of drawn edits, which are undone after that."""
  folder, _ = whole
  draw = random.Random(seed)
  drawn = [EDITS[i] for i in range(seed, len(EDITS), 6)] + draw.sample(EDITS, seed % 2)
  before = {name: (folder / name).read_text() for name in ('mine.py', 'further.txt')}
  try:
    expected: set[str] = set()
    for (name, old, new), _, changed in drawn:
      text = (folder / name).read_text()
      if old in text:
        (folder / name).write_text(text.replace(old, new))
      expected |= changed
    for name in STAGES:
      expected |= {name} if NEEDS.get(name, set()) & expected else set()
    # Python takes an edit of the same second and size for what it has compiled
    shutil.rmtree(folder / '__pycache__', ignore_errors=True)
    found = states(folder)
    again = {name for name, state in found.items() if state.startswith('runs again: ')}
    assert again == expected, found
    assert {found[name] for name in found.keys() - again} <= {'done'}
    for _, said, changed in drawn:
      assert all(said in found[name] for name in changed), found
  finally:
    for name, text in before.items():
      (folder / name).write_text(text)


@pytest.mark.slow
def test_files_that_were_edited_or_deleted_are_made_again(whole):
  folder, _ = whole
  made = folder / 'all' / 'tokenizer' / 'tok.model'
  content = made.read_bytes()
  for damage, said in ((lambda: made.write_bytes(b'x'), 'changed'), (made.unlink, 'changed')):
    damage()
    found = states(folder)
    assert found['data'] == 'done'
    assert found['tokenizer'] == f'runs again: what it had made has {said}'
    assert found['more'].endswith('it needs base; it needs tokenizer')
  made.write_bytes(content)
  assert states(folder) == dict.fromkeys(STAGES, 'done')


def killed(folder: pathlib.Path, is_due, number: int = signal.SIGKILL) -> int:
  """Starts the recipe and sends it a signal as soon as `is_due`; returns its exit code."""
  process = runs.started(command(), ENVIRONMENT, folder, stdout=subprocess.DEVNULL)
  end = time.monotonic() + 300
  while process.poll() is None and not is_due():
    assert time.monotonic() < end
    time.sleep(0.01)
  process.send_signal(number)
  return process.wait()


def has_outcome(folder: pathlib.Path, name: str) -> bool:
  path = folder / 'all' / 'recipe.json'
  return path.is_file() and outcomes(folder).get(name) is not None


def has_trained(folder: pathlib.Path, name: str, steps: int) -> bool:
  path = folder / 'all' / name / 'metrics.jsonl'
  return path.is_file() and path.read_text().count('\n') >= steps


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != 'linux', reason='a run ends with its recipe on Linux alone')
def test_a_recipe_that_is_killed_again_and_again_ends_in_the_same_bits(whole, tmp_path):
  """In files, between stages, in a stage, and politely; bits are those of an undisturbed one."""
  folder = written(tmp_path / 'killed')
  (folder / 'kill').touch()
  assert killed(folder, lambda: False) == -signal.SIGKILL
  assert not (folder / 'all' / 'data').exists()
  assert killed(folder, lambda: has_outcome(folder, 'data')) == -signal.SIGKILL
  assert killed(folder, lambda: has_trained(folder, 'base', 1)) == -signal.SIGKILL
  assert killed(folder, lambda: has_outcome(folder, 'base')) == -signal.SIGKILL
  assert killed(folder, lambda: has_trained(folder, 'more', 1), signal.SIGTERM) == 75
  recipe(folder)
  assert outcomes(folder) == outcomes(whole[0])
  assert not [*(folder / 'all').glob('*.unfinished*'), *(folder / 'all').glob('*.before*')]


@pytest.mark.slow
def test_another_value_runs_its_stages_again_and_keeps_what_they_had(whole, tmp_path):
  import shutil

  folder = tmp_path / 'copy'
  shutil.copytree(whole[0], folder)  # a moved recipe is the same
  assert states(folder) == dict.fromkeys(STAGES, 'done')
  before = outcomes(folder)
  said = recipe(folder, '--set', 'base.SEED=3', '--until=base')
  assert re.findall(r'^Stage \d of 3: (\w+)$', said, re.MULTILINE) == ['base']
  assert 'base was moved to base.before' in said
  assert (folder / 'all' / 'base.before' / 'experiment.json').is_file()
  after = outcomes(folder)
  assert {name for name in before if after[name] != before[name]} == {'base'}
  found = states(folder, '--set', 'base.SEED=3')
  assert found['more'] == 'runs again: base was made again'
  assert found['other'] == 'done'


@pytest.mark.slow
def test_what_does_not_hold_ends_the_recipe(whole):
  folder, _ = whole
  text = (folder / 'mine.py').read_text()
  try:
    for bound, said in (
      ("'held_out: avg_xent <= 1'", 'held_out: avg_xent <= 1 does not hold: it is '),
      ("'held: avg_xent <= 1'", 'cannot be checked: the run evaluated held_out: '),
    ):
      (folder / 'mine.py').write_text(text.replace("'held_out: avg_xent <= 9'", bound))
      assert f'stopped: stage base: {bound[1:-1]}' in (found := recipe(folder, code=1))
      assert said in found
  finally:
    (folder / 'mine.py').write_text(text)


@pytest.mark.cases(fast=0, slow=3)
@pytest.mark.slow
@pytest.mark.parametrize(
  ('arguments', 'said'),
  [
    (['--set', 'more.VOCAB_SIZE=256'], 'stage more cannot start from base: it has VOCAB_SIZE=256'),
    (['--set', 'more.NUM_LAYERS=2'], 'it has NUM_LAYERS=2, but the weights have NUM_LAYERS=1'),
    (['--set', 'more.VOCAB_PATH={data}/tok.model'], 'its tokenizer is '),
    (['--set', 'more.ACTIVATION_CLS=relu'], 'its model computes something else: '),
    (['--set', 'more.LEARNING_RAT=1'], 'Did you mean LEARNING_RATE?'),
    (['--set', 'base.TRAIN_FILES=nope.txt'], 'nope.txt is missing'),
    (['--set', 'base.TRAIN_FILES=nope/*.txt'], 'nope/*.txt matches no file'),
    (['--set', 'base.MAX_STEPS=-1'], 'stage base: '),
    ([f'--set={name}.MODEL_DIMS=4000000' for name in ('base', 'more')], ' are free at '),
    (['--until=sft'], '--until: no stage sft'),
    (['--folder=.'], 'holds something other than a recipe'),
  ],
)
def test_wrong_input_is_refused_in_a_line_before_anything_is_written(arguments, said, tmp_path):
  folder = written(tmp_path / 'wrong')
  error = recipe(folder, *arguments, code=2)
  assert said in error
  assert len([line for line in error.splitlines() if line.startswith('error: ')]) == 1
  assert not (folder / 'all').exists()
  assert {p.name for p in folder.iterdir()} - {'__pycache__'} == {'mine.py', 'further.txt'}


def test_a_dry_run_prints_what_stages_take_and_writes_nothing(tmp_path):
  folder = written(tmp_path / 'dry')
  lines = recipe(folder, '--dry_run', '--until=more').splitlines()
  assert [line.split()[0] for line in lines] == ['stage', 'data', 'tokenizer', 'base', 'more']
  assert lines[3].split()[1:3] == ['30,176', '512']
  assert not (folder / 'all').exists()


@pytest.mark.slow
def test_a_folder_of_another_recipe_is_refused(whole):
  folder, _ = whole
  os.rename(folder / 'mine.py', folder / 'yours.py')
  try:
    done = runs.ended([*command()[:4], 'yours.py', '--folder=all'], ENVIRONMENT, cwd=folder)
  finally:
    os.rename(folder / 'yours.py', folder / 'mine.py')
  assert done.returncode == 2
  assert 'belongs to the recipe mine, not yours' in done.stderr


@pytest.mark.slow
def test_chat_small_has_a_table_of_all_stages(tmp_path):
  """With a tiny model of few steps; its folders are those of ordinary runs."""
  small = ['NUM_LAYERS=1', 'MODEL_DIMS=32', 'HIDDEN_DIMS=64', 'VOCAB_SIZE=400', 'MAX_STEPS=2']
  values = [f'{name}.{value}' for name in ('pretrain', 'sft', 'grpo') for value in small]
  values += ['data.paragraphs=30', 'data.chats=100', 'data.prompts=20', 'tokenizer.vocab_size=400']
  values += ['tokenizer.files=["{data}/facts.txt"]', 'pretrain.TRAIN_FILES={data}/facts.txt']
  values += [f'{name}.holds=None' for name in ('pretrain', 'sft', 'grpo')]
  values += ['grpo.PERCORE_BATCH_SIZE=16', 'grpo.MAX_SEQ_LEN=128']
  settings = [f'--set={value}' for value in values]
  done = runs.module('paxlite', 'recipe', 'chat_small', f'--folder={tmp_path}/chat', *settings)
  table = done.stdout[done.stdout.rindex('\nstage ') :].splitlines()[2:]
  cells = [re.split(r'  +', line) for line in table]
  assert [row[:3] for row in cells] == [
    ['pretrain', 'held_out', 'nats per byte'],
    ['pretrain', 'text', 'nats per byte'],
    ['pretrain', 'sums', 'exact_match'],
    ['pretrain', 'calls', 'exact_match'],
    ['sft', 'held_out', 'avg_xent'],
    ['sft', 'text', 'nats per byte'],
    ['sft', 'sums', 'exact_match'],
    ['sft', 'calls', 'exact_match'],
    ['grpo', 'text', 'nats per byte'],
    ['grpo', 'sums', 'exact_match'],
    ['grpo', 'calls', 'exact_match'],
  ]
  assert all(len(row) == 5 for row in cells if row[0] != 'pretrain' and row[1] != 'held_out')
  runs.module('paxlite', 'chat', f'{tmp_path}/chat/grpo', '--prompt=What is 2 + 3?')


def _written(path: pathlib.Path, records: list[dict]) -> str:
  path.write_text(''.join(json.dumps(record) + '\n' for record in records))
  return str(path)


@pytest.mark.exhaustive  # chat_small has the same stages; what it has of its own, unit tests have
def test_chat_d20_runs_with_files_in_place_of_the_hub(tmp_path):
  """Of depth 1, on one device."""
  say = lambda role, content: {'role': role, 'content': content}
  texts = [{'text': f'{i} pens and {i} inks are {2 * i} things. ' * 20} for i in range(60)]
  chats = [{'messages': [say('user', f'{i}?'), say('assistant', f'{i}!')]} for i in range(200)]
  asked = [{'question': f'What is {i}?', 'answer': f'It is {i}. #### {i}'} for i in range(20)]
  found = {
    name: _written(tmp_path / f'{name}.jsonl', records)
    for name, records in (('texts', texts), ('chats', chats), ('asked', asked))
  }
  small = ['DEPTH=1', 'MAX_STEPS=2', 'VOCAB_SIZE=400', 'EVAL_TASKS=[]', 'MAX_EVAL_BATCHES=1']
  small += ['ICI_MESH_SHAPE=[1,1,1]', 'MAX_SEQ_LEN=64']
  values = [f'{name}.{value}' for name in ('pretrain', 'sft', 'grpo') for value in small]
  values += [f'tokenizer.files=["{found["texts"]}"]', 'tokenizer.vocab_size=400']
  values += [f'pretrain.TRAIN_SOURCES={found["texts"]}', 'data.chats=100']
  values += [f'sft.TRAIN_FILES={found["chats"]},{{data}}/chats.jsonl', 'sft.PERCORE_BATCH_SIZE=1']
  values += [f'questions.source={found["asked"]}', 'grpo.PERCORE_BATCH_SIZE=16']
  values += [
    'grpo.MAX_NEW_TOKENS=8',
    'pretrain.EVAL_TASKS_IN_TRAINING=False',
    'pretrain.HELD_OUT_EVERY=10',
  ]
  settings = [f'--set={value}' for value in values]
  runs.module('paxlite', 'recipe', 'chat_d20', f'--folder={tmp_path}/chat', *settings)
  about = json.loads((tmp_path / 'chat' / 'grpo' / 'experiment.json').read_text())['values']
  assert (about['NUM_LAYERS'], about['MODEL_DIMS']) == (1, 64)
  assert about['LEARNING_RATE_FACTORS'] == ['transformer/.*/w=4']  # by AdamW


@pytest.mark.slow
def test_hours_are_predicted_by_steps_that_are_run(tmp_path):
  folder = written(tmp_path / 'hours')
  said = recipe(folder, '--dry_run', '--target=here', '--price=2')
  header, *rows = said.splitlines()[:-1]
  assert re.split('  +', header)[5:] == ['hours', 'dollars']
  found = {row.split()[0]: re.split('  +', row)[5:7] for row in rows[2:5]}
  assert [*found] == ['base', 'more', 'other']
  assert all(float(hours) > 0 for hours, _ in found.values())
  assert 'hours are those of training steps' in said.splitlines()[-1]
  assert not (folder / 'all').exists()
