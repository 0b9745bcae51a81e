"""Model, loss, metrics and gradients as pure functions of (state or params, batch, rng)."""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from paxlite.core.trees import PyTree
from paxlite.layers.einsum import FP8_COLLECTIONS
from paxlite.layers.language_model import TransformerLm
from paxlite.layers.sown import SOWN, over_layers, total_loss
from paxlite.optim.optimizers import Optimizer, merge
from paxlite.parallel.partitioning import TAPS, new_taps, reading_taps
from paxlite.training import own_loss, tap_trees
from paxlite.training.metrics import Metrics, Weighted, num_tokens, over_microbatches
from paxlite.training.microbatch_loop import microbatch_scan
from paxlite.training.train_state import TrainState

Batch = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Task:
  """Next-token prediction with a language model.

  A batch holds ids and labels [B, T] int32, and weights [B, T] float32. A packed batch also holds
  segment_ids (0 is padding) and segment_pos, both [B, T] int32.

  Attributes:
    model: The language model.
    optimizer: The optimizer, with its schedule and the names of the trainable variables.
    num_microbatches: Number of parts of a step's batch that are computed one after another.
    mean_over_padding: Whether the loss is the mean over all positions (GLaM), padding included,
      and not over the targets. Rows without any target do not count.
    max_skipped_steps: After this many skipped steps in a row the state no longer changes.
    gradient_dtype: The dtype that the gradients of one microbatch are kept in. Their sum over
      several microbatches is float32.
    frozen_dtype: The dtype that frozen parameters are kept in.
    load_bias_rate: How much a step moves the biases for the load of experts; 0: not at all.
    context: Returns a context in which the model is traced, forward and backward.
    begin_step: Turns a state's `overwritten` into what the model reads in this step.
  """

  model: TransformerLm
  optimizer: Optimizer
  num_microbatches: int = 1
  mean_over_padding: bool = False
  max_skipped_steps: int = 100
  gradient_dtype: str = 'float32'
  frozen_dtype: str = 'float32'
  load_bias_rate: float = 0.001
  context: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
  begin_step: Callable[[Mapping[str, PyTree]], Mapping[str, PyTree]] = dict

  def init_params(self, rng: jax.Array) -> PyTree:
    """Returns new parameters, boxed with their logical axes (flax.linen.LogicallyPartitioned)."""
    return self._init_variables(rng)['params']

  def init(self, rng: jax.Array) -> TrainState:
    """Returns a new state; parameters and moments are boxed with their logical axes."""
    variables = self._init_variables(rng)
    params = variables['params']
    if type(self).init_params is not Task.init_params:
      params = self.init_params(rng)
    params = self.optimizer.with_frozen_as(params, self.frozen_dtype)
    trainable, _ = self.optimizer.split(params)
    zero = lambda: jnp.zeros((), jnp.int32)  # arrays of their own, which a step can overwrite
    return TrainState(
      step=zero(),
      params=params,
      opt_state=self.optimizer.init(trainable),
      overwritten={k: variables[k] for k in FP8_COLLECTIONS if k in variables},
      skipped=zero(),
      skipped_in_a_row=zero(),
    )

  def boxed_params(self) -> PyTree:
    """Returns the shapes of the parameters, boxed; they are the same on any mesh."""
    trace = functools.partial(jax.eval_shape, self.init_params, jax.random.key(0))
    return contextvars.Context().run(trace)  # without the mesh that may be active

  def _init_variables(self, rng: jax.Array) -> Mapping[str, PyTree]:
    with self.context():
      return self.model.init(rng, jnp.zeros((1, 1), jnp.int32))

  def loss(
    self,
    params: PyTree,
    batch: Batch,
    rng: jax.Array | None = None,
    overwritten: Mapping[str, PyTree] | None = None,
    taps: PyTree = None,
  ) -> tuple[jax.Array, Metrics]:
    """Returns the loss and Pax's metrics.

    A subclass may override it: see `loss_and_metrics`. This one is the mean cross-entropy per
    target token in nats, plus the layers' auxiliary losses: Σ(xent·w) / (Σw + 1e-6) + Σ auxiliary.
    With mean_over_padding the divisor is the number of positions in rows that have a target.

    Args:
      params: Unboxed parameters.
      batch: A batch as the class describes it.
      rng: Random key of dropout; None turns dropout off.
      overwritten: FP8 statistics as in TrainState, unboxed.
      taps: Arrays like some parameters, whose gradients are those of the parameters in the arrays'
        dtype; None means no taps. See partitioning.param.
    """
    with self.context(), reading_taps(tap_trees.names_of(taps)):
      (losses, sown) = self.model.apply(
        {'params': params, TAPS: taps or {}, **self.begin_step(overwritten or {})},
        batch['ids'],
        batch['labels'],
        batch.get('segment_pos'),
        batch.get('segment_ids'),
        rngs=None if rng is None else {'dropout': rng},
        method='losses',
        mutable=SOWN,
      )
    weights = batch['weights']
    num_predictions = weights.sum()
    mean = lambda x: (x * weights).sum() / (num_predictions + 1e-6)
    one = jnp.ones(())
    xent = Weighted(mean(losses.xent), num_predictions)
    if self.mean_over_padding:
      positions = self._xent_weight(weights)
      xent = Weighted((losses.xent * weights).sum() / jnp.maximum(positions, 1), positions)
    aux_loss = total_loss(sown)
    loss = xent.value + aux_loss
    # Pax weights the total by targets; microbatches of one's own loss need what it is a mean over
    return loss, {
      'total_loss': Weighted(loss, xent.weight if self.has_own_loss else num_predictions),
      'avg_xent': xent,
      'aux_loss': Weighted(aux_loss, one),
      'log_pplx': xent,
      'fraction_of_correct_next_step_preds': Weighted(mean(losses.correct), num_predictions),
      'num_predictions': Weighted(num_predictions, one),
    } | {name: Weighted(value, num_tokens(batch)) for name, value in over_layers(sown).items()}

  @property
  def has_own_loss(self) -> bool:
    """Whether a subclass overrides `loss`."""
    return type(self).loss is not Task.loss

  def loss_and_metrics(
    self,
    params: PyTree,
    batch: Batch,
    rng: jax.Array | None = None,
    overwritten: Mapping[str, PyTree] | None = None,
    **taps: PyTree,
  ) -> tuple[jax.Array, Metrics]:
    """Returns what `loss` returns, checked and completed where a subclass overrides it.

    The metrics of a loss of one's own may be bare scalars and may be few: own_loss.completed says
    what is added. The value of `total_loss` is always the loss itself. Its weight says how much the
    rows of this batch count beside others; the number of target tokens is the default.

    Raises:
      UserError: An overridden loss returns something else.
    """
    found = self.loss(params, batch, rng=rng, overwritten=overwritten, **taps)
    if not self.has_own_loss:
      return found
    weights_BT = batch['weights']
    return own_loss.completed(found, self.loss, self._xent_weight(weights_BT), weights_BT.sum())

  def grads(
    self,
    params: PyTree,
    batch: Batch,
    rng: jax.Array | None,
    overwritten: Mapping[str, PyTree] | None = None,
  ) -> tuple[PyTree, tuple[PyTree, PyTree], Metrics]:
    """Returns the gradients for the trainable parameters, what others become, and the metrics.

    The second result is what replaces `overwritten`, and the loads of the whole batch for the
    parameters that Optimizer.split_load_biases selects: see group_router.balanced.

    The cross-entropy of a microbatch is weighted by its number of target tokens. Therefore the
    number of microbatches changes the result only by rounding, dropout masks and FP8. Auxiliary
    losses are averaged over the microbatches. Each microbatch passes `overwritten` on to the next,
    as each step does. The biases for the load are the same for all microbatches of a step.

    If a subclass overrides `loss`, the loss of a step is the mean of the losses that it returns for
    the microbatches, weighted by the weights of their `total_loss`. This is the loss of the whole
    batch if that is such a mean over its rows.
    """
    trainable, others = self.optimizer.split(params)
    biases, frozen = self.optimizer.split_load_biases(others)
    overwritten = dict(overwritten or {})
    is_tapped = self.gradient_dtype != 'float32'
    taps = new_taps(self.loss, trainable, self.gradient_dtype) if is_tapped else None
    # a loss of one's own may read parameters itself, and not only through the model and its taps
    varied = (trainable if not is_tapped or self.has_own_loss else None), taps

    def loss(varied, changed, batch, rng):
      (weights, taps), (overwritten, biases) = varied, changed
      params = merge(trainable if weights is None else weights, merge(biases, frozen))
      if taps is None:  # a user's loss may have no argument for them
        return self.loss_and_metrics(params, batch, rng, overwritten)
      with reading_taps(tap_trees.names_of(taps)):
        return self.loss_and_metrics(
          params, batch, rng, overwritten, taps=tap_trees.without_gaps(taps)
        )

    if self.num_microbatches == 1:
      with self.context():
        gradient = jax.grad(loss, argnums=(0, 1), has_aux=True)
        (grads, after), metrics = gradient(varied, (overwritten, biases), batch, rng)
      return tap_trees.gradients_of(*grads), after, metrics

    n = self.num_microbatches
    # a microbatch takes every n-th row, so that rows stay on their devices
    split = jax.tree.map(lambda x: x.reshape(-1, n, *x.shape[1:]).swapaxes(0, 1), batch)
    whole = jnp.maximum(self._xent_weight(batch['weights']), 1e-6)

    def part(varied, changed, microbatch, rng):
      value, metrics = loss(varied, changed, microbatch, rng)
      if self.has_own_loss:
        return value, metrics
      xent, aux_loss = metrics['avg_xent'], metrics['aux_loss']
      return xent.value * xent.weight / whole + aux_loss.value / n, metrics

    def accumulate(carry, inputs):
      total, overwritten, loads = carry
      i, microbatch = inputs
      rng_i = None if rng is None else jax.random.fold_in(rng, i)
      with self.context():
        gradient = jax.grad(part, argnums=(0, 1), has_aux=True)
        (g, after), metrics = gradient(varied, (overwritten, biases), microbatch, rng_i)
      g, of_part = tap_trees.gradients_of(*g), metrics['total_loss']
      loads = jax.tree.map(jnp.add, loads, after[1])
      if self.has_own_loss:
        total = total.with_part((g, of_part.value), of_part.weight)
      else:
        total = jax.tree.map(jnp.add, total, g)
      return (total, after[0], loads), metrics

    zeros, no_load = jax.tree.map(jnp.zeros_like, (trainable, biases))
    first = own_loss.RunningMean.of((zeros, jnp.zeros(()))) if self.has_own_loss else zeros
    start = first, overwritten, no_load
    (found, *after), metrics = microbatch_scan()(accumulate, start, (jnp.arange(n), split))
    mean = {k: over_microbatches(k, m) for k, m in metrics.items()}
    if self.has_own_loss:
      found, total = found.mean
    else:
      total = mean['avg_xent'].value + mean['aux_loss'].value
    mean['total_loss'] = Weighted(total, mean['total_loss'].weight)
    return found, tuple(after), mean

  def _xent_weight(self, weights_BT: jax.Array) -> jax.Array:
    """Returns the divisor of the sum of cross-entropies."""
    if not self.mean_over_padding:
      return weights_BT.sum()
    return (weights_BT.max(1) > 0).sum() * jnp.float32(weights_BT.shape[1])
