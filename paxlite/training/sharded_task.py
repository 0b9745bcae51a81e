"""A task on a mesh, with the shardings of its states and batches and its jitted train step."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax.linen import meta
from jax.sharding import Mesh, NamedSharding

from paxlite.parallel import partitioning
from paxlite.runtime import compiler
from paxlite.training.metrics import Metrics
from paxlite.training.step import train_step
from paxlite.training.task import Batch, Task
from paxlite.training.train_state import TrainState


@dataclasses.dataclass(frozen=True)
class ShardedTask:
  """A task whose states and batches are sharded over a mesh.

  Attributes:
    task: The model, its loss and its optimizer.
    mesh: The devices.
    rules: Maps logical axes to mesh axes.
    seed: Seed of the initial values and of dropout.
  """

  task: Task
  mesh: Mesh
  rules: partitioning.Rules
  seed: int

  @functools.cached_property
  def abstract(self) -> TrainState:
    """The shapes, dtypes and shardings of the train state."""
    boxed = jax.eval_shape(self.task.init, jax.random.key(0))
    return partitioning.sharded_shapes(boxed, self.mesh, self.rules)

  @property
  def batch_sharding(self) -> NamedSharding:
    """The sharding of every array [B, T] of a batch."""
    return partitioning.batch_sharding(self.mesh, self.rules)

  @contextlib.contextmanager
  def compiling(self) -> Iterator[None]:
    """A context in which programs of the model are compiled, or called for the first time.

    Transformer Engine reads the active mesh once more while XLA partitions the program. Without an
    active mesh it would not reduce the largest absolute values over any mesh axis.
    """
    with partitioning.activate(self.mesh, self.rules), self.task.context():
      yield

  def new(self, part: Callable[[TrainState], Any], like: Any) -> Any:
    """Computes only `part` of a new state, with the shardings of `like`.

    No device ever holds the unsharded arrays.
    """
    init = jax.jit(
      lambda rng: part(meta.unbox(self.task.init(rng))),
      out_shardings=jax.tree.map(lambda x: x.sharding, like),
      compiler_options=compiler.initial_values_options(self.mesh.devices.flat[0].platform),
    )
    with self.compiling():
      return init(jax.random.key(self.seed))

  def jitted_step(self) -> Any:
    """Returns train_step as a jitted function of (state, batch), which donates the state."""

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
      with partitioning.activate(self.mesh, self.rules):
        return train_step(self.task, self.seed, state, batch)

    shardings = jax.tree.map(lambda x: x.sharding, self.abstract)
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))

  def lower_step(self, batch: Any) -> Any:
    """Returns the train step lowered for `batch`, which may be its shapes and shardings alone."""
    with self.compiling():
      return self.jitted_step().lower(self.abstract, batch)
