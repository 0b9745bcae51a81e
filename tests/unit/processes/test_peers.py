"""How processes meet and notice the loss of others, with real sockets between threads."""

import concurrent.futures
import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

import pytest

from paxlite.core.errors import EXIT_AGAIN, Interrupted, UserError
from paxlite.processes import peers
from paxlite.processes.peers import Peers, attend, gather, received, send
from paxlite.processes.place import ProcessPlace
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


@pytest.fixture
def left(monkeypatch):
  """An event that is set when a watching thread would end the process; the thread then stays."""
  found = threading.Event()
  monkeypatch.setattr(peers, '_GRACE_SECONDS', 0.1)
  monkeypatch.setattr(os, '_exit', lambda code: (found.set(), threading.Event().wait()))
  return found


def place(port: int, process: int, count: int) -> ProcessPlace:
  return ProcessPlace(HOST, port, process, count)


def connected(port: int) -> socket.socket:
  """Connects to the process that will listen at the port."""
  end = time.monotonic() + 10
  while True:
    try:
      return socket.create_connection((HOST, port), timeout=10)
    except OSError:
      assert time.monotonic() < end
      time.sleep(0.05)


def here(port: int, process: int, count: int, key: bytes = b'paxlite') -> Connection:
  """Returns the connection of a process that process 0 has greeted."""
  link = connected(port)
  link.settimeout(None)
  connection = Connection(link.detach())
  answer_challenge(connection, key)
  deliver_challenge(connection, key)
  send(connection, {'process': process, 'count': count, 'statement': {}})
  assert received(connection) == {'here': True}
  return connection


def pair() -> tuple[Connection, Connection]:
  ends = socket.socketpair()
  return Connection(ends[0].detach()), Connection(ends[1].detach())


def test_all_come_in_any_order(port, threads):
  others = [threads.submit(attend, place(port, i, 4), {'N': str(i)}, 20) for i in (3, 1)]
  time.sleep(0.3)
  first = threads.submit(gather, place(port, 0, 4), 20)
  others.append(threads.submit(attend, place(port, 2, 4), {'N': '2'}, 20))
  joined = first.result()
  assert {i: statement for i, (_, statement) in joined.items()} == {
    1: {'N': '1'}, 2: {'N': '2'}, 3: {'N': '3'}
  }  # fmt: skip
  for connection, _ in joined.values():
    send(connection, {'service': 1234})
  for found in others:
    connection, service = found.result()
    assert service == 1234
    connection.close()


def test_a_difference_reaches_the_others(port, threads):
  there = threads.submit(attend, place(port, 1, 2), {}, 20)
  joined = gather(place(port, 0, 2), 20)
  send(joined[1][0], {'differ': 'the processes of this run differ'})
  with pytest.raises(UserError, match='the processes of this run differ'):
    there.result()


def test_who_does_not_come_is_named(port, threads, monkeypatch, capfd):
  monkeypatch.setattr(peers, '_SAY_SECONDS', 0.1)
  there = threads.submit(attend, place(port, 2, 4), {}, 3)
  message = (
    rf'did not connect within 2 s: process 0 waits for processes 1, 3 to connect to {HOST}:{port}'
  )
  with pytest.raises(UserError, match=message):
    gather(place(port, 0, 4), seconds=2)
  with pytest.raises(Interrupted, match='process 2: process 0 is gone'):
    there.result()
  said = capfd.readouterr().err
  assert f'process 0 waits for processes 1, 3 to connect to {HOST}:{port} (' in said
  assert 'process 2 waits for the others, as process 0 does (' in said


def test_process_0_that_cannot_be_reached_is_named_with_the_reason(port):
  expected = rf'in 0 s: process 1 waits for process 0 at {HOST}:{port} \(Connection refused\)'
  with pytest.raises(UserError, match=expected):
    attend(place(port, 1, 2), {}, seconds=0.3)
  expected = r'at no\.such\.host\.invalid:1 \(.*(Name|name|nodename).*\)'
  with pytest.raises(UserError, match=expected):
    attend(ProcessPlace('no.such.host.invalid', 1, 1, 2), {}, seconds=0.3)


def test_a_process_that_came_and_is_gone_is_named(port, threads):
  first = threads.submit(gather, place(port, 0, 4), 20)
  there = threads.submit(attend, place(port, 2, 4), {}, 20)
  time.sleep(0.3)
  here(port, 1, 4).close()
  began = time.monotonic()
  with pytest.raises(Interrupted, match='process 0: process 1 is gone'):
    first.result()
  with pytest.raises(Interrupted, match='process 2: process 1 is gone'):
    there.result()
  assert time.monotonic() - began < 5


def test_strangers_are_hung_up_on_and_hold_nobody_up(port, threads, monkeypatch):
  monkeypatch.setattr(peers, '_GREETING_SECONDS', 1)
  first = threads.submit(gather, place(port, 0, 3), 20)
  silent, noisy, slow = connected(port), connected(port), connected(port)
  noisy.sendall(b'GET / HTTP/1.1\r\n\r\n')
  slow.sendall(b'\0\0')
  one = here(port, 1, 3)
  for stranger in (noisy, silent, slow):
    with contextlib.suppress(ConnectionError):
      while stranger.recv(64):  # process 0 speaks first
        pass
  other = here(port, 2, 3)
  assert sorted(first.result()) == [1, 2]
  for s in (silent, noisy, slow, one, other):
    s.close()


def test_a_process_with_another_token_is_refused_and_told_why(port, threads, monkeypatch):
  """It knows what paxlite's processes say, and comes first."""
  monkeypatch.setenv('PAXLITE_TOKEN', 'a secret of this run')
  first = threads.submit(gather, place(port, 0, 2), 20)
  with pytest.raises(Exception, match='digest sent was rejected'):
    here(port, 1, 2)
  one = here(port, 1, 2, b'paxlitea secret of this run')
  assert list(first.result()) == [1]
  one.close()


