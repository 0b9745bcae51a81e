"""Joins this process to the others of a run, and ends it when others are gone."""

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping

from paxlite.cli import own_code
from paxlite.cli.terminal import settle, warn
from paxlite.core.errors import EXIT_AGAIN, Interrupted, TrainingError, UserError
from paxlite.processes import cluster
from paxlite.processes.agreement import Statement, compare_at_start
from paxlite.processes.coordinator import HEARTBEAT_SECONDS, SHUTDOWN_SECONDS, Coordinator
from paxlite.processes.peers import Peers
from paxlite.processes.rendezvous import attend, cannot_listen, gather, listens_on

_VERDICT_SECONDS = 4
_SLURM = ('SLURM_JOB_ID', 'SLURM_STEP_NODELIST', 'SLURM_NTASKS', 'SLURM_PROCID', 'SLURM_LOCALID')
# words in the errors of collectives and JAX's coordination service for a peer that does not answer
_LOST_PEER = re.compile(
  r'gloo|nccl|connection (closed|reset|refused)|closed by peer|socket|heartbeat|unavailable|'
  r'coordination|deadline',
  re.IGNORECASE,
)


log = logging.getLogger('paxlite')


def join(
  server_addr: str | None,
  num_hosts: int | None,
  host_idx: int | None,
  required: bool = False,
  statement: Callable[[], Statement] = dict,
) -> Peers:
  """Joins the processes of a run; must be called before anything asks JAX for devices.

  Without arguments, it joins the tasks of the Slurm step, or the processes of a place that JAX
  knows, if there are several. A single process joins nothing.

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
    UserError: An argument is missing or not valid, the other processes did not connect, or what
      the processes state differs.
    Interrupted: A process connected and was lost again, or a signal asked this process to leave.
  """
  given = {'server_addr': server_addr, 'num_hosts': num_hosts, 'host_idx': host_idx}
  missing = [f'--{name}' for name, value in given.items() if value is None]
  if not missing:
    _check(server_addr or '', num_hosts or 0, host_idx or 0)
  elif num_hosts == 1 and server_addr is None and not host_idx:
    return Peers()
  elif len(missing) < len(given):
    raise UserError(
      f'{" and ".join(missing)} missing: one of several processes needs --server_addr, '
      '--num_hosts and --host_idx'
    )
  elif int(os.environ.get('SLURM_STEP_NUM_TASKS', '1')) > 1:
    server_addr, num_hosts, host_idx = slurm_step(os.environ)
  elif found := cluster.detected():
    server_addr, num_hosts, host_idx = found
  elif required:
    raise UserError(
      '--multiprocess_gpu needs --server_addr=HOST:PORT, --num_hosts and --host_idx, or a place '
      'where processes are known: Slurm, Open MPI, Kubernetes, TPUs of Google Cloud'
    )
  else:
    return Peers()

  if num_hosts == 1:
    return Peers()
  host, _, port = str(server_addr).rpartition(':')
  where = host.strip('[]'), int(port), int(host_idx or 0), int(num_hosts or 0)
  return _joined(*where, statement())


def _joined(host: str, port: int, process: int, count: int, statement: Statement) -> Peers:
  coordinator = None
  connections = {}
  if process == 0:
    if not listens_on(host):
      log.warning('%s is 127.0.1.1 in /etc/hosts here: listening on all addresses', host)
    try:
      coordinator = Coordinator(listens_on(host), count)
    except OSError as e:
      raise cannot_listen(host, port, e) from None
    try:
      connections = gather(host, port, count, answer=lambda: _ready(coordinator))
      compare_at_start(connections, process, statement)
    except BaseException:
      coordinator.shutdown()
      raise
    service = coordinator.port  # `answer` has waited for it.
  else:
    connections[0], answer = attend(host, port, process, count)
    compare_at_start(connections, process, statement)
    service = int(answer)
  peers = Peers(connections, process, count)
  peers.watch()

  import jax

  used = contextlib.nullcontext() if coordinator is None else coordinator.used_by_jax()
  try:
    with used:
      jax.distributed.initialize(
        f'[{host}]:{service}' if ':' in host else f'{host}:{service}',
        count,
        process,
        local_device_ids=local_devices(os.environ),
        heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        shutdown_timeout_seconds=SHUTDOWN_SECONDS,
      )
  except (RuntimeError, ValueError) as e:
    raise UserError(f'the processes did not come together: {str(e).splitlines()[0]}') from None
  return peers


def _ready(coordinator: Coordinator) -> str:
  """Waits until the coordination service listens; returns its port."""
  coordinator.wait_until_ready()
  return str(coordinator.port)


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
      own_code.print_error(e, '')
      code, what = 1, f'stopped: {process} failed'
    warn(what)
    settle()
    os._exit(code)


def local_devices(environment: Mapping[str, str]) -> list[int] | None:
  """Returns the ids of this task's GPUs on its node; None leaves the choice to JAX.

  Under Slurm, JAX takes one GPU per task, even if a node has one task and eight GPUs. It also takes
  the GPU with the task's number on the node, even if --gpus-per-task has hidden the others.
  """
  if 'JAX_LOCAL_DEVICE_IDS' in environment:
    return None
  if 'SLURM_GPUS_PER_TASK' in environment and environment.get('CUDA_VISIBLE_DEVICES'):
    return list(range(environment['CUDA_VISIBLE_DEVICES'].count(',') + 1))
  gpus = environment.get('SLURM_GPUS_ON_NODE', '')
  tasks = re.match(r'\d+', environment.get('SLURM_STEP_TASKS_PER_NODE', ''))
  local = environment.get('SLURM_LOCALID', '')
  if not (gpus.isdigit() and tasks and local.isdigit()) or int(gpus) % int(tasks[0]):
    return None
  share = int(gpus) // int(tasks[0])
  return list(range(int(local) * share, (int(local) + 1) * share)) or None


def slurm_step(environment: Mapping[str, str]) -> tuple[str, int, int]:
  """Returns the address of process 0, the number of processes and the number of this process.

  They are read from the variables of the Slurm step. The port depends on the job, so that two jobs
  on one node do not use the same port.
  """
  missing = [name for name in _SLURM if name not in environment]
  if missing:
    raise UserError(f'the environment of this Slurm task lacks {missing[0]}: start it with srun')
  job, nodes = int(environment['SLURM_JOB_ID']), environment['SLURM_STEP_NODELIST']
  # The list is like n1,n2 or n[1-4,7],m1 or r[0-1]n[0-3]: take the first of each range.
  first = re.sub(r'\[(\d+)[^\]]*\]', r'\1', nodes).partition(',')[0]
  address = f'{first}:{environment.get("JAX_COORDINATOR_PORT") or 61_440 + job % 4_096}'
  processes, this = int(environment['SLURM_NTASKS']), int(environment['SLURM_PROCID'])
  _check(address, processes, this)
  return address, processes, this


def _check(server_addr: str, num_hosts: int, host_idx: int) -> None:
  host, _, port = server_addr.rpartition(':')
  if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 1 << 16:
    raise UserError(f'--server_addr={server_addr} must be HOST:PORT, with a port from 1 to 65535')
  try:
    host.encode('idna')
  except UnicodeError:
    raise UserError(f'--server_addr={server_addr}: {host} is no name of a host') from None
  if num_hosts < 1 or not 0 <= host_idx < num_hosts:
    raise UserError(f'--host_idx={host_idx} must be from 0 to --num_hosts={num_hosts} − 1')
