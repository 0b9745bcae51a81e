"""Finds out which process of a run this one is: from flags, or as JAX detects it.

`jax.distributed.initialize()` detects that too, but its answer is needed before: processes meet and
compare what they must have in common before JAX's service starts (see peers.py). So the
classes that it asks, jax._src.clusters, are asked here, and nowhere else. They know Open MPI,
Slurm, mpi4py, TPUs on GKE and on Compute Engine, Kubernetes, and what a user derives from their
base class.
"""

import dataclasses
import importlib.util
import os
import re
from collections.abc import Mapping

from paxlite.cli.terminal import warn
from paxlite.core.errors import UserError, line_of

_FLAGS = '--server_addr=HOST:PORT, --num_hosts and --host_idx'
_ALONE = '--num_hosts=1 runs this process alone'
_SLURM = ('SLURM_JOB_ID', 'SLURM_STEP_NODELIST', 'SLURM_NTASKS', 'SLURM_PROCID', 'SLURM_LOCALID')
# variables of launchers: the number of processes, which one this is, and one that the others lack:
# a launcher in a Slurm step leaves Slurm's variables, and Slurm sets PMI's
_LAUNCHERS = {
  'Open MPI': ('OMPI_COMM_WORLD_SIZE', 'OMPI_COMM_WORLD_RANK', 'OMPI_COMM_WORLD_LOCAL_RANK'),
  'MPI': ('PMI_SIZE', 'PMI_RANK', 'MPI_LOCALRANKID'),
  'Slurm': ('SLURM_STEP_NUM_TASKS', 'SLURM_PROCID', 'SLURM_STEP_NUM_TASKS'),
}
# how many processes of the run are on this host, and which one of them this is
_ON_HOST = (
  ('OMPI_COMM_WORLD_LOCAL_SIZE', 'OMPI_COMM_WORLD_LOCAL_RANK'),
  ('MPI_LOCALNRANKS', 'MPI_LOCALRANKID'),
)
_DETECT_SECONDS = 300  # that a host's name may take to resolve: JAX's own default


@dataclasses.dataclass(frozen=True)
class ProcessPlace:
  """The place of a process in a run of several."""

  host: str  # the host name or address of process 0
  port: int  # the port on which process 0 listens
  process: int  # the number of this process, from 0
  count: int  # the number of processes

  @property
  def address(self) -> str:
    return self.named(self.port)

  def named(self, port: int) -> str:
    """Returns the address of another port of the same host."""
    return f'[{self.host}]:{port}' if ':' in self.host else f'{self.host}:{port}'

  @classmethod
  def parsed(cls, address: str, count: int, process: int, given: str = '') -> 'ProcessPlace':
    """Returns a place; raises UserError if it cannot be.

    Args:
      address: HOST:PORT of process 0.
      count: The number of processes.
      given: Where the three come from, for messages: by default, from flags.
    """
    named = f'{given}: {address}' if given else f'--server_addr={address}'
    host, _, port = address.rpartition(':')
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 1 << 16:
      raise UserError(f'{named} must be HOST:PORT, with a port from 1 to 65535')
    try:
      host.encode('idna')
    except UnicodeError:
      raise UserError(f'{named}: {host} is not a host name') from None
    if count < 1 or not 0 <= process < count:
      raise UserError(
        f'{given}: process {process} of {count} is not possible'
        if given
        else f'--host_idx={process} must be from 0 to --num_hosts={count} − 1'
      )
    return cls(host.strip('[]'), int(port), process, count)


def find(
  server_addr: str | None, num_hosts: int | None, host_idx: int | None, required: bool = False
) -> ProcessPlace | None:
  """Returns the place of this process; None if it is alone.

  Raises UserError if an argument is missing, not valid, or contradicts the environment.

  Args:
    server_addr: host:port of process 0.
    num_hosts: The number of processes.
    host_idx: The number of this process, from 0.
    required: Whether a single process is an error.
  """
  given = {'server_addr': server_addr, 'num_hosts': num_hosts, 'host_idx': host_idx}
  missing = [f'--{name}' for name, value in given.items() if value is None]
  if len(missing) == len(given):
    place = detected(os.environ)
    if place is None and required:
      raise UserError(
        f'--multiprocess_gpu needs {_FLAGS}, or a place where JAX detects several processes '
        '(Slurm, MPI, TPUs, Kubernetes)'
      )
    return place
  if missing and num_hosts == 1 and not host_idx:
    return None
  if missing:
    raise UserError(
      f'{" and ".join(missing)} missing: one of several processes needs --server_addr, '
      '--num_hosts and --host_idx'
    )
  place = ProcessPlace.parsed(server_addr or '', num_hosts or 0, host_idx or 0)
  if place.count == 1:
    return None
  launcher, *numbers = _launched(os.environ)
  if launcher and numbers != [place.count, place.process]:
    raise UserError(
      f'--num_hosts={place.count} --host_idx={place.process} contradict {launcher}, where this is '
      f'process {numbers[1]} of {numbers[0]}: leave them out, with --server_addr; {_ALONE}'
    )
  return place


