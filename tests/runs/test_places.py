"""Two processes join without flags, by the variables that each place sets, and train.

Slurm itself is in test_slurm.py. Open MPI, Kubernetes and the clouds are not here: their variables
are, a metadata server of Compute Engine, and stand-ins for the packages kubernetes and mpi4py.
"""

import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping

import pytest

from tests.support import metadata_server, runs

# From here on, JAX chooses ports by the number of the job.
FIRST_PORT = 61_440
STAND_INS = f'{runs.ROOT}/tests/support/places{os.pathsep}{runs.ROOT}'
SHORT = (
  '--fdl.ICI_MESH_SHAPE=[1,1,1]', '--fdl.DCN_MESH_SHAPE=[2,1,1]', '--fdl.PERCORE_BATCH_SIZE=1',
  '--fdl.MAX_STEPS=2', '--fdl.NUM_LAYERS=1', '--fdl.SUMMARY_INTERVAL_STEPS=1',
)  # fmt: skip
PLAIN_JAX = """
import os, sys, time
import jax
process = int(sys.argv[2])
jax.distributed.initialize(f'127.0.0.1:{sys.argv[1]}', 2, process)
print('joined', flush=True)
time.sleep(60)
"""


def free_port(first: int = 0) -> int:
  for port in range(first, 65_536):
    with contextlib.suppress(OSError), socket.create_server(('127.0.0.1', port)) as s:
      return s.getsockname()[1]
  raise AssertionError


def start(folder, variables: Mapping[str, str], *flags: str, module='paxlite.main'):
  return runs.started(
    runs.command(folder, *SHORT, *flags, module=module),
    runs.environment() | variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
  )  # fmt: skip


@contextlib.contextmanager
def open_mpi(folder: pathlib.Path) -> Iterator[list[dict[str, str]]]:
  """Open MPI 4."""
  job = (free_port(FIRST_PORT) - FIRST_PORT) << 12
  yield [
    {
      'OMPI_MCA_orte_hnp_uri': f'{job}.0;tcp://127.0.0.1:34911', 'OMPI_COMM_WORLD_SIZE': '2',
      'OMPI_COMM_WORLD_RANK': str(i), 'OMPI_COMM_WORLD_LOCAL_SIZE': '2',
      'OMPI_COMM_WORLD_LOCAL_RANK': str(i),
    }
    for i in range(2)
  ]  # fmt: skip


@contextlib.contextmanager
def open_mpi_5(folder: pathlib.Path) -> Iterator[list[dict[str, str]]]:
  with open_mpi(folder) as found:
    added = {
      'PYTHONPATH': STAND_INS,
      'FAKE_MPI': str(folder / 'address'),
      'JAX_COORDINATOR_PORT': str(free_port()),
    }
    yield [{k: v for k, v in e.items() if 'orte' not in k} | added for e in found]


@contextlib.contextmanager
def slurm(folder: pathlib.Path) -> Iterator[list[dict[str, str]]]:
  yield [
    {
      'SLURM_JOB_ID': str(free_port(FIRST_PORT) - FIRST_PORT), 'SLURM_STEP_NODELIST': 'localhost',
      'SLURM_NTASKS': '2', 'SLURM_STEP_NUM_TASKS': '2', 'SLURM_PROCID': str(i),
      'SLURM_LOCALID': str(i),
    }
    for i in range(2)
  ]  # fmt: skip


@contextlib.contextmanager
def kubernetes(folder: pathlib.Path) -> Iterator[list[dict[str, str]]]:
  """The name of the first pod does not resolve here, so that its address is given."""
  answers = {'job': 'paxlite-worker-0', 'jobset': 'paxlite', 'parallelism': 2}
  address = f'127.0.0.1:{free_port()}'
  yield [
    {
      'PYTHONPATH': STAND_INS, 'FAKE_KUBERNETES': json.dumps(answers),
      'KUBERNETES_SERVICE_HOST': '10.0.0.1', 'HOSTNAME': 'localhost',
      'JOB_COMPLETION_INDEX': str(i), 'JAX_COORDINATOR_ADDRESS': address,
    }
    for i in range(2)
  ]  # fmt: skip


@contextlib.contextmanager
def gke(folder: pathlib.Path) -> Iterator[list[dict[str, str]]]:
  with metadata_server.serving({'tpu-env': ''}) as server:
    yield [
      {
        'TPU_WORKER_HOSTNAMES': 'localhost,localhost', 'TPU_WORKER_ID': str(i),
        'TPU_SKIP_MDS_QUERY': 'true', 'GCE_METADATA_IP': server,
        'JAX_COORDINATOR_PORT': str(free_port(20_000)),
      }
      for i in range(2)
    ]  # fmt: skip


