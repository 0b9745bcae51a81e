"""Runs the batch scripts on a real Slurm of two virtual nodes, with one task each."""

import pathlib
import re
import sys
import time
from collections.abc import Callable

import pytest

from tests.support import runs, slurm

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(slurm.missing()), reason=slurm.missing())]

STEPS = 60
MESH = '--fdl.ICI_MESH_SHAPE=[1,1,1] --fdl.DCN_MESH_SHAPE=[2,1,1] --fdl.SUMMARY_INTERVAL_STEPS=1'
LONG = (
  f'{MESH} --fdl.MAX_STEPS={STEPS} --fdl.CHECKPOINT_EVERY_N_STEPS=5'
  f' --fdl.LEARNING_RATE=5e-3 --fdl.LR_COS_DECAY_END={STEPS}'
)


class Job:
  """A job of launch_base_script.sub, or of another script in scripts/."""

  def __init__(self, cluster: slurm.Cluster, workspace: pathlib.Path, *flags: str, **env: str):
    self.cluster = cluster
    self.workspace = workspace
    self.logs = workspace / 'logs' / 'run'
    script = env.pop('script', 'launch_base_script.sub')
    given = {
      **runs.environment(),
      'VENV': sys.prefix,
      'BASE_WORKSPACE_DIR': str(workspace),
      'OUTPUT_DIR': 'output',
      'LOG_DIR_LOCAL': 'logs/run',
      'PREC': 'float32',
      'GPUS_PER_NODE': '1',
      'ENABLE_TE': '0',
      'ENABLE_FP8': '0',
    }
    self.number = cluster.submit(
      runs.ROOT / 'scripts' / script,
      *('-N', '2', '-A', 'any', '-p', 'main', '-J', workspace.name, '-t', '30'),
      f'--output={workspace}/batch.txt', *flags, env=given | env, cwd=runs.ROOT,
    )  # fmt: skip

  def wait_for_step(self, step: int) -> None:
    deadline = time.monotonic() + 120
    metrics = self.logs / 'metrics.jsonl'  # one line per step
    while not metrics.exists() or metrics.read_text().count('\n') < step:
      assert time.monotonic() < deadline, self.said
      time.sleep(0.2)

  def end(self, state: str = 'COMPLETED') -> None:
    found = self.cluster.wait(self.number)
    assert found['JobState'] == state, f'{found}\n{self.said}\n{self.printed}'

  @property
  def said(self) -> str:
    """The output of the batch script."""
    return (self.workspace / 'batch.txt').read_text()

  @property
  def printed(self) -> str:
    """The output of the first task."""
    return (self.workspace / 'output' / f'output-{self.number}-0-0.txt').read_text()


@pytest.fixture(scope='module')
def cluster():
  with slurm.cluster() as found:
    yield found


@pytest.fixture(scope='module')
def losses(cluster, tmp_path_factory) -> dict[int, float]:
  """The losses of an undisturbed job on text."""
  workspace = tmp_path_factory.mktemp('undisturbed')
  job = Job(cluster, workspace, CONFIG='tests.support.experiments.TinyText', ADDITIONAL_ARGS=LONG)
  job.end()
  assert 'complete' in job.said
  found = runs.losses(job.logs)
  assert list(found) == list(range(1, STEPS + 1))
  assert found[STEPS] < found[1] - 0.2
  return found


def test_the_recipe_of_pax(cluster, tmp_path):
  sizes = '--fdl.NUM_LAYERS=1 --fdl.NUM_HEADS=2 --fdl.MODEL_DIMS=16 --fdl.VOCAB_SIZE=64'
  more = f'{MESH} {sizes} --fdl.MAX_SEQ_LEN=16 --fdl.MAX_STEPS=3'
  # the environment's Python runs, whatever PYTHON a profile exports
  job = Job(cluster, tmp_path, CONFIG='Synthetic126M', ADDITIONAL_ARGS=more, PYTHON='no-python')
  job.end()
  assert list(runs.losses(job.logs)) == [1, 2, 3]
  assert 'step 3/3' in job.printed


