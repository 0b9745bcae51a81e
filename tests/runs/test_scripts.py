"""The scripts for users: their checks and the commands that they call.

Stand-ins on PATH replace Python, srun and other commands, and record their arguments. Containers
are tested only with stand-ins, because pyxis is a plugin of a cluster's Slurm.
tests/runs/test_slurm.py uses a real Slurm.
"""

import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest

from paxlite.data import packaged
from paxlite.experiments.registry import experiments
from tests.support import runs

SCRIPTS = runs.ROOT / 'paxlite' / 'contrib' / 'gpu' / 'scripts_gpu'
RUN = sorted(p.name for p in SCRIPTS.glob('run_*.sh'))
BATCH = sorted((runs.ROOT / 'scripts').glob('*.sub'))
ALL = [*SCRIPTS.glob('*.sh'), *(runs.ROOT / 'scripts').iterdir()]

# `python -c` is the check that paxlite can be imported.
PYTHON = """#!/bin/bash
if [[ $1 == -c ]]; then exit 0; fi
printf '%q ' "$@" >>"$CALLS"
echo >>"$CALLS"
echo "said by $3"
exit "${CODE:-0}"
"""


class Sandbox:
  """An empty folder to run scripts in, and a folder with stand-ins."""

  def __init__(self, folder: pathlib.Path):
    self.folder = folder / 'here'
    self.bin = folder / 'bin'
    self.calls_file = folder / 'calls'
    for path in (self.folder, self.bin, folder / 'tfds'):
      path.mkdir()
    self.stand_in('python', PYTHON)
    self.tfds = str(folder / 'tfds')
    self.env = {
      'PATH': f'{self.bin}:{os.environ["PATH"]}', 'HOME': str(folder),
      'PYTHON': str(self.bin / 'python'), 'CALLS': str(self.calls_file),
    }  # fmt: skip

  def stand_in(self, name: str, text: str) -> None:
    path = self.bin / name
    path.write_text(text)
    path.chmod(0o755)

  def run(self, script: object, *arguments: str, code: int = 0, **env: str):
    script = SCRIPTS / script if isinstance(script, str) else script
    result = subprocess.run(
      ['bash', str(script), *arguments], capture_output=True, text=True, cwd=self.folder,
      env=self.env | env, timeout=60, check=False,
    )  # fmt: skip
    assert result.returncode == code, f'{result.returncode}\n{result.stdout}\n{result.stderr}'
    return result

  @property
  def calls(self) -> list[list[str]]:
    """The arguments of each call of a stand-in that records them."""
    if not self.calls_file.exists():
      return []
    return [shlex.split(line) for line in self.calls_file.read_text().splitlines()]

  @property
  def flags(self) -> list[str]:
    """The flags of the only call of paxlite.main."""
    ((unbuffered, option, module, *flags),) = self.calls
    assert (unbuffered, option, module) == ('-u', '-m', 'paxlite.main')
    return flags


@pytest.fixture
def box(tmp_path) -> Sandbox:
  return Sandbox(tmp_path)


@pytest.mark.parametrize('script', RUN)
@pytest.mark.parametrize('flag', ['--help', '-h'])
def test_help(box, script, flag):
  said = box.run(script, flag).stdout
  assert said.startswith(script)
  assert all(word in said for word in ('Environment:', 'XLA_FLAGS', 'Example', 'VOCAB_PATH'))
  assert max(map(len, said.splitlines())) <= 100
  assert not box.calls


