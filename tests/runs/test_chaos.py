"""The benchmark of faults: a short version, and whether it would notice a loss."""

import dataclasses
import json
import pathlib
import random
import signal
import subprocess
import sys

import pytest

from benchmarks.chaos import starts, supervisor, table
from benchmarks.chaos.faults import AT_REST, KINDS, Draws, Plan
from benchmarks.chaos.outcomes import Outcome
from benchmarks.chaos.places import Place, Run, Started
from benchmarks.chaos.supervisor import Supervisor
from tests.support import failing_calls, runs

WHOLE = Outcome([(1, 'a'), (2, 'b')], [(2, 'c')], {'params/x': '0', 'params/y': '1'})


@pytest.mark.exhaustive
@failing_calls.NEEDS_A_COMPILER
def test_each_kind_of_fault_once_and_nothing_is_lost(tmp_path):
  """A folder and SeaweedFS have no other kinds; bits of files need runs that last longer."""
  flags = '--minutes=0', '--steps=40', '--places', 'gs', 'devices', 'processes'
  out = runs.module('benchmarks.chaos', *flags, f'--json={tmp_path}/x')
  found = json.loads((tmp_path / 'x').read_text())
  assert found['kinds'].keys() >= KINDS.keys() - set(AT_REST)
  assert not any(found['lost'].values())
  assert sum(found['runs_to_the_end'].values()) >= 3
  assert found['starts_with_several_faults'] > 0
  assert '| SIGKILL | ' in out.stdout


@pytest.mark.parametrize(
  ('change', 'lost'),
  [
    ({}, {}),
    ({'losses': [(1, 'a')]}, {'records': 1}),
    ({'losses': [(1, 'a'), (2, 'b'), (2, 'b')]}, {'records': 1}),
    ({'losses': [(1, 'a'), (2, 'x')]}, {'bits': 1}),
    ({'evaluations': []}, {'records': 1}),
    ({'evaluations': [(2, 'x')]}, {'bits': 1}),
    ({'state': {'params/x': '0', 'params/y': '2'}}, {'bits': 1}),
  ],
)
def test_what_differs_at_the_end_is_counted(change, lost):
  assert WHOLE.lost(dataclasses.replace(WHOLE, **change)) == lost


def started(folder: pathlib.Path, code: str) -> Started:
  log = folder / 'start'
  with open(f'{log}.out', 'wb') as out, open(f'{log}.err', 'wb') as err:
    process = subprocess.Popen([sys.executable, '-c', code], stdout=out, stderr=err)
  return Started([process], [log])


STOPPED = 'import sys; print("stopped: {}", file=sys.stderr); sys.exit(1)'
FLIP = ('bit of the batch', 1, 7)


@pytest.mark.parametrize(
  ('code', 'plan', 'lost'),
  [
    ('pass', Plan('a'), {}),
    ('raise ValueError', Plan('a', happened=['full disk']), {'unclear errors': 1}),
    (STOPPED.format('it is full'), Plan('a', happened=['full disk']), {}),
    (STOPPED.format('it is full'), Plan('a'), {'unclear errors': 1}),
    ('import sys; sys.exit(1)', Plan('a', happened=['full disk']), {'unclear errors': 1}),
    (
      STOPPED.format('the batch of step 7 differs from the data, on device 1.'),
      Plan('a', happened=[FLIP[0]], flip=FLIP),
      {},
    ),
    (
      STOPPED.format('the batch of step 7 differs from the data, on device 2.'),
      Plan('a', happened=[FLIP[0]], flip=FLIP),
      {'unclear errors': 1},
    ),
    ('pass', Plan('a', happened=[FLIP[0]], flip=FLIP), {'bits': 1}),
  ],
)
def test_an_end_without_a_reason_or_a_clear_error_is_counted(tmp_path, code, plan, lost):
  run, one = Run(Place('folder'), tmp_path / 'run', 10, ''), started(tmp_path, code)
  assert not starts.watch(one, plan)
  assert starts.ended(run, one, plan, False, plan.happened, False).lost == lost


def test_a_start_that_hangs_is_killed_and_counted(tmp_path, monkeypatch):
  monkeypatch.setattr(starts, 'HANG', 0.5)
  run, one = (
    Run(Place('folder'), tmp_path / 'run', 10, ''),
    started(tmp_path, 'import time; time.sleep(60)'),
  )
  assert starts.watch(one, Plan('a'))
  assert one.processes[0].returncode == -signal.SIGKILL
  assert starts.ended(run, one, Plan('a'), True, [], False).lost == {'hangs': 1}


@pytest.mark.slow
@pytest.mark.cases(fast=0, slow=2)
@pytest.mark.parametrize(
  ('flags', 'message'),
  [
    (('--kinds', 'lost process'), 'none of --kinds happens in any of --places'),
    (('--minutes=0', '--kinds', *AT_REST), 'flipped bits of files alone need some minutes'),
  ],
)
def test_faults_that_cannot_happen_are_refused(flags, message):
  result = runs.module('benchmarks.chaos', '--places', 'folder', *flags, code=2)
  assert message in result.stderr
  assert 'Traceback' not in result.stderr


def test_a_run_that_never_ends_with_0_is_lost(tmp_path):
  counted = table.Table()
  run = Run(Place('folder'), tmp_path / 'run', 10, '')
  run.starts = supervisor.MOST_STARTS
  nothing = Supervisor(run, random.Random(0), Draws(random.Random(0), []), None, list, counted)
  nothing._reached = run.steps
  nothing.bring_to_end(WHOLE)
  assert counted.lost == 1


def test_the_table_has_what_was_lost_and_done_again():
  counted = table.Table()
  counted.add('folder', ['SIGKILL', 'full disk'], ['killed'], [], None, {})
  counted.add('folder', [], ['complete'], ['SIGKILL', 'full disk'], 7, {'checkpoints': 1})
  counted.lose({'records': 2}, {'SIGKILL'})
  found = counted.result()
  assert counted.lost == 3
  assert found['kinds']['SIGKILL']['steps_again'] == {'median': 7, 'largest': 7}
  assert found['kinds']['SIGKILL']['lost']['records'] == 2
  assert found['steps_again'] == {'median': 7, 'largest': 7, 'all': 7}
  lines = table.markdown(found).splitlines()
  assert lines[2] == '| SIGKILL | 1 | 1 | 1 | 7, 7 | killed (1) | 0, 2, 0, 0, 0, 0 |'
  assert lines[-1].endswith('| 0, 2, 0, 1, 0, 0 |')
