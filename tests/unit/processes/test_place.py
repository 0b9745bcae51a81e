"""Which process this is, by flags and as JAX detects it from the variables of each place."""

import json
import os
import socket
import sys

import pytest
from jax._src.clusters import GceTpuCluster, cloud_tpu_cluster, k8s_cluster

from paxlite.core.errors import UserError
from paxlite.processes import join, place
from paxlite.processes.place import ProcessPlace
from tests.support import metadata_server, runs

SLURM = {
  'SLURM_JOB_ID': '4097', 'SLURM_STEP_NODELIST': 'n7', 'SLURM_NTASKS': '8',
  'SLURM_STEP_NUM_TASKS': '8', 'SLURM_PROCID': '5', 'SLURM_LOCALID': '1',
}  # fmt: skip
OPEN_MPI = {
  'OMPI_COMM_WORLD_SIZE': '4', 'OMPI_COMM_WORLD_RANK': '2',
  'OMPI_COMM_WORLD_LOCAL_SIZE': '2', 'OMPI_COMM_WORLD_LOCAL_RANK': '0',
}  # fmt: skip
ORTE = {'OMPI_MCA_orte_hnp_uri': '1531576320.0;tcp://10.96.0.1,10.148.0.1:34911'}
GKE = {
  'TPU_WORKER_HOSTNAMES': 'localhost,n1', 'TPU_WORKER_ID': '1', 'TPU_SKIP_MDS_QUERY': 'true'
}  # fmt: skip
SLICES = {
  'MEGASCALE_COORDINATOR_ADDRESS': 'localhost:8081', 'MEGASCALE_NUM_SLICES': '2',
  'MEGASCALE_SLICE_ID': '1',
}  # fmt: skip


@pytest.fixture
def here(monkeypatch):
  """Sets the variables of a place, and no others that JAX or paxlite look at."""

  def set_variables(variables: dict[str, str]) -> None:
    beginnings = (
      'SLURM_', 'OMPI_', 'PMI_', 'MPI_', 'TPU_', 'MEGASCALE_', 'JAX_COORD', 'KUBERNETES', 'GCE_',
    )  # fmt: skip
    for name in list(os.environ):
      if name.startswith(beginnings):
        monkeypatch.delenv(name)
    for name, value in variables.items():
      monkeypatch.setenv(name, value)

  return set_variables


@pytest.fixture
def on_tpus(monkeypatch):
  monkeypatch.setattr(cloud_tpu_cluster, 'running_in_cloud_tpu_vm', True)
  monkeypatch.setattr(cloud_tpu_cluster.time, 'sleep', lambda _: None)  # between tries


@pytest.mark.parametrize(
  ('arguments', 'match'),
  [
    (('h:1', 2, None), '--host_idx missing: one of several'),
    ((None, 2, None), '--server_addr and --host_idx missing: one of several'),
    (('h', 2, 0), '--server_addr=h must be HOST:PORT'),
    (('h:0', 2, 0), 'with a port from 1 to 65535'),
    (('h:99999', 2, 0), 'with a port from 1 to 65535'),
    (('h:²', 2, 0), 'with a port from 1 to 65535'),
    (('a..b:1234', 2, 0), 'a..b is not a host name'),
    (('h:1', 2, 2), '--host_idx=2 must be from 0 to --num_hosts=2'),
    ((None, None, None, True), '--multiprocess_gpu needs --server_addr'),
  ],
)
def test_arguments_that_cannot_be(here, arguments, match):
  here({})
  with pytest.raises(UserError, match=match):
    place.find(*arguments)


@pytest.mark.parametrize('host', ['no.such.host.invalid', '192.0.2.7'])
def test_process_0_that_cannot_listen(here, host):
  here({})
  with pytest.raises(UserError, match=f'process 0 cannot listen on {host}:1234'):
    join.join(f'{host}:1234', 2, 0)


def test_flags_go_before_what_is_detected(here):
  here(SLURM)
  assert place.find('h:1', 8, 5) == ProcessPlace('h', 1, 5, 8)
  assert place.find('[::1]:7', 8, 5).host == '::1'
  assert place.find(None, 1, None) is None
  assert place.find('h:1', 1, None) is None
  assert place.find('h:1', 1, 0) is None


@pytest.mark.parametrize(
  ('variables', 'launcher'),
  [
    (SLURM, 'Slurm, where this is process 5 of 8'),
    (SLURM | OPEN_MPI, 'Open MPI, where this is process 2 of 4'),
    ({'PMI_SIZE': '4', 'PMI_RANK': '2', 'MPI_LOCALRANKID': '0'}, 'MPI, where this is process 2 of'),
  ],
)
def test_flags_that_contradict_the_launcher(here, variables, launcher):
  here(variables)
  with pytest.raises(UserError, match=f'--num_hosts=2 --host_idx=1 contradict {launcher}') as e:
    place.find('h:1', 2, 1)
  assert '--num_hosts=1 runs this process alone' in str(e.value)