PILE = ['TFDS', packaged.VOCAB]
MISTAKES = [
  ('run_pile_singlenode.sh', [], {}, 'TFDS_DATA_DIR is missing'),
  (
    'run_pile_singlenode.sh', ['nowhere', packaged.VOCAB], {},
    "TFDS_DATA_DIR='nowhere' is not a folder",
  ),
  ('run_pile_singlenode.sh', ['TFDS'], {}, 'VOCAB_PATH is missing'),
  ('run_pile_singlenode.sh', ['TFDS', 'x'], {}, "VOCAB_PATH='x' does not exist"),
  ('run_pile_singlenode.sh', [*PILE, 'bf16'], {}, "PRECISION='bf16' is not known"),
  ('run_pile_singlenode.sh', [*PILE, 'float32', '0'], {}, "NUM_GPUS='0' is not a number"),
  ('run_pile_singlenode.sh', [*PILE, 'float32', '2', '4x'], {}, "PERCORE_BATCH_SIZE='4x'"),
  ('run_pile_singlenode.sh', [*PILE, 'float32', '2', '0.0'], {}, "PERCORE_BATCH_SIZE='0.0'"),
  ('run_pile_singlenode.sh', [*PILE, 'float32', '2', '4', '/dev/null/x'], {}, "LOGDIR='/dev/null"),
  ('run_pile_singlenode.sh', PILE, {'PYTHON': 'no-python'}, "PYTHON='no-python' is not there"),
  ('run_pile_singlenode.sh', PILE, {'PYTHON': 'false'}, 'false cannot import paxlite'),
  ('run_lambada_singlenode.sh', PILE, {}, "LOGDIR='test_logdir' holds no checkpoint"),
  ('run_pile_multinode.sh', PILE, {}, 'this is no task of a Slurm step'),
  (
    'run_pile_multinode.sh',
    [*PILE, 'float32', '2'],
    {'SLURM_STEP_NUM_TASKS': '6', 'SLURM_JOB_NUM_NODES': '2'},
    '6 tasks do not share 2 GPUs a node evenly',
  ),
  ('run_base_config_multinode.sh', [], {}, 'CONFIG is missing'),
  ('run_base_config_multinode.sh', ['TinyGPT', 'fp8'], {}, "PREC='fp8' is not known"),
  ('run_base_config_multinode.sh', ['TinyGPT', 'float32', '-1'], {}, "NUM_GPUS='-1'"),
  (
    'run_base_config_multinode.sh', ['TinyGPT'], {'PERCORE_BATCH_SIZE': 'a'},
    "E='a' is not a number",
  ),
  ('run_base_config_multinode.sh', ['TinyGPT'], {'VOCAB_PATH': '/x'}, "VOCAB_PATH='/x' does not"),
  ('run_llama_boolq.sh', [], {}, 'VOCAB_PATH is missing'),
  ('run_llama_boolq.sh', [], {'VOCAB_PATH': packaged.VOCAB}, 'TFDS_DATA_DIR is missing'),
  *(
    (
      'run_llama_boolq.sh', [], {'VOCAB_PATH': packaged.VOCAB, 'TFDS_DATA_DIR': '/', name: value},
      said,
    )
    for name, value, said in [
      ('USE_LORA', 'True', "USE_LORA='True' is not known"),
      ('EVAL_ONLY', '1', 'CHECKPOINT_RESTORE_PATH is missing'),
      ('CHECKPOINT_RESTORE_PATH', '/x', "CHECKPOINT_RESTORE_PATH='/x' is not a folder"),
      ('LORA_RANK', '0', "LORA_RANK='0' is not a number"),
      ('LORA_TARGET_LAYERS', 'none', "LORA_TARGET_LAYERS='none' is not known"),
      ('LEARNING_RATE', '-1', "LEARNING_RATE='-1' is not a number above 0"),
      ('LR_SCHEDULE', 'cosine', "LR_SCHEDULE='cosine' is not known"),
      ('ICI_MESH_SHAPE', '8,1,1', "ICI_MESH_SHAPE='8,1,1' is not the shape"),
      ('USE_REPEATED_LAYER', '1', "USE_REPEATED_LAYER='1' is not known"),
      ('USE_MULTIPROCESS', '1', 'USE_MULTIPROCESS=1 is for a task of a Slurm step'),
      ('NVTE_FUSED_ATTN', 'on', "NVTE_FUSED_ATTN='on' is not known"),
      ('LOG_DIR', '/dev/null', "LOG_DIR='/dev/null' cannot be written"),
    ]
  ),
]  # fmt: skip