def saved_at(printed: str) -> int:
  """Returns the step at which the first SIGTERM was answered."""
  found = re.search(r'step ([\d,]+) is saved', printed)
  assert found, printed
  return int(found[1].replace(',', ''))


@pytest.fixture
def slow_job(cluster, losses, tmp_path) -> Callable[..., Job]:
  """Starts a slow job and waits for its 8th step; the job is fast after a restart by Slurm."""

  def start(*flags: str) -> Job:
    config = 'tests.support.experiments.SlowText'
    job = Job(cluster, tmp_path, *flags, CONFIG=config, ADDITIONAL_ARGS=LONG)
    job.wait_for_step(8)
    return job

  return start


def test_the_time_limit(slow_job, losses):
  """The limit becomes so short that its signal is due; Slurm checks that every 30 seconds.

  With a short limit from the start, a slow machine would get the signal before the 8th step.
  """
  job = slow_job('--signal=B:USR1@170')
  job.cluster.run('scontrol', 'update', f'JobId={job.number}', 'TimeLimit=3')
  job.cluster.wait(job.number, lambda found: found['Restarts'] == '1')
  job.cluster.run('scontrol', 'update', f'JobId={job.number}', 'TimeLimit=30')
  job.end()
  assert 'got USR1' in job.said
  assert re.search('requeued after exit code .*: restart 1 from this checkpoint', job.said)
  assert f'Continuing from the checkpoint of step {saved_at(job.printed)}.' in job.printed
  assert runs.losses(job.logs) == losses


@pytest.mark.exhaustive
def test_requeued_from_outside(slow_job, losses):
  """As at the time limit, but by SIGTERM, which tests/runs/test_scripts.py sends to the script."""
  job = slow_job()
  job.cluster.run('scontrol', 'requeue', job.number)
  job.end()
  assert 'got TERM' in job.said
  assert 'Slurm decides' in job.said
  assert f'Continuing from the checkpoint of step {saved_at(job.printed)}.' in job.printed
  assert runs.losses(job.logs) == losses


def test_the_first_node_is_lost(slow_job, losses):
  """The batch script is lost too, so Slurm itself requeues the job."""
  job = slow_job()
  job.cluster.kill_node('n0')
  job.cluster.wait(job.number, lambda found: found['JobState'] != 'RUNNING')
  job.cluster.start_node('n0')
  job.end()
  assert 'restart 0] requeued' not in job.said
  assert 'restart 1] runs' in job.said
  assert re.search(r'Continuing from the checkpoint of step \d*[05]\.', job.printed)
  assert runs.losses(job.logs) == losses


@pytest.mark.exhaustive
def test_another_node_is_lost_for_a_moment(slow_job, losses):
  """Slurm has not noticed the loss, so the batch script must see that its tasks are gone."""
  job = slow_job()
  job.cluster.kill_node('n1')
  job.cluster.start_node('n1')
  job.end()
  assert 'requeued after exit code' in job.said
  assert re.search(r'Continuing from the checkpoint of step \d*[05]\.', job.printed)
  assert runs.losses(job.logs) == losses


def test_no_progress_ends(cluster, tmp_path):
  (tmp_path / 'dies.sh').write_text('kill -KILL $$\n')
  job = Job(cluster, tmp_path, CONFIG='any', BASE_SCRIPT='dies.sh')
  job.end('FAILED')
  assert job.said.count('requeued after exit code') == 3
  assert '3 restarts in a row without a newer checkpoint' in job.said


def test_a_mistake_is_not_repeated(cluster, tmp_path):
  job = Job(cluster, tmp_path, CONFIG='TinyGPTT', ADDITIONAL_ARGS=MESH)
  job.end('FAILED')
  assert 'failed with 2: not requeued' in job.said
  assert 'Did you mean TinyGPT' in job.printed
