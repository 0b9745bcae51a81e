"""How processes meet and notice the loss of others, with real sockets between threads."""

import concurrent.futures
import contextlib
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from paxlite.core.errors import EXIT_AGAIN, Interrupted, UserError
from paxlite.processes import rendezvous
from paxlite.processes.peers import Peers
from paxlite.processes.rendezvous import attend, gather
from tests.support import runs

HOST = '127.0.0.1'


@pytest.fixture
def port():
  with socket.create_server((HOST, 0)) as s:
    return s.getsockname()[1]


@pytest.fixture
def threads():
  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    yield pool


def greeting(process: int, count: int) -> bytes:
  return b'paxlite1' + process.to_bytes(4, 'big') + count.to_bytes(4, 'big')


def connected(port: int) -> socket.socket:
  """Connects to the process that will listen at the port."""
  end = time.monotonic() + 10
  while True:
    try:
      return socket.create_connection((HOST, port), timeout=10)
    except OSError:
      assert time.monotonic() < end
      time.sleep(0.05)


def pair() -> tuple[socket.socket, socket.socket]:
  with socket.create_server((HOST, 0)) as server:
    ours = socket.create_connection(server.getsockname())
    return ours, server.accept()[0]


def test_all_come_in_any_order(port, threads):
  others = [threads.submit(attend, HOST, port, i, 4, 20) for i in (3, 1)]
  time.sleep(0.3)
  first = threads.submit(gather, HOST, port, 4, lambda: 'here', 20)
  others.append(threads.submit(attend, HOST, port, 2, 4, 20))
  connections = first.result()
  assert sorted(connections) == [1, 2, 3]
  for found in others:
    connection, answer = found.result()
    assert answer == 'here'
    connection.close()
  for connection in connections.values():
    connection.close()


def test_who_does_not_come_is_named(port, threads, monkeypatch, capfd):
  monkeypatch.setattr(rendezvous, '_SAY_SECONDS', 0.1)
  there = threads.submit(attend, HOST, port, 2, 4, 3)
  message = (
    rf'did not come together in 2 s: process 0 waits for processes 1, 3 to come to {HOST}:{port}'
  )
  with pytest.raises(UserError, match=message):
    gather(HOST, port, 4, str, seconds=2)
  with pytest.raises(Interrupted, match='process 2: process 0 is gone'):
    there.result()
  said = capfd.readouterr().err
  assert f'process 0 waits for processes 1, 3 to come to {HOST}:{port} (' in said
  assert 'process 2 waits for the others, as process 0 does (' in said
  with pytest.raises(UserError, match=rf'in 0 s: process 1 waits for process 0 at {HOST}:{port}'):
    attend(HOST, port, 1, 2, seconds=0.3)


def test_a_process_that_came_and_is_gone_is_named(port, threads):
  first = threads.submit(gather, HOST, port, 4, str, 20)
  there = threads.submit(attend, HOST, port, 2, 4, 20)
  time.sleep(0.3)
  with connected(port) as gone:
    gone.sendall(greeting(1, 4))
    time.sleep(0.3)
  began = time.monotonic()
  with pytest.raises(Interrupted, match='process 0: process 1 is gone'):
    first.result()
  with pytest.raises(Interrupted, match='process 2: process 1 is gone'):
    there.result()
  assert time.monotonic() - began < 5


def test_strangers_are_hung_up_on_and_hold_nobody_up(port, threads, monkeypatch):
  monkeypatch.setattr(rendezvous, '_GREETING_SECONDS', 0.5)
  first = threads.submit(gather, HOST, port, 2, str, 20)
  silent, noisy, slow = connected(port), connected(port), connected(port)
  noisy.sendall(b'GET / HTTP/1.1\r\n\r\n')
  slow.sendall(b'paxlite')
  for stranger in (noisy, silent, slow):
    with contextlib.suppress(ConnectionError):
      assert stranger.recv(1) == b''
  connection, _ = attend(HOST, port, 1, 2, 20)
  assert list(first.result()) == [1]
  for s in (silent, noisy, slow, connection, *first.result().values()):
    s.close()


