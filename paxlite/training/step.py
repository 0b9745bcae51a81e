"""The train step, which computes gradients and updates the state once."""

import jax
import jax.numpy as jnp
import optax

from paxlite.losses.metrics import Metrics, Weighted, scalars
from paxlite.optim.moments import merged
from paxlite.parallel.weight_dims import declared
from paxlite.training.task import Batch, Task
from paxlite.training.train_state import TrainState


def train_step(
  task: Task, seed: int, state: TrainState, batch: Batch
) -> tuple[TrainState, Metrics]:
  """Updates the state once.

  If the gradient, the loss, or a largest value of FP8 is not finite, only the step and the counters
  change. FP8 saturates: after a product, an infinite number is one of the largest.

  Args:
    task: Computes loss and gradients, and has the optimizer.
    seed: Seed of dropout; it is combined with the step.
    state: The state before the step. If the jitted step donates it, it is overwritten.
    batch: A batch as Task describes it.

  Returns:
    The next state, and scalars by their TensorBoard names.
  """
  rng = jax.random.fold_in(jax.random.key(seed), state.step)
  grads, (fp8_state, counts), metrics = task.grads(state.params, batch, rng, state.fp8_state)
  grad_norm = optax.tree.norm(optax.tree.cast(grads, jnp.float32))
  # after the limit the state stays as it is, so that the run can stop with its last good state
  seen = [
    jnp.atleast_1d(x)[..., 0].sum() for x in jax.tree.leaves(fp8_state)
  ]  # the newest of each history
  finite = jnp.isfinite(grad_norm) & jnp.isfinite(metrics['total_loss'].value)
  finite &= jnp.isfinite(sum(seen, jnp.zeros(())))
  valid = finite & (state.skipped_in_a_row < task.max_skipped_steps)

  trainable, others = task.optimizer.split(state.params)
  ruled, frozen = task.optimizer.split_ruled(others)
  fp8_state, ruled = jax.tree.map(
    lambda new, old: jnp.where(valid, new, old),
    (fp8_state, task.moved(ruled, counts)),
    (state.fp8_state, ruled),
  )
  with declared(task.boxed_params):
    trainable, opt_state = task.optimizer.update(
      grads, grad_norm, valid, state.opt_state, trainable
    )
  params = task.after_update(merged(trainable, merged(ruled, frozen)), metrics, valid)
  new_state = TrainState(
    step=state.step + 1, params=params, opt_state=opt_state,
    overwritten=fp8_state, skipped=state.skipped + ~valid,
    skipped_in_a_row=jnp.where(valid, 0, state.skipped_in_a_row + 1),
  )  # fmt: skip
  learning_rate = task.optimizer.learning_rate(state.opt_state, state.step - state.skipped)
  learning = {} if learning_rate is None else {'lr': learning_rate}
  learning |= {
    'raw_grad_norm': grad_norm,
    'clipped_grad_norm': task.optimizer.clipped(grad_norm),
    'is_valid_step': valid,
    'skipped_steps': new_state.skipped,
    'skipped_in_a_row': new_state.skipped_in_a_row,
  }
  named = {f'Metrics/{k}': m for k, m in scalars(metrics).items()}
  named |= {f'learning/{k}': Weighted(v, jnp.ones(())) for k, v in learning.items()}
  return new_state, named
