"""Adds a loss with a metric of its own to the cross-entropy.

    python examples/own_loss.py --folder=runs/own_loss

The loss is the negative entropy of the predictions, so that the model is punished for being sure
(https://arxiv.org/abs/1701.06548). A loss returns a sum over the batch; paxlite divides it by the
number of target tokens, over all microbatches and devices.
"""

import argparse
import dataclasses

import fiddle as fdl
import jax
import jax.numpy as jnp

import paxlite
from paxlite.config.templates import config
from paxlite.experiments.demo import DemoGPT
from paxlite.losses.loss import Loss


@dataclasses.dataclass(frozen=True)
class Sureness(Loss):
  """The sum over the target tokens of Σ p·log(p), in nats."""

  def __call__(self, outputs, batch):
    log_p = jax.nn.log_softmax(outputs.logits)
    return ((jnp.exp(log_p) * log_p).sum(-1) * batch['weights']).sum()

  def metrics(self, outputs, batch):
    p = jax.nn.softmax(outputs.logits)
    weights = batch['weights']
    certain = (p.max(-1) * weights).sum() / jnp.maximum(weights.sum(), 1)
    return {'certainty': certain}


@paxlite.register
class Humble(DemoGPT):
  """A small DemoGPT with a penalty on sure predictions."""

  PENALTY: float = 0.1  # an attribute of its own needs a type
  NUM_LAYERS = 2
  MODEL_DIMS = 128
  HIDDEN_DIMS = 512
  MAX_EVAL_BATCHES = 8
  SUMMARY_INTERVAL_STEPS = 10

  def losses(self) -> dict[str, fdl.Config]:
    return super().losses() | {'sureness': config(Sureness, coefficient=self.PENALTY)}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--folder', default='runs/own_loss')
  parser.add_argument('--steps', type=int, default=200)
  parser.add_argument('--penalty', type=float, default=0.1)
  args = parser.parse_args()
  experiment = Humble(
    PENALTY=args.penalty,
    MAX_STEPS=args.steps,
    EVAL_INTERVAL_STEPS=args.steps,
  )
  run = paxlite.train(experiment, args.folder)
  for name in ('total_loss', 'avg_xent', 'sureness', 'certainty'):
    print(f'{name}: {run.evaluations[name][-1]:.4f}')


if __name__ == '__main__':
  main()
