"""Which model the weights in CHECKPOINT_RESTORE_PATH are of: read once, when a program is built."""

import functools
from collections.abc import Mapping, Sequence
from typing import TypeVar

from paxlite.checkpointing.source import weights_facts
from paxlite.core.json_text import Json
from paxlite.experiments import registry
from paxlite.experiments.base import Experiment

E = TypeVar('E', bound=Experiment)


def build_experiment(
  name: str,
  fiddlers: Sequence[str],
  overrides: Mapping[str, str],
  run: Mapping[str, Json] | None = None,
) -> Experiment:
  """Returns what registry.build_experiment does, with what the files beside its weights say."""
  return registry.build_experiment(name, fiddlers, overrides, run, functools.cache(weights_facts))


def knowing_weights(e: E) -> E:
  """Returns an experiment that was made in Python, with what the files beside its weights say."""
  is_known = e.weights.path == e.CHECKPOINT_RESTORE_PATH
  return e if is_known else e.knowing(weights_facts(e.CHECKPOINT_RESTORE_PATH))
