"""The command line: the files of a run, and every user error as one clear line with exit code 2."""

import gzip
import json
import pty
import subprocess
import sys

import pytest

from paxlite import main
from paxlite.experiments.identity import run_values
from paxlite.programs.run import Run
from paxlite.programs.training import train
from paxlite.training import goodput
from tests.support import runs
from tests.support.experiments import TinySft


def call(capsys, *argv: str) -> tuple[int, str, str]:
  code = main.main(['paxlite.main', *argv])
  captured = capsys.readouterr()
  return code, captured.out, captured.err


TINY = '--fdl_config=TinyGPT'


@pytest.mark.parametrize(
  ('argv', 'message'),
  [
    ([], '--fdl_config=EXPERIMENT is missing'),
    ([TINY], '--job_log_dir=FOLDER is missing'),
    (['--fdl_config=TinyGTP'], 'no experiment has this name. Did you mean TinyGPT'),
    (['--fdl_config=Nothing'], 'List them: paxlite list'),
    (['--fdl_config=no.such.module.X'], 'no module is named no'),
    (['--fdl_config=paxlite.experiments.gptj.GPTJ_6B'], 'paxlite may have removed it: continue'),
    (
      ['--fdl_config=paxml.contrib.gpu.scripts_gpu.configs.Pile126M'],
      'needs 64 devices, but 1 is present',
    ),
    (
      ['--fdl_config=paxlite.experiments.gpt.GPT127M'],
      'paxlite.experiments.gpt has no GPT127M. Did you mean GPT126M',
    ),
    (['--fdl_config=os.system'], 'os.system is not an Experiment class'),
    (['--fdl_config=subprocess.getoutput'], 'is not an Experiment class'),
    ([TINY, '--fiddler=gone'], 'paxlite.experiments.demo has no gone'),
    ([TINY, '--fiddler=os.environ'], '--fiddler=os.environ is not a function'),
    ([TINY, '--fdl.NUM_LAYER=2'], 'TinyGPT has no attribute NUM_LAYER. Did you mean NUM_LAYERS'),
    ([TINY, '--fdl.NUM_LAYERS=two'], "TinyGPT.NUM_LAYERS must be int, for example 2; got 'two'"),
    ([TINY, '--fdl.FPROP_DTYPE=float17'], "must be one of 'bfloat16', 'float32', 'float16'"),
    ([TINY, '--fdl.NUM_LAYERS'], 'has no value: write --fdl.NUM_LAYERS=VALUE'),
    ([TINY, '--fdl.NUM_LAYERS=0'], 'NUM_LAYERS=0 must be at least 1'),
    ([TINY, '--mode=trian'], "should be one of <train|eval|verify|decode|decode_once>"),
    (['--exp=TinyGTP'], 'no experiment has this name. Did you mean TinyGPT'),
    (['--exp=TinyGPT', '--mode=decode_once'], 'DECODE_FILES=/path/to/prompts.jsonl is miss'),
    ([TINY, '--per_device_batch_size=4'], 'It is PERCORE_BATCH_SIZE here.'),
    ([TINY, 'steps=10'], 'flags are written --name=value. It is MAX_STEPS here.'),
    ([TINY, 'steps=10', 'dtype=x'], 'Write MAX_STEPS=VALUE. dtype: It is FPROP_DTYPE here.'),
    ([TINY, '--job_logdir=x'], "flag 'job_logdir'. Did you mean --job_log_dir?"),
    (['--mode=eval'], 'is missing, and --job_log_dir='),
    ([TINY, '--fdl.VOCAB_PATH=s3://b/x.model'], 'has no attribute VOCAB_PATH'),
    (
      ['--fdl_config=DemoGPT', '--fdl.VOCAB_PATH=s3://b/x.model'],
      'VOCAB_PATH: s3://b/x.model names no bucket: write s3://bucket/name',
    ),
    (
      [TINY, '--fdl.CHECKPOINT_RESTORE_PATH=nowhere/of/this/name'],
      'nowhere/of/this/name is not a folder: it must be a job_log_dir or imported weights',
    ),
    (
      ['--fdl_config=HuggingFaceLoRA', '--fdl.CHECKPOINT_RESTORE_PATH=HuggingFaceTB/SmolLM2-135M'],
      'HuggingFaceTB/SmolLM2-135M cannot be read',
    ),
    ([TINY, '--job_dir=x'], "Unknown command line flag 'job_dir'"),
    ([TINY, '--nodry_run=x'], '--nodry_run=x: --nodry_run takes no value'),
    ([TINY, '--dry_run=maybe'], '--dry_run=maybe must be true or false'),
    ([TINY, '--num_hosts=two'], '--num_hosts=two must be a whole number'),
    ([TINY, '--mode', '--dry_run'], 'Missing value for flag --mode'),
    ([TINY, '--flagfile=gone.txt'], "--flagfile=gone.txt cannot be read: [Errno 2]"),
    ([TINY, 'stray'], "unexpected argument 'stray'"),
    (
      [TINY, '--fdl.ICI_MESH_SHAPE=[8,1,1]', '--fdl.PERCORE_BATCH_SIZE=1'],
      'needs 8 devices, but 1 is present. To use what is here: \'ICI_MESH_SHAPE=[1,1,1]\'',
    ),
    ([TINY, '--fdl.ICI_MESH_SHAPE=[8,1]'], 'must have 3 positive sizes, for replica, data, mdl'),
    (
      [TINY, '--fdl.ICI_MESH_SHAPE=[2,2,2]', '--fdl.PERCORE_BATCH_SIZE=0.75'],
      'global batch of 6, not divisible by replica × data = 4',
    ),
    ([TINY, '--fdl.PERCORE_BATCH_SIZE=0.3'], 'is a global batch of 0.3: it must be a whole number'),
    ([TINY, '--fdl.NUM_MICROBATCHES=3'], 'replica × data = 1 × NUM_MICROBATCHES=3'),
    ([TINY, '--fdl.NUM_HEADS=5'], 'NUM_HEADS=5 × DIMS_PER_HEAD=6 is 30, not MODEL_DIMS=32'),
    ([TINY, '--fdl.NUM_KV_HEADS=3'], 'NUM_HEADS=4 is not divisible by NUM_KV_HEADS=3'),
    ([TINY, '--fdl.LR_COS_DECAY_END=2'], 'LR_COS_DECAY_START=3 < LR_COS_DECAY_END=2'),
    (['--fdl_config=Pile126M', '--fdl.ICI_MESH_SHAPE=[1,1,1]', '--fdl.DCN_MESH_SHAPE=[1,1,1]'],
     'no tokenizer is set: VOCAB_PATH'),
    (['--fdl_config=GPT126M', '--fdl.ICI_MESH_SHAPE=[1,1,1]', '--fdl.DCN_MESH_SHAPE=[1,1,1]'],
     'GPT126M has no dataset: mix one in'),
    (['--fdl_config=DemoGPT', '--fdl.VOCAB_SIZE=4096'],
     'but VOCAB_SIZE is 4096: set VOCAB_SIZE=8192'),
    (['--fdl_config=DemoGPT', '--fdl.VOCAB_PATH=x.model'],
     'the tokenizer x.model is not a file: VOCAB_PATH'),
    (['--fdl_config=DemoGPT', '--fdl.TRAIN_FILES=["gone.txt"]'], 'gone.txt is not a file'),
    (['--fdl_config=FlatTokens5B', '--fdl.ICI_MESH_SHAPE=[1,1,1]', '--fdl.DCN_MESH_SHAPE=[1,1,1]'],
     'DATASET_PATH=/path/to/flat/tokens is missing'),
    ([TINY, '--fdl.TRAINABLE_VARIABLES=["x.*"]'], 'matches no whole variable name, such as'),
    ([TINY, '--fdl.NUM_LOSS_CHUNKS=0'], 'NUM_LOSS_CHUNKS=0 must be at least 1'),
    ([TINY, '--fdl.MAX_STEPS=1e999'], "MAX_STEPS must be int, for example 10; got '1e999'"),
    ([TINY, '--fdl.PERCORE_BATCH_SIZE=1e999'], 'PERCORE_BATCH_SIZE must be float'),
    ([TINY, '--fdl.SEED=99999999999999999999'], 'must be from 0 to 2**32 - 1'),
    ([TINY, '--fdl.DROPOUT_PROB=1.5'], 'DROPOUT_PROB=1.5 must be at least 0 and below 1'),
    ([TINY, '--fdl.ADAM_BETA1=1'], 'ADAM_BETA1=1 must be at least 0 and below 1'),
    ([TINY, '--fdl.EVAL_BATCH_SIZE=0'], 'EVAL_BATCH_SIZE=0 must be at least 1'),
    ([TINY, '--fdl.MAX_EVAL_BATCHES=0'], 'MAX_EVAL_BATCHES=0 must be at least 1'),
    ([TINY, '--fdl.SAMPLE_PROMPT=hi'], 'no tokenizer is set: VOCAB_PATH'),
    ([TINY, '--jax_profiler_port=99999'], '--jax_profiler_port=99999 must be from 1 to 65535'),
    (['--fdl_config=.foo'], '--fdl_config=.foo is not a dotted path'),
    (['--fdl_config=..foo.Bar'], 'is not a dotted path'),
    ([TINY, '--fdl.TRAINABLE_VARIABLES=["("]'], "'(' is not a regular expression"),
    ([TINY, '--fdl.COMPILER_OPTIONS=[xla_cpu_nonsense=1]'], "No such compile option: 'xla_cpu_non"),
    ([TINY, '--mode=eval'], 'holds no checkpoint to evaluate: train first'),
  ],
)  # fmt: skip
def test_mistakes(capsys, tmp_path, argv, message):
  folder = tmp_path / 'run'
  if argv and argv != [TINY]:
    argv = [*argv, f'--job_log_dir={folder}']
  code, out, err = call(capsys, *argv)
  assert code == 2
  assert message in err
  assert err.startswith('error: ')
  assert err.count('\n') == 1, 'one line'
  assert out == ''
  assert not folder.exists(), 'nothing is written'


