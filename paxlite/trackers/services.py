"""Sends the metrics of a run to services that compare runs: Weights & Biases, MLflow, Trackio.

Each needs its extra (wandb, mlflow, trackio) and finds its server and key by its own environment
variables. A tracker that cannot start is an error before a run begins; one that fails later never
stops the run.
"""

import abc
import contextlib
import hashlib
import importlib.util
import logging
import os
import pathlib
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from paxlite.core import shell
from paxlite.core.errors import UserError
from paxlite.core.json_text import Json
from paxlite.core.run_files import write_file
from paxlite.tracking.writers import Writer

log = logging.getLogger('paxlite')

_MOST_WAITING = 10_000  # records that wait for a tracker


class Tracker(Writer, abc.ABC):
  """A writer that sends numbers by name to a service's run, which continues when the run does.

  A thread sends the numbers, so a server that does not answer delays no step. The end of a run
  waits for unsent numbers, up to `end_seconds`.

  Args:
    folder: The run's job_log_dir, whose name is the name of the run.
    project: The project, or MLflow's experiment, that the run belongs to.
    config: The values of the experiment.
  """

  way_out = ''  # a sentence on what it needs, for a message
  end_seconds = 60.0  # the longest time that the end of a run waits for the tracker

  def __init__(self, folder: pathlib.Path, project: str, config: Mapping[str, object]):
    self._folder = folder
    self._project = project
    self._config = dict(config)
    self._waiting: queue.Queue[Callable[[], None] | None] = queue.Queue(_MOST_WAITING)
    self._thread: threading.Thread | None = None
    self._failed = False

  def start(self) -> None:
    if self._thread is not None:
      return
    try:
      self._start()
    except Exception as e:  # packages of others raise anything
      reason = str(e).strip() or type(e).__name__
      raise UserError(
        f'TRACKERS has {self.name}, which cannot start: {reason.rstrip(".")}. {self.way_out}; '
        "'TRACKERS=[]' trains without it"
      ) from None
    self._thread = threading.Thread(target=self._send, name=self.name, daemon=True)
    self._thread.start()

  def train(self, step: int, record: Mapping[str, Json], scalars: Mapping[str, float]) -> None:
    known = {k: v for k, v in record.items() if v is not None}
    self._log_later(step, {f'train/{k}': v for k, v in {**scalars, **known}.items()})

  def evaluation(self, step: int, name: str, metrics: Mapping[str, float]) -> None:
    self._log_later(step, {f'eval_{name}/{k}': v for k, v in metrics.items()})

  def close(self) -> None:
    if self._thread is None:
      return
    until = time.monotonic() + self.end_seconds
    with contextlib.suppress(queue.Full):
      self._waiting.put(self._end, timeout=self.end_seconds)
      self._waiting.put(None, timeout=max(0.0, until - time.monotonic()))
    self._thread.join(max(0.0, until - time.monotonic()))
    if self._thread.is_alive():
      log.error('%s does not answer: its last numbers are not sent', self.name)
    self._thread = None

  def _log_later(self, step: int, numbers: dict[str, float]) -> None:
    try:
      self._waiting.put_nowait(lambda: self._log(step, numbers))
    except queue.Full:
      self._report('it does not answer; queued numbers are dropped')

  def _send(self) -> None:
    """Sends what waits until there is a None; runs in the thread."""
    while (act := self._waiting.get()) is not None:
      try:
        act()
      except Exception as e:  # packages of others raise anything
        self._report(str(e).strip() or type(e).__name__)

  def _report(self, reason: str) -> None:
    """Logs the first failure."""
    if not self._failed:
      log.error('%s failed, training continues: %s', self.name, ' '.join(reason.split()))
    self._failed = True

  @abc.abstractmethod
  def _start(self) -> None:
    """Begins the run, or continues it."""

  @abc.abstractmethod
  def _log(self, step: int, numbers: dict[str, float]) -> None:
    """Sends numbers of a step, by name."""

  @abc.abstractmethod
  def _end(self) -> None:
    """Ends the run, which may continue later."""

  @property
  def _run_id(self) -> str:
    """A name that is the same whenever this folder's run continues, and no other run's."""
    return hashlib.sha256(os.fsencode(self._folder.absolute())).hexdigest()[:16]


