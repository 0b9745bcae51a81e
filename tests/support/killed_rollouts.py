"""Runs the real paxlite.main until KILLED: in generation:N, in training:N, or between:N."""

import os
import signal
import sys

from paxlite import main
from paxlite.finetuning.reinforcement.actor import Actor
from paxlite.generation.engine import Engine
from paxlite.processes import preemption
from paxlite.training.trainer import Trainer

phase, _, at = os.environ['KILLED'].partition(':')
go_on, stepped, reached, step_of_engine = (
  Actor.go_on,
  Trainer._stepped,
  preemption.reached,
  Engine.step,
)
rollouts = 0


def killed() -> None:
  print('killed', flush=True)
  os.kill(os.getpid(), signal.SIGKILL)


def counted(self, *args):
  global rollouts
  rollouts += 1
  return go_on(self, *args)


def in_generation(self, **kwargs):
  found = step_of_engine(self, **kwargs)
  if rollouts > int(at):
    killed()
  return found


def in_training(self, state, step, metrics):
  if step == int(at):
    killed()  # the devices are computing it, and others generate
  return stepped(self, state, step, metrics)


def in_between(step, last):
  if step == int(at):
    killed()
  return reached(step, last)


match phase:
  case 'generation':
    Actor.go_on, Engine.step = counted, in_generation
  case 'training':
    Trainer._stepped = in_training
  case 'between':
    preemption.reached = in_between

sys.exit(main.main(sys.argv))