def test_a_wrong_class_of_the_user_is_one_line(capsys, tmp_path, monkeypatch):
  monkeypatch.syspath_prepend(tmp_path)
  (tmp_path / 'mine_with_a_typo.py').write_text(
    'from paxlite.experiments.demo import TinyGPT\n\nclass Mine(TinyGPT):\n  num_layers = 3\n'
  )
  code, out, err = call(capsys, '--fdl_config=mine_with_a_typo.Mine', '--dry_run')
  assert (code, out) == (2, '')
  assert 'Mine has no attribute num_layers. Did you mean NUM_LAYERS? ' in err
  assert err.count('\n') == 1


@pytest.mark.parametrize('path', ['az://bucket/run', 's3://b/run', '~nobody_of_this_name/run'])
def test_a_folder_that_is_no_path_here_is_refused(capsys, tmp_path, monkeypatch, path):
  monkeypatch.chdir(tmp_path)
  code, _, err = call(capsys, TINY, f'--job_log_dir={path}')
  assert code == 2
  assert err.startswith(f'error: --job_log_dir={path}')
  assert err.count('\n') == 1
  assert list(tmp_path.iterdir()) == []


def test_home_is_expanded_in_job_log_dir(capsys, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv('HOME', str(tmp_path / 'home'))
  code, _, err = call(capsys, '--mode=eval', TINY, '--job_log_dir=~/run', '--alsologtostderr')
  assert code == 2
  assert f'{tmp_path}/home/run holds no checkpoint to evaluate' in err


@pytest.mark.slow
def test_a_run_is_evaluated_as_what_it_was(capsys, tmp_path):
  """Its own values apply without flags, and its training data may be gone."""
  files = {name: tmp_path / f'{name}.jsonl' for name in ('train', 'eval')}
  for name, path in files.items():
    path.write_text(''.join(json.dumps(dict(inputs=name, targets=f'{i}')) + '\n' for i in range(9)))
  folder = tmp_path / 'run'
  changes = dict(TRAIN_FILES=[str(files['train'])], EVAL_FILES=[str(files['eval'])])
  train(Run(TinySft(NUM_LAYERS=3, LEARNING_RATE=3e-4, **changes), folder))
  files['train'].unlink()
  before = runs.records(folder, 'eval_metrics.jsonl')[-1]
  capsys.readouterr()

  flags = '--mode=eval', f'--job_log_dir={folder}'
  named = '--fdl_config=tests.support.experiments.TinySft'
  for more in [[], [named], [named, '--fdl.NUM_LAYERS=3', '--fdl.LEARNING_RATE=1e-3']]:
    code, _, err = call(capsys, *flags, *more)
    assert (code, err) == (0, '')
    assert runs.records(folder, 'eval_metrics.jsonl')[-1] == before, 'same numbers'
  code, out, _ = call(capsys, *flags, '--fdl.MAX_EVAL_BATCHES=1', '--dry_run')
  assert code == 0
  assert 'NUM_LAYERS = 3' in out
  assert 'MAX_EVAL_BATCHES = 1' in out
  code, _, err = call(capsys, *flags, '--fdl.NUM_LAYERS=2')
  assert code == 2
  assert 'holds checkpoints of another model: NUM_LAYERS 3 → 2' in err
  code, _, err = call(capsys, *flags, TINY)
  assert code == 2
  assert 'holds checkpoints of another model' in err
  assert run_values(folder)['values']['NUM_LAYERS'] == 3


def test_a_run_of_a_module_that_is_not_imported_asks_for_its_name(capsys, tmp_path):
  (tmp_path / 'experiment.json').write_text(
    json.dumps({'experiment': 'somebody.Else', 'values': {}})
  )
  code, _, err = call(capsys, '--mode=eval', f'--job_log_dir={tmp_path}')
  assert code == 2
  assert 'if it is yours, --import=somebody' in err


@pytest.mark.parametrize(
  ('platform', 'module'),
  [
    ('cuda', 'paxlite.main'),
    *(
      pytest.param(*case, marks=pytest.mark.slow)
      for case in (
        ('tpu', 'paxlite.main'),
        ('nonsense', 'paxlite.main'),
        ('tpu', 'paxlite compile'),
      )
    ),
  ],
)
def test_devices_that_are_not_here_are_a_line(tmp_path, module, platform):
  rest = ['--target=here'] if module.endswith('compile') else [f'--job_log_dir={tmp_path}/run']
  result = subprocess.run(
    [sys.executable, '-m', *module.split(), TINY, *rest], capture_output=True, text=True,
    cwd=runs.ROOT, env=runs.environment() | {'JAX_PLATFORMS': platform}, check=False,
  )  # fmt: skip
  assert result.returncode == 2
  (line,) = [x for x in result.stderr.splitlines() if not x.startswith(('WARNING', 'INFO'))]
  assert line.startswith(f'error: JAX has no devices of JAX_PLATFORMS={platform} here')
  assert (f'[{platform.replace("cuda", "cuda13")}]' in line) == (platform != 'nonsense')
  assert not (tmp_path / 'run').exists()


def test_help_needs_neither_jax_nor_fiddle():
  code = 'import sys; from paxlite.main import main; main(["x", "--help"]); print(*sys.modules)'
  out = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, text=True, check=True
  ).stdout
  assert '--job_log_dir' in out
  modules = out.splitlines()[-1].split()
  assert not {'jax', 'fiddle', 'flax', 'numpy'} & set(modules)


