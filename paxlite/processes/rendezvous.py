"""Connects the processes of a run: each one connects to process 0 and stays connected.

Process 0 listens on the address that all processes know. A waiting process logs which processes it
waits for, and for how long. When all are connected, process 0 sends the others the port of JAX's
coordination service.
"""

import contextlib
import hashlib
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterable

from paxlite.cli.terminal import warn
from paxlite.core.errors import Interrupted, UserError
from paxlite.processes import preemption

_MAGIC = b'paxlite1'
_TOKEN = 'PAXLITE_TOKEN'  # an environment variable that the processes of a run share
_GREETING_BYTES = len(_MAGIC) + 8  # followed by the process number and the number of processes
_GREETING_SECONDS = 5.0  # A connection that sends no greeting is closed after this time.
_STRANGERS = 64  # maximum number of connections without a complete greeting
_ANSWER_BYTES = 300
_WAIT_SECONDS = 300.0  # The nodes of a large job start minutes apart.
_SAY_SECONDS = 10.0
_HERE, _YES, _NO, _GONE = b'+', b'=', b'!', b'-'  # _HERE is sent first, one of the others later.
_LENGTH = struct.Struct('>I')  # bytes of a text
_LONGEST_TEXT = 1 << 24
_TEXT_SECONDS = 120.0  # the most time that another process may take for a text


def listens_on(host: str) -> str:
  """Returns the address on which process 0 listens for a host name; '' means all addresses.

  The services authenticate nobody, so it is safer to listen on one address. But Debian resolves a
  host's own name to 127.0.1.1, which other hosts cannot reach; then process 0 listens on all.
  """
  try:
    found = {info[4][0] for info in socket.getaddrinfo(host, None)}
  except OSError:
    return host
  return '' if '127.0.1.1' in found else host


def send_text(connection: socket.socket, text: str) -> None:
  """Sends a text; a lost connection is noticed when something is received from it."""
  data = text.encode()
  connection.settimeout(_TEXT_SECONDS)
  with contextlib.suppress(OSError):
    connection.sendall(_LENGTH.pack(len(data)) + data)
  connection.settimeout(None)


def receive_text(connection: socket.socket, gone: str) -> str:
  """Receives a text that `send_text` sent.

  Raises:
    Interrupted: The connection is lost, or nothing came in time; `gone` is the message.
  """
  connection.settimeout(_TEXT_SECONDS)
  try:
    (length,) = _LENGTH.unpack(received(connection, _LENGTH.size))
    if length > _LONGEST_TEXT:
      raise EOFError
    return received(connection, length).decode()
  except (OSError, EOFError, UnicodeDecodeError):
    raise Interrupted(gone) from None
  finally:
    connection.settimeout(None)


def received(connection: socket.socket, count: int) -> bytes:
  """Returns the next `count` bytes of a connection; raises EOFError if it ends before."""
  data = b''
  while len(data) < count:
    more = connection.recv(count - len(data))
    if not more:
      raise EOFError
    data += more
  return data


def _greeting() -> bytes:
  """Returns the first bytes of a greeting, which only processes with the same token know."""
  token = os.environ.get(_TOKEN)
  return hashlib.sha256(_MAGIC + os.fsencode(token)).digest()[: len(_MAGIC)] if token else _MAGIC


def cannot_listen(host: str, port: int, error: OSError) -> UserError:
  """Returns the error to raise if process 0 cannot listen."""
  return UserError(
    f'process 0 cannot listen on {host}:{port}: {error.strerror or error}. Its host and a free '
    'port of it must be named'
  )


def gather(
  host: str, port: int, count: int, answer: Callable[[], str], seconds: float = _WAIT_SECONDS
) -> dict[int, socket.socket]:
  """Waits in process 0 until all other processes have connected.

  Args:
    host: The host name or address by which the others reach this process.
    port: The port by which the others reach this process.
    count: The number of processes, including this one.
    answer: Called when all are connected; the text that it returns is sent to each process.
    seconds: The longest time to wait.

  Returns:
    The connections by process number.

  Raises:
    UserError: Process 0 cannot listen on the port, or not all processes connected in time.
    Interrupted: A process connected and was lost again, or a signal asked this process to leave.
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
      with contextlib.suppress(OSError):  # peers.py will detect the lost connection.
        connection.sendall(_YES + reply.ljust(_ANSWER_BYTES - 1))
    return gathering.release()


def attend(
  host: str, port: int, process: int, count: int, seconds: float = _WAIT_SECONDS
) -> tuple[socket.socket, str]:
  """Connects to process 0 and waits until all other processes have connected too.

  Args:
    host: The host name or address of process 0.
    port: The port of process 0.
    process: The number of this process.
    count: The number of processes.
    seconds: The longest time to wait.

  Returns:
    The connection, and the answer of process 0.

  Raises:
    UserError: Process 0 cannot be reached, expects another number of processes, or has a process of
      this number already.
    Interrupted: A process connected and was lost again, or a signal asked this process to leave.
  """
  waiting = _Waiting(seconds)
  said = b''
  while not said:
    waiting.check(f'process {process} waits for process 0 at {host}:{port}')
    try:
      connection = socket.create_connection((host, port), timeout=5)
    except OSError:  # Process 0 does not listen yet, or its name does not resolve yet.
      time.sleep(0.2)
      continue
    try:
      said = _answer(connection, process, count, waiting)
    except BaseException:
      connection.close()
      raise
    if not said:  # Process 0 is too busy, or another program listens for a moment.
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
  """Returns the answer to the greeting; only _HERE if process 0 was lost after that."""
  connection.settimeout(1.0)
  said = b''
  try:
    connection.sendall(_greeting() + process.to_bytes(4, 'big') + count.to_bytes(4, 'big'))
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
  """Logs regularly what a process waits for, and ends the wait when it takes too long."""

  def __init__(self, seconds: float):
    self._began = self._said = time.monotonic()
    self._seconds = seconds

  def check(self, what: str) -> None:
    """Raises UserError if the time is over, and Interrupted if there was a signal."""
    if preemption.asked():
      raise Interrupted('asked to leave before the processes had come together: nothing was lost')
    now = time.monotonic()
    if now - self._began > self._seconds:
      raise UserError(f'the processes did not come together in {self._seconds:.0f} s: {what}')
    if now - self._said > _SAY_SECONDS:
      self._said = now
      warn(f'{what} ({now - self._began:.0f} s of {self._seconds:.0f})')


class _Gathering:
  """The connections to process 0 until all processes have connected."""

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
    """Returns the connections of the processes, which stay open when the context ends."""
    joined, self.joined = self.joined, {}
    return joined

  @property
  def missing(self) -> list[int]:
    return [i for i in range(1, self._count) if i not in self.joined]

  def step(self) -> None:
    """Handles the connections and data that arrive within a second."""
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
    if not more or said[: len(_MAGIC)] != _greeting()[: len(said)]:
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
    with contextlib.suppress(OSError):  # A lost connection is detected when it is read.
      connection.sendall(_HERE)

  def _check_joined(self, connection: socket.socket) -> None:
    """Raises Interrupted if a process that had connected is gone."""
    with contextlib.suppress(BlockingIOError):
      try:
        said = connection.recv(1)
      except ConnectionError:
        said = b''
      process = next(i for i, c in self.joined.items() if c is connection)
      if said:  # A process has nothing to send at this point.
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
