"""How the processes of a run come together: each connects to process 0, and stays connected.

Process 0 listens on the address that all of them know. Whoever waits says for whom, and how long.
When all are there, process 0 sends the others the address of JAX's coordination service.
"""

import contextlib
import selectors
import socket
import time
from collections.abc import Callable, Iterable

from paxlite.core.errors import Interrupted, UserError
from paxlite.core.terminal import warn
from paxlite.runtime import preemption

_MAGIC = b'paxlite1'
_GREETING_BYTES = len(_MAGIC) + 8  # then the number of the process, and of processes
_GREETING_SECONDS = 5.0  # a stranger who says nothing is hung up on
_STRANGERS = 64  # connections that have not said who they are
_ANSWER_BYTES = 300
_WAIT_SECONDS = 300.0  # nodes of a large job start minutes apart
_SAY_SECONDS = 10.0
_HERE, _YES, _NO, _GONE = b'+', b'=', b'!', b'-'  # the first of them before what comes later


def listens_on(host: str) -> str:
  """The address on which process 0 listens when others know it by this name; '' is all of them.

  What asks nobody who they are had better listen on one. Debian knows a host's own name as
  127.0.1.1, where nobody else could reach it.
  """
  try:
    found = {info[4][0] for info in socket.getaddrinfo(host, None)}
  except OSError:
    return host
  return '' if '127.0.1.1' in found else host


def cannot_listen(host: str, port: int, error: OSError) -> UserError:
  """The error to raise where process 0 cannot listen."""
  return UserError(
    f'process 0 cannot listen on {host}:{port}: {error.strerror or error}. Its host and a free '
    'port of it must be named'
  )


def gather(
  host: str, port: int, count: int, answer: Callable[[], str], seconds: float = _WAIT_SECONDS
) -> dict[int, socket.socket]:
  """Waits, as process 0, for all others.

  Args:
    host: The host that the others connect to.
    port: The port of process 0.
    count: How many processes there are, this one included.
    answer: Called when all are there; its result is sent to each of them.
    seconds: How long to wait.

  Returns:
    The connections, by the number of the process.

  Raises:
    UserError: the port is in use, or not all of them came.
    Interrupted: one of them came and is gone again.
  """
  family = socket.AF_INET6 if ':' in host else socket.AF_INET
  try:
    server = socket.create_server((listens_on(host), port), family=family)
  except OSError as e:
    raise cannot_listen(host, port, e) from None
  with server, _Gathering(server, count) as gathering:
    waiting = _Waiting(seconds)
    while missing := gathering.missing:
      waiting.check(f'process 0 waits for {_named(missing)} to come to {host}:{port}')
      gathering.step()
    reply = answer().encode()
    for connection in gathering.joined.values():
      connection.setblocking(True)
      with contextlib.suppress(OSError):  # whoever watches the connections will notice
        connection.sendall(_YES + reply.ljust(_ANSWER_BYTES - 1))
    return gathering.release()


def attend(
  host: str, port: int, process: int, count: int, seconds: float = _WAIT_SECONDS
) -> tuple[socket.socket, str]:
  """Connects to process 0 and waits until all others have.

  Args:
    host: The host of process 0.
    port: The port of process 0.
    process: Which process this is.
    count: How many processes there are.
    seconds: How long to wait.

  Returns:
    The connection, and the answer of process 0.

  Raises:
    UserError: process 0 is not there, knows another number of processes, or has this one already.
    Interrupted: a process came and is gone again.
  """
  waiting = _Waiting(seconds)
  said = b''
  while not said:
    waiting.check(f'process {process} waits for process 0 at {host}:{port}')
    try:
      connection = socket.create_connection((host, port), timeout=5)
    except OSError:  # it has not begun to listen, or its name is not known yet
      time.sleep(0.2)
      continue
    try:
      said = _answer(connection, process, count, waiting)
    except BaseException:
      connection.close()
      raise
    if not said:  # it has no time for this process yet, or something else is there for a moment
      connection.close()
      time.sleep(0.2)
  kind, text = said[:1], said[1:].decode(errors='replace').strip()
  if kind == _YES and len(said) == _ANSWER_BYTES:
    connection.settimeout(None)
    return connection, text
  connection.close()
  if said == _HERE:
    raise Interrupted(f'process {process}: process 0 is gone')
  if kind == _GONE:
    raise Interrupted(f'process {process}: {text}')
  raise UserError(
    f'{host}:{port} refuses process {process}: {text}' if kind == _NO
    else f'{host}:{port} is not process 0 of this run: something else listens there'
  )  # fmt: skip


def _answer(connection: socket.socket, process: int, count: int, waiting: '_Waiting') -> bytes:
  """The answer to the greeting; _HERE alone where process 0 has ended in the meantime."""
  connection.settimeout(1.0)
  said = b''
  try:
    connection.sendall(_MAGIC + process.to_bytes(4, 'big') + count.to_bytes(4, 'big'))
    while len(said) < _ANSWER_BYTES:
      waiting.check(f'process {process} waits for the others, as process 0 does')
      try:
        more = connection.recv(1 if not said else _ANSWER_BYTES - len(said))
      except TimeoutError:
        continue
      if not more:
        return said
      said = more if said == _HERE else said + more
  except ConnectionError:
    pass
  return said