@pytest.mark.parametrize(
  ('nodes', 'host'),
  [
    ('n7', 'n7'),
    ('n7,m2', 'n7'),
    ('node[003-010,12],m1', 'node003'),
    ('a-b[1,3]', 'a-b1'),
    ('n[1-4]-ib', 'n1-ib'),
    ('r[0-1]n[2-3],x', 'r0n2'),
  ],
)
def test_process_0_of_a_slurm_step(here, nodes, host):
  here(SLURM | {'SLURM_STEP_NODELIST': nodes})
  assert place.find(None, None, None) == ProcessPlace(host, 61441, 5, 8)


def test_slurm(here):
  here({k: v for k, v in SLURM.items() if k != 'SLURM_PROCID'})
  with pytest.raises(UserError, match='lacks SLURM_PROCID: start it with srun'):
    place.find(None, None, None)
  here(SLURM | {'SLURM_STEP_NUM_TASKS': '1'})  # in salloc: SLURM_NTASKS is that of the job
  assert place.find(None, None, None) is None
  here(SLURM | {'PMI_SIZE': '8', 'PMI_RANK': '5', 'JAX_COORDINATOR_PORT': '77'})  # --mpi=pmi2
  assert place.find(None, None, None) == ProcessPlace('n7', 77, 5, 8)


def test_open_mpi(here):
  here(OPEN_MPI | ORTE)
  assert place.find(None, None, None) == ProcessPlace('10.96.0.1', 61440 + 373920 % 4096, 2, 4)
  # mpirun in a Slurm allocation: Slurm's step is that of its daemons
  here(SLURM | OPEN_MPI | ORTE | {'JAX_COORDINATOR_PORT': '77'})
  assert place.find(None, None, None) == ProcessPlace('10.96.0.1', 77, 2, 4)
  here(OPEN_MPI | ORTE | {'JAX_COORDINATOR_ADDRESS': 'n3:78'})
  assert place.find(None, None, None) == ProcessPlace('n3', 78, 2, 4)
  here(OPEN_MPI | ORTE | {'OMPI_COMM_WORLD_SIZE': '1', 'OMPI_COMM_WORLD_RANK': '0'})
  assert place.find(None, None, None) is None


@pytest.mark.parametrize('launcher', [SLURM, OPEN_MPI | ORTE])
def test_a_wrong_address_is_named_by_its_variable(here, launcher):
  here(launcher | {'JAX_COORDINATOR_ADDRESS': 'n3:port'})
  with pytest.raises(UserError, match='JAX_COORDINATOR_ADDRESS: n3:port must be HOST:PORT'):
    place.find(None, None, None)
  here(SLURM | {'SLURM_PROCID': '8'})
  with pytest.raises(UserError, match='the Slurm step: process 8 of 8 is not possible'):
    place.find(None, None, None)


def test_mpi_without_mpi4py(here):
  hydra = {'PMI_SIZE': '4', 'PMI_RANK': '2', 'MPI_LOCALRANKID': '0', 'MPI_LOCALNRANKS': '4'}
  for variables in (OPEN_MPI | {'OMPI_VERSION': '5.0.1'}, hydra):
    here(variables)
    with pytest.raises(UserError, match=r'mpi4py.*Give --server_addr|mpi4py.*Or give --server_a'):
      place.find(None, None, None)
    here(variables | {'OMPI_COMM_WORLD_SIZE': '1', 'PMI_SIZE': '1'})
    assert place.find(None, None, None) is None


def test_mpi4py(here, monkeypatch, tmp_path):
  monkeypatch.syspath_prepend(runs.ROOT / 'tests' / 'support' / 'places')
  here(OPEN_MPI | {'FAKE_MPI': str(tmp_path / 'address')})
  (tmp_path / 'address').write_text('n5:61500')
  try:
    assert place.find(None, None, None) == ProcessPlace('n5', 61500, 2, 4)
  finally:
    for name in ('mpi4py', 'mpi4py.MPI'):
      sys.modules.pop(name, None)


def test_gke(here, on_tpus):
  """A slice of two machines, then two such slices."""
  with metadata_server.serving({'tpu-env': ''}) as server:
    here(GKE | {'GCE_METADATA_IP': server})
    assert place.find(None, None, None) == ProcessPlace('localhost', 8482, 1, 2)
    here(GKE | {'GCE_METADATA_IP': server, 'TPU_WORKER_HOSTNAMES': 'n0', 'TPU_WORKER_ID': '0'})
    assert place.find(None, None, None) is None
  here(GKE | SLICES)
  assert place.find(None, None, None) == ProcessPlace('localhost', 8482, 3, 4)
  here(SLICES | {name: value for name, value in GKE.items() if name != 'TPU_WORKER_ID'})
  with pytest.raises(UserError, match=r'detects a GkeTpuCluster here, but not .*: ValueError'):
    place.find(None, None, None)


