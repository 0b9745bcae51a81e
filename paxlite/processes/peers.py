"""Connects the processes of a run, and detects at once that one of them is gone.

JAX's coordination service could connect them too, but while it waits for processes, it does not say
for which ones, and hears no signal. Its heartbeats need half a minute to detect a loss and end the
process with SIGABRT, and a collective whose peer is gone may wait for ever. So each process
connects to process 0 first, which says on which port it starts that service, and stays connected.
The kernel closes the connection when a process ends, however it ends. When process 0 loses one, it
sends the number of the lost process to the others and leaves. The others leave when they get this
message or lose process 0. Messages are JSON; both ends prove that they know the token of the run.
"""

import contextlib
import ctypes
import json
import os
import queue
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait

from paxlite.cli.terminal import settle, warn
from paxlite.core.errors import EXIT_AGAIN, Interrupted, TrainingError, UserError
from paxlite.core.json_text import Json, JsonObject, parsed
from paxlite.processes import preemption
from paxlite.processes.agreement import Statement
from paxlite.processes.place import ProcessPlace

_TOKEN = 'PAXLITE_TOKEN'  # an environment variable that the processes of a run share
_LONGEST = 1 << 24  # bytes
_GREETING_SECONDS = 5  # A connection that has not said who it is is closed after this time.
_GREETINGS = 64  # connections at a time that have not said who they are; others wait
_WAIT_SECONDS = 300.0  # The nodes of a large job start minutes apart.
_SAY_SECONDS = 10.0
_GRACE_SECONDS = 2  # If all processes fail alike, each reports its error and exit code.
# A host that loses power closes no connection: it counts as gone after this many seconds of silence
# and this many unanswered probes, or when what was sent is not acknowledged for 40 s.
_KEEPALIVE = {'TCP_KEEPIDLE': 10, 'TCP_KEEPINTVL': 10, 'TCP_KEEPCNT': 3, 'TCP_USER_TIMEOUT': 40_000}
# what reading raises if something else is at the other end
_FOREIGN = OSError, EOFError, ValueError, AssertionError, AuthenticationError

Joined = tuple[Connection, Statement]  # a process, and what it must have in common with the others


class Peers:
  """A context in which process `process` of `count` leaves with EXIT_AGAIN when another is gone.

  `connections` are those to other processes by number: process 0 has one to each, and any other
  process has one to process 0. There are none in a run of one process.
  """

  def __init__(
    self, connections: Mapping[int, Connection] | None = None, process: int = 0, count: int = 1
  ):
    self._connections = connections or {}
    self._process = process
    self.count = count
    self._leaving = False
    self._at: dict[int, tuple[int, str]] = {}

  def watch(self) -> None:
    """Starts to watch in a thread, until the context ends."""
    threading.Thread(target=self._watch, name='peers', daemon=True).start()

  def __enter__(self) -> 'Peers':
    return self

  def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
    self._leaving = True
    together = kind is None or issubclass(kind, (Interrupted, TrainingError))  # all have these
    self._tell({'bye': together})

  def report(self, progress: int, phase: str) -> None:
    """Sends the progress of this process (a growing number) and its phase to process 0."""
    if self._process != 0:
      self._tell({'at': [progress, phase]})

  def behind(self, progress: int) -> dict[int, str]:
    """Returns the phases of the processes behind this one; only process 0 knows them."""
    if self._process != 0:
      return {}
    found = {i: self._at.get(i, (-1, 'starting')) for i in sorted(self._connections)}
    return {i: phase for i, (at, phase) in found.items() if at < progress}

  def _tell(self, message: JsonObject) -> None:
    for connection in self._connections.values():
      send(connection, message)

  def _watch(self) -> None:
    watched = dict(self._connections)
    while watched:
      ready = wait(watched.values())
      if self._leaving:
        return
      for process in [i for i, connection in watched.items() if connection in ready]:
        message: Json = None
        with contextlib.suppress(*_FOREIGN):
          message = received(watched[process])
        match message:
          case {'at': [int(progress), str(phase)]}:
            self._at[process] = progress, phase
            continue
          case {'gone': int(lost)}:
            self._leave(lost)
          case {'bye': True}:  # It has done what this process does.
            pass
          case _:
            self._leave(process)
        del watched[process]

  def _leave(self, lost: int) -> None:
    if self._process == 0:
      self._tell({'gone': lost})
    time.sleep(_GRACE_SECONDS)
    if self._leaving:
      return
    warn(f'stopped: process {self._process} of {self.count}: process {lost} is gone')
    settle()
    os._exit(EXIT_AGAIN)


