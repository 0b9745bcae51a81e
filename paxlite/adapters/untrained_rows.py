"""Finds tokens of the training data with untrained rows in frozen variables.

Base models have tokens that no text of their training had, such as those of a chat template. Their
rows of the embedding are zeros, or one row is that of several tokens. A run that trains factors of
LoRA alone never changes them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from paxlite.cli.terminal import say
from paxlite.core import shell
from paxlite.core.errors import listed
from paxlite.core.trees import PyTree
from paxlite.data.base import Batch, Input, RowInput
from paxlite.data.mixture import MixtureInput
from paxlite.data.tokenizer import open_tokenizer
from paxlite.experiments import options
from paxlite.experiments.language_model import LanguageModel
from paxlite.optim.optimizers import Optimizer
from paxlite.programs.run import Run
from paxlite.training.callbacks import Callback, Loop
from paxlite.training.train_state import TrainState
from paxlite.training.trainer import Trainer

_ROWS = 64  # of the training data that are looked at
_SMALL = 0.02  # of the median norm of all rows: those of tokens differ by a factor of a few
_CLOSE = 1e-3  # of the norm of a row: by how much equal ones may differ
_PROJECTIONS = 4  # by which rows are compared: chance agrees in all of them once in 1e9


def callbacks(run: Run, trainer: Trainer) -> list[Callback]:
  """Returns what warns before the first step of a run that starts from weights."""
  e = run.experiment
  return [UntrainedRows(e, trainer)] if isinstance(e, LanguageModel) else []


class UntrainedRows(Callback):
  """Prints the warnings."""

  def __init__(self, e: LanguageModel, trainer: Trainer):
    self._e, self._trainer = e, trainer

  def on_start(self, state: TrainState, step: int, loop: Loop) -> None:
    store, data = self._trainer.store, self._trainer.data.input
    if store.checkpoints.steps() or store.is_local(step) or store.plan is None:
      return
    for line in warnings(self._e, store.task.task.optimizer, state.params, data):
      if jax.process_index() == 0:
        say(line)


def warnings(e: LanguageModel, optimizer: Optimizer, params: PyTree, data: Input) -> list[str]:
  """Returns a sentence if the data need rows that were not trained and stay frozen.

  Args:
    e: The experiment of the run.
    optimizer: Its optimizer, which says what is trained.
    params: The parameters before the first step.
    data: The training data, of which the first rows are read. Streams and rollouts are not.
  """
  sample = _sample(data)
  if sample is None:
    return []
  frozen = optimizer.split(params)[1]
  read, learned = sample['ids'][sample['is_text']], sample['labels'][sample['weights'] > 0]
  is_tied = 'softmax' not in params
  tables = {
    'embedding/emb_var': np.concatenate([read, learned]) if is_tied else read,
    'softmax/w': learned,
  }
  found, trained_ids = {}, options.value(e, 'LORA_TOKENS')
  for name, ids in tables.items():
    module, leaf = name.split('/')
    rows_VD = frozen.get(module, {}).get(leaf)
    if isinstance(rows_VD, jax.Array):  # and not None, as where it is trained
      found[name] = np.setdiff1d(untrained(rows_VD, np.unique(ids)), trained_ids)
  names = [name for name, ids in found.items() if len(ids)]
  if not names:
    return []
  path = e.tokenizer_path or e.weights.tokenizer
  tokenizer = open_tokenizer(path) if path else None
  spelled = lambda i: repr(tokenizer.decode_marked([i])) if tokenizer else str(i)
  tokens = sorted({int(i) for name in names for i in found[name]})
  trained = shell.flag('TRAINABLE_VARIABLES', [*e.TRAINABLE_VARIABLES, *names])
  return [
    "Some tokens of the training data have untrained rows, near zero or equal to other tokens' "
    f'rows, which stay frozen in {" and ".join(names)}: {listed(map(spelled, tokens))}. The model '
    f'cannot tell these tokens apart. To train all rows: {trained}; to train these rows alone: '
    f'{shell.flag("LORA_TOKENS", tokens)}'
  ]


def untrained(rows_VD: jax.Array, ids: np.ndarray) -> np.ndarray:
  """Returns the `ids` with a row near zero or equal to another id's row.

  Args:
    rows_VD: A row for each id; it may be spread over devices of several processes.
    ids: The ids to look at.
  """
  whole = functools.partial(multihost_utils.process_allgather, tiled=True)
  norms_V, projected_VQ = map(whole, _measured(rows_VD))
  is_small = norms_V < _SMALL * np.median(norms_V)
  order = np.argsort(projected_VQ[:, 0])
  gaps = np.abs(np.diff(projected_VQ[order], axis=0)).max(1, initial=0)
  is_equal = np.zeros(len(norms_V), bool)
  neighbors = gaps <= _CLOSE * norms_V[order][1:]
  is_equal[order[1:]] |= neighbors
  is_equal[order[:-1]] |= neighbors
  return ids[(is_small | is_equal)[ids]]


@jax.jit
def _measured(rows_VD: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns the norm of each row, and its products with a few random vectors."""
  wide_VD = rows_VD.astype(jnp.float32)
  random_DQ = jax.random.normal(jax.random.key(0), (rows_VD.shape[1], _PROJECTIONS))
  return jnp.linalg.norm(wide_VD, axis=1), wide_VD @ random_DQ


def _sample(data: Input) -> Batch | None:
  """Returns the first rows of the data; None if it has no rows that can be read by number."""
  inputs = data.inputs if isinstance(data, MixtureInput) else [data]
  sources = [x.source for x in inputs if isinstance(x, RowInput)]
  read = [source.read(np.arange(min(_ROWS, len(source)))) for source in sources]
  if not read:
    return None
  of_text = [batch.get('segment_ids', batch['ids'] * 0 + 1) > 0 for batch in read]
  batches = [batch | {'is_text': is_text} for batch, is_text in zip(read, of_text, strict=True)]
  names = 'ids', 'labels', 'weights', 'is_text'
  return {name: np.concatenate([batch[name].ravel() for batch in batches]) for name in names}
