"""What verifies steps of a run, as its experiment asks for it."""

from paxlite.experiments.base import Experiment
from paxlite.experiments.language_model import LanguageModel
from paxlite.training.sharded_task import ShardedTask
from paxlite.training.step_verifier import StepVerifier
from paxlite.training.train_data import TrainData


def verifier_of(e: Experiment, task: ShardedTask, data: TrainData) -> StepVerifier | None:
  """Returns what verifies steps; None if none is to be verified."""
  if not e.VERIFY_EVERY_N_STEPS:
    return None
  values, sharding = e.values(), task.batch_sharding
  has_dropout = any(values.get(name) for name in ('DROPOUT_PROB', 'EMBEDDING_DROPOUT_PROB'))
  has_experts = isinstance(e, LanguageModel) and e.has_any_experts
  return StepVerifier(
    e.VERIFY_EVERY_N_STEPS,
    sharding,
    lambda step: data.redrawn(step, sharding),
    depends_on_places=has_dropout or has_experts,
  )
