"""Joins this process to the others of a run, and ends it when others are gone."""

import contextlib
import dataclasses
import os
import re
import time
from collections.abc import Callable, Iterator

from paxlite.cli import user_code
from paxlite.cli.terminal import settle, warn
from paxlite.core.errors import EXIT_AGAIN, Interrupted, TrainingError, UserError
from paxlite.processes.agreement import Statement, difference
from paxlite.processes.peers import Peers, attend, delay_aborts, gather, listening, send
from paxlite.processes.place import find, local_devices

# Heartbeats are not needed: peers.py detects a process that is gone, and the watchdog one that
# hangs. A suspended process misses heartbeats, and its agent would then end it with SIGABRT.
_HEARTBEAT_SECONDS = 24 * 3600
_SHUTDOWN_SECONDS = 60  # the time that the first process to end waits for the last
_VERDICT_SECONDS = 4
# words in the errors of collectives and JAX's coordination service for a peer that does not answer
_LOST_PEER = re.compile(
  r'gloo|nccl|connection (closed|reset|refused)|closed by peer|socket|heartbeat|unavailable|'
  r'coordination|deadline',
  re.IGNORECASE,
)


def join(
  server_addr: str | None,
  num_hosts: int | None,
  host_idx: int | None,
  required: bool = False,
  statement: Callable[[], Statement] = dict,
) -> Peers:
  """Joins the processes of a run; must be called before anything asks JAX for devices.

  Without arguments, it joins those that JAX detects (see place.py), if there are several. A single
  process joins nothing.

  Args:
    server_addr: host:port of process 0, which listens only there. It listens on all addresses if
      its own host resolves to 127.0.1.1.
    num_hosts: The number of processes; 1 alone means that there are no others.
    host_idx: The number of this process, from 0.
    required: Whether a single process is an error.
    statement: Returns what all processes must have in common; called if there are several.

  Returns:
    The other processes, watched from now on; none for a single process.

  Raises:
    UserError: An argument is missing, not valid, or contradicts the environment; the other
      processes did not connect, or what the processes state differs.
    Interrupted: A process connected and was lost again, or a signal asked this process to leave.
  """
  place = find(server_addr, num_hosts, host_idx, required)
  if place is None:
    return Peers()

  import jax  # takes seconds, in which another program could take a port that was chosen

  bind, mine = None, statement()
  if place.process == 0:
    joined = gather(place)
    connections = {i: connection for i, (connection, _) in joined.items()}
    problem = difference([mine, *(joined[i][1] for i in sorted(joined))])
    with listening(place.host) as free:
      bind, port = free.getsockname()[:2]
    for connection in connections.values():
      send(connection, {'differ': problem} if problem else {'service': port})
    if problem:
      raise UserError(problem)
  else:
    connection, port = attend(place, mine)
    connections = {0: connection}
  peers = Peers(connections, place.process, place.count)
  peers.watch()
  delay_aborts()
  try:
    jax.distributed.initialize(
      place.named(port),
      place.count,
      place.process,
      local_device_ids=local_devices(os.environ),
      cluster_detection_method='deactivate',  # place.py has asked already.
      coordinator_bind_address=bind and dataclasses.replace(place, host=bind).named(port),
      heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
      shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
    )
  except (RuntimeError, ValueError) as e:
    raise UserError(f'the processes could not connect: {str(e).splitlines()[0]}') from None
  return peers


@contextlib.contextmanager
def leaving_together(before: Callable[[], None] = lambda: None) -> Iterator[None]:
  """A context that ends one of several processes at once when it fails or loses another process.

  If the process ended as usual, it would wait for the others, while they wait for it in a
  collective. The exit code is EXIT_AGAIN if others are gone, 2 for wrong input and 1 for any other
  failure in this process. A single process ends as usual, and so does every process on an error
  that all processes have (Interrupted, TrainingError).

  Args:
    before: Called before the process ends.
  """
  import jax

  try:
    yield
  except (Interrupted, TrainingError):  # All processes have these.
    raise
  except Exception as e:
    if jax.process_count() == 1:
      raise
    before()
    process = f'process {jax.process_index()} of {jax.process_count()}'
    if isinstance(e, UserError):
      code, what = 2, f'error: {process}: {str(e).splitlines()[0]}'
    elif isinstance(e, (ValueError, jax.errors.JaxRuntimeError)) and _LOST_PEER.search(str(e)):
      time.sleep(_VERDICT_SECONDS)  # Meanwhile peers.py names the lost process, and ends this one.
      code, what = EXIT_AGAIN, f'stopped: {process} lost another one: {str(e).splitlines()[0]}'
    else:
      user_code.print_error(e, '')
      code, what = 1, f'stopped: {process} failed'
    warn(what)
    settle()
    os._exit(code)
