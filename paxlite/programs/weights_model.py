"""The weights of an experiment: which models they are of, and what is restored from them."""

from paxlite.checkpointing.restore import Restore
from paxlite.checkpointing.source import weights_facts
from paxlite.config.attribute_kinds import Kind
from paxlite.experiments.base import Experiment
from paxlite.experiments.compatibility import check_function
from paxlite.experiments.parts.objective import Objective


def knowing_weights(e: Experiment) -> Experiment:
  """Returns an experiment made in Python, completed from the files next to its weights.

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


def restore_of(e: Experiment) -> Restore | None:
  """The checkpoint that a new run starts from. A model with another function is refused."""
  if not e.CHECKPOINT_RESTORE_PATH:
    return None
  return Restore(
    path=e.CHECKPOINT_RESTORE_PATH,
    ignore=tuple(e.ignored_variables),
    rename=tuple(e.CHECKPOINT_RENAME_RULES),
    whole_state=e.CHECKPOINT_RESTORE_STATE,
    sizes=e.values_of(Kind.SHAPE),
    check=lambda source: check_function(
      e, source.folder, source.experiment, source.unrolled_params()
    ),
  )


def reference_of(e: Experiment) -> Restore | None:
  """The checkpoint of a frozen reference model; None if it has no checkpoint."""
  path = e.reference_path
  if not path or not isinstance(e, Objective):
    return None
  rename = e.CHECKPOINT_RENAME_RULES if path == e.CHECKPOINT_RESTORE_PATH else ()
  if e.reference() != e.initial_reference():  # what another model must equal is not known
    return Restore(path, rename=tuple(rename))
  return Restore(
    path, rename=tuple(rename), sizes=e.values_of(Kind.SHAPE),
    check=lambda source: check_function(e, source.folder, source.experiment),
  )  # fmt: skip