@pytest.mark.parametrize(('script', 'arguments', 'env', 'said'), MISTAKES)
def test_mistakes_are_one_line_and_nothing_is_written(box, script, arguments, env, said):
  arguments = [box.tfds if a == 'TFDS' else a for a in arguments]
  result = box.run(script, *arguments, code=2, **env)
  assert result.stderr.startswith('error: ')
  assert result.stderr.count('\n') == 1
  assert result.stderr.count('; ') >= 2
  assert said in result.stderr
  assert not result.stdout
  assert not list(box.folder.iterdir())
  assert not box.calls


def test_the_pile_on_one_node(box):
  more = ['--fdl.MAX_STEPS=3', '--fdl.EVAL_TASKS=["a b"]']
  result = box.run(
    'run_pile_singlenode.sh', box.tfds, packaged.VOCAB, 'float32', '2', '1', 'l', *more
  )
  assert result.stdout.startswith('XLA_PYTHON_CLIENT_MEM_FRACTION=0.85 XLA_FLAGS=\n')
  assert set(box.flags) == {
    '--fdl_config=Pile126M', '--job_log_dir=l', f'--tfds_data_dir={box.tfds}',
    f'--fdl.VOCAB_PATH={packaged.VOCAB}', '--fdl.FPROP_DTYPE=float32', '--fdl.PERCORE_BATCH_SIZE=1',
    '--fdl.ICI_MESH_SHAPE=[2,1,1]', '--fdl.DCN_MESH_SHAPE=[1,1,1]', *more,
  }  # fmt: skip


def test_lambada_on_the_run_of_the_pile(box):
  (box.folder / 'test_logdir' / 'checkpoints').mkdir(parents=True)
  box.run('run_lambada_singlenode.sh', box.tfds, packaged.VOCAB)
  wanted = ['--fdl_config=Lambada126M', '--mode=eval', '--job_log_dir=test_logdir']
  assert set(wanted) < set(box.flags)
  assert '--fdl.ICI_MESH_SHAPE=[8,1,1]' in box.flags


def test_a_task_of_the_pile_on_two_nodes(box):
  slurm = {'SLURM_STEP_NUM_TASKS': '16', 'SLURM_JOB_NUM_NODES': '2', 'SLURM_LOCALID': '3'}
  box.run('run_pile_multinode.sh', box.tfds, packaged.VOCAB, **slurm)
  wanted = ['--multiprocess_gpu', '--fdl.ICI_MESH_SHAPE=[8,1,1]', '--fdl.DCN_MESH_SHAPE=[2,1,1]']
  assert set(wanted) < set(box.flags)


def test_fewer_tasks_than_gpus_share_them(box):
  box.stand_in('python', PYTHON.replace('echo >>', 'echo "$JAX_LOCAL_DEVICE_IDS" >>'))
  slurm = {'SLURM_STEP_NUM_TASKS': '4', 'SLURM_JOB_NUM_NODES': '2', 'SLURM_LOCALID': '1'}
  box.run('run_base_config_multinode.sh', 'TinyGPT', **slurm)
  assert box.flags[-1] == '4,5,6,7'


def test_any_experiment(box):
  (box.folder / 'm=1').touch()  # without quotes, a shell expands --fdl.X=[m]=1 or * to this
  additional = '--fdl.DCN_MESH_SHAPE=[1,1,1]  *\t--x=$(touch y) m=[1]\n--last'
  box.run('run_base_config_multinode.sh', 'Synthetic5B', 'float16', '8', 'a b', '', '', additional,
          "--fdl.EVAL_TASKS=['c d']")  # fmt: skip
  assert box.flags == [
    '--fdl_config=Synthetic5B', '--job_log_dir=a b', '--fdl.FPROP_DTYPE=float16',
    '--fdl.DCN_MESH_SHAPE=[1,1,1]', '*', '--x=$(touch', 'y)', 'm=[1]', '--last',
    "--fdl.EVAL_TASKS=['c d']",
  ]  # fmt: skip
  assert [p.name for p in box.folder.iterdir()] == ['m=1']