@contextlib.contextmanager
def slices_on_gke(folder: pathlib.Path) -> Iterator[list[dict[str, str]]]:
  """Two slices of one machine each."""
  yield [
    {
      'TPU_WORKER_HOSTNAMES': 'localhost', 'TPU_WORKER_ID': '0',
      'MEGASCALE_COORDINATOR_ADDRESS': 'localhost', 'MEGASCALE_NUM_SLICES': '2',
      'MEGASCALE_SLICE_ID': str(i), 'TPU_SKIP_MDS_QUERY': 'true',
      'JAX_COORDINATOR_PORT': str(free_port(20_000)),
    }
    for i in range(2)
  ]  # fmt: skip


@contextlib.contextmanager
def compute_engine(folder: pathlib.Path) -> Iterator[list[dict[str, str]]]:
  port = str(free_port(20_000))
  with contextlib.ExitStack() as stack:
    environments = []
    for i in range(2):
      attributes = {
        'agent-worker-number': str(i),
        'worker-network-endpoints': 'n0:0:127.0.0.1,n1:1:127.0.0.1',
        'tpu-env': "ZONE: 'us-central2-b'",
      }
      server = stack.enter_context(metadata_server.serving(attributes))
      environments.append({'GCE_METADATA_IP': server, 'JAX_COORDINATOR_PORT': port})
    yield environments


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.parametrize(
  'place',
  [
    open_mpi,
    *(
      pytest.param(p, marks=pytest.mark.slow)
      for p in (open_mpi_5, slurm, kubernetes, gke, slices_on_gke, compute_engine)
    ),
  ],
)
def test_two_processes_join_without_flags(tmp_path, place):
  on_tpus = place in (gke, slices_on_gke, compute_engine)
  with place(tmp_path) as environments:
    module = 'tests.support.tpu_main' if on_tpus else 'paxlite.main'
    started = [start(tmp_path / 'run', e, module=module) for e in environments]
    ended = [p.communicate(timeout=120) for p in started]
  assert [p.returncode for p in started] == [0, 0], ended
  assert list(runs.losses(tmp_path / 'run')) == [1, 2]
  assert re.search(r'^Devices: 2 ', ended[0][0], re.MULTILINE), ended[0][0]
  assert 'step 2' in ended[0][0]
  assert 'step 2' not in ended[1][0]


def test_flags_that_contradict_the_place_are_a_line(tmp_path):
  with open_mpi(tmp_path) as environments:
    flags = '--server_addr=127.0.0.1:1', '--num_hosts=4', '--host_idx=1'
    process = start(tmp_path / 'run', environments[1], *flags)
    _, stderr = process.communicate(timeout=60)
  assert process.returncode == 2
  assert stderr.splitlines()[-1].startswith(
    'error: --num_hosts=4 --host_idx=1 contradict Open MPI, where this is process 1 of 2: leave'
  )
  assert not (tmp_path / 'run').exists()


@pytest.mark.slow
def test_one_of_several_places_runs_alone_if_it_is_told_so(tmp_path):
  with open_mpi(tmp_path) as environments:
    flags = '--num_hosts=1', '--fdl.DCN_MESH_SHAPE=[1,1,1]'
    process = start(tmp_path / 'run', environments[1], *flags)
    ended = process.communicate(timeout=120)
  assert process.returncode == 0, ended
  assert list(runs.losses(tmp_path / 'run')) == [1, 2]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_signal_ends_the_wait_for_a_process_0_that_cannot_be_reached(tmp_path):
  """Nobody listens there. Without a signal, the wait ends after five minutes, with the reason."""
  with open_mpi(tmp_path) as environments:
    process = start(tmp_path / 'run', environments[1])
    for line in process.stderr:
      if 'process 1 waits for process 0 at 127.0.0.1:' in line:
        break
    assert '(Connection refused) (1' in line
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=30)
  assert process.returncode == 75
  assert 'told to stop before the processes connected:' in stderr


@pytest.mark.slow
def test_jax_alone_ends_the_others_by_sigabrt_when_process_0_dies():
  """If this fails, JAX has learned what peers.py is for: test_faults.py has what paxlite does."""
  command = [sys.executable, '-c', PLAIN_JAX, str(free_port())]
  processes = [
    subprocess.Popen(
      [*command, str(i)], env={**os.environ, 'JAX_PLATFORMS': 'cpu'}, text=True,
      stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )
    for i in range(2)
  ]  # fmt: skip
  assert [p.stdout.readline() for p in processes] == ['joined\n'] * 2
  processes[0].kill()
  _, stderr = processes[1].communicate(timeout=30)
  assert processes[1].returncode == -signal.SIGABRT
  assert 'process 0 is gone' not in stderr
  processes[0].communicate()
