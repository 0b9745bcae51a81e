"""Processes compare what they must have in common, over real sockets between threads."""

import concurrent.futures
import re
import socket

import pytest

from paxlite.core.errors import Interrupted, UserError
from paxlite.experiments.registry import find
from paxlite.processes import rendezvous
from paxlite.processes.agreement import compare_at_start, difference
from paxlite.programs.agreement import statement
from paxlite.programs.run import Run


def pair() -> tuple[socket.socket, socket.socket]:
  with socket.create_server(('127.0.0.1', 0)) as server:
    ours = socket.create_connection(server.getsockname())
    return ours, server.accept()[0]


def compared(*statements: dict[str, str]) -> list[str]:
  """Returns the errors of the processes, '' for none."""
  pairs = {i: pair() for i in range(1, len(statements))}

  def compare(process: int) -> str:
    of_0 = {i: ends[0] for i, ends in pairs.items()}
    connections = of_0 if process == 0 else {0: pairs[process][1]}
    try:
      compare_at_start(connections, process, statements[process])
    except UserError as e:
      return str(e)
    return ''

  with concurrent.futures.ThreadPoolExecutor(len(statements)) as pool:
    found = list(pool.map(compare, range(len(statements))))
  for ends in pairs.values():
    for end in ends:
      end.close()
  return found


def test_all_processes_get_the_same_error_on_one_line():
  same, other = {'A': '1', 'LR': '0.001'}, {'A': '1', 'LR': '0.002'}
  assert compared(same, same, same) == ['', '', '']
  errors = compared(same, same, other)
  assert len(set(errors)) == 1
  expected = 'the processes of this run differ: process 2 has LR=0.002, process 0 has 0.001. Start'
  assert errors[0].startswith(expected)
  assert '\n' not in errors[0]


def test_what_one_process_lacks_is_a_difference():
  assert 'process 1 has XLA_FLAGS=nothing, process 0 has --x' in difference(
    [{'XLA_FLAGS': '--x'}, {}]
  )
  assert 'process 1 has B=2, process 0 has nothing' in difference([{}, {'B': '2'}])
  many = difference([{f'N{i}': '1' for i in range(9)}, {}])
  assert '; and 4 more. Start all' in many
  assert len(difference([{'A': 'x' * 500}, {'A': 'y' * 500}])) < 400


@pytest.mark.parametrize('last', [b'', b'\0\0\0\4{', b'\xff\xff\xff\xff', b'\0\0\0\2xy'])
def test_a_process_that_is_lost_or_talks_nonsense_is_named(last, monkeypatch):
  monkeypatch.setattr(rendezvous, '_TEXT_SECONDS', 0.5)
  ours, theirs = pair()
  theirs.sendall(last)
  theirs.shutdown(socket.SHUT_WR)
  with ours, theirs, pytest.raises(Interrupted, match='process 0: process 1 is gone'):
    compare_at_start({1: ours}, 0, {})


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