def test_any_experiment_with_what_the_environment_says(box):
  given = {'TFDS_DATA_DIR': box.tfds, 'VOCAB_PATH': packaged.VOCAB, 'PERCORE_BATCH_SIZE': '0.5'}
  result = box.run('run_base_config_multinode.sh', 'Pile5B', XLA_FLAGS='--b', BASE_XLA_FLAGS='--a',
                   **given)  # fmt: skip
  assert result.stdout.startswith('XLA_PYTHON_CLIENT_MEM_FRACTION=0.9 XLA_FLAGS=--a --b\n')
  assert {f'--tfds_data_dir={box.tfds}', '--fdl.PERCORE_BATCH_SIZE=0.5'} < set(box.flags)


def test_a_python_without_paxlite_gets_that_of_the_scripts(box):
  found = 'if [[ $1 == -c ]]; then [[ -n ${PYTHONPATH:-} ]]; exit; fi'
  text = PYTHON.replace('if [[ $1 == -c ]]; then exit 0; fi', found)
  box.stand_in('python', text.replace('echo >>', 'echo "$PYTHONPATH" >>'))
  box.run('run_base_config_multinode.sh', 'TinyGPT')
  assert box.flags[-1] == str(runs.ROOT)


def xla_flags(config: str, device: str = 'gpu') -> str:
  command = f'source {SCRIPTS}/common.sh; xla_flags "$@"'
  return subprocess.check_output(['bash', '-c', command, 'test', config, device], text=True)


@pytest.mark.slow
def test_xla_knows_the_flags_of_every_experiment():
  loop = 'for name in "${@:2}"; do xla_flags "$name" "$1" || exit 1; echo; done'
  command = ['bash', '-c', f'source {SCRIPTS}/common.sh; {loop}', 'test']
  of_all = lambda device: set(
    subprocess.check_output([*command, device, *experiments()], text=True).splitlines()
  )
  found = of_all('gpu')
  assert len(found) == 2
  assert of_all('cpu') == {''}
  for flags in found:
    env = os.environ | {'XLA_FLAGS': flags, 'JAX_PLATFORMS': 'cpu'}
    subprocess.run([sys.executable, '-c', 'import jax; jax.devices()'], env=env, check=True)


def test_flags_for_gpus_where_there_are_some(box):
  box.stand_in('nvidia-smi', '#!/bin/bash\necho "GPU 0: H100 (UUID: GPU-0)"\n')
  result = box.run('run_base_config_multinode.sh', 'Synthetic126M', XLA_FLAGS='--mine')
  flags = f'XLA_FLAGS={xla_flags("Synthetic126M")} --mine\n'
  assert result.stdout.startswith(f'XLA_PYTHON_CLIENT_MEM_FRACTION=0.9 {flags}')
  assert 'combine_threshold_bytes=33554432' in flags
  assert 'combine_threshold_bytes=51200' in xla_flags('LLaMA7B')


