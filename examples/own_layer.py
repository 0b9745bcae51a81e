"""Replaces the feed-forward layer of a GPT by one of your own, and trains both.

    python examples/own_layer.py --folder=runs/own_layer

The layer multiplies the hidden units of a second projection by a squared ReLU of the first one.
docs/tutorials/write_layer.md goes further: checks, sharding, and tests.
"""

import argparse
import pathlib

import fiddle as fdl
import jax
import jax.numpy as jnp
from fiddle import selectors

import paxlite
from paxlite.experiments.demo import DemoGPTAdam
from paxlite.layers.feedforward import FeedForward


class SquaredReLU(FeedForward):
  """The hidden units are relu(w·x)², as in https://arxiv.org/abs/2109.08668.

  x_BTD is [batch, length, model width].
  """

  def hidden(self, x_BTD: jax.Array) -> jax.Array:
    return jnp.square(jax.nn.relu(self.up(x_BTD, 'ffn_layer1')))


@paxlite.register
class Plain(DemoGPTAdam):
  """A DemoGPTAdam without gates, of two layers."""

  USE_GATED_ACTIVATION = False
  ACTIVATION_CLS = 'relu'
  NUM_LAYERS = 2
  MODEL_DIMS = 128
  HIDDEN_DIMS = 512
  MAX_EVAL_BATCHES = 8
  LR_COS_WARMUP = 10


@paxlite.register
class Squared(Plain):
  """The same with the layer from above."""

  def model(self) -> fdl.Config:
    model = super().model()
    for layer in selectors.select(model, FeedForward):
      fdl.update_callable(layer, SquaredReLU)
    return model


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--folder', type=pathlib.Path, default=pathlib.Path('runs/own_layer'))
  parser.add_argument('--steps', type=int, default=200)
  args = parser.parse_args()
  steps = dict(MAX_STEPS=args.steps, EVAL_INTERVAL_STEPS=args.steps)
  steps['LR_COS_DECAY_END'] = max(args.steps, 20)
  for kind in (Plain, Squared):
    run = paxlite.train(kind(**steps), args.folder / kind.__name__)
    print(f'{kind.__name__}: {run.evaluations["avg_xent"][-1]:.4f} nats a token, held out')


if __name__ == '__main__':
  main()
