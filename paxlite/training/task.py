"""Model, losses and optimizer, and the gradients as pure functions of (params, batch, rng)."""

import contextlib
import contextvars
import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from paxlite.core.errors import UserError
from paxlite.core.training_rules import Rule, rule_of
from paxlite.core.trees import PyTree
from paxlite.core.variable_names import REFERENCE, path_name
from paxlite.layers.language_model import TransformerLm
from paxlite.layers.precision.einsum import FP8_COLLECTIONS
from paxlite.layers.sown import SOWN
from paxlite.losses import checks
from paxlite.losses.loss import Loss
from paxlite.losses.metric_names import larger_is_better
from paxlite.losses.metrics import Metrics, Weighted, divisor, over_microbatches, scalars
from paxlite.losses.outputs import Outputs
from paxlite.optim.moments import merged
from paxlite.optim.optimizers import Optimizer
from paxlite.parallel.partitioning import PROBES, reading_probes
from paxlite.training import gradient_probes
from paxlite.training.microbatch_loop import in_microbatches, summed
from paxlite.training.train_state import TrainState

Batch = dict[str, jax.Array]
TOTAL = 'total_loss'  # the metric of the sum of all losses


class FrozenModel(Protocol):
  """A frozen model next to the trained one, as training.reference.Reference."""

  @property
  def model(self) -> TransformerLm | None:
    """The model; None if its outputs are in the batches."""

  @property
  def is_base(self) -> bool:
    """Whether it has no own parameters."""

  def outputs(self, params: PyTree, batch: Batch) -> Any:
    """Returns what losses read of it for a batch."""