class WandbTracker(Tracker):
  """Weights & Biases. WANDB_MODE=offline writes to the run's folder, for `wandb sync`."""

  name = 'wandb'
  way_out = 'With WANDB_MODE=offline in the environment it needs neither a key nor a network'

  def _start(self) -> None:
    import wandb

    self._run = wandb.init(
      project=os.environ.get('WANDB_PROJECT', self._project), name=self._folder.name,
      id=self._run_id, resume='allow', dir=self._folder, config=self._config,
    )  # fmt: skip
    # a run that continues repeats some steps, which W&B's own counter would refuse
    self._run.define_metric('*', step_metric='step')

  def _log(self, step: int, numbers: dict[str, float]) -> None:
    self._run.log({**numbers, 'step': step})

  def _end(self) -> None:
    self._run.finish()


class MlflowTracker(Tracker):
  """MLflow, at MLFLOW_TRACKING_URI.

  Without that variable, it is MLflow's own default, a database in the current folder. The small
  package mlflow-skinny has no database: then it is the folder mlruns.
  """

  name = 'mlflow'
  way_out = 'MLFLOW_TRACKING_URI in the environment names a server or a folder'

  def _start(self) -> None:
    from mlflow import MlflowClient

    uri = os.environ.get('MLFLOW_TRACKING_URI')
    if not uri and importlib.util.find_spec('sqlalchemy') is None:
      uri = pathlib.Path('mlruns').absolute().as_uri()
    if uri and (uri.startswith('file:') or '://' not in uri):
      # MLflow advises against folders, and without this refuses them
      os.environ.setdefault('MLFLOW_ALLOW_FILE_STORE', 'true')
    self._client = client = MlflowClient(uri or None)
    note = self._folder / 'mlflow_run_id'
    if note.is_file():
      self._run = note.read_text().strip()
      client.update_run(self._run, status='RUNNING')
      return
    name = os.environ.get('MLFLOW_EXPERIMENT_NAME', self._project)
    experiment = client.get_experiment_by_name(name)
    number = client.create_experiment(name) if experiment is None else experiment.experiment_id
    self._run = client.create_run(number, run_name=self._folder.name).info.run_id
    for key, value in self._config.items():
      client.log_param(self._run, key, str(value)[:500])  # MLflow's longest value
    write_file(note, f'{self._run}\n'.encode())

  def _log(self, step: int, numbers: dict[str, float]) -> None:
    from mlflow.entities import Metric

    now = int(1000 * time.time())
    metrics = [Metric(k, float(v), now, step) for k, v in numbers.items()]
    self._client.log_batch(self._run, metrics=metrics)

  def _end(self) -> None:
    self._client.set_terminated(self._run)


class TrackioTracker(Tracker):
  """Trackio, with its database in TRACKIO_DIR."""

  name = 'trackio'
  way_out = 'TRACKIO_DIR in the environment names the folder of its database'

  def _start(self) -> None:
    import trackio

    name = f'{self._folder.name}-{self._run_id[:6]}'
    self._run = trackio.init(
      project=os.environ.get('TRACKIO_PROJECT', self._project), name=name, config=self._config,
      resume='allow',
    )  # fmt: skip

  def _log(self, step: int, numbers: dict[str, float]) -> None:
    self._run.log(numbers, step=step)

  def _end(self) -> None:
    self._run.finish()


KINDS: dict[str, Callable[..., Tracker]] = {
  c.name: c for c in (WandbTracker, MlflowTracker, TrackioTracker)
}


def trackers(
  names: Sequence[str], folder: pathlib.Path, project: str, config: Mapping[str, object]
) -> list[Tracker]:
  """Returns the trackers of these names.

  Raises UserError if the package of a tracker is not installed.
  """
  for name in names:
    if importlib.util.find_spec(name) is None:
      raise UserError(f'TRACKERS has {name}, which is not installed: {shell.install(name)}')
  return [KINDS[name](folder, project, config) for name in names]
