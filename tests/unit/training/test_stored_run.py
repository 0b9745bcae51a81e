"""A run in a bucket, in this process; tests/runs/test_stores.py starts and disturbs others."""

import json

import pytest

from paxlite.core.addresses import Address
from paxlite.core.errors import UserError
from paxlite.experiments.demo import TinyGPT
from paxlite.programs import stored_run
from paxlite.programs.run import Run
from paxlite.programs.training import train
from paxlite.tools.report_page.records import read_runs
from tests.support import runs
from tests.support.gcs_server import gcs_server

PLACE = 'gs://bkt/runs/one'


def experiment(steps):
  return TinyGPT(
    MAX_STEPS=steps, NUM_LAYERS=1, CHECKPOINT_EVERY_N_STEPS=2, SUMMARY_INTERVAL_STEPS=1
  )


def test_a_run_continues_on_another_machine(tmp_path, monkeypatch):
  monkeypatch.setattr(stored_run, '_LOOK_SECONDS', 0.05)
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  with gcs_server('bkt') as gcs:
    for name, value in gcs.environment().items():
      monkeypatch.setenv(name, value)
    for machine, steps in (('a', 3), ('b', 4)):
      folder = stored_run.twin(Address.parsed(PLACE), str(tmp_path / machine))
      train(Run(experiment(steps), folder, address=Address.parsed(PLACE)))
    train(Run(experiment(4), tmp_path / 'folder'))
    (stored,) = read_runs([PLACE])
    assert runs.losses(stored.folder) == runs.losses(tmp_path / 'folder')
    assert stored.goodput.attempts == 2
    content = {k.removeprefix('runs/one/'): v for k, (_, v) in gcs.objects['bkt'].items()}
    steps = {k.split('/')[1] for k in content if k.endswith('checksums.json')}
    assert steps == {f'checkpoint_{step:08d}' for step in (2, 3, 4)}
    assert json.loads(content['lease.json'])['released']
    with pytest.raises(UserError, match='a different experiment: NUM_LAYERS 1 → 2'):
      train(Run(experiment(7).replaced(NUM_LAYERS=2), folder, address=Address.parsed(PLACE)))
    assert json.loads(gcs.objects['bkt']['runs/one/lease.json'][1])['released']
