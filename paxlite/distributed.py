"""Joins this process to the others of a run."""

import os
from typing import Any

from paxlite.errors import UserError

_HEARTBEAT_SECONDS = 30  # after which a process that is gone is known to be


def join(
  server_addr: str | None, num_hosts: int | None, host_idx: int | None, required: bool = False
) -> None:
  """Joins the processes of a run, before anything asks JAX for devices.

  Without arguments, those of a Slurm step of several tasks; a process alone joins nothing.

  Args:
    server_addr: host:port of process 0, which listens there and nowhere else.
    num_hosts: How many processes.
    host_idx: Which of them this is, from 0.
    required: Whether a process alone is an error.

  Raises:
    UserError: an argument is missing or cannot be, or the others did not come.
  """
  given = {'server_addr': server_addr, 'num_hosts': num_hosts, 'host_idx': host_idx}
  missing = [f'--{name}' for name, value in given.items() if value is None]
  if not missing:
    _check(server_addr or '', num_hosts or 0, host_idx or 0)
    arguments: dict[str, Any] = dict(
      coordinator_address=server_addr,
      num_processes=num_hosts,
      process_id=host_idx,
      coordinator_bind_address=server_addr if host_idx == 0 else None,
    )
  elif len(missing) < len(given):
    raise UserError(
      f'{" and ".join(missing)} missing: one of several processes needs --server_addr, '
      '--num_hosts and --host_idx'
    )
  elif int(os.environ.get('SLURM_STEP_NUM_TASKS', '1')) > 1:
    arguments = {}  # JAX reads Slurm's variables
  elif required:
    raise UserError(
      '--multiprocess_gpu needs --server_addr=HOST:PORT, --num_hosts and --host_idx, or Slurm'
    )
  else:
    return

  import jax

  try:
    jax.distributed.initialize(**arguments, heartbeat_timeout_seconds=_HEARTBEAT_SECONDS)
  except (RuntimeError, ValueError) as e:
    raise UserError(f'the processes did not come together: {str(e).splitlines()[0]}') from None


def _check(server_addr: str, num_hosts: int, host_idx: int) -> None:
  host, _, port = server_addr.rpartition(':')
  if not host or not port.isdigit():
    raise UserError(f'--server_addr={server_addr} must be HOST:PORT')
  if num_hosts < 1 or not 0 <= host_idx < num_hosts:
    raise UserError(f'--host_idx={host_idx} must be from 0 to --num_hosts={num_hosts} − 1')