@pytest.mark.slow
def test_a_synthetic_run_imports_neither_tensorflow_nor_torch(tmp_path):
  """Both exist as empty modules, so an attempt to import them would succeed."""
  for name in ('tensorflow', 'torch', 'seqio', 'transformers'):
    (tmp_path / f'{name}.py').write_text('')
  code = (
    'import sys; from paxlite.main import main;'
    f'c = main(["x", "{TINY}", "--job_log_dir={tmp_path}/run", "--fdl.MAX_STEPS=2"]);'
    'print(*sys.modules); sys.exit(c)'
  )
  env = runs.environment() | {'PYTHONPATH': f'{tmp_path}:{runs.ROOT}'}
  result = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, text=True, env=env, check=True
  )
  modules = set(result.stdout.splitlines()[-1].split())
  assert 'jax' in modules
  assert not {'tensorflow', 'torch', 'seqio', 'transformers'} & modules


@pytest.mark.parametrize(
  ('name', 'parameters'),
  [('GPT126M', '125,262,336'), ('GPT5B', '5,047,558,144'), ('GPT175B', '174,604,259,328')],
)
def test_dry_run(capsys, name, parameters):
  code, out, _ = call(capsys, f'--fdl_config={name}', '--dry_run')
  assert code == 0
  assert f'\nparameters {parameters}\n' in out
  assert 'VOCAB_SIZE = 50' in out
  assert 'task.model.transformer_tpl: template of paxlite.layers.transformer.' in out


