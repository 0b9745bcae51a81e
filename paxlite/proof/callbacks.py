"""Puts what verifies steps into a run, as its experiment asks for it."""

import dataclasses

from paxlite.experiments.language_model import LanguageModel
from paxlite.programs.run import Run
from paxlite.proof.attributes import Verification
from paxlite.proof.step_verifier import StepVerifier
from paxlite.training.callbacks import Callback
from paxlite.training.trainer import Trainer


def callbacks(run: Run, trainer: Trainer) -> list[Callback]:
  """Makes a trainer verify steps where VERIFY_EVERY_N_STEPS says so; returns no callbacks."""
  e = model = run.experiment
  if not isinstance(e, Verification) or not e.VERIFY_EVERY_N_STEPS:
    return []
  values, sharding = e.values(), trainer.store.task.batch_sharding
  has_dropout = any(values.get(name) for name in ('DROPOUT_PROB', 'EMBEDDING_DROPOUT_PROB'))
  has_experts = isinstance(model, LanguageModel) and model.has_any_experts
  trainer.do_step = StepVerifier(
    e.VERIFY_EVERY_N_STEPS, sharding, lambda step: trainer.data.redrawn(step, sharding),
    depends_on_places=has_dropout or has_experts,
  )  # fmt: skip
  memory = dataclasses.replace(trainer.compiler.memory, copied_for='VERIFY_EVERY_N_STEPS')
  trainer.compiler = dataclasses.replace(trainer.compiler, memory=memory)
  return []
