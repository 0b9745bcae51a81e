"""Sends the metrics of a run to services that compare runs: Weights & Biases, MLflow, Trackio.

Each is a package of its own (the extras wandb, mlflow and trackio) and finds its server and its key
by its own environment variables. A tracker that fails never stops a run.
"""

import abc
import hashlib
import importlib.util
import os
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence

from paxlite.core import shell
from paxlite.core.errors import UserError
from paxlite.core.json_text import Json
from paxlite.training.writers import Writer


class Tracker(Writer, abc.ABC):
  """A writer that sends numbers by name, in a run of its own that continues when ours does.

  Args:
    folder: The run's job_log_dir, whose name is the name of the run.
    project: The project, or MLflow's experiment, that the run belongs to.
    config: The values of the experiment.
  """

  failures: tuple[type[Exception], ...] = (Exception,)

  def __init__(self, folder: pathlib.Path, project: str, config: Mapping[str, object]):
    self._folder = folder
    self._project = project
    self._config = dict(config)
    self._started = False

  def train(self, step: int, record: Mapping[str, Json], scalars: Mapping[str, float]) -> None:
    known = {k: v for k, v in record.items() if v is not None}
    self._log_in_run(step, {f'train/{k}': v for k, v in {**scalars, **known}.items()})

  def evaluation(self, step: int, name: str, metrics: Mapping[str, float]) -> None:
    self._log_in_run(step, {f'eval_{name}/{k}': v for k, v in metrics.items()})

  def close(self) -> None:
    if self._started:
      self._end()
    self._started = False

  def _log_in_run(self, step: int, numbers: dict[str, float]) -> None:
    if not self._started:
      self._start()
      self._started = True
    self._log(step, numbers)

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

  def _start(self) -> None:
    import wandb

    self._run = wandb.init(
      project=os.environ.get('WANDB_PROJECT', self._project),
      name=self._folder.name,
      id=self._run_id,
      resume='allow',
      dir=self._folder,
      config=self._config,
    )
    # a run that continues repeats some steps, which W&B's own counter would refuse
    self._run.define_metric('*', step_metric='step')

  def _log(self, step: int, numbers: dict[str, float]) -> None:
    self._run.log({**numbers, 'step': step})

  def _end(self) -> None:
    self._run.finish()


class MlflowTracker(Tracker):
  """MLflow, at MLFLOW_TRACKING_URI."""

  name = 'mlflow'

  def _start(self) -> None:
    from mlflow import MlflowClient

    self._client = client = MlflowClient()
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
    note.write_text(f'{self._run}\n')

  def _log(self, step: int, numbers: dict[str, float]) -> None:
    from mlflow.entities import Metric

    now = int(1000 * time.time())
    metrics = [Metric(k, float(v), now, step) for k, v in numbers.items()]
    self._client.log_batch(self._run, metrics=metrics)

  def _end(self) -> None:
    self._client.set_terminated(self._run)


class TrackioTracker(Tracker):
  """Trackio, whose database is in TRACKIO_DIR."""

  name = 'trackio'

  def _start(self) -> None:
    import trackio

    name = f'{self._folder.name}-{self._run_id[:6]}'
    self._run = trackio.init(
      project=os.environ.get('TRACKIO_PROJECT', self._project),
      name=name,
      config=self._config,
      resume='allow',
    )

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

  Raises:
    UserError: The package of a tracker is not installed.
  """
  for name in names:
    if importlib.util.find_spec(name) is None:
      raise UserError(f'TRACKERS has {name}, which is not installed: {shell.install(name)}')
  return [KINDS[name](folder, project, config) for name in names]