def test_dry_run_counts_bytes_per_device(capsys):
  """GPT5B on 256 devices: 4 bytes per parameter and 8 bytes for Adam, split by FSDP."""
  _, out, _ = call(capsys, '--fdl_config=GPT5B', '--dry_run')
  lines = dict(
    line.rsplit(' ', 2)[:2] for line in out.splitlines() if line.startswith('per device')
  )
  parameters, optimizer, gradients = (int(v.replace(',', '')) for v in lines.values())
  whole = 4 * 5_047_558_144
  assert whole / 256 <= parameters < 1.1 * whole / 256  # biases are copied to every device
  assert gradients == parameters
  assert optimizer == pytest.approx(2 * parameters, abs=16)
  assert 'global batch 2,048 × 2,048 = 4,194,304 tokens per step' in out


def test_both_spellings_and_fiddlers(capsys):
  flags = (
    ['--fdl.FPROP_DTYPE=float16', '--fdl.ICI_MESH_SHAPE=[8,1,1]', '--fdl.SEED=7'],
    [
      '--fdl.FPROP_DTYPE="float16"',
      '--fdl.ICI_MESH_SHAPE="[8, 1, 1]"',
      '--fiddler=tests.runs.test_main.seven',
    ],
  )
  shown = [call(capsys, TINY, '--dry_run', *f)[1] for f in flags]
  assert shown[0] == shown[1]
  assert "FPROP_DTYPE = 'float16'" in shown[0]
  assert 'SEED = 7' in shown[0]


