"""Checks of what a run is made of, before anything is compiled or written."""

import pathlib
from collections.abc import Collection, Mapping

from paxlite.checkpointing.source import tokenizer_of
from paxlite.core.errors import UserError
from paxlite.data.base import Input, OnPolicyInput
from paxlite.data.tokenizer import open_tokenizer, vocabulary_fingerprint
from paxlite.experiments.base import Experiment
from paxlite.experiments.identity import run_values
from paxlite.parallel import partitioning

TRAINING = 'training'  # the name of the training data among the inputs


def check_best_metric(metric: str, losses: Collection[str]) -> None:
  """Raises UserError if the default of BEST_METRIC is not one of the losses."""
  if metric == 'avg_xent' and metric not in losses:
    raise UserError(
      f'BEST_METRIC={metric}, the default, is not one of the losses ({", ".join(losses)}): set '
      'BEST_METRIC=total_loss, or another metric'
    )


def check_inputs(e: Experiment, evaluated: Mapping[str, Input], data: Input | None = None) -> None:
  """Raises UserError if inputs do not fit the experiment.

  Args:
    evaluated: The evaluation inputs, by name.
    data: The training data; None: they are not read.
  """
  inputs = {**evaluated} if data is None else {TRAINING: data, **evaluated}
  check_vocabulary(e, inputs)
  check_eval_batches(e, evaluated)
  check_examples(e, inputs)


def check_vocabulary(e: Experiment, inputs: Mapping[str, Input]) -> None:
  vocab_size = e.vocab_size
  for name, data in inputs.items():
    if vocab_size is not None and data.max_token_id >= vocab_size:
      raise UserError(
        f'the {name} data {data.name} has token id {data.max_token_id}, but VOCAB_SIZE is '
        f'{vocab_size}: set VOCAB_SIZE={-(-(data.max_token_id + 1) // 128) * 128} or another '
        'dataset'
      )


def check_moments(e: Experiment, folder: pathlib.Path) -> None:
  """Raises UserError if the moments of a run would have to be converted from or to int8."""
  stated = (run_values(folder) or {'values': {}})['values'], e.values()
  before, now = (values.get('ADAM_MOMENTS_DTYPE') for values in stated)
  if before not in (None, now) and 'int8' in (before, now):
    raise UserError(
      f'ADAM_MOMENTS_DTYPE={now}: the moments in {folder} are {before}, and int8 moments cannot '
      f'be converted. Keep {before}, or choose another folder'
    )


def check_reference_tokenizer(e: Experiment) -> None:
  """Raises UserError if a reference model, such as a teacher, has other tokens than the run."""
  if e.reference_path:
    check_tokenizer(e, e.reference_path)


def check_tokenizer(e: Experiment, path: str) -> None:
  """Raises UserError if the model at `path` has other tokens than the run."""
  theirs = tokenizer_of(path)
  ours = e.tokenizer_path or e.weights.tokenizer
  if not theirs or not ours or pathlib.Path(ours).resolve() == theirs.resolve():
    return
  found = [vocabulary_fingerprint(open_tokenizer(path)) for path in (ours, str(theirs))]
  if found[0] != found[1]:
    raise UserError(
      f'{path} has another tokenizer than the run: {theirs} differs from {ours}. Its '
      'ids stand for other tokens, so its probabilities do not apply to this data'
    )


def check_eval_batches(e: Experiment, inputs: Mapping[str, Input]) -> None:
  for name, data in inputs.items():
    if isinstance(data, OnPolicyInput):
      data.eval_batches(slice(0))  # raises UserError
    if data.batch_size % (e.batch_shards * e.ROWS_PER_EXAMPLE):
      axes = ' × '.join(partitioning.axes_of(e.rules['batch']))
      each = f' × ROWS_PER_EXAMPLE={e.ROWS_PER_EXAMPLE}' if e.ROWS_PER_EXAMPLE != 1 else ''
      raise UserError(
        f'EVAL_BATCH_SIZE={data.batch_size} ({name}) is not divisible by '
        f'{axes} = {e.batch_shards}{each}'
      )


def check_examples(e: Experiment, inputs: Mapping[str, Input]) -> None:
  for name, data in inputs.items():
    rows = getattr(data, 'rows_per_example', 1)
    if rows != e.ROWS_PER_EXAMPLE:
      raise UserError(
        f'the {name} data ({data.name}) has examples of {rows} sequences, but ROWS_PER_EXAMPLE is '
        f'{e.ROWS_PER_EXAMPLE}: losses and data must agree'
      )
