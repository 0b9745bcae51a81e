"""Distillation from a larger teacher: the divergence from the teacher's distribution."""

import dataclasses

import jax

from paxlite.config.templates import config
from paxlite.experiments.demo import TinyGPT
from paxlite.finetuning.reference import Reference
from paxlite.losses.loss import Loss


@dataclasses.dataclass(frozen=True)
class Divergence(Loss):
  """KL(teacher ‖ student) with a temperature, times its square, the mean over the target tokens."""

  temperature: float = 2.0

  def __call__(self, outputs, batch):
    ours = jax.nn.log_softmax(outputs.logits / self.temperature)
    theirs = jax.nn.log_softmax(outputs.reference.logits / self.temperature)
    each_BT = (jax.numpy.exp(theirs) * (theirs - ours)).sum(-1) * self.temperature**2
    return (each_BT * batch['weights']).sum()


class Teacher(TinyGPT):
  NUM_LAYERS, MODEL_DIMS, MAX_STEPS = 3, 64, 2


class Student(TinyGPT):
  MAX_STEPS, LR_COS_WARMUP, LEARNING_RATE = 4, 1, 1e-2

  def losses(self):
    return super().losses() | {'divergence': config(Divergence)}

  def reference(self):
    return config(Reference, model=Teacher().model())
