"""Processes that are killed lose at most the steps since the last state that their hosts have kept.

Two processes with folders of their own stand for two hosts.
"""

import json
import random
import shutil
import time

import pytest

from paxlite.data import packaged
from paxlite.files.text_files import read_text
from tests.support import runs
from tests.support.processes import on_processes, start_processes

EVERY = 6
FLAGS = [
  f'--fdl.LOCAL_CHECKPOINT_EVERY_N_STEPS={EVERY}', '--fdl.CHECKPOINT_EVERY_N_STEPS=100000',
  '--fdl.EVAL_INTERVAL_STEPS=100000', '--fdl.MAX_EVAL_BATCHES=1', '--fdl.DROPOUT_PROB=0.1',
  '--fdl.NUM_LAYERS=1', '--fdl.MAX_STEPS=40', '--fdl.HELD_OUT_EVERY=5',
  f'--fdl.VOCAB_PATH={packaged.VOCAB}',
]  # fmt: skip
CONFIG = 'tests.support.experiments.TinyDocuments'


@pytest.fixture(scope='module')
def documents(tmp_path_factory) -> str:
  """The flag of two files of documents, each of which is read by one of two readers."""
  lines = [p for p in read_text(packaged.TEXTS[0]).split('\n\n') if p.strip()]
  text = ''.join(json.dumps({'text': line}) + '\n' for line in lines)
  paths = [tmp_path_factory.mktemp('documents') / name for name in ('a.jsonl', 'b.jsonl')]
  for path in paths:
    path.write_text(text)
  return f'--fdl.TRAIN_SOURCES={[str(p) for p in paths]}'


def hosts(tmp_path) -> list:
  return [tmp_path / f'host{i}' for i in range(2)]


def own(tmp_path) -> list[str]:
  return [f'--fdl.LOCAL_CHECKPOINT_DIR={host}' for host in hosts(tmp_path)]


def steps_kept(host) -> list[int]:
  return sorted(int(p.name[:8]) for p in host.rglob('*.state'))


def killed(tmp_path, victim: int, after: int, flags: list[str], all_at_once: bool = False):
  """Kills a process once there are `after` records; returns their number and the output.

  The other process notices it and ends, unless it is killed as well.
  """
  folder = tmp_path / 'run'
  started = start_processes(folder, 2, *FLAGS, *flags, config=CONFIG, each=own(tmp_path))
  count = lambda: len((folder / 'metrics.jsonl').read_bytes().splitlines())
  until = time.monotonic() + 120
  while not (folder / 'metrics.jsonl').exists() or count() < after:
    assert time.monotonic() < until
    assert started[0].poll() is None, started[0].communicate()
    time.sleep(0.01)
  started[victim].kill()
  if all_at_once:
    started[1 - victim].kill()
  printed = [p.communicate(timeout=120) for p in started]
  assert all_at_once or started[1 - victim].returncode == 75, printed
  return count(), printed[0][0] + printed[0][1]


def continued_from(printed: str) -> int:
  found = [line for line in printed.splitlines() if 'Continuing from the local state' in line]
  assert len(found) == 1, printed
  return int(found[0].rstrip('.').rpartition(' ')[2].replace(',', ''))


@pytest.mark.exhaustive
def test_killed_processes_lose_a_few_steps_and_replicas_help_a_new_host(tmp_path, documents):
  """The mesh has two replicas, one on each host. Each process reads documents of its own."""
  rng = random.Random(0)
  whole = tmp_path / 'whole'
  on_processes(whole, 2, *FLAGS, documents, config=CONFIG, each=own(tmp_path / 'other'))

  lost, _ = killed(tmp_path, victim=0, after=rng.randrange(7, 13), flags=[documents])
  assert all(1 <= len(steps_kept(host)) <= 2 for host in hosts(tmp_path))
  shutil.rmtree(hosts(tmp_path)[1])  # it is replaced
  after = lost + rng.randrange(7, 13)
  before, printed = killed(tmp_path, 1, after, [documents], all_at_once=True)
  assert lost - EVERY <= continued_from(printed) <= lost
  lost = before

  # A file of one host is damaged; the other has a replica.
  newest = max(hosts(tmp_path)[0].rglob('*.state'))
  content = bytearray(newest.read_bytes())
  content[len(content) // 2] ^= 1
  newest.write_bytes(content)
  printed, _ = on_processes(
    tmp_path / 'run', 2, *FLAGS, documents, config=CONFIG, each=own(tmp_path)
  )
  assert lost - EVERY <= continued_from(printed) <= lost
  assert runs.losses(tmp_path / 'run') == runs.losses(whole)
  assert len(runs.losses(whole)) == 40
  assert not [p for host in hosts(tmp_path) for p in host.rglob('*.state')]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_without_replicas_a_new_host_means_the_last_checkpoint(tmp_path, documents):
  flags = [documents, '--fdl.ICI_MESH_SHAPE=[1,4,1]', '--fdl.CHECKPOINT_EVERY_N_STEPS=12']
  lost, _ = killed(tmp_path, 1, 16, flags)
  kept = steps_kept(hosts(tmp_path)[0])
  shutil.rmtree(hosts(tmp_path)[1])
  flags.append('--fdl.MAX_STEPS=20')
  started = start_processes(tmp_path / 'run', 2, *FLAGS, *flags, config=CONFIG, each=own(tmp_path))
  printed, said = started[0].communicate(timeout=120)
  assert started[0].returncode == 0, said
  assert f'Continuing from the checkpoint of step {lost // 12 * 12}.' in printed
  for step in kept:
    if step > lost // 12 * 12:
      assert f'the local state of step {step} is incomplete and not used: 2 of 4 devices' in said
  started[1].communicate(timeout=120)
