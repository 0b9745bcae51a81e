"""Runs a Slurm of virtual nodes on this machine, with real daemons in a temporary folder.

Each slurmd runs in its own mount namespace, in which the names of the nodes resolve to loopback. So
the processes of a node are those in its namespace. Only these processes are killed.
"""

import contextlib
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator

_PROGRAMS = ('slurmctld', 'slurmd', 'munged', 'sbatch', 'unshare')
_PATH = f'{os.environ["PATH"]}:/usr/sbin:/sbin'

# FirstJobId: paxlite's processes derive the port where they meet from the job's number.
_CONFIGURATION = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
FirstJobId={controller_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SwitchType=switch/none
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
SlurmctldTimeout=10
InactiveLimit=0
KillWait=10
MinJobAge=600
JobRequeue=1
PropagateResourceLimitsExcept=MEMLOCK
RebootProgram=/bin/true
"""
_NODE = (
  'NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=8 RealMemory=4000 '
  'State=UNKNOWN\n'
)
_PARTITION = 'PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE State=UP\n'

_ENDS = ('COMPLETED', 'FAILED', 'CANCELLED', 'TIMEOUT', 'NODE_FAIL')
_REQUEUE_SECONDS = 3  # in the second of its requeue, a job's credential is too old to start it


def missing() -> str:
  """Returns the reason why Slurm cannot run here; empty if it can."""
  programs = [p for p in _PROGRAMS if shutil.which(p, path=_PATH) is None]
  if programs:
    return f'{", ".join(programs)} not installed'
  return '' if os.geteuid() == 0 else 'virtual nodes need root'


class Cluster:
  """Running daemons; see `cluster`.

  Attributes:
    folder: The folder that they write to.
    env: An environment in which Slurm's commands use this cluster.
  """

  def __init__(self, folder: pathlib.Path, num_nodes: int):
    self.folder = folder
    self.names = [f'n{i}' for i in range(num_nodes)]
    # The processes on the nodes inherit this environment.
    self.env = {**os.environ, 'SLURM_CONF': str(folder / 'slurm.conf'), 'PATH': _PATH}
    self._processes: dict[str, subprocess.Popen] = {}

  def start(self) -> None:
    for name in ('munge', 'state', 'spool', 'log'):
      (self.folder / name).mkdir(mode=0o700)
    key = self.folder / 'munge' / 'key'
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(1024))
    host = socket.gethostname().partition('.')[0]
    controller_port, *ports = _free_ports(1 + len(self.names))
    text = _CONFIGURATION.format(folder=self.folder, host=host, controller_port=controller_port)
    for name, port in zip(self.names, ports, strict=True):
      text += _NODE.format(name=name, host=host, port=port)
    text += _PARTITION.format(names=','.join(self.names))
    (self.folder / 'slurm.conf').write_text(text)
    hosts = ''.join(f'127.0.0.1 {name}\n' for name in self.names)
    (self.folder / 'hosts').write_text(pathlib.Path('/etc/hosts').read_text() + hosts)
    munge = {
      'key-file': key,
      **{f'{n}-file': self.folder / 'munge' / n for n in ('pid', 'log', 'seed')},
      'socket': self.folder / 'munge' / 'socket',
    }
    # --force: munged would refuse a folder under /tmp.
    options = [f'--{name}={path}' for name, path in munge.items()]
    self._daemon('munged', 'munged', '--foreground', '--force', *options)
    _until((self.folder / 'munge' / 'socket').exists)
    self._daemon('slurmctld', 'slurmctld', '-D', '-c')
    for name in self.names:
      self.start_node(name)
    self.wait_until_idle()

  def start_node(self, name: str) -> None:
    (self.folder / 'spool' / name).mkdir(exist_ok=True)
    script = f'mount --bind {self.folder}/hosts /etc/hosts && exec slurmd -D -N {name}'
    self._daemon(name, 'unshare', '--mount', 'bash', '-c', script)

  def kill_node(self, name: str) -> None:
    """Kills the daemon of a node and all processes that it started, like a power failure."""
    daemon = self._processes.pop(name)
    pids = _sharing_namespace(daemon.pid)
    # all stop first: else the batch script may see that its tasks are gone, and requeue its job
    for number in signal.SIGSTOP, signal.SIGKILL:
      for pid in pids:
        with contextlib.suppress(ProcessLookupError):
          os.kill(pid, number)
    daemon.wait()

  def stop(self) -> None:
    with contextlib.suppress(AssertionError, OSError):
      jobs = self.run('squeue', '-h', '-o', '%A').split()
      self.run('scancel', '--full', '--signal=KILL', *jobs)
    for name in self.names:
      if name in self._processes:
        self.kill_node(name)
    for process in reversed(self._processes.values()):
      process.terminate()
      with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)
      process.kill()

  def wait_until_idle(self) -> None:
    _until(lambda: self.run('sinfo', '-h', '-N', '-o', '%T').split() == ['idle'] * len(self.names))

  def run(self, *command: str, env: dict[str, str] | None = None, cwd: object = None) -> str:
    """Returns the output of a command of Slurm."""
    result = subprocess.run(
      command, capture_output=True, text=True, env=self.env | (env or {}), cwd=cwd, check=False
    )
    assert result.returncode == 0, f'{command}: {result.stdout}{result.stderr}'
    return result.stdout

  def submit(self, script: pathlib.Path, *flags: str, env: dict[str, str], cwd: object) -> str:
    """Submits a job and returns its number."""
    return self.run('sbatch', '--parsable', *flags, str(script), env=env, cwd=cwd).strip()

  def job(self, number: str) -> dict[str, str]:
    """Returns the fields that scontrol shows for a job."""
    shown = self.run('scontrol', 'show', 'job', '--oneliner', number)
    return dict(word.split('=', 1) for word in shown.split() if '=' in word)

  def wait(
    self,
    number: str,
    until: Callable[[dict[str, str]], bool] = lambda job: job['JobState'] in _ENDS,
    timeout: float = 240,
  ) -> dict[str, str]:
    """Returns the job's fields when it has ended; a requeued job does not wait for two minutes."""
    waiting_since = None
    deadline = time.monotonic() + timeout
    while not until(job := self.job(number)):
      assert time.monotonic() < deadline, job
      if (job['JobState'], job['Reason']) == ('PENDING', 'BeginTime'):
        waiting_since = waiting_since or time.monotonic()
        if time.monotonic() - waiting_since > _REQUEUE_SECONDS:
          self.run('scontrol', 'update', f'JobId={number}', 'StartTime=now')
          waiting_since = None
      time.sleep(0.3)
    return job

  def _daemon(self, name: str, *command: str) -> None:
    with (self.folder / 'log' / name).open('ab') as log:
      self._processes[name] = subprocess.Popen(
        command, env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
        start_new_session=True,
      )  # fmt: skip


@contextlib.contextmanager
def cluster(num_nodes: int = 2) -> Iterator[Cluster]:
  """Runs a Slurm for the duration of the context."""
  folder = pathlib.Path(tempfile.mkdtemp(prefix='slurm-'))
  found = Cluster(folder, num_nodes)
  try:
    found.start()
    yield found
  finally:
    found.stop()
    shutil.rmtree(folder, ignore_errors=True)


def _free_ports(count: int) -> list[int]:
  with contextlib.ExitStack() as stack:
    sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
    for s in sockets:
      s.bind(('127.0.0.1', 0))
    return [s.getsockname()[1] for s in sockets]


def _sharing_namespace(pid: int) -> list[int]:
  def namespace(of: object) -> str:
    with contextlib.suppress(OSError):
      return os.readlink(f'/proc/{of}/ns/mnt')
    return ''

  mine = namespace(pid)
  assert mine not in ('', namespace('self'))
  return [int(p) for p in os.listdir('/proc') if p.isdigit() and namespace(p) == mine]


def _until(condition: Callable[[], bool], timeout: float = 20) -> None:
  deadline = time.monotonic() + timeout
  while True:
    with contextlib.suppress(AssertionError):
      if condition():
        return
    if time.monotonic() > deadline:
      raise TimeoutError(condition)
    time.sleep(0.1)
