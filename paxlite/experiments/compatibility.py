"""Checks whether weights fit a model, by comparing the models that two experiments build.

Shapes are not enough. A query that is scaled by 1 and a query that is scaled by 1/8 have variables
with the same names and shapes. But weights that were trained for one are useless for the other.
"""

import pathlib
import re
from collections.abc import Collection

import fiddle as fdl

from paxlite.config.attribute_kinds import Kind
from paxlite.config.experiment_file import read_experiment
from paxlite.config.former_names import current
from paxlite.config.templates import config_text
from paxlite.core import shell
from paxlite.core.errors import UserError, listed, located
from paxlite.experiments.base import Experiment
from paxlite.experiments.identity import stated_values
from paxlite.experiments.registry import class_of

# Fields of layers that change the result only by rounding: how a layer is initialized,
# regularized, recomputed and split up; and modules that the logits do not depend on.
_NEUTRAL = re.compile(
  r'(.*_init|dtype|dropout|embedding_dropout|checkpoint_policy|num_loss_chunks|kernel_tpl|rank'
  r'|factor_scale|chosen|row_ids|aux_loss_weight|num_groups|num_stages|num_microbatches|num_repeats'
  r'|gathers_once|unrolled_on|scheme|prediction_tpls)'
)
# Classes that compute the same as other classes.
_SAME = {
  'DoraProjection': 'Projection', 'QuantizedDoraProjection': 'Projection',
  'QuantizedLoraProjection': 'Projection', 'QuantizedProjection': 'Projection',
  'LoraMoeFeedForward': 'MoeFeedForward', 'LoraProjection': 'Projection',
  'PipelinedTransformer': 'UnrolledTransformer', 'RowsEmbedding': 'TokenEmbedding',
  'RowsHead': 'LmHead', 'RepeatedTransformer': 'UnrolledTransformer',
}  # fmt: skip
_CLASS = re.compile(r'(.*: (?:template of )?)\S+\.(\w+)')


def check_function(
  e: Experiment, folder: pathlib.Path, experiment: pathlib.Path, stored: Collection[str] = ()
) -> None:
  """Compares the model of `e` with the model of a checkpoint.

  Attributes that CHECKPOINT_RESTORE_CHANGES names may differ. A checkpoint that does not name its
  experiment is not compared. If its class was not imported, only the attributes are compared.
  Raises UserError if the checkpoint's model computes a different function.

  Args:
    folder: The checkpoint, for messages.
    experiment: The experiment.json of what wrote it; it may not exist.
    stored: Names of parameters of an unrolled stack that `e` goes on with.
  """
  function = e.values_of(Kind.FUNCTION)
  changing = [*map(current, e.CHECKPOINT_RESTORE_CHANGES)]
  for name in changing:
    if name not in function:
      raise UserError(
        f'CHECKPOINT_RESTORE_CHANGES: {name!r} is not one of {", ".join(function) or "nothing"}'
      )
  if not experiment.is_file():
    return
  found = read_experiment(experiment)
  changes = {name: function[name] for name in changing}
  writer = _experiment_of(found['experiment'], found['values'], changes)
  # what derives from a change is changed by it
  theirs = found['values'] | ({} if writer is None else writer.values())
  differing = {
    name: theirs[name]
    for name, ours in function.items()
    if name not in changes and name in found['values'] and theirs[name] != ours
  }
  if differing:
    raise UserError(
      f'{folder} belongs to a model that computes something else: it has {shell.flags(differing)} '
      f"and this run {shell.flags({k: function[k] for k in differing})}. Use the checkpoint's "
      'values, or, to accept the change, '
      f'{shell.flag("CHECKPOINT_RESTORE_CHANGES", list(differing))}'
    )
  if writer is None:
    return
  lines = function_lines(writer.plain.build_task().model)
  if different := differences(lines, function_lines(e.plain.model_of(writer))):
    raise UserError(
      f'{folder} is of {found["experiment"]}, which computes something else than '
      f'{type(e).__name__}: {listed(different, shown=3)}. Use the former'
    )
  with located(str(folder)):
    e.check_continued(writer, stored)


def refuse_edited_model(e: Experiment) -> None:
  """Raises UserError if CONFIG_EDITS change the function of the model.

  Files of other programs say what a model computes, and are written from its attributes.
  """
  edited, stated = (
    function_lines(x.build_task().model) for x in (e.plain, e.plain.replaced(CONFIG_EDITS=[]))
  )
  if different := differences(stated, edited):
    raise UserError(
      f'CONFIG_EDITS={e.CONFIG_EDITS} change what the model computes, but a file for another '
      f'program can only state attributes: {listed(different, shown=3)}'
    )


def _experiment_of(
  name: str, values: dict[str, object], changes: dict[str, object]
) -> Experiment | None:
  """Returns an experiment with these values and changes; None if its class is not imported."""
  try:
    cls = class_of({'experiment': name, 'values': values | changes})
  except UserError:
    return None
  return cls(**stated_values(cls, values) | changes)


def function_lines(model: fdl.Config) -> list[str]:
  """Returns a model's config, one line per field, without fields that its function ignores."""
  lines = []
  for line in config_text(model, 'model').splitlines():
    path = re.split(r'[:=]', line, maxsplit=1)[0].strip()
    if any(_NEUTRAL.fullmatch(re.sub(r'\[\d+\]$', '', part)) for part in path.split('.')):
      continue
    if named := _CLASS.fullmatch(line):
      line = named[1] + _SAME.get(named[2], named[2])
    lines.append(line)
  return lines


def differences(theirs: list[str], ours: list[str]) -> list[str]:
  """Returns the lines that differ, each ending in 'there' (theirs) or 'here' (ours)."""
  found = []
  for line in sorted(set(theirs) ^ set(ours)):
    field, separator, value = re.match(r'([^:=]*)( = |: )(.*)', line).groups()  # type: ignore[union-attr]
    side = 'there' if line in theirs else 'here'
    found.append(f'{field}{separator}{value} {side}')
  return found
