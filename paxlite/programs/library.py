"""paxlite from Python: train an experiment, and use what was trained."""

import functools
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paxlite import extensions
from paxlite.cli.terminal import warn
from paxlite.config.generation import Sampling
from paxlite.core.errors import UserError
from paxlite.core.trees import PyTree
from paxlite.experiments import registry
from paxlite.experiments.base import Experiment
from paxlite.experiments.identity import run_values
from paxlite.files import paths
from paxlite.files.schemes import is_address, records_of
from paxlite.programs import training
from paxlite.programs.run import Run
from paxlite.programs.run_folder import located_run
from paxlite.programs.weights_model import knowing_weights
from paxlite.tracking.writers import read_records


def get(name: str) -> type[Experiment]:
  """Returns an experiment class: get('TinyGPT')(NUM_LAYERS=6) is an experiment of that size.

  Args:
    name: The bare name of one of paxlite's experiments, or a dotted path.

  Raises:
    UserError: There is no such experiment; the message suggests similar names.
  """
  return registry.find(name)


def list_experiments() -> list[str]:
  """Returns the names of all experiments, of paxlite and of the modules imported so far."""
  return list(registry.experiments())


def train(
  experiment: Experiment, folder: str | os.PathLike, accept_changes: bool = False
) -> 'TrainedModel':
  """Trains to MAX_STEPS and returns what was trained.

  If the folder holds a run of this experiment that is not complete, training continues from its
  last checkpoint. Ctrl-C, or a notebook's stop, saves the state first.

  Args:
    experiment: The experiment, such as get('TinyGPT')().
    folder: Folder for checkpoints and metrics, or an address (gs://, s3://).
    accept_changes: Whether to continue a run that began with other values or data.

  Raises:
    UserError: The experiment, its data or the folder cannot be used.
    Interrupted: Training was stopped. The same call continues it.
  """
  experiment = knowing_weights(experiment)
  experiment.validate()
  experiment.check_edits()
  here, address = located_run(paths.stored(os.fspath(folder)), None)
  training.train(Run(experiment, here, accept_changes=accept_changes, address=address))
  return TrainedModel(here)


def load(folder: str | os.PathLike, **values: object) -> 'TrainedModel':
  """Returns the model of a run, or of weights that `paxlite import` has written.

  A run of your own experiment needs its module imported first; a warning says so.

  Args:
    folder: The folder, the address or the name of the run or of the weights.
    **values: Attributes of the experiment to change, such as FPROP_DTYPE='float32'.

  Raises:
    UserError: The folder holds neither.
  """
  given = os.fspath(folder)
  place = paths.stored((extensions.hint('weights', given) or [given])[0])
  here = records_of(place)
  if not here.is_dir():
    raise UserError(f'{here} is not a folder')
  try:
    if found := run_values(here):
      registry.class_of(found)
  except UserError as e:  # its records can be read
    warn(f'{place}: {e}')
  return TrainedModel(here, values, place if is_address(place) else '')


class TrainedModel:
  """A run, or imported weights: its records, and its model, which is loaded when it is used.

  Attributes:
    folder: Where it is, or where the records of a run in an object store were copied.
  """

  def __init__(
    self, folder: pathlib.Path, values: Mapping[str, object] | None = None, address: str = ''
  ):
    self.folder = folder
    self._values = dict(values or {})
    self._checkpoint = address or str(folder)

  def __repr__(self) -> str:
    return f'<TrainedModel of {self._checkpoint}>'

  @property
  def metrics(self) -> dict[str, np.ndarray]:
    """The recorded training steps as columns: step, loss, lr, grad_norm, tokens_per_second, …

    pandas.DataFrame(run.metrics) and plt.plot(run.metrics['step'], run.metrics['loss']) take it.
    """
    return _columns(self.folder / 'metrics.jsonl')

  @property
  def evaluations(self) -> dict[str, np.ndarray]:
    """The evaluations as columns: step, input, avg_xent, …"""
    return _columns(self.folder / 'eval_metrics.jsonl')

  @functools.cached_property
  def inference(self) -> Any:
    """The model with its parameters and its tokenizer; see generation.inference.Inference."""
    overrides = {k: str(v) for k, v in self._values.items()}
    return extensions.hook('TrainedModel.inference')(self._checkpoint, overrides=overrides)

  @property
  def experiment(self) -> Experiment:
    """The experiment that the model was trained with, with unrolled layers."""
    return self.inference.experiment

  @property
  def params(self) -> PyTree:
    """The parameters, a tree of arrays by the names that they have in training.

    `inference.params` has them in the order for generation, which `inference.model` takes. Each
    access makes arrays of the same size beside these.
    """
    return self.inference.fused_projections.unfused(self.inference.params)

  def logits(self, text: str | Sequence[int]) -> jax.Array:
    """Returns the float32 logits [T, V] of a text, or of token ids.

    Row t has the logits of the token after token t. The model's start id comes first if it has one.
    """
    ids = self.inference.encode(text) if isinstance(text, str) else list(text)
    return self._logits(self.inference.params, jnp.asarray([ids]))[0]

  @functools.cached_property
  def _logits(self) -> Callable[[PyTree, jax.Array], jax.Array]:
    return jax.jit(lambda params, ids_BT: self.inference.model.apply({'params': params}, ids_BT))

  def generate(
    self, prompt: str, max_new_tokens: int = 128, sampling: Sampling | None = None, seed: int = 0
  ) -> str:
    """Returns the continuation of a text.

    Args:
      prompt: The text.
      max_new_tokens: The most tokens to generate.
      sampling: How tokens are chosen; None takes the attributes TEMPERATURE, TOP_K and so on.
      seed: Seed of the choice.
    """
    inference = self.inference
    engine = inference.engine(sampling)
    ids = inference.encode(prompt)
    (answer,) = engine.generate([engine.request(ids, max_new_tokens, seed)])
    return answer.text


def _columns(path: pathlib.Path) -> dict[str, np.ndarray]:
  """Returns the records of a file as columns; a number that a record lacks is NaN."""
  records = list(read_records(path))
  names = dict.fromkeys(name for record in records for name in record)
  columns = {}
  for name in names:
    values = [record.get(name) for record in records]
    is_text = any(isinstance(v, str) for v in values)
    columns[name] = np.array(values if is_text else [np.nan if v is None else v for v in values])
  return columns
