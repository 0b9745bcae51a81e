"""Where the runs are: in a folder, in a bucket, on several devices, in several processes."""

import contextlib
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import IO

from paxlite.checkpointing.checksums import CHECKSUMS, folder_name, step_of
from paxlite.programs.run_folder import twin
from paxlite.stores.object_store import ObjectStore
from paxlite.stores.step_copies import StepCopies
from tests.support import failing_calls
from tests.support.gcs_server import Gcs, gcs_server
from tests.support.proxy import Proxy, proxy
from tests.support.s3_server import Server, free_ports, s3_server

ROOT = pathlib.Path(__file__).parents[2]
BUCKET = 'chaos'
SAVE_EVERY = 10
FLAGS = [
  '--fdl_config=DemoGPT', '--fdl.NUM_LAYERS=1', '--fdl.MODEL_DIMS=32', '--fdl.NUM_HEADS=2',
  '--fdl.DIMS_PER_HEAD=16', '--fdl.HIDDEN_DIMS=64', '--fdl.MAX_SEQ_LEN=32',
  '--fdl.PERCORE_BATCH_SIZE=4', '--fdl.DROPOUT_PROB=0.1', '--fdl.SAMPLE_PROMPT=None',
  f'--fdl.CHECKPOINT_EVERY_N_STEPS={SAVE_EVERY}', '--fdl.CHECKPOINT_MAX_TO_KEEP=3',
  '--fdl.EVAL_INTERVAL_STEPS=25', '--fdl.MAX_EVAL_BATCHES=1', '--fdl.SUMMARY_INTERVAL_STEPS=1',
]  # fmt: skip


@dataclasses.dataclass
class Place:
  """A kind of place.

  Attributes:
    name: What the command line calls it.
    flags: Flags of its runs, after FLAGS.
    module: What is run; it takes the flags of paxlite.main.
    devices: Devices of each process.
    processes: Processes of a run.
    copies: Environment by which this program reaches the bucket; None: there is no bucket.
    between: The proxy between the runs and the bucket.
    environment: Environment of the processes, besides that of this program.
  """

  name: str
  flags: tuple[str, ...] = ()
  module: str = 'paxlite.main'
  devices: int = 1
  processes: int = 1
  copies: dict[str, str] | None = None
  between: Proxy | None = None
  environment: dict[str, str] = dataclasses.field(default_factory=dict)

  @property
  def machines(self) -> tuple[str, ...]:
    """The machines on which a run may be started; each is a folder for --local_dir."""
    return ('a',) if self.copies is None else ('a', 'b')


@contextlib.contextmanager
def opened(name: str, folder: pathlib.Path) -> Iterator[Place]:
  """A place, with the servers that it needs, whose files are in `folder`."""
  if name == 'folder':
    yield Place(name)
  elif name == 'devices':  # three, so that the majority names the one that is wrong
    flags = (
      '--fdl.ICI_MESH_SHAPE=[3,1,1]', '--fdl.PERCORE_BATCH_SIZE=2', '--fdl.EVAL_BATCH_SIZE=12',
      '--fdl.DROPOUT_PROB=0',
    )  # fmt: skip
    yield Place(name, flags, 'tests.support.flipped_main', devices=3)
  elif name == 'processes':
    mesh = '--fdl.ICI_MESH_SHAPE=[2,1,1]', '--fdl.PERCORE_BATCH_SIZE=2'
    yield Place(name, mesh, processes=2)
  else:
    with contextlib.ExitStack() as stack:
      if name == 's3':
        s3 = stack.enter_context(s3_server(folder))
        s3.create_bucket(BUCKET)
        server: Server | Gcs = s3
      else:
        server = stack.enter_context(gcs_server(BUCKET))
      between = stack.enter_context(proxy(server.endpoint))
      yield Place(
        name, (), 'tests.support.stored_main', copies=server.environment(), between=between,
        environment=server.environment(between.endpoint),
      )  # fmt: skip


PLACES = 'folder', 's3', 'gs', 'devices', 'processes'


