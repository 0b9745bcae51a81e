"""Processes of one run that have unlike values, code, data or folders end together, with 2."""

import pathlib
import socket
import subprocess
import sys

import pytest

from paxlite.data import packaged
from paxlite.files.text_files import read_text
from tests.support import runs

FLAGS = [
  '--fdl.ICI_MESH_SHAPE=[2,1,1]', '--fdl.PERCORE_BATCH_SIZE=1', '--fdl.MAX_STEPS=2',
  '--fdl.NUM_LAYERS=1', '--num_hosts=2',
]  # fmt: skip
OWN = """
import dataclasses
import pathlib
from paxlite.config.templates import config
from paxlite.experiments.registry import find
from paxlite.losses.token_losses import CrossEntropy

@dataclasses.dataclass(frozen=True)
class Scaled(CrossEntropy):
  def __call__(self, outputs, batch):
    return super().__call__(outputs, batch) * float(pathlib.Path('factor').read_text())

class Mine(find('TinyGPT')):
  def losses(self):
    return {'avg_xent': config(Scaled)}
"""


def ended(
  folders: list[pathlib.Path], *flags: str, each: tuple[str, str] = ('', '')
) -> list[tuple[int, str]]:
  """Runs a process in each folder; returns their exit codes and the last lines of stderr."""
  with socket.socket() as s:
    s.bind(('127.0.0.1', 0))
    address = f'--server_addr=127.0.0.1:{s.getsockname()[1]}'
  environment = runs.environment() | {'PYTHONPATH': str(runs.ROOT)}
  started = [
    runs.started(
      [sys.executable, '-m', 'paxlite.main', *FLAGS, *flags, *filter(None, [each[i]]), address,
       f'--host_idx={i}'],
      environment, folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )
    for i, folder in enumerate(folders)
  ]  # fmt: skip
  printed = [p.communicate(timeout=120)[1].splitlines() for p in started]
  return [(p.returncode, lines[-1]) for p, lines in zip(started, printed, strict=True)]


def differ(found: list[tuple[int, str]], expected: str) -> None:
  for code, said in found:
    assert code == 2, said
    assert expected in said


@pytest.mark.cases(fast=0, slow=2)
@pytest.mark.slow
@pytest.mark.parametrize(
  ('flag', 'expected'),
  [
    ('--fdl.LEARNING_RATE=0.002', 'process 1 has LEARNING_RATE=0.002, process 0 has 0.0006'),
    ('--fdl.MAX_STEPS=4', 'process 1 has MAX_STEPS=4, process 0 has 2'),
    ('--fdl.ICI_MESH_SHAPE=[1,2,1]', 'has ICI_MESH_SHAPE=[1, 2, 1]'),
  ],
)
def test_values(tmp_path, flag, expected):
  """All end before there are devices, so that unlike programs cannot wait for each other."""
  flags = '--fdl_config=TinyGPT', f'--job_log_dir={tmp_path}/run'
  differ(ended([tmp_path, tmp_path], *flags, each=('', flag)), expected)
  assert not (tmp_path / 'run').exists()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_code_data_and_folders(tmp_path):
  here = [tmp_path / 'a', tmp_path / 'b']
  for folder in here:
    folder.mkdir()
    (folder / 'mine.py').write_text(OWN)
    (folder / 'factor').write_text('1')
    text = read_text(packaged.TEXTS[0])
    (folder / 'text.txt').write_text(text if folder.name == 'a' else text.replace('the', 'The'))
  own = '--fdl_config=mine.Mine', f'--job_log_dir={tmp_path}/run'
  text = (
    '--fdl_config=DemoGPT', '--fdl.TRAIN_FILES=["text.txt"]', '--fdl.EVAL_FILES=[]',
    '--fdl.MAX_SEQ_LEN=64', '--fdl.MODEL_DIMS=16', '--fdl.NUM_HEADS=2', '--fdl.HIDDEN_DIMS=32',
    f'--job_log_dir={tmp_path}/run',
  )  # fmt: skip
  differ(ended(here, *text), 'process 1 has the training data')
  (here[1] / 'factor').write_text('2')
  differ(ended(here, *own), 'process 1 has the program of the train step')
  (here[1] / 'mine.py').write_text(OWN + '# another comment\n')
  differ(ended(here, *own), 'process 1 has the code of mine')
  own = '--fdl_config=TinyGPT', '--job_log_dir=run'
  said = ended(here, *own)
  assert [code for code, _ in said] == [2, 2], said
  assert 'sees other files than process 0 in --job_log_dir=' in said[0][1]