def delay_aborts() -> None:
  """Makes a thread that calls abort() wait before the process ends with SIGABRT.

  When a peer is gone, gloo may throw where nobody catches, and JAX's agent aborts half a second
  after process 0, which has its coordination service, has died. The watching thread then says who
  is gone, and ends the process with EXIT_AGAIN. The handler is libc's sleep(), whose argument is
  the number of the signal: 6 seconds, longer than _GRACE_SECONDS. It replaces that of faulthandler.
  """
  libc = ctypes.CDLL(None)
  libc.signal.argtypes = ctypes.c_int, ctypes.c_void_p
  libc.signal.restype = ctypes.c_void_p
  libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))


def listening(host: str, port: int = 0) -> socket.socket:
  """Returns a socket on which process 0 listens; raises UserError if it cannot.

  JAX's service authenticates nobody, so it is safer to listen on one address. But Debian resolves a
  host's own name to 127.0.1.1, which other hosts cannot reach; then process 0 listens on all.
  """
  family = socket.AF_INET6 if ':' in host else socket.AF_INET
  try:
    found = {info[4][0] for info in socket.getaddrinfo(host, None)}
    everywhere = '127.0.1.1' in found
    if everywhere and port:
      warn(f'{host} is 127.0.1.1 in /etc/hosts here: listening on all addresses')
    return socket.create_server(('' if everywhere else host, port), family=family)
  except OSError as e:
    raise UserError(
      f'process 0 cannot listen on {host}:{port}: {e.strerror or e}. Name its host and a free '
      'port: --server_addr=HOST:PORT, with --num_hosts and --host_idx'
    ) from None


def gather(place: ProcessPlace, seconds: float = _WAIT_SECONDS) -> dict[int, Joined]:
  """Waits in process 0 until all others have connected.

  Args:
    place: The place of process 0.
    seconds: How long it waits.

  Returns:
    The others by number, with open connections.

  Raises:
    UserError: It cannot listen there, or the others did not come in time.
    Interrupted: One of them is gone again, or a signal asked this process to leave.
  """
  check = _waiting(seconds)
  greeted: queue.SimpleQueue[tuple[Connection, int, int, Statement]] = queue.SimpleQueue()
  greetings = threading.BoundedSemaphore(_GREETINGS)
  joined: dict[int, Joined] = {}
  with contextlib.ExitStack() as closing, listening(place.host, place.port) as server:
    server.settimeout(0.2)
    while missing := [i for i in range(1, place.count) if i not in joined]:
      more = f', … ({len(missing)} in all)' if len(missing) > 8 else ''
      named = f'process{"es" if missing[1:] else ""} {", ".join(map(str, missing[:8]))}{more}'
      check(f'process 0 waits for {named} to connect to {place.address}')
      ended = wait([connection for connection, _ in joined.values()], 0)  # They say nothing now.
      for gone in [i for i, (connection, _) in joined.items() if connection in ended]:
        for connection, _ in joined.values():
          send(connection, {'gone': gone})
        raise Interrupted(f'process 0: process {gone} is gone')
      if greetings.acquire(timeout=0.2):
        try:
          accepted = server.accept()[0]
        except OSError as e:
          greetings.release()
          if not isinstance(e, TimeoutError):  # This process may have no more files for a while.
            time.sleep(0.2)
        else:
          of = accepted, greeted, greetings
          threading.Thread(target=_greet, args=of, daemon=True).start()
      while not greeted.empty():
        connection, process, count, statement = greeted.get()
        problems = {
          f'it expects {count} processes, but process 0 expects {place.count}': count
          != place.count,
          f'process {process} of {count} is unknown: only process 0 runs here': not 0
          < process
          < count,
          f'another process {process} is there already': process in joined,
        }
        problem = next((text for text, true in problems.items() if true), '')
        send(connection, {'refused': problem} if problem else {'here': True})
        if not problem:  # A connection that nobody refers to is closed.
          joined[process] = closing.enter_context(connection), statement
    closing.pop_all()
  return joined