@dataclasses.dataclass
class Run:
  """A run that is started as often as it needs.

  Attributes:
    place: Where it is.
    parent: A folder of its own on this machine.
    steps: Its last step.
    library: failing_calls.c, compiled.
  """

  place: Place
  parent: pathlib.Path
  steps: int
  library: str

  def __post_init__(self) -> None:
    self.parent.mkdir(parents=True)
    self.starts = 0

  @property
  def address(self) -> str:
    """Where it is in the bucket."""
    return f'{self.place.name}://{BUCKET}/{self.parent.name}'

  @property
  def is_full(self) -> pathlib.Path:
    """While this file exists, nothing can be written to the disks of the run."""
    return self.parent / 'disk-is-full'

  def folder(self, machine: str) -> pathlib.Path:
    """The folder of the run on a machine."""
    if self.place.copies is None:
      return self.parent / 'run'
    return twin(self.address, str(self.parent / 'run' / machine))

  def start(
    self, machine: str, flags: tuple[str, ...] = (), env: dict[str, str] | None = None
  ) -> 'Started':
    """Starts its processes."""
    self.starts += 1
    common = [f'--fdl.MAX_STEPS={self.steps}', *FLAGS, *self.place.flags, *flags]
    if self.place.copies is None:
      common.append(f'--job_log_dir={self.folder(machine)}')
    else:
      common += [f'--job_log_dir={self.address}', f'--local_dir={self.parent / "run" / machine}']
    count = self.place.processes
    each: list[list[str]] = [[]]
    if count > 1:
      together = [f'--server_addr=127.0.0.1:{free_ports(1)[0]}', f'--num_hosts={count}']
      each = [['--multiprocess_gpu', *together, f'--host_idx={i}'] for i in range(count)]
    devices = f'--xla_force_host_platform_device_count={self.place.devices}'
    environment = {
      **os.environ,
      **self.place.environment,
      'JAX_PLATFORMS': 'cpu',
      'XLA_FLAGS': f'{os.environ.get("XLA_FLAGS", "")} {devices}',
      **failing_calls.environment(
        self.library, 'write', str(self.parent / 'run'), 28, exists=str(self.is_full)
      ),
      **(env or {}),
    }
    processes, logs = [], []
    for i, own in enumerate(each):
      log = self.parent / f'start-{self.starts:03d}-{i}'
      with open(f'{log}.out', 'wb') as out, open(f'{log}.err', 'wb') as err:
        processes.append(_process([*common, *own], self.place.module, environment, out, err))
      logs.append(log)
    return Started(processes, logs)

  def local(self, machine: str) -> list[int]:
    """The complete checkpoints on a machine."""
    folders = self.folder(machine).glob('checkpoints/*')
    found = [step_of(p.name) for p in folders if (p / CHECKSUMS).exists()]
    return sorted(step for step in found if step is not None)

  def stored(self) -> list[int]:
    """The complete checkpoints in the bucket."""
    return [] if self.place.copies is None else self._copies('a').steps()

  def checkpoint(self, machine: str, step: int) -> pathlib.Path:
    """The folder of a checkpoint."""
    return self.folder(machine) / 'checkpoints' / folder_name(step)

  def store(self) -> ObjectStore:
    """The bucket itself, not through the proxy."""
    return ObjectStore(self.address, environment=self.place.copies or {})

  def _copies(self, machine: str) -> StepCopies:
    return StepCopies(self.store(), 'checkpoints', self.folder(machine) / 'checkpoints')

  def is_copied(self, machine: str) -> bool:
    """Whether the last checkpoint in the bucket is that of the machine; without a bucket: yes."""
    return self.place.copies is None or self._copies(machine).is_same(self.steps)

  def is_being_copied(self, machine: str) -> bool:
    """Whether a checkpoint is partly in the bucket."""
    return self.place.copies is not None and bool(self._copies(machine).unfinished())

  def last_step(self) -> int:
    """The last recorded step on any machine."""
    steps = [0]
    for machine in self.place.machines:
      with contextlib.suppress(OSError):
        lines = (self.folder(machine) / 'metrics.jsonl').read_bytes().split(b'\n')[:-1]
        steps += [json.loads(line)['step'] for line in lines[-1:]]
    return max(steps)


def _process(
  flags: list[str], module: str, environment: dict[str, str], out: IO[bytes], err: IO[bytes]
) -> subprocess.Popen:
  command = [sys.executable, '-m', module, *flags]
  return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=err)


@dataclasses.dataclass
class Started:
  """The processes of one start, and the files in which they print."""

  processes: list[subprocess.Popen]
  logs: list[pathlib.Path]

  @property
  def is_running(self) -> bool:
    return any(p.poll() is None for p in self.processes)

  def signal(self, number: int, which: int | None = None) -> None:
    """Sends a signal to all processes, or to one of them."""
    for i, process in enumerate(self.processes):
      if which in (None, i) and process.poll() is None:
        process.send_signal(number)

  @property
  def printed(self) -> str:
    """What the processes have printed so far."""
    names = [f'{log}.{kind}' for log in self.logs for kind in ('out', 'err')]
    return '\n'.join(pathlib.Path(n).read_text(errors='replace') for n in names)

  def last_lines(self) -> list[str]:
    """The line with which each process ended, without the command that continues the run."""
    found = []
    for log in self.logs:
      lines = pathlib.Path(f'{log}.err').read_text(errors='replace').splitlines()
      lines = [x for x in lines if x.strip() and not x.startswith('python ')]
      found.append(lines[-1].removesuffix(' Continue with:') if lines else '')
    return found