class _Waiting:
  """Says every few seconds what is waited for, and when that has taken too long."""

  def __init__(self, seconds: float):
    self._began = self._said = time.monotonic()
    self._seconds = seconds

  def check(self, what: str) -> None:
    """Raises UserError when the time is over, and Interrupted when there was a signal."""
    if preemption.asked():
      raise Interrupted('asked to leave before the processes had come together: nothing was lost')
    now = time.monotonic()
    if now - self._began > self._seconds:
      raise UserError(f'the processes did not come together in {self._seconds:.0f} s: {what}')
    if now - self._said > _SAY_SECONDS:
      self._said = now
      warn(f'{what} ({now - self._began:.0f} s of {self._seconds:.0f})')


class _Gathering:
  """The connections to process 0 while the processes come together."""

  def __init__(self, server: socket.socket, count: int):
    self.joined: dict[int, socket.socket] = {}
    self._server = server
    self._count = count
    self._greetings: dict[socket.socket, tuple[bytes, float]] = {}
    self._selector = selectors.DefaultSelector()

  def __enter__(self) -> '_Gathering':
    self._server.setblocking(False)
    self._selector.register(self._server, selectors.EVENT_READ)
    return self

  def __exit__(self, *error: object) -> None:
    self._selector.close()
    for connection in (*self._greetings, *self.joined.values()):
      connection.close()

  def release(self) -> dict[int, socket.socket]:
    """The connections of the processes, which are left open."""
    joined, self.joined = self.joined, {}
    return joined

  @property
  def missing(self) -> list[int]:
    return [i for i in range(1, self._count) if i not in self.joined]

  def step(self) -> None:
    """Takes what has come within a second."""
    for key, _ in self._selector.select(1.0):
      connection = key.fileobj
      assert isinstance(connection, socket.socket)
      if connection is self._server:
        self._accept()
      elif connection in self._greetings:
        self._read(connection)
      else:
        self._check_joined(connection)
    now = time.monotonic()
    for stranger in [c for c, (_, until) in self._greetings.items() if now > until]:
      self._drop(stranger)

  def _accept(self) -> None:
    with contextlib.suppress(OSError):
      connection, _ = self._server.accept()
      if len(self._greetings) >= _STRANGERS:
        connection.close()
        return
      connection.setblocking(False)
      self._greetings[connection] = b'', time.monotonic() + _GREETING_SECONDS
      self._selector.register(connection, selectors.EVENT_READ)

  def _read(self, connection: socket.socket) -> None:
    said, until = self._greetings[connection]
    try:
      more = connection.recv(_GREETING_BYTES - len(said))
    except BlockingIOError:
      return
    except OSError:
      more = b''
    said += more
    self._greetings[connection] = said, until
    if not more or not said.startswith(_MAGIC[: len(said)]):
      self._drop(connection)
    elif len(said) == _GREETING_BYTES:
      self._greet(connection, *(int.from_bytes(said[i : i + 4], 'big') for i in (8, 12)))

  def _greet(self, connection: socket.socket, process: int, count: int) -> None:
    problem = ''
    if count != self._count:
      problem = f'it counts {count} processes, and process 0 {self._count}'
    elif not 0 < process < count:
      problem = f'there is no process {process} of {count} but process 0 here'
    elif process in self.joined:
      problem = f'another process {process} is there already'
    if problem:
      _tell(connection, _NO + problem.encode())
      self._drop(connection)
      return
    del self._greetings[connection]
    self.joined[process] = connection
    with contextlib.suppress(OSError):  # that it is gone is seen where it is read from
      connection.sendall(_HERE)

  def _check_joined(self, connection: socket.socket) -> None:
    """Raises Interrupted where a process that had come is gone."""
    with contextlib.suppress(BlockingIOError):
      try:
        said = connection.recv(1)
      except ConnectionError:
        said = b''
      process = next(i for i, c in self.joined.items() if c is connection)
      if said:  # it has nothing to say now
        return
      gone = f'process {process} is gone'
      for other in self.joined.values():
        _tell(other, _GONE + gone.encode())
      raise Interrupted(f'process 0: {gone}')

  def _drop(self, connection: socket.socket) -> None:
    del self._greetings[connection]
    self._selector.unregister(connection)
    connection.close()


def _tell(connection: socket.socket, message: bytes) -> None:
  with contextlib.suppress(OSError):
    connection.sendall(message.ljust(_ANSWER_BYTES))


def _named(processes: Iterable[int]) -> str:
  """'process 3', 'processes 1, 2, 3', 'processes 1, 2, 3, … (16 in all)'."""
  numbers = list(processes)
  if len(numbers) == 1:
    return f'process {numbers[0]}'
  more = f', … ({len(numbers)} in all)' if len(numbers) > 8 else ''
  return f'processes {", ".join(map(str, numbers[:8]))}{more}'