def test_a_program_without_the_token_is_not_taken_for_process_0(port, threads, monkeypatch):
  there = threads.submit(attend, place(port, 1, 2), {}, 20)
  with socket.create_server((HOST, port)) as server:
    connection = Connection(server.accept()[0].detach())
    with pytest.raises(Exception, match='digest'):
      deliver_challenge(connection, b'another key')
  with pytest.raises(UserError, match=r'another program listens there, or PAXLITE_TOKEN differs'):
    there.result()


@pytest.mark.parametrize(
  ('process', 'count', 'problem'),
  [
    (1, 4, 'it expects 4 processes, but process 0 expects 3'),
    (0, 3, 'process 0 of 3 is unknown: only process 0 runs here'),
    (1, 3, 'another process 1 is there already'),
  ],
)
def test_a_process_that_does_not_belong_here_is_told_why(port, threads, process, count, problem):
  first = threads.submit(gather, place(port, 0, 3), 20)
  one = here(port, 1, 3)
  with pytest.raises(UserError, match=f'refuses process {process}: {problem}'):
    attend(place(port, process, count), {}, 20)
  two = here(port, 2, 3)
  assert sorted(first.result()) == [1, 2]
  one.close()
  two.close()


@pytest.mark.parametrize('said', [b'220 mail.example ESMTP\r\n' * 20, b'HTTP/1.1 400 Bad\r\n\r\n'])
def test_something_else_listens_there(threads, said):
  with socket.create_server((HOST, 0)) as server:
    port = server.getsockname()[1]
    found = threads.submit(attend, place(port, 1, 2), {}, 20)
    stranger, _ = server.accept()
    with stranger:
      stranger.sendall(said)
      with pytest.raises(UserError, match='is not process 0 of this run'):
        found.result()
    with pytest.raises(UserError, match=f'cannot listen on {HOST}:{port}: Address already'):
      gather(place(port, 0, 2))


def test_where_process_0_listens(port, monkeypatch, capfd):
  with peers.listening(HOST) as server:
    assert server.getsockname()[0] == HOST
  answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, '', ('127.0.1.1', 0))]
  monkeypatch.setattr(socket, 'getaddrinfo', lambda *_: answer)
  with peers.listening('n7') as server:
    assert server.getsockname()[0] == '0.0.0.0'
  assert capfd.readouterr().err == ''
  peers.listening('n7', port).close()
  assert 'n7 is 127.0.1.1 in /etc/hosts here: listening on all' in capfd.readouterr().err


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
  time.sleep(0.1)
  ours.close()
  theirs.close()


@pytest.mark.parametrize('process', [0, 1])
@pytest.mark.parametrize('last', [b'', b'{"bye": false}', b'not JSON', b'[]'])
def test_a_lost_peer_ends_the_process(process, last, left, capfd):
  ours, theirs = pair()
  Peers({1 - process: ours}, process, 2).watch()
  if last:
    theirs.send_bytes(last)
  else:
    theirs.close()
  assert left.wait(10)
  assert f'stopped: process {process} of 2: process {1 - process} is gone' in capfd.readouterr().err


def test_the_others_hear_from_process_0_who_is_lost(left):
  ends = {1: pair(), 2: pair()}
  Peers({i: ours for i, (ours, _) in ends.items()}, 0, 3).watch()
  ends[2][1].close()
  assert ends[1][1].poll(1)
  assert received(ends[1][1]) == {'gone': 2}
  assert left.wait(10)


@pytest.mark.slow
def test_a_library_that_aborts_when_a_peer_is_gone_does_not_end_the_process_first():
  """A thread calls abort(), as gloo does through std::terminate; it is another one that watches."""
  code = """
import ctypes, faulthandler
from multiprocessing import Pipe
from paxlite.processes.peers import Peers, delay_aborts
faulthandler.enable()
ours, theirs = Pipe()
Peers({1: ours}, 0, 2).watch()
delay_aborts()
theirs.close()
ctypes.CDLL(None).abort()
"""
  done = subprocess.run(
    [sys.executable, '-c', code], cwd=runs.ROOT, capture_output=True, text=True, timeout=60
  )
  assert done.returncode == EXIT_AGAIN, done.stderr
  assert 'stopped: process 0 of 2: process 1 is gone' in done.stderr


def test_a_stranger_that_sends_slowly_keeps_nobody_out(port, threads, monkeypatch):
  monkeypatch.setattr(peers, '_GREETING_SECONDS', 1)
  monkeypatch.setattr(peers, '_GREETINGS', 1)
  first = threads.submit(gather, place(port, 0, 2), 20)
  stranger, closed = connected(port), threading.Event()

  def drip():
    with contextlib.suppress(OSError):
      while True:  # a byte in less than the time that one read may take
        stranger.send(b'\0')
        time.sleep(0.1)
    closed.set()

  threads.submit(drip)
  with here(port, 1, 2):
    assert set(first.result()) == {1}
  assert closed.wait(10)
  stranger.close()


@pytest.mark.slow
def test_what_accepts_and_does_not_answer_is_said(port, capfd, monkeypatch):
  monkeypatch.setattr(peers, '_GREETING_SECONDS', 1)
  monkeypatch.setattr(peers, '_SAY_SECONDS', 0.1)
  with (
    socket.create_server((HOST, port)),
    pytest.raises(UserError, match='something there accepts, and does not answer'),
  ):
    attend(place(port, 1, 2), {}, 4)