class TestLlama:
  NAME = 'llama-LLaMA7B-mbs-2-te-0-lora-0'

  @pytest.fixture
  def run(self, box):
    given = {'VOCAB_PATH': packaged.VOCAB, 'TFDS_DATA_DIR': box.tfds, 'LOG_DIR': 'logs'}
    return lambda *args, **kwargs: box.run('run_llama_boolq.sh', *args, **(given | kwargs))

  def test_trains_and_evaluates(self, box, run):
    run('--fdl.MODEL_DIMS=16')
    train, evaluate = box.calls
    assert f'--job_log_dir=logs/{self.NAME}' in train
    wanted = {
      '--fdl.LEARNING_RATE=1e-6', '--fdl.LR_SCHEDULE=linear_rampup_cosine_decay',
      '--fdl.MAX_STEPS=1000', '--fdl.LR_COS_WARMUP=500', '--fdl.LR_COS_DECAY_END=1000',
      '--fdl.ICI_MESH_SHAPE=[1,8,1]', '--fdl.DCN_MESH_SHAPE=[1,2,1]', '--fdl.MAX_SEQ_LEN=4096',
      '--fdl.PERCORE_BATCH_SIZE=2', '--fdl.USE_REPEATED_LAYER=False', '--fdl.MODEL_DIMS=16',
    }  # fmt: skip
    assert wanted < set(train)
    assert set(evaluate) == {*train, '--mode=eval', '--fdl.EVAL_SPLIT=None'}
    log = (box.folder / 'logs' / f'{self.NAME}.log').read_text()
    assert log.count('said by paxlite.main') == 2

  def test_lora(self, box, run):
    run(USE_LORA='1', LORA_TARGET_LAYERS='mlp', CHECKPOINT_RESTORE_PATH=box.tfds)
    wanted = {
      '--fdl.USE_LORA=True', '--fdl.LORA_RANK=32', '--fdl.LORA_TARGET_LAYERS=mlp',
      '--fdl.LEARNING_RATE=1e-4', '--fdl.LR_SCHEDULE=constant', '--fdl.MAX_STEPS=600',
      '--fdl.ICI_MESH_SHAPE=[8,1,1]', '--fdl.DCN_MESH_SHAPE=[1,1,1]',
      f'--fdl.CHECKPOINT_RESTORE_PATH={box.tfds}',
    }  # fmt: skip
    assert box.calls
    for call in box.calls:
      assert wanted < set(call)
      assert not any('LR_COS' in flag for flag in call)

  @pytest.mark.parametrize('code', ['75', '1', '2'])
  def test_its_exit_code_is_that_of_training(self, box, run, code):
    run(code=int(code), CODE=code)
    assert len(box.calls) == 1

  def test_evaluates_a_run_or_weights(self, box, run):
    weights = box.folder / 'weights'
    weights.mkdir()
    run(EVAL_ONLY='1', CHECKPOINT_RESTORE_PATH=str(weights))
    (weights / 'checkpoints').mkdir()
    run(EVAL_ONLY='1', CHECKPOINT_RESTORE_PATH=str(weights))
    of_weights, of_run = box.calls
    assert f'--fdl.CHECKPOINT_RESTORE_PATH={weights}' in of_weights
    assert f'--job_log_dir=logs/{self.NAME}-eval' in of_weights
    assert f'--job_log_dir={weights}' in of_run
    assert not any('CHECKPOINT_RESTORE_PATH' in flag for flag in of_run)

  def test_passes_a_signal_on(self, box):
    text = PYTHON.replace('exit "${CODE:-0}"', 'trap "echo leaving; exit 75" TERM\n'
                          'while true; do sleep 0.05; done')  # fmt: skip
    box.stand_in('python', text)
    env = box.env | {'VOCAB_PATH': packaged.VOCAB, 'TFDS_DATA_DIR': box.tfds}
    command = ['bash', str(SCRIPTS / 'run_llama_boolq.sh')]
    with subprocess.Popen(command, cwd=box.folder, env=env, stdout=subprocess.PIPE) as process:
      deadline = time.monotonic() + 20
      while not box.calls and time.monotonic() < deadline:
        time.sleep(0.05)
      time.sleep(0.2)
      process.send_signal(signal.SIGTERM)
      out = process.communicate(timeout=20)[0]
    assert process.returncode == 75
    assert b'leaving' in out
    assert len(box.calls) == 1


SRUN = """#!/bin/bash
printf '%q ' "$@" >>"$CALLS"
echo >>"$CALLS"
if [[ ${CODE:-} == term ]]; then
  until [[ -e told ]]; do sleep 0.05; done
  exit 75
fi
exit "${CODE:-0}"
"""