@dataclasses.dataclass(frozen=True)
class Task:
  """A language model, the losses that it is trained with, and the optimizer.

  A batch holds ids and labels [B, T] int32, and weights [B, T] float32. A packed batch also holds
  segment_ids (0 is padding) and segment_pos, both [B, T] int32. Losses may need further arrays.
  """

  model: TransformerLm  # the language model
  optimizer: Optimizer  # the optimizer, with its schedule and the names of the trainable variables
  # the terms of the loss, by the names of their metrics; their order is that of the sum
  losses: Mapping[str, Loss]
  # a frozen model whose outputs losses read; None: there is none
  reference: FrozenModel | None = None
  num_microbatches: int = 1  # number of parts of a step's batch that are computed one after another
  rows_per_example: int = 1  # so many rows in a row belong together, and stay in one microbatch
  # whether the last microbatches of a step are skipped, as far as they hold no target
  skips_empty: bool = False
  max_skipped_steps: int = 100  # after this many skipped steps in a row the state no longer changes
  # The dtype that the gradients of one microbatch are kept in. Their sum over several microbatches
  # is float32.
  gradient_dtype: str = 'float32'
  frozen_dtype: str = 'float32'  # the dtype that frozen parameters are kept in
  # what moves variables that no gradient trains, by the last part of their names, in place of the
  # rules that their layers declare: see core/training_rules.py
  rules: Mapping[str, Rule] = dataclasses.field(default_factory=dict)
  # returns a context in which the model is traced, forward and backward
  context: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
  # turns a state's `fp8_state` into what the model reads in this step
  begin_step: Callable[[Mapping[str, PyTree]], Mapping[str, PyTree]] = dict

  def __post_init__(self) -> None:
    checks.check_losses(self.losses)
    if hasattr(self, 'loss'):
      raise UserError(
        f'{type(self).__name__} has a method `loss`, which is never called: write a subclass of '
        'paxlite.losses.loss.Loss, and return it from losses() of the experiment'
      )

  def init_params(self, rng: jax.Array) -> PyTree:
    """Returns new parameters, boxed with their logical axes (flax.linen.LogicallyPartitioned)."""
    return self._init_variables(rng)['params']

  def init(self, rng: jax.Array) -> TrainState:
    """Returns a new state; parameters and moments are boxed with their logical axes."""
    variables = self._init_variables(rng)
    params = variables['params']
    if type(self).init_params is not Task.init_params:
      params = self.init_params(rng)
    frozen = self.reference
    if frozen is not None and frozen.model is not None and not frozen.is_base:
      params = {**params, REFERENCE: self._init_variables(rng, frozen.model)['params']}
    params = self.optimizer.with_frozen_as(params, self.frozen_dtype)
    trainable, _ = self.optimizer.split(params)
    zero = lambda: jnp.zeros((), jnp.int32)  # arrays of their own, which a step can overwrite
    return TrainState(
      step=zero(), params=params, opt_state=self.optimizer.init(trainable),
      overwritten={k: variables[k] for k in FP8_COLLECTIONS if k in variables}, skipped=zero(),
      skipped_in_a_row=zero(),
    )  # fmt: skip

  def evaluated(self, state: TrainState) -> PyTree:
    """Returns the parameters to evaluate: with EMA_DECAY the average of the trained ones."""
    return self.optimizer.evaluated(state.opt_state, state.params)

  def boxed_params(self) -> PyTree:
    """Returns the shapes of the parameters, boxed; they are the same on any mesh."""
    trace = functools.partial(jax.eval_shape, self.init_params, jax.random.key(0))
    return contextvars.Context().run(trace)  # without the mesh that may be active

  def _init_variables(
    self, rng: jax.Array, model: TransformerLm | None = None
  ) -> Mapping[str, PyTree]:
    with self.context():
      return (model or self.model).init(rng, jnp.zeros((1, 1), jnp.int32))

  def loss_and_metrics(
    self,
    params: PyTree,
    batch: Batch,
    rng: jax.Array | None = None,
    fp8_state: Mapping[str, PyTree] | None = None,
  ) -> tuple[jax.Array, Metrics]:
    """Returns the loss of a whole batch, and the metrics.

    Args:
      params: Unboxed parameters.
      batch: A batch as the class describes it.
      rng: Random key of dropout; None turns dropout off.
      fp8_state: FP8 statistics as in TrainState, unboxed.
    """
    loss, metrics = self._share(self._weights(batch), params, batch, rng, fp8_state or {})
    return loss, scalars(self._with_total(metrics, batch))

  def _share(
    self,
    whole: Mapping[str, jax.Array],
    params: PyTree,
    batch: Batch,
    rng: jax.Array | None,
    fp8_state: Mapping[str, PyTree],
    probes: PyTree = None,
  ) -> tuple[jax.Array, Metrics]:
    """Returns what a microbatch adds to the loss of the batch, and its metrics.

    Args:
      whole: The weight of each loss in the whole batch.
      params, batch, rng, fp8_state: As loss_and_metrics takes them.
      probes: Gradient probes: arrays like some parameters, whose gradients are those of the
        parameters in the arrays' dtype; None means no probes. See partitioning.param.
    """
    shares: dict[str, jax.Array] = {}
    metrics: Metrics = {}
    weights = self._weights(batch)
    with self.context(), reading_probes(gradient_probes.names_of(probes)):
      outputs = self._outputs(params, batch, rng, fp8_state, probes)
      for name, loss in self.losses.items():
        total = checks.checked_sum(name, loss, loss(outputs, batch))
        shares[name] = total / divisor(whole[name])
        metrics[name] = Weighted.mean(total, weights[name])
        own = checks.checked_metrics(name, loss, loss.metrics(outputs, batch), weights[name])
        checks.check_distinct(metrics, own, self.losses)
        metrics |= own
      metrics |= self.observed(outputs)
    return self.total(shares), metrics

  def observed(self, outputs: Outputs) -> Metrics:
    """Returns arrays that `after_update` reads; over microbatches they are combined as metrics."""
    return {}

  def after_update(self, params: PyTree, metrics: Metrics, valid: jax.Array) -> PyTree:
    """Returns the parameters of the next step.

    Args:
      params: The parameters after the update.
      metrics: The metrics of the step, with what `observed` has returned.
      valid: Whether the update counts; if not, the parameters must stay as they are.
    """
    return params

  def _weights(self, batch: Batch) -> dict[str, jax.Array]:
    return {k: checks.checked_weight(k, x, x.weight(batch)) for k, x in self.losses.items()}

  def _outputs(
    self,
    params: PyTree,
    batch: Batch,
    rng: jax.Array | None,
    fp8_state: Mapping[str, PyTree],
    probes: PyTree,
  ) -> Outputs:
    probes = gradient_probes.without_gaps(probes or {})
    variables = {'params': params, PROBES: probes, **self.begin_step(fp8_state)}
    rngs = None if rng is None else {'dropout': rng}
    model = self.model.bind(variables, rngs=rngs, mutable=SOWN)
    reference = None
    if self.reference is not None:
      reference = functools.partial(self.reference.outputs, params, batch)
    return Outputs(model, batch, params if self._reads_params else None, reference)

  @property
  def _reads_params(self) -> bool:
    return any(loss.reads_params for loss in self.losses.values())

  def _with_total(self, metrics: Metrics, batch: Batch) -> Metrics:
    """Adds the sum of all losses; its weight is the number of targets, as in Pax."""
    total = self.total({name: metrics[name].value for name in self.losses})
    return {TOTAL: Weighted(total, batch['weights'].sum()), **metrics}

  def total(self, means: Mapping[str, Any]) -> Any:
    """Returns the sum of the losses' means, arrays or floats, each times its coefficient."""
    terms = [
      means[name] if loss.coefficient == 1 else loss.coefficient * means[name]
      for name, loss in self.losses.items()
    ]
    return functools.reduce(operator.add, terms)

  def larger_is_better(self, metric: str) -> bool:
    """Returns whether a larger value of a metric of evaluations is better; of a loss, it is not."""
    stated = {name: loss.larger_is_better for name, loss in self.losses.items()}
    return larger_is_better(metric, {TOTAL: (), **stated})

  @property
  def shown(self) -> dict[str, str]:
    """Formats of the metrics that the terminal shows after an evaluation, by their names.

    The loss is the total, unless there is one loss alone that has a label.
    """
    labels = {k: k if loss.label is None else loss.label for k, loss in self.losses.items()}
    named = {k: f'{label} {{:.4f}}' for k, label in labels.items() if label}
    formats = (
      {TOTAL: 'loss {:.4f}'} | named
      if len(named) > 1
      else dict.fromkeys(named or [TOTAL], 'loss {:.4f}')
    )
    for loss in self.losses.values():
      formats |= loss.shown
    return formats

  @property
  def followed(self) -> dict[str, str]:
    """Formats of the metrics that the lines of training steps show, by their names."""
    return {name: text for loss in self.losses.values() for name, text in loss.followed.items()}

  def moved(self, ruled: PyTree, counts: PyTree) -> PyTree:
    """Returns the parameters that rules move, after a step.

    Args:
      ruled: These parameters.
      counts: What stands for their gradients, of the whole batch.
    """

    def one(path: jax.tree_util.KeyPath, x: jax.Array, count: jax.Array) -> jax.Array:
      name = path_name(path)
      rule = self.rules.get(name.rpartition('/')[2]) or rule_of(name)
      assert rule is not None
      moved: jax.Array = rule(x, count)
      return moved

    return jax.tree_util.tree_map_with_path(one, ruled, counts)

  def grads(
    self,
    params: PyTree,
    batch: Batch,
    rng: jax.Array | None,
    fp8_state: Mapping[str, PyTree] | None = None,
  ) -> tuple[PyTree, tuple[PyTree, PyTree], Metrics]:
    """Returns the gradients for the trainable parameters, what others become, and the metrics.

    The second result is what replaces `fp8_state`, and the counts of the whole batch for the
    parameters that Optimizer.split_ruled selects: see `moved`.

    Each loss is divided by its weight in the whole batch. Therefore the number of microbatches
    changes the result only by rounding, dropout masks and FP8, if the loss is a sum over rows. Each
    microbatch passes `fp8_state` on to the next, as each step does. The biases for the load are
    the same for all microbatches of a step.
    """
    trainable, others = self.optimizer.split(params)
    ruled, frozen = self.optimizer.split_ruled(others)
    has_probes = self.gradient_dtype != 'float32'
    like = lambda w: jnp.zeros(w.shape, self.gradient_dtype)
    probes = jax.tree.map(like, trainable) if has_probes else None
    varied = (trainable if not has_probes or self._reads_params else None), probes
    parts = in_microbatches(batch, self.num_microbatches, self.rows_per_example)
    whole = jax.tree.map(jnp.sum, jax.vmap(self._weights)(parts))

    def share(
      varied: PyTree, changed: PyTree, microbatch: Batch, rng: jax.Array | None
    ) -> tuple[jax.Array, PyTree]:
      (weights, probes), (fp8_state, ruled) = varied, changed
      params = merged(trainable if weights is None else weights, merged(ruled, frozen))
      return self._share(whole, params, microbatch, rng, fp8_state, probes)

    def part(i: jax.Array | None, microbatch: Batch, fp8_state: PyTree) -> PyTree:
      rng_i = rng if i is None or rng is None else jax.random.fold_in(rng, i)
      with self.context():
        gradient = jax.grad(share, argnums=(0, 1), has_aux=True)
        (grads, after), metrics = gradient(varied, (fp8_state, ruled), microbatch, rng_i)
      return (gradient_probes.gradients_of(*grads), after[1]), after[0], metrics

    zeros = jax.tree.map(jnp.zeros_like, (trainable, ruled))
    count = _full(parts) if self.skips_empty else None
    (grads, counts), after, found = summed(part, zeros, dict(fp8_state or {}), parts, count)
    metrics = {k: over_microbatches(k, m) for k, m in found.items()}
    return grads, (after, counts), self._with_total(metrics, batch)


def _full(parts: Batch) -> jax.Array:
  """Returns the number of the last microbatch that holds a target, from 1; 0: none does."""
  has_targets_N = (parts['weights'] != 0).any((1, 2))
  return jnp.where(has_targets_N, jnp.arange(1, len(has_targets_N) + 1), 0).max()