def detected(environment: Mapping[str, str]) -> ProcessPlace | None:
  """Returns the place of this process as JAX detects it; None if it is alone."""
  from jax._src import clusters

  launcher, *_ = _launched(environment)
  if launcher == 'Slurm':  # JAX counts the tasks of the job, and misreads some lists of nodes.
    return slurm_step(environment)
  if environment.get('OMPI_COMM_WORLD_SIZE') == '1':
    return None
  for cluster in clusters.ClusterEnv._cluster_types:
    if (
      cluster is clusters.SlurmCluster
      or (cluster is clusters.K8sCluster and not _in_indexed_job(environment))
      or (cluster.opt_in_only_method and not (cluster is clusters.Mpi4pyCluster and launcher))
    ):
      continue
    try:
      if not cluster.is_env_present():
        continue
      count = cluster.get_process_count()
      if count == 1:
        return None
      address = environment.get('JAX_COORDINATOR_ADDRESS') or cluster.get_coordinator_address(
        timeout_secs=_DETECT_SECONDS,
        override_coordinator_port=environment.get('JAX_COORDINATOR_PORT'),
      )
      process = cluster.get_process_id()
    except Exception as e:  # of requests, of kubernetes, of a variable that is no number
      raise UserError(
        f'JAX detects a {cluster.__name__} here, but not which process this is: '
        f'{type(e).__name__}: {line_of(e)}. Give {_FLAGS}; {_ALONE}'
      ) from None
    return ProcessPlace.parsed(address, count, process, _source(environment, cluster.__name__))
  if launcher:
    raise UserError(
      f'{launcher} started several processes, but JAX needs mpi4py to find them: python -m pip '
      f'install mpi4py. Or give {_FLAGS}; {_ALONE}'
    )
  return None


def local_devices(environment: Mapping[str, str]) -> list[int] | None:
  """Returns the ids of this process's GPUs on its host; None means all.

  Under Slurm and MPI, JAX takes one GPU for each process, even if a host has one process and eight
  GPUs. Under Slurm, it also takes the GPU with the task's number on the node, even if
  --gpus-per-task has hidden the others.
  """
  if 'JAX_LOCAL_DEVICE_IDS' in environment:  # JAX reads it.
    return None
  for size, rank in _ON_HOST:
    if environment.get(size, '1') != '1' and environment.get(rank, '').isdigit():
      return [int(environment[rank])]
  if 'SLURM_GPUS_PER_TASK' in environment and environment.get('CUDA_VISIBLE_DEVICES'):
    return list(range(environment['CUDA_VISIBLE_DEVICES'].count(',') + 1))
  local = environment.get('SLURM_LOCALID', '')
  gpus = environment.get('SLURM_GPUS_ON_NODE', '')
  tasks = re.match(r'\d+', environment.get('SLURM_STEP_TASKS_PER_NODE', ''))
  if not local.isdigit():
    return None
  if not (gpus.isdigit() and tasks) or int(gpus) % int(tasks[0]):
    return [int(local)] if 'SLURM_STEP_NODELIST' in environment else None
  share = int(gpus) // int(tasks[0])
  return list(range(int(local) * share, (int(local) + 1) * share)) or None  # no GPUs


def slurm_step(environment: Mapping[str, str]) -> ProcessPlace:
  """Returns the place of this process as the variables of its Slurm step say it.

  The port depends on the job, so that two jobs on one node do not use the same port.
  """
  missing = [name for name in _SLURM if name not in environment]
  if missing:
    raise UserError(f'the environment of this Slurm task lacks {missing[0]}: start it with srun')
  job, nodes = int(environment['SLURM_JOB_ID']), environment['SLURM_STEP_NODELIST']
  # The list is like n1,n2 or n[1-4,7],m1 or r[0-1]n[0-3]: take the first of each range.
  first = re.sub(r'\[(\d+)[^\]]*\]', r'\1', nodes).partition(',')[0]
  port = environment.get('JAX_COORDINATOR_PORT') or 61_440 + job % 4_096
  address = environment.get('JAX_COORDINATOR_ADDRESS') or f'{first}:{port}'
  return ProcessPlace.parsed(
    address, int(environment['SLURM_NTASKS']), int(environment['SLURM_PROCID']),
    _source(environment, 'the Slurm step'),
  )  # fmt: skip


def _source(environment: Mapping[str, str], detected_by: str) -> str:
  name = 'JAX_COORDINATOR_ADDRESS'
  return name if name in environment else detected_by


def _launched(environment: Mapping[str, str]) -> tuple[str, int, int]:
  """Returns which launcher started this process, as one of how many, and which one it is.

  The name is '' if there is one process, or no launcher that says so in variables.
  """
  for launcher, (size, rank, own) in _LAUNCHERS.items():
    count = environment.get(size, '')
    if own in environment and count.isdigit() and int(count) > 1:
      return launcher, int(count), int(environment.get(rank) or 0)
  return '', 1, 0


def _in_indexed_job(environment: Mapping[str, str]) -> bool:
  """Returns whether this is a pod of an indexed Job of Kubernetes, which JAX can ask about it.

  JAX cannot tell the place of any other pod, which is that of a notebook or of a run of one
  process. The first pod may be the only one, so that it runs alone if JAX cannot ask, and says so.
  """
  index = environment.get('JOB_COMPLETION_INDEX')
  if index is None or importlib.util.find_spec('kubernetes') is not None:
    return index is not None
  if index != '0':
    raise UserError(
      f'this is pod {index} of an indexed Job, but JAX needs the package kubernetes to find the '
      f'others: python -m pip install kubernetes. Or give {_FLAGS}; {_ALONE}'
    )
  warn(
    'this is pod 0 of an indexed Job: without the package kubernetes, it runs as if it were alone'
  )
  return False
