"""Which models the weights of an experiment are of: read once, when a program is built."""

import functools
from collections.abc import Mapping, Sequence

from paxlite.checkpointing.source import weights_facts
from paxlite.core.json_text import Json
from paxlite.experiments import registry
from paxlite.experiments.base import Experiment


def build_experiment(
  name: str,
  fiddlers: Sequence[str],
  overrides: Mapping[str, str],
  run: Mapping[str, Json] | None = None,
) -> Experiment:
  """Returns what registry.build_experiment does, with what the files beside its weights say."""
  return registry.build_experiment(name, fiddlers, overrides, run, functools.cache(weights_facts))


def knowing_weights(e: Experiment) -> Experiment:
  """Returns an experiment that was made in Python, with what the files beside its weights say.

  HuggingFaceSFT and its like become the experiment of the model that the weights are of.
  """
  if all(e.facts_of(path).path == path for path in e.paths_of_weights):
    return e
  facts = weights_facts(e.CHECKPOINT_RESTORE_PATH)
  cls, values = type(e).chosen(facts)
  if cls is not type(e) or values:
    stated = {name: value for name, value in vars(e).items() if name.isupper()}
    e = cls(**(values | stated))
  return e.knowing(facts, *map(weights_facts, e.paths_of_weights[1:]))
