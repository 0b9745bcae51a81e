"""The processes of a run where JAX knows the place: TPUs of Google Cloud, Kubernetes, Open MPI.

JAX's classes for these places say where process 0 is, how many processes there are, and which one
this is. `jax.distributed.initialize()` asks them too, but it connects the processes at once; here
they are compared and watched before that (see rendezvous.py), so the classes are asked first.
Slurm's variables are read in join.py, which also shares out the GPUs of a node.
"""

import logging
import os
import warnings
from typing import Any

from paxlite.core.errors import UserError, line_of

# by JAX's name of the class
_PLACES = {
  'GceTpuCluster': 'a TPU of Google Cloud',
  'GkeTpuCluster': 'a TPU of Google Kubernetes Engine',
  'K8sCluster': 'a pod of Kubernetes',
  'OmpiCluster': 'a process of Open MPI',
}
_SECONDS = 300  # for the name of process 0 to appear

log = logging.getLogger('paxlite')


def detected() -> tuple[str, int, int] | None:
  """Returns the address of process 0, the number of processes, and the number of this process.

  None means that this is no place that JAX knows.

  Raises:
    UserError: It is such a place, and it does not say which processes there are.
  """
  from jax._src import clusters

  known: dict[str, Any] = {kind.__name__: kind for kind in clusters.ClusterEnv._cluster_types}
  for name, place in _PLACES.items():
    try:
      with warnings.catch_warnings(action='ignore'):  # a package for Kubernetes that is not there
        if name not in known or not known[name].is_env_present():
          continue
      port = os.environ.get('JAX_COORDINATOR_PORT')
      address = known[name].get_coordinator_address(_SECONDS, port)
      found = address, known[name].get_process_count(), known[name].get_process_id()
    except Exception as e:  # of a library of the place, such as that of Kubernetes
      if name == 'K8sCluster' and 'JOB_COMPLETION_INDEX' not in os.environ:
        log.info('this pod is not one of a Job with several: %s', line_of(e))
        continue
      raise UserError(
        f'this is {place}, and it does not say which processes the run has: {line_of(e)}. Name '
        'them by --server_addr, --num_hosts and --host_idx; a run of this process alone has '
        '--num_hosts=1'
      ) from None
    if found[1] > 1:
      log.info('this is %s: process %d of %d', place, found[2], found[1])
    return found
  return None
