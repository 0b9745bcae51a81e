"""Takes the steps of training by hand: paxlite's model, loss, optimizer and data in your loop.

    python examples/python_loop.py --steps=50

There is no folder, no checkpoint and no log. The train state is a tree of arrays, and the model a
Flax module, so that everything of JAX can be used with them (docs/library.md, docs/api.md).
"""

import argparse

import fiddle as fdl
import jax
import jax.numpy as jnp
from flax.linen import meta

import paxlite
from paxlite.training.step import train_step


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--steps', type=int, default=50)
  parser.add_argument('--microbatches', type=int, default=2)
  args = parser.parse_args()

  experiment = paxlite.get('DemoGPT')(
    NUM_LAYERS=2,
    MODEL_DIMS=128,
    HIDDEN_DIMS=512,
    MAX_STEPS=args.steps,
    NUM_MICROBATCHES=args.microbatches,
  )
  # An experiment describes its parts as Fiddle configs. Building one makes the part.
  task = fdl.build(experiment.task())
  data = fdl.build(experiment.train_input())

  state = meta.unbox(task.init(jax.random.key(0)))
  print(f'{sum(x.size for x in jax.tree.leaves(state.params)):,} parameters')

  step = jax.jit(
    lambda state, batch: train_step(task, experiment.SEED, state, batch), donate_argnums=0
  )
  batches = data.train_batches(0, slice(0, data.batch_size))
  for number, batch in zip(range(args.steps), batches, strict=False):
    state, metrics = step(state, batch)
    if number % 10 == 0 or number == args.steps - 1:
      print(f'step {number}: {float(metrics["Metrics/total_loss"].value):.3f}')

  logits_BTV = task.model.apply({'params': state.params}, batch['ids'])
  right = (jnp.argmax(logits_BTV, -1) == batch['labels']) * batch['weights']
  print(f'{right.sum() / batch["weights"].sum():.1%} of the last batch guessed')


if __name__ == '__main__':
  main()
