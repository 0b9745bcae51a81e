"""The Python interface: trains experiments and loads trained models."""

import functools
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

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
  """Returns an experiment class; its arguments are attributes, as in get('TinyGPT')(NUM_LAYERS=6).

  Raises UserError if no experiment has this name; the message suggests similar ones.

  Args:
    name: The name of a registered experiment, or a dotted path.
  """
  return registry.find(name)


def list_experiments() -> list[str]:
  """Returns the names of all experiments in paxlite and in the modules imported so far."""
  return list(registry.experiments())


def train(
  experiment: Experiment, folder: str | os.PathLike, accept_changes: bool = False
) -> 'TrainedModel':
  """Trains to MAX_STEPS and returns the trained model.

  If the folder holds an unfinished run of this experiment, training continues from its last
  checkpoint. Ctrl-C, or a notebook's stop button, saves the state first.

  Args:
    experiment: The experiment, such as get('TinyGPT')().
    folder: The run folder, or its address in an object store (gs://, s3://).
    accept_changes: Whether to continue a run that started with other values or data.

  Raises:
    UserError: The experiment, its data or the folder is not usable.
    Interrupted: Training was stopped. The same call continues it.
  """
  experiment = knowing_weights(experiment)
  experiment.validate()
  experiment.check_edits()
  here, address = located_run(paths.stored(os.fspath(folder)), None)
  training.train(Run(experiment, here, accept_changes=accept_changes, address=address))
  return TrainedModel(here)


def load(folder: str | os.PathLike, **values: object) -> 'TrainedModel':
  """Loads the model of a run, or weights that `paxlite import` wrote.

  Import the module of your own experiment before you load its run; a warning says if it is missing.
  Raises UserError if the folder holds neither a run nor weights.

  Args:
    folder: The folder, address or name of the run or weights.
    **values: Attributes of the experiment to change, such as FPROP_DTYPE='float32'.
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
  """A run or imported weights: its records, and its model, which is loaded at first use.

  Attributes:
    folder: The run folder, or the local copy of the records of a run in an object store.
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

    For example: pandas.DataFrame(run.metrics), plt.plot(run.metrics['step'], run.metrics['loss']).
    """
    return _columns(self.folder / 'metrics.jsonl')

  @property
  def evaluations(self) -> dict[str, np.ndarray]:
    """The evaluations as columns: step, input, avg_xent, …"""
    return _columns(self.folder / 'eval_metrics.jsonl')

  @functools.cached_property
  def inference(self) -> Any:
    """The model with parameters and tokenizer: a generation.inference.Inference."""
    overrides = {k: str(v) for k, v in self._values.items()}
    return extensions.hook('TrainedModel.inference')(self._checkpoint, overrides=overrides)

  @property
  def experiment(self) -> Experiment:
    """The experiment that trained the model, with unrolled layers."""
    return self.inference.experiment

  @property
  def params(self) -> PyTree:
    """The parameters, a tree of arrays with the names that training uses.

    `inference.params` has the layout for generation, which `inference.model` takes. Each access
    allocates new arrays of the same size.
    """
    return self.inference.fused_projections.unfused(self.inference.params)

  def logits(self, text: str | Sequence[int] | ArrayLike) -> jax.Array:
    """Returns the float32 logits [T, V] of a text or of token ids [T], or [B, T, V] of ids [B, T].

    Row t predicts the token after token t. A text is preceded by the model's start id, if it has
    one; ids are not.
    """
    given = self.inference.encode(text) if isinstance(text, str) else text
    try:
      ids = np.asarray(given)
    except ValueError:
      ids = np.zeros(0)
    if ids.ndim not in (1, 2) or not ids.size or not np.issubdtype(ids.dtype, np.integer):
      raise UserError('logits takes a text, token ids [T], or sequences [B, T] of the same length')
    size = cast(int, self.experiment.values()['VOCAB_SIZE'])
    if outside := sorted({*ids[(ids < 0) | (ids >= size)].tolist()}):
      raise UserError(f'logits got ids outside the vocabulary of {size}: {outside[:5]}')
    logits = self._logits(self.inference.params, jnp.asarray(np.atleast_2d(ids)))
    return logits if ids.ndim == 2 else logits[0]

  @functools.cached_property
  def _logits(self) -> Callable[[PyTree, jax.Array], jax.Array]:
    return jax.jit(lambda params, ids_BT: self.inference.model.apply({'params': params}, ids_BT))

  def generate(
    self, prompt: str, max_new_tokens: int = 128, sampling: Sampling | None = None, seed: int = 0
  ) -> str:
    """Generates a continuation of a prompt and returns it.

    Args:
      prompt: The text to continue.
      max_new_tokens: The maximum number of new tokens.
      sampling: How to sample; None uses the attributes TEMPERATURE, TOP_K and so on.
      seed: The sampling seed.
    """
    inference = self.inference
    engine = inference.engine(sampling)
    ids = inference.encode(prompt)
    (answer,) = engine.generate([engine.request(ids, max_new_tokens, seed)])
    return answer.text


def _columns(path: pathlib.Path) -> dict[str, np.ndarray]:
  """Returns a file's records as columns; missing numbers are NaN."""
  records = list(read_records(path))
  names = dict.fromkeys(name for record in records for name in record)
  columns = {}
  for name in names:
    values = [record.get(name) for record in records]
    is_text = any(isinstance(v, str) for v in values)
    columns[name] = np.array(values if is_text else [np.nan if v is None else v for v in values])
  return columns