class Batch:
  """A copy of a batch script in another folder, as Slurm runs it."""

  def __init__(self, box: Sandbox):
    self.box = box
    box.stand_in('srun', SRUN)
    box.stand_in('scontrol', '#!/bin/bash\necho "scontrol $*"\n')
    self.workspace = box.folder / 'work space'
    self.workspace.mkdir()
    self.given = {
      'SLURM_JOB_ID': '7', 'SLURM_JOB_NUM_NODES': '2', 'SLURM_SUBMIT_DIR': str(runs.ROOT),
      'BASE_WORKSPACE_DIR': str(self.workspace), 'BASE_TFDS_DATA_DIR': box.tfds,
      'BASE_VOCAB_PATH': packaged.VOCAB, 'CONFIG': 'Synthetic126M',
    }  # fmt: skip

  def run(self, script: str = 'launch_base_script.sub', code: int = 0, **env: str) -> str:
    spool = self.box.folder.parent / 'slurm_script'
    shutil.copy(runs.ROOT / 'scripts' / script, spool)
    given = {k: v for k, v in (self.given | env).items() if v is not None}
    result = self.box.run(spool, code=code, **given)
    return result.stdout + result.stderr

  @property
  def command(self) -> tuple[list[str], list[str]]:
    """srun's flags, and the command that srun was to run."""
    (words,) = self.box.calls
    at = words.index('bash')
    return words[:at], words[at + 1 :]


@pytest.fixture
def batch(box) -> Batch:
  return Batch(box)


def test_the_base_script_in_a_job(batch):
  batch.run(ADDITIONAL_ARGS='--fdl.MAX_STEPS=1  --x', GPUS_PER_NODE='4')
  flags, (script, *arguments) = batch.command
  output = f'{batch.workspace}/output/output-%j-%n-%t.txt'
  assert {
    '--nodes=2', '--ntasks=8', '--ntasks-per-node=4', '--kill-on-bad-exit=0', '--wait=60',
    '--export=ALL', f'--output={output}', f'--error={output}', '--open-mode=append',
  } < set(flags)  # fmt: skip
  assert not any('container' in flag for flag in flags)
  assert script == str(SCRIPTS / 'run_base_config_multinode.sh')
  assert arguments == [
    'Synthetic126M', 'bfloat16', '4', f'{batch.workspace}/logs', batch.box.tfds, packaged.VOCAB,
    '--fdl.MAX_STEPS=1  --x',
  ]  # fmt: skip


def test_a_container(batch):
  batch.run(CONTAINER='image:1', BASE_TFDS_DATA_DIR=None, ENABLE_TE='1', XLA_FLAGS='--a --b',
            PYTHON=None)  # fmt: skip
  flags, (script, *arguments) = batch.command
  mounts = ','.join(f'{p}:{p}' for p in (batch.workspace, packaged.VOCAB))
  assert {'--container-image=image:1', f'--container-mounts={mounts}'} < set(flags)
  (kept,) = (f for f in flags if f.startswith('--container-env='))
  assert {'ENABLE_TE', 'XLA_FLAGS'} <= set(kept.partition('=')[2].split(','))
  assert script == '/opt/paxlite/paxlite/contrib/gpu/scripts_gpu/run_base_config_multinode.sh'
  assert arguments[4:6] == ['None', packaged.VOCAB]


def test_an_environment(batch):
  batch.box.stand_in('srun', SRUN.replace('echo >>', 'echo "$PATH" >>'))
  venv = batch.box.folder / 'venv'
  (venv / 'bin').mkdir(parents=True)
  (venv / 'bin' / 'python3').symlink_to(sys.executable)
  batch.run(VENV=str(venv))
  assert batch.command[1][-1].startswith(f'{venv}/bin:')


def test_a_script_of_the_user(batch):
  (batch.workspace / 'mine.sh').write_text('')
  batch.run(BASE_SCRIPT='mine.sh')
  assert batch.command[1][:3] == [f'{batch.workspace}/mine.sh', 'Synthetic126M', 'bfloat16']