def seven(cfg):
  cfg.SEED = 7


def test_what_a_run_leaves(tmp_path, capsys):
  flags = '--fdl.PROFILER_CAPTURE_STEP=4', '--fdl.EVAL_INTERVAL_STEPS=5'
  config = 'tests.support.experiments.TinyText'
  out = runs.run(tmp_path, *flags, config=config).stdout
  assert 'Compiled the train step in' in out
  assert 'First step: ' in out
  assert 'eval held_out at step 10: loss' in out
  assert "A sample at temperature 0.8, continuing 'In the beginning':\nIn the beginning" in out
  assert f'Logs, metrics and checkpoints are in {tmp_path}' in out
  assert main.main(['paxlite.main', f'--job_log_dir={tmp_path}']) == 2
  assert (
    'is missing. The run there is of tests.support.experiments.TinyText' in capsys.readouterr().err
  )

  spent = goodput.report(tmp_path).seconds
  assert min(spent['profile'], spent['evaluation']) > 0

  first, *rest = runs.records(tmp_path)
  expected = {'step', 'loss', 'lr', 'grad_norm', 'tokens_per_second', 'step_seconds', 'mfu'}
  assert expected <= first.keys()
  assert first['tokens_per_second'] is None, 'compilation and the first step are never averaged in'
  assert all(r['tokens_per_second'] > 0 and r['step_seconds'] > 0 for r in rest)
  assert [r['step'] for r in runs.records(tmp_path, 'eval_metrics.jsonl')] == [5, 10]

  for name in ('experiment.txt', 'experiment.json', 'config.txt', 'config.json', 'versions.json'):
    assert (tmp_path / name).stat().st_size > 0, name
  assert json.loads((tmp_path / 'experiment.json').read_text())['values']['MAX_STEPS'] == 10
  assert 'jax' in json.loads((tmp_path / 'versions.json').read_text())['packages']
  built = json.loads((tmp_path / 'config.json').read_text())
  assert built.keys() == {'task', 'train_input', 'eval_inputs.held_out'}
  tags = tensorboard_tags(tmp_path / 'summaries' / 'train')
  assert {'loss', 'Steps/sec', 'Metrics/total_loss', 'Metrics/log_pplx', 'learning/lr'} <= tags
  assert {'learning/raw_grad_norm', 'learning/clipped_grad_norm', 'learning/var_norm'} <= tags
  assert 'Metrics/bits_per_byte' in tensorboard_tags(tmp_path / 'summaries' / 'eval_held_out')
  (trace,) = (tmp_path / 'profile').rglob('perfetto_trace.json.gz')
  assert len(json.loads(gzip.decompress(trace.read_bytes()))['traceEvents']) > 100
  assert list((tmp_path / 'profile').rglob('*.xplane.pb'))

  before = runs.records(tmp_path, 'eval_metrics.jsonl')[-1]
  runs.run(tmp_path, *flags, '--mode=eval', config=config)
  assert runs.records(tmp_path, 'eval_metrics.jsonl')[-1] == before, 'same numbers'