@pytest.mark.parametrize('workers', ['n0:0:127.0.0.1,n1:1:10.0.0.2', '127.0.0.1,10.0.0.2'])
def test_compute_engine(here, on_tpus, workers):
  attributes = {
    'agent-worker-number': '1',
    'worker-network-endpoints': workers,
    'tpu-env': "ZONE: 'us-central2-b'",
  }
  with metadata_server.serving(attributes) as server:
    here({'GCE_METADATA_IP': server})
    assert place.find(None, None, None) == ProcessPlace('127.0.0.1', 8482, 1, 2)
    attributes['tpu-env'] += ''.join(f"\n{name}: '{value}'" for name, value in SLICES.items())
    assert place.find(None, None, None) == ProcessPlace('localhost', 8482, 3, 4)
  with metadata_server.serving({}) as server:  # a machine without TPUs
    here({'GCE_METADATA_IP': server})
    assert not GceTpuCluster.is_env_present()
    assert place.find(None, None, None) is None


def test_a_metadata_server_that_is_not_there(here, on_tpus):
  here({'GCE_METADATA_IP': '127.0.0.1:9'})
  with pytest.raises(
    UserError, match=r'a GceTpuCluster here.*ConnectionError.*Give --server_a'
  ) as e:
    place.find(None, None, None)
  assert '\n' not in str(e.value)


def test_kubernetes(here, monkeypatch):
  """A pod of an indexed Job is one of several; any other pod is alone."""
  pod = {'KUBERNETES_SERVICE_HOST': '10.0.0.1', 'HOSTNAME': 'localhost'}
  monkeypatch.delenv('JOB_COMPLETION_INDEX', raising=False)
  here(pod)
  assert place.find(None, None, None) is None
  here(pod | {'JOB_COMPLETION_INDEX': '0'})
  assert place.find(None, None, None) is None
  here(pod | {'JOB_COMPLETION_INDEX': '1'})
  with pytest.raises(UserError, match=r'this is pod 1 of an indexed Job.* pip install kubernetes'):
    place.find(None, None, None)
  monkeypatch.syspath_prepend(runs.ROOT / 'tests' / 'support' / 'places')
  monkeypatch.setattr(k8s_cluster.time, 'sleep', lambda _: None)
  monkeypatch.setattr(socket, 'gethostbyname', lambda _: '127.0.0.1')
  answers = {'job': 'paxlite-worker-0', 'jobset': 'paxlite', 'parallelism': 2}
  here(pod | {'JOB_COMPLETION_INDEX': '1', 'FAKE_KUBERNETES': json.dumps(answers)})
  try:
    assert place.find(None, None, None) == ProcessPlace('paxlite-worker-0-0.paxlite', 55527, 1, 2)
  finally:
    sys.modules.pop('kubernetes', None)


@pytest.mark.parametrize(
  ('environment', 'expected'),
  [
    ({}, None),
    # 8 GPUs with one task, two tasks and eight tasks; then tasks that cannot share them evenly
    ({'SLURM_GPUS_ON_NODE': '8', 'SLURM_STEP_TASKS_PER_NODE': '1(x2)', 'SLURM_LOCALID': '0'},
     [0, 1, 2, 3, 4, 5, 6, 7]),
    ({'SLURM_GPUS_ON_NODE': '8', 'SLURM_STEP_TASKS_PER_NODE': '2(x2)', 'SLURM_LOCALID': '1'},
     [4, 5, 6, 7]),
    ({'SLURM_GPUS_ON_NODE': '8', 'SLURM_STEP_TASKS_PER_NODE': '8', 'SLURM_LOCALID': '3'}, [3]),
    ({'SLURM_GPUS_ON_NODE': '8', 'SLURM_STEP_TASKS_PER_NODE': '3', 'SLURM_LOCALID': '1'}, None),
    ({'SLURM_GPUS_ON_NODE': '8', 'SLURM_STEP_TASKS_PER_NODE': '3', 'SLURM_LOCALID': '1',
      'SLURM_STEP_NODELIST': 'n1'}, [1]),
    # --gpus-per-task=1: the task sees only its own GPU
    ({'SLURM_GPUS_ON_NODE': '8', 'SLURM_STEP_TASKS_PER_NODE': '8', 'SLURM_LOCALID': '3',
      'SLURM_GPUS_PER_TASK': '1', 'CUDA_VISIBLE_DEVICES': '3'}, [0]),
    ({'SLURM_GPUS_ON_NODE': '8', 'SLURM_STEP_TASKS_PER_NODE': '1', 'SLURM_LOCALID': '0',
      'JAX_LOCAL_DEVICE_IDS': '2'}, None),
    # two processes of Open MPI or Hydra on a host, and one
    (OPEN_MPI | {'OMPI_COMM_WORLD_LOCAL_RANK': '1'}, [1]),
    ({'MPI_LOCALNRANKS': '4', 'MPI_LOCALRANKID': '3'}, [3]),
    (OPEN_MPI | {'OMPI_COMM_WORLD_LOCAL_SIZE': '1'}, None),
  ],
)  # fmt: skip
def test_the_gpus_of_a_process(environment, expected):
  assert place.local_devices(environment) == expected