def test_the_other_jobs(batch):
  batch.run('example_slurm_pile.sub', ADDITIONAL_ARGS='--a --b=[1]')
  assert batch.command[1] == [
    str(SCRIPTS / 'run_pile_multinode.sh'), batch.box.tfds, packaged.VOCAB, 'bfloat16', '8', '4',
    f'{batch.workspace}/logs', '--a', '--b=[1]',
  ]  # fmt: skip
  batch.box.calls_file.unlink()
  environment = 'echo "$CHECKPOINT_RESTORE_PATH" "$USE_MULTIPROCESS$VOCAB_PATH" "$LOG_DIR" >>'
  batch.box.stand_in('srun', SRUN.replace('echo >>', environment))
  batch.run('example_slurm_llama.sub', BASE_CHECKPOINT_DIR=batch.box.tfds, ADDITIONAL_ARGS='--a')
  script, *arguments = batch.command[1]
  assert script == str(SCRIPTS / 'run_llama_boolq.sh')
  assert ' '.join(arguments) == f'--a {batch.box.tfds} 1{packaged.VOCAB} {batch.workspace}/logs'
  batch.box.calls_file.unlink()
  batch.box.stand_in('srun', SRUN)
  batch.run('example_slurm_maxtext.sub', MODEL='mistral-7b', RUN_NAME='speed', CONFIG=None)
  script, config, *arguments, flags = batch.command[1]
  assert (config, arguments[2]) == ('SyntheticMistral7B', f'{batch.workspace}/outputs/speed')
  assert {'--fdl.ICI_MESH_SHAPE=[1,8,1]', '--fdl.DCN_MESH_SHAPE=[1,2,1]'} < set(flags.split())


def test_every_name_of_maxtext_is_an_experiment():
  text = (runs.ROOT / 'scripts' / 'example_slurm_maxtext.sub').read_text()
  found = re.findall(r'\[[\w.-]+\]=(\w+)', text)
  assert len(found) > 7
  assert set(found) <= set(experiments())


@pytest.mark.parametrize(
  ('env', 'said'),
  [
    ({'SLURM_JOB_ID': None}, 'this is not a job'),
    ({'BASE_WORKSPACE_DIR': None}, 'BASE_WORKSPACE_DIR is missing'),
    ({'BASE_WORKSPACE_DIR': 'relative'}, "BASE_WORKSPACE_DIR='relative' is not possible"),
    ({'BASE_WORKSPACE_DIR': '/a,b'}, "BASE_WORKSPACE_DIR='/a,b' is not possible"),
    ({'BASE_WORKSPACE_DIR': '/nowhere'}, "BASE_WORKSPACE_DIR='/nowhere' does not exist"),
    ({'OUTPUT_DIR': '/tmp'}, "OUTPUT_DIR='/tmp' is not possible"),
    ({'LOG_DIR_LOCAL': 'a/../../b'}, "LOG_DIR_LOCAL='a/../../b' leads elsewhere"),
    ({'PREC': 'fp8'}, "PREC='fp8' is not possible"),
    ({'GPUS_PER_NODE': '8x'}, "GPUS_PER_NODE='8x' is not possible"),
    ({'ENABLE_TE': 'yes'}, "ENABLE_TE='yes' is not possible"),
    ({'CONFIG': None}, 'CONFIG is missing'),
    ({'BASE_VOCAB_PATH': '/nowhere'}, "BASE_VOCAB_PATH='/nowhere' does not exist"),
    ({'VENV': '/nowhere'}, "VENV='/nowhere' holds no bin/python3"),
    ({'BASE_SCRIPT': 'nowhere.sh'}, 'nowhere.sh is not there'),
    ({'PAXLITE_DIR': '/nowhere'}, 'run_base_config_multinode.sh is not there'),
    ({'SLURM_SUBMIT_DIR': '/'}, 'scripts/slurm_job.sh is not found'),
    ({'script': 'example_slurm_pile.sub', 'BASE_VOCAB_PATH': None}, 'BASE_VOCAB_PATH is missing'),
    ({'script': 'example_slurm_maxtext.sub', 'MODEL': 'gpt5'}, "MODEL='gpt5' is not known"),
  ],
)
def test_mistakes_of_a_job(batch, env, said):
  printed = batch.run(code=2, **env)
  assert printed.startswith('error: ')
  assert printed.count('\n') == 1
  assert said in printed
  assert not list(batch.workspace.iterdir())
  assert not batch.box.calls


