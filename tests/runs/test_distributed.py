"""Several processes give the same losses as one, also if their number changes at a restart."""

import json
import math
import pathlib
import shutil
import socket
import subprocess
import sys

import numpy as np
import pytest
import yaml

import tests.support.experiments  # noqa: F401  RunData imports no experiments
from paxlite.data import packaged
from paxlite.data.positions import Field
from paxlite.files.text_files import read_text
from paxlite.run_data.run_data import RunData
from tests.support import runs
from tests.support.processes import MESH, on_processes


@pytest.mark.exhaustive
@pytest.mark.slow
def test_two_processes_are_as_one_and_go_on_as_one(tmp_path):
  config = 'tests.support.experiments.TinyText'
  alone, two, mixed = (tmp_path / name for name in ('alone', 'two', 'mixed'))
  runs.run(alone, *MESH, '--fdl.MAX_STEPS=6', config=config, devices=4)
  printed = on_processes(two, 2, '--fdl.MAX_STEPS=6', config=config)
  assert 'step 6' in printed[0]
  assert 'step 6' not in printed[1]
  on_processes(mixed, 2, '--fdl.MAX_STEPS=3', config=config)
  runs.run(mixed, *MESH, '--fdl.MAX_STEPS=6', config=config, devices=4)
  expected = runs.losses(alone)
  assert len(expected) == 6
  for folder in (two, mixed):
    found = runs.losses(folder)
    assert found.keys() == expected.keys()
    assert all(math.isclose(found[s], expected[s], rel_tol=1e-5) for s in expected)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_one_saves_and_two_go_on(tmp_path):
  alone, mixed = tmp_path / 'alone', tmp_path / 'mixed'
  runs.run(alone, *MESH, '--fdl.MAX_STEPS=6', devices=4)
  runs.run(mixed, *MESH, '--fdl.MAX_STEPS=3', devices=4)
  on_processes(mixed, 2, '--fdl.MAX_STEPS=6', config='TinyGPT')
  expected, found = runs.losses(alone), runs.losses(mixed)
  assert all(math.isclose(found[s], expected[s], rel_tol=1e-5) for s in range(1, 7))


@pytest.mark.exhaustive
def test_streams_go_on_with_the_same_rows_on_another_number_of_processes(tmp_path):
  """Two processes train and one continues; each has a reader of its own, as the files are equal."""
  lines = [p for p in read_text(packaged.TEXTS[0]).split('\n\n') if p.strip()]
  text = ''.join(json.dumps({'text': line}) + '\n' for line in lines)
  paths = [str(tmp_path / name) for name in ('a.jsonl', 'b.jsonl')]
  for path in paths:
    pathlib.Path(path).write_text(text)
  flags = [f'--fdl.TRAIN_SOURCES={paths}', f'--fdl.VOCAB_PATH={packaged.VOCAB}',
           '--fdl.HELD_OUT_EVERY=5', '--fdl.MAX_EVAL_BATCHES=1']  # fmt: skip
  config = 'tests.support.experiments.TinyDocuments'
  whole, two, mixed = (tmp_path / name for name in ('whole', 'two', 'mixed'))
  alone = lambda folder, steps: runs.run(
    folder, *MESH, *flags, f'--fdl.MAX_STEPS={steps}', config=config, devices=4
  )
  alone(whole, 6)
  on_processes(two, 2, *flags, '--fdl.MAX_STEPS=3', config=config)
  shutil.copytree(two, mixed)
  on_processes(two, 2, *flags, '--fdl.MAX_STEPS=6', config=config)
  alone(mixed, 6)
  expected = runs.losses(whole)
  assert len(expected) == 6
  for folder in (two, mixed):
    found = runs.losses(folder)
    assert found.keys() == expected.keys()
    assert all(math.isclose(found[s], expected[s], rel_tol=1e-5) for s in expected)
  metadata = [
    json.loads((f / 'checkpoints/checkpoint_00000006/data/metadata').read_text())
    for f in (whole, two, mixed)
  ]
  assert metadata[0]['position'] == metadata[1]['position'] == metadata[2]['position']
  assert metadata[0]['position'][0][Field.READERS] == 2
  read = [list(RunData(str(folder)).batches(1, 6)) for folder in (whole, two, mixed)]
  for (step, one), *others in zip(*read, strict=True):
    for other_step, other in others:
      assert step == other_step
      for name, array in one.items():
        np.testing.assert_array_equal(array, other[name])


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_jobset_of_the_docs(tmp_path):
  """Runs its two pods as two processes of one device at tiny sizes, without Kubernetes."""
  page = (runs.ROOT / 'docs' / 'clusters.md').read_text()
  jobset = yaml.safe_load(page.partition('```yaml\n')[2].partition('```')[0])
  (job,) = jobset['spec']['replicatedJobs']
  pods = job['template']['spec']
  (container,) = pods['template']['spec']['containers']
  name = jobset['metadata']['name']
  first_pod = f'{name}-{job["name"]}-0-0.{name}'  # the form of JobSet's DNS names
  with socket.socket() as s:
    s.bind(('127.0.0.1', 0))
    port = s.getsockname()[1]
  here = {
    f'{first_pod}:12345': f'127.0.0.1:{port}',
    '/logs/126m': str(tmp_path),
    '[8,1,1]': '[1,1,1]',
  }
  assert container['command'] == ['python', '-m', 'paxlite.main']
  text = '\n'.join(container['args'])
  assert all(text.count(old) == 1 for old in here)
  for old, new in here.items():
    text = text.replace(old, new)
  tiny = '--fdl.NUM_LAYERS=1', '--fdl.MODEL_DIMS=16', '--fdl.NUM_HEADS=2', '--fdl.VOCAB_SIZE=64'
  processes = [
    runs.started(
      [sys.executable, '-m', 'paxlite.main',
       *text.replace('$(JOB_COMPLETION_INDEX)', str(i)).splitlines(), *tiny,
       '--fdl.MAX_SEQ_LEN=16', '--fdl.MAX_STEPS=2', '--fdl.HIDDEN_DIMS=32'],
      runs.environment(), stderr=subprocess.PIPE, stdout=subprocess.PIPE,
    )
    for i in range(pods['completions'])
  ]  # fmt: skip
  ended = [p.communicate(timeout=120) for p in processes]
  assert [p.returncode for p in processes] == [0, 0], ended
  assert (tmp_path / 'checkpoints' / 'checkpoint_00000002').is_dir()