def _greet(
  accepted: socket.socket, greeted: queue.SimpleQueue, greetings: threading.Semaphore
) -> None:
  """Waits until a process says who it is; any other connection is closed."""
  # The socket's own limit is one of each read, which a slow sender starts anew with each byte.
  both_ends = accepted.dup()
  timer = threading.Timer(_GREETING_SECONDS, _shut_down, [both_ends])
  timer.daemon = True
  timer.start()
  try:
    connection = _connection(accepted)
    deliver_challenge(connection, _key())
    answer_challenge(connection, _key())
    match received(connection):
      case {'process': int(process), 'count': int(count), 'statement': dict(statement)}:
        timer.cancel()
        greeted.put((connection, process, count, statement))
  except _FOREIGN:
    pass
  finally:
    timer.cancel()
    both_ends.close()
    greetings.release()


def _shut_down(connected: socket.socket) -> None:
  with contextlib.suppress(OSError):  # It is closed already.
    connected.shutdown(socket.SHUT_RDWR)


def attend(
  place: ProcessPlace, statement: Statement, seconds: float = _WAIT_SECONDS
) -> tuple[Connection, int]:
  """Connects to process 0, and waits until all processes are there.

  Args:
    statement: What it must have in common with the others.
    seconds: How long it waits.

  Returns:
    The open connection to process 0, and the port of JAX's coordination service on its host.

  Raises:
    UserError: The others did not come in time, state something else, or process 0 is none of this
      run.
    Interrupted: A process is gone, or a signal asked this process to leave.
  """
  check, why = _waiting(seconds), ''
  while True:
    check(f'process {place.process} waits for process 0 at {place.address}{why}')
    try:
      connection = _connection(socket.create_connection((place.host, place.port), timeout=5))
    except OSError as e:  # Process 0 does not listen yet, or its name does not resolve yet.
      why = f' ({e.strerror or e})'
    else:
      if port := _service(connection, place, statement, check):
        return connection, port
      why = ' (something there accepts, and does not answer)'
    time.sleep(0.2)


def _service(
  connection: Connection, place: ProcessPlace, statement: Statement, check: Callable[[str], None]
) -> int:
  """Returns the port of JAX's service; 0 if the connection ended before process 0 spoke."""
  here = False
  message: Json = None
  try:
    answer_challenge(connection, _key())
    deliver_challenge(connection, _key())
    send(connection, {'process': place.process, 'count': place.count, 'statement': statement})
    while message in (None, {'here': True}):
      here = message is not None
      while not connection.poll(0.5):
        check(f'process {place.process} waits for the others, as process 0 does')
      message = received(connection)
  except (EOFError, ConnectionError, BlockingIOError):
    if not here:
      return 0  # Process 0 is too busy, or another program listens for a moment.
    message = {'gone': 0}
  except UserError:  # from `check`
    raise
  except _FOREIGN:
    pass
  match message:
    case {'service': int(port)}:
      return port
    case {'differ': problem}:
      raise UserError(problem)
    case {'gone': gone}:
      raise Interrupted(f'process {place.process}: process {gone} is gone')
    case {'refused': problem}:
      raise UserError(f'{place.address} refuses process {place.process}: {problem}')
  raise UserError(
    f'{place.address} is not process 0 of this run: another program listens there, or {_TOKEN} '
    'differs'
  )


def send(connection: Connection, message: JsonObject) -> None:
  """Sends a message; a lost connection is noticed when something is received from it."""
  with contextlib.suppress(OSError):
    connection.send_bytes(json.dumps(message).encode())


def received(connection: Connection) -> Json:
  """Returns the next message; raises EOFError, OSError or ValueError if none came whole."""
  return parsed(connection.recv_bytes(_LONGEST))


def _connection(connected: socket.socket) -> Connection:
  connected.setblocking(True)
  seconds = struct.pack('ll', _GREETING_SECONDS, 0)
  connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, seconds)
  connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
  for option, value in _KEEPALIVE.items():
    if hasattr(socket, option):  # only on Linux
      connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
  return Connection(connected.detach())


def _key() -> bytes:
  return b'paxlite' + os.fsencode(os.environ.get(_TOKEN, ''))


def _waiting(seconds: float) -> Callable[[str], None]:
  """Returns a function that says regularly what is waited for, and raises when that must end."""
  began = said = time.monotonic()

  def check(what: str) -> None:
    nonlocal said
    if preemption.asked():
      raise Interrupted('told to stop before the processes connected: nothing was lost')
    now = time.monotonic()
    if now - began > seconds:
      raise UserError(f'the processes did not connect within {seconds:.0f} s: {what}')
    if now - said > _SAY_SECONDS:
      said = now
      warn(f'{what} ({now - began:.0f} s of {seconds:.0f})')

  return check