@pytest.mark.parametrize(
  ('code', 'again'), [(0, False), (1, False), (2, False), (75, True), (137, True), (143, True)]
)
def test_what_is_requeued(batch, code, again):
  printed = batch.run(code=code, CODE=str(code))
  assert ('scontrol requeue 7' in printed) == again
  assert (batch.workspace / 'logs' / 'restarts').exists() == again


def test_restarts_without_a_newer_checkpoint_end(batch):
  def attempt(restart: int, checkpoint: int | None = None) -> bool:
    if checkpoint is not None:
      (batch.workspace / f'logs/run/checkpoints/checkpoint_{checkpoint:08}').mkdir(parents=True)
    printed = batch.run(code=75, CODE='75', SLURM_RESTART_COUNT=str(restart))
    assert ('stopped with 75: 3 restarts in a row' in printed) != ('scontrol requeue' in printed)
    return 'scontrol requeue' in printed

  assert all(attempt(i) for i in range(3))
  assert all(attempt(3 + i, checkpoint=10 * i) for i in range(4))  # each has a newer checkpoint
  assert [attempt(7 + i) for i in range(3)] == [True, True, False]
  assert attempt(0)  # the job was submitted again


def test_a_signal_before_there_is_a_step(batch):
  batch.box.stand_in('mkdir', '#!/bin/bash\nkill -USR1 "$PPID"\nexec /bin/mkdir "$@"\n')
  assert 'scontrol requeue 7' in batch.run(code=75)
  assert not batch.box.calls


def test_a_signal_while_the_step_begins(batch):
  """At first squeue does not list the step, and scancel would report no error."""
  batch.box.stand_in('srun', SRUN.replace('printf', 'kill -USR1 "$PPID"\nprintf', 1))
  batch.box.stand_in('squeue', '#!/bin/bash\nif [[ -e asked ]]; then echo 7.0; fi\ntouch asked\n')
  batch.box.stand_in('scancel', '#!/bin/bash\n[[ -e asked ]] && touch told\necho "scancel $*"\n')
  printed = batch.run(code=75, CODE='term')
  assert 'scancel --signal=TERM 7.0' in printed
  assert 'scontrol requeue 7' in printed


def test_a_job_that_was_cancelled_stays_so(batch):
  batch.box.stand_in('srun', SRUN.replace('printf', 'kill -TERM "$PPID"; sleep 0.3\nprintf', 1))
  printed = batch.run(code=75, CODE='75')
  assert 'Slurm decides' in printed
  assert 'requeue 7' not in printed


@pytest.mark.slow
@pytest.mark.skipif(shutil.which('shellcheck') is None, reason='shellcheck is not installed')
def test_shellcheck():
  command = ['shellcheck', '--shell=bash', '--external-sources', *map(str, ALL)]
  result = subprocess.run(command, capture_output=True, text=True, cwd=runs.ROOT, check=False)
  assert result.returncode == 0, result.stdout


@pytest.mark.parametrize('path', ALL, ids=lambda p: p.name)
def test_style(path):
  text = path.read_text()
  assert not re.search(r'(^|[;&|(`]\s*)eval\s', text, re.MULTILINE)
  assert '\t' not in text
  assert max(map(len, text.splitlines())) <= 100
  if path.name.startswith('run_') or path.suffix == '.sub':
    assert 'set -euo pipefail' in text
    assert os.access(path, os.X_OK)


@pytest.mark.parametrize('path', BATCH, ids=lambda p: p.name)
def test_headers(path):
  text = path.read_text()
  for flag in ('-A example', '--ntasks-per-node=8', '--overcommit', '--dependency=singleton',
               '--requeue', '--open-mode=append', '--signal=B:USR1@120'):  # fmt: skip
    assert f'#SBATCH {flag}' in text


def test_the_scripts_are_installed():
  """They are data files of the package."""
  text = (runs.ROOT / 'pyproject.toml').read_text()
  assert '"paxlite.contrib.gpu.scripts_gpu" = ["*.sh"]' in text