def tensorboard_tags(folder) -> set[str]:
  """Returns the tags of the event files, read record by record: [length, crc, data, crc]."""
  from tensorboardX.proto.event_pb2 import Event

  tags = set()
  for path in folder.iterdir():
    data = path.read_bytes()
    while data:
      length = int.from_bytes(data[:8], 'little')
      event = Event.FromString(data[12 : 12 + length])
      tags |= {value.tag for value in event.summary.value}
      data = data[16 + length :]
  return tags


@pytest.mark.slow
def test_no_checkpoints_where_they_are_off(tmp_path):
  runs.run(tmp_path, '--noenable_checkpoint_saving', '--fdl.MAX_STEPS=2')
  assert not (tmp_path / 'checkpoints').exists()


@pytest.mark.slow
def test_a_live_line_on_a_terminal(tmp_path):
  """rich rewrites one line on a real (pseudo) terminal; only the other lines stay."""
  leader, follower = pty.openpty()
  process = subprocess.Popen(
    runs.command(tmp_path, '--noenable_checkpoint_saving'), stdout=follower, stderr=follower,
    env=runs.environment() | {'TERM': 'xterm', 'COLUMNS': '200'}, cwd=runs.ROOT,
  )  # fmt: skip
  shown = runs.shown_on(leader, follower, process)
  text = shown.decode()
  assert '\x1b[2K' in text, 'a line is erased and written again'
  assert 'step 10/10' in text
  assert 'Compiled the train step in' in text


@pytest.mark.parametrize('kind', ['a file', 'below a file', 'empty'])
def test_a_folder_that_cannot_be_is_named(capsys, tmp_path, kind):
  (tmp_path / 'file').write_text('mine')
  folder = {'a file': tmp_path / 'file', 'below a file': tmp_path / 'file' / 'run', 'empty': ''}[
    kind
  ]
  code, _, err = call(capsys, TINY, f'--job_log_dir={folder}')
  assert code == 2
  assert '--job_log_dir=' in err
  assert err.count('\n') == 1
  assert (tmp_path / 'file').read_text() == 'mine'


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_vocabulary_rounded_up_samples_known_tokens_only(tmp_path):
  flags = '--fdl.VOCAB_SIZE=65536', '--fdl.MAX_STEPS=1', '--noenable_checkpoint_saving'
  out = runs.run(tmp_path, *flags, config='tests.support.experiments.TinyText').stdout
  assert "A sample at temperature 0.8, continuing 'In the beginning':" in out
