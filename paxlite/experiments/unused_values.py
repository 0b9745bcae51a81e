"""Finds values that a user has set and that change nothing, because other values leave them out."""

import contextlib
import functools
from collections.abc import Callable, Collection
from typing import Any

from paxlite import extensions
from paxlite.config.attribute_kinds import Kind
from paxlite.config.attributes import derived
from paxlite.config.templates import config_text
from paxlite.core.errors import UserError
from paxlite.experiments.base import Experiment
from paxlite.experiments.description import configs_text

# A permission, and what matters to data, to prompts and to initial values, which no config of the
# model holds.
_NOT_OF_CONFIGS = {'HEADS_SPAN_MODEL', 'START_ID', 'SEED', 'MAX_SEQ_LEN', 'PACKED_INPUT'}

_SPIKES = 'LOSS_SPIKE_FACTOR', lambda e: e.LOSS_SPIKE_FACTOR
_STAGES = 'an axis stage of the mesh', lambda e: e.mesh_sizes.get('stage', 1) > 1
_GENERATION, _EVAL = (
  (f'the extension {leaf}', lambda e, leaf=leaf: leaf in {x.name for x in extensions.found()})
  for leaf in ('generation', 'eval')
)
_EVALUATED = 'data to evaluate on', lambda e: e.eval_inputs()
# Attributes that decide how a run goes, each with what it needs, and whether that is there.
_NEEDS: dict[str, tuple[str, Callable[[Any], object]]] = {
  'LOSS_SPIKE_WINDOW': _SPIKES,
  'MAX_ROLLBACKS': _SPIKES,
  'BEST_METRIC': (
    'KEEP_BEST or EARLY_STOPPING_PATIENCE',
    lambda e: e.KEEP_BEST or e.EARLY_STOPPING_PATIENCE,
  ),
  'LOCAL_CHECKPOINT_DIR': (
    'LOCAL_CHECKPOINT_EVERY_N_STEPS',
    lambda e: e.LOCAL_CHECKPOINT_EVERY_N_STEPS,
  ),
  'PROFILER_NUM_STEPS': ('PROFILER_CAPTURE_STEP', lambda e: e.PROFILER_CAPTURE_STEP is not None),
  'FROZEN_DTYPE': ('variables that TRAINABLE_VARIABLES leaves out', lambda e: not e.trains_all),
  'NUM_PIPELINE_REPEATS': _STAGES,
  'GATHER_STAGES_ONCE': _STAGES,
  'CONTEXT_ATTENTION': (
    'an axis context of the mesh',
    lambda e: e.mesh_sizes.get('context', 1) > 1,
  ),
  'SEQUENCE_SHARDED_ACTIVATIONS': (
    'an axis mdl of the mesh',
    lambda e: e.mesh_sizes.get('mdl', 1) > 1,
  ),
  'SAMPLE_PROMPT': _GENERATION,
  'SAMPLE_PROMPTS': _GENERATION,
  'EVAL_TASKS_IN_TRAINING': _EVAL,
  'SAMPLE_CHAT': ('SAMPLE_PROMPTS', lambda e: e.SAMPLE_PROMPT or e.SAMPLE_PROMPTS),
  'EVAL_BATCH_SIZE': _EVALUATED,
  'MAX_EVAL_BATCHES': _EVALUATED,
}


def warnings(experiment: Experiment, known: Collection[str]) -> list[str]:
  """Returns a sentence on each value that a user has set, and that changes nothing.

  Args:
    known: Attributes of which it is said already that they have no effect; they are left out.
  """
  unused = ((name, 'other values leave it out') for name in without_effect(experiment, known))
  waiting = (
    (name, f'it needs {what}')
    for name, (what, is_there) in _NEEDS.items()
    if hasattr(experiment, name) and _otherwise(experiment, name) and not is_there(experiment)
  )
  return [
    f'{name}={getattr(experiment, name)!r} changes nothing: {why}.'
    for name, why in (*unused, *waiting)
  ]


def without_effect(experiment: Experiment, known: Collection[str]) -> list[str]:
  """Returns the attributes of model and training that a user has set, and that change nothing.

  They are set on this object, or in a class outside of paxlite. An attribute changes nothing if the
  configs that the experiment makes are the same with the value that it would have otherwise, and
  `validate` accepts that value.

  Args:
    known: Attributes of which it is known already that they have no effect; they are left out.
  """
  found = []
  of_task = functools.cache(lambda: config_text(experiment.build_task(), 'task'))
  text = functools.cache(lambda: configs_text(experiment))
  for name in experiment.values_of(Kind.SHAPE, Kind.FUNCTION, Kind.TRAINING):
    if name in known or name in _NOT_OF_CONFIGS or name.startswith('CHECKPOINT_'):
      continue
    with contextlib.suppress(UserError):
      without = _otherwise(experiment, name)
      if without is None:
        continue
      without.validate()
      # the task first: configs of inputs may ask a store for a tokenizer
      if config_text(without.build_task(), 'task') == of_task() and configs_text(without) == text():
        found.append(name)
  return found


def _otherwise(experiment: Experiment, name: str) -> Experiment | None:
  """Returns the experiment with the value that an attribute has otherwise; None if it is that."""
  cls = type(experiment)
  values = {other: value for other, value in vars(experiment).items() if other.isupper()}
  if name in values:
    del values[name]
  else:
    published = _published(cls, name)
    if isinstance(published, derived):
      return None
    values[name] = published
  other = cls(**values).knowing(*experiment.known_weights)
  return None if getattr(other, name) == getattr(experiment, name) else other


def _published(cls: type[Experiment], name: str) -> object:
  """Returns the value, or the rule, that an attribute has in the nearest class of paxlite."""
  ours = (base for base in cls.__mro__ if base.__module__.startswith('paxlite.'))
  return next((vars(base)[name] for base in ours if name in vars(base)), getattr(cls, name))
