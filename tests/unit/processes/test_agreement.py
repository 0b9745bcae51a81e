"""What the processes of a run must have in common, and what is said where they differ."""

import re

from paxlite.experiments.registry import find
from paxlite.processes.agreement import difference
from paxlite.programs.agreement import statement
from paxlite.programs.run import Run


def test_a_difference_is_named_on_one_line():
  same, other = {'A': '1', 'LR': '0.001'}, {'A': '1', 'LR': '0.002'}
  assert difference([same, same, same]) == ''
  found = difference([same, same, other])
  expected = 'the processes of this run differ: process 2 has LR=0.002, process 0 has 0.001. Start'
  assert found.startswith(expected)
  assert '\n' not in found


def test_what_one_process_lacks_is_a_difference():
  assert 'process 1 has XLA_FLAGS=nothing, process 0 has --x' in difference(
    [{'XLA_FLAGS': '--x'}, {}]
  )
  assert 'process 1 has B=2, process 0 has nothing' in difference([{}, {'B': '2'}])
  many = difference([{f'N{i}': '1' for i in range(9)}, {}])
  assert '; and 4 more. Start all' in many
  assert len(difference([{'A': 'x' * 500}, {'A': 'y' * 500}])) < 400


def changed(run: Run, other: Run) -> list[str]:
  first, second = statement(run), statement(other)
  return [name for name in first if first[name] != second.get(name)]


def test_what_is_stated(tmp_path, monkeypatch):
  """Every value counts, but for a path of the machine; folders and numbers of processes do not."""
  cls = find('TinyGPT')
  run = Run(cls(), tmp_path)
  for name, value in {'LEARNING_RATE': 0.5, 'SEED': 7, 'MAX_STEPS': 9, 'STEP_TIMEOUT': 1.0}.items():
    assert name in changed(run, Run(cls(**{name: value}), tmp_path))
  assert changed(run, Run(cls(LOCAL_CHECKPOINT_DIR='/x'), tmp_path / 'same')) == []
  assert changed(run, Run(cls(), tmp_path, save=False)) == ['--enable_checkpoint_saving']
  code = statement(run)['the code of paxlite']
  assert re.fullmatch('[0-9a-f]{8}', code)
  monkeypatch.setenv('XLA_FLAGS', '--xla_dump_to=/tmp/x --xla_cpu_enable_fast_math=true')
  assert statement(run)['XLA_FLAGS'] == '--xla_cpu_enable_fast_math=true'