def test_a_stranger_without_the_token_is_hung_up_on(port, threads, monkeypatch):
  """He knows what paxlite's processes say, and comes first."""
  monkeypatch.setenv('PAXLITE_TOKEN', 'a secret of this run')
  first = threads.submit(gather, HOST, port, 2, str, 20)
  stranger = connected(port)
  stranger.sendall(greeting(1, 2))
  with contextlib.suppress(ConnectionError):
    assert stranger.recv(1) == b''
  connection, _ = attend(HOST, port, 1, 2, 20)
  for s in (stranger, connection, *first.result().values()):
    s.close()


@pytest.mark.parametrize(
  ('process', 'count', 'problem'),
  [
    (1, 4, 'it counts 4 processes, and process 0 3'),
    (0, 3, 'there is no process 0 of 3 but process 0 here'),
    (1, 3, 'another process 1 is there already'),
  ],
)
def test_a_process_that_does_not_belong_here_is_told_why(port, threads, process, count, problem):
  first = threads.submit(gather, HOST, port, 3, str, 20)
  there = connected(port)
  there.sendall(greeting(1, 3))
  time.sleep(0.2)
  with pytest.raises(UserError, match=f'refuses process {process}: {problem}'):
    attend(HOST, port, process, count, 20)
  last, _ = attend(HOST, port, 2, 3, 20)
  assert sorted(first.result()) == [1, 2]
  for s in (there, last, *first.result().values()):
    s.close()


def test_something_else_listens_there(threads):
  with socket.create_server((HOST, 0)) as server:
    port = server.getsockname()[1]
    found = threads.submit(attend, HOST, port, 1, 2, 20)
    stranger, _ = server.accept()
    with stranger:
      stranger.sendall(b'220 mail.example ESMTP\r\n' * 20)
      with pytest.raises(UserError, match='is not process 0 of this run'):
        found.result()
    found = threads.submit(attend, HOST, port, 1, 2, 20)
    stranger, _ = server.accept()
    with stranger:
      stranger.sendall(b'HTTP/1.1 400 Bad Request\r\n\r\n')  # then closes the connection
    with pytest.raises(UserError, match='is not process 0 of this run'):
      found.result()
    with pytest.raises(UserError, match=f'cannot listen on {HOST}:{port}: Address already'):
      gather(HOST, port, 2, str)


def test_what_the_others_do_is_known_to_process_0():
  ours, theirs = pair()
  first, second = Peers({1: ours}, 0, 2), Peers({0: theirs}, 1, 2)
  first.watch()
  second.watch()
  assert first.behind(5) == {1: 'starting'}
  second.report(4, 'compiling and the first step')
  end = time.monotonic() + 10
  while first.behind(5) != {1: 'compiling and the first step'}:
    assert time.monotonic() < end
    time.sleep(0.01)
  assert first.behind(4) == {}
  assert second.behind(100) == {}
  with second, first:
    pass  # both say goodbye, so no process is lost
  for s in (ours, theirs):
    s.close()


@pytest.mark.parametrize('process', [0, 1])
def test_a_lost_peer_ends_the_process(process, monkeypatch, capfd):
  left = threading.Event()
  monkeypatch.setattr('paxlite.processes.peers._GRACE_SECONDS', 0.1)
  monkeypatch.setattr(os, '_exit', lambda code: (left.set(), time.sleep(60)))
  ours, theirs = pair()
  Peers({1 - process: ours}, process, 2).watch()
  theirs.close()
  assert left.wait(10)
  assert f'stopped: process {process} of 2: process {1 - process} is gone' in capfd.readouterr().err
  ours.close()


def test_a_library_that_aborts_when_a_peer_is_gone_does_not_end_the_process_first():
  """A thread calls abort(), as gloo does through std::terminate; it is another one that watches."""
  code = """
import ctypes, socket, threading
from paxlite.processes.peers import Peers
server = socket.create_server(('127.0.0.1', 0))
theirs = socket.create_connection(server.getsockname())
Peers({1: server.accept()[0]}, 0, 2).watch()
theirs.close()
ctypes.CDLL(None).abort()
"""
  done = subprocess.run(
    [sys.executable, '-c', code], cwd=runs.ROOT, capture_output=True, text=True, timeout=60
  )
  assert done.returncode == EXIT_AGAIN, done.stderr
  assert 'stopped: process 0 of 2: process 1 is gone' in done.stderr
