"""Runs find their processes where JAX knows the place, without flags.

Open MPI is the environment that its mpirun sets, and the processes are real. TPUs of Google Cloud
are the environment of Kubernetes Engine, and a metadata server on loopback as queued resources have
it; there is no TPU. Kubernetes without TPUs needs an API server, and was not tried.
"""

import contextlib
import http.server
import socket
import threading

import pytest
from jax._src import clusters
from jax._src.clusters import cloud_tpu_cluster

from paxlite.core.errors import UserError
from paxlite.processes import cluster
from paxlite.processes.join import join
from tests.support import runs
from tests.support.processes import MESH

HOSTS = 'localhost,worker-1.tpu'  # JAX waits until the name of the first one is known


def open_mpi(rank: int, port: int, size: int = 2) -> dict[str, str]:
  """Returns what Open MPI's mpirun sets; without the port, JAX chooses it by the job."""
  return {
    'OMPI_MCA_orte_hnp_uri': '1531576320.0;tcp://127.0.0.1:34911',
    'OMPI_COMM_WORLD_SIZE': str(size),
    'OMPI_COMM_WORLD_RANK': str(rank),
    'OMPI_COMM_WORLD_LOCAL_RANK': str(rank),
    'JAX_COORDINATOR_PORT': str(port),
  }


def put(monkeypatch, **variables):
  for name, value in variables.items():
    monkeypatch.setenv(name, value)


def test_nothing_is_detected_here():
  assert cluster.detected() is None


def test_a_place_of_one_process_is_a_run_of_one(monkeypatch):
  put(monkeypatch, **open_mpi(0, 1234, size=1))
  assert join(None, None, None, required=True).alone


def test_processes_of_open_mpi_train_together(tmp_path):
  with socket.socket() as s:
    s.bind(('127.0.0.1', 0))
    port = s.getsockname()[1]
  flags = *MESH, '--fdl.MAX_STEPS=2', '--fdl.NUM_LAYERS=1', '--noenable_checkpoint_saving'
  started = [
    runs.started(
      runs.command(tmp_path / 'run', *flags, config='TinyGPT'),
      runs.environment(2) | open_mpi(rank, port),
      stdout=-1, stderr=-1,
    )
    for rank in range(2)
  ]  # fmt: skip
  for process in started:
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
  assert len((tmp_path / 'run/metrics.jsonl').read_text().splitlines()) == 2


def test_an_environment_that_says_half(monkeypatch):
  """--num_hosts=1 is the way out for a process alone."""
  put(monkeypatch, **open_mpi(0, 1234))
  monkeypatch.delenv('OMPI_COMM_WORLD_SIZE')
  with pytest.raises(
    UserError, match=r'this is a process of Open MPI, and it does not say .*hosts=1'
  ):
    join(None, None, None)
  assert join(None, 1, None).alone


@pytest.mark.parametrize('index', [None, '0'])
def test_a_pod_that_cannot_ask_is_alone_unless_it_is_of_an_indexed_job(monkeypatch, index):
  def refuse(cls):
    raise RuntimeError('Service host/port is not set.')

  kind = clusters.K8sCluster
  monkeypatch.setattr(kind, 'is_env_present', classmethod(refuse))
  monkeypatch.delenv('JOB_COMPLETION_INDEX', raising=False)
  if index is None:
    assert join(None, None, None).alone
  else:
    put(monkeypatch, JOB_COMPLETION_INDEX=index)
    with pytest.raises(UserError, match='a pod of Kubernetes, and it does not say'):
      join(None, None, None)


@pytest.mark.parametrize('slices', [1, 2])
def test_tpus_of_kubernetes_engine(monkeypatch, slices):
  monkeypatch.setattr(cloud_tpu_cluster, 'running_in_cloud_tpu_vm', True)
  put(monkeypatch, TPU_SKIP_MDS_QUERY='1', TPU_WORKER_ID='1', TPU_WORKER_HOSTNAMES=HOSTS)
  put(monkeypatch, MEGASCALE_COORDINATOR_ADDRESS='localhost:8080' if slices > 1 else '')
  put(monkeypatch, MEGASCALE_NUM_SLICES=str(slices), MEGASCALE_SLICE_ID=str(slices - 1))
  with metadata({'tpu-env': "MEGASCALE_COORDINATOR_ADDRESS: 'localhost'"}, monkeypatch):
    found = cluster.detected()
  assert found == ('localhost:8482', 2 * slices, 2 * (slices - 1) + 1)


def test_queued_resources(monkeypatch):
  """The metadata server of a virtual machine says which worker it is, and where the others are."""
  monkeypatch.setattr(cloud_tpu_cluster, 'running_in_cloud_tpu_vm', True)
  for name in ('TPU_SKIP_MDS_QUERY', 'MEGASCALE_COORDINATOR_ADDRESS', 'JAX_COORDINATOR_PORT'):
    monkeypatch.delenv(name, raising=False)
  said = {
    'agent-worker-number': '3',
    'worker-network-endpoints': 'w0:0:127.0.0.1,w1:1:10.0.0.2,w2:2:10.0.0.3,w3:3:10.0.0.4',
    'tpu-env': "ACCELERATOR_TYPE: 'v5litepod-16'",
  }
  with metadata(said, monkeypatch):
    assert cluster.detected() == ('127.0.0.1:8482', 4, 3)


@contextlib.contextmanager
def metadata(said, monkeypatch):
  """A metadata server of Google Cloud on loopback."""

  class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
      text = said.get(self.path.rpartition('/')[2])
      assert self.headers['Metadata-Flavor'] == 'Google'
      self.send_response(404 if text is None else 200)
      self.end_headers()
      self.wfile.write((text or '').encode())

    def log_message(self, *args):
      pass

  with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv('GCE_METADATA_IP', f'127.0.0.1:{server.server_address[1]}')
    yield
    server.shutdown()
