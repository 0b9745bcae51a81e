"""A task on a mesh: where its states and batches lie, and its train step as a program."""

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
  """Attributes:

  task: The model, its loss and its optimizer.
  mesh: The devices.
  rules: Maps logical axes to mesh axes.
  seed: Seed of initial values and of dropout.
  """

  task: Task
  mesh: Mesh
  rules: partitioning.Rules
  seed: int

  @functools.cached_property
  def abstract(self) -> TrainState:
    """Shapes, dtypes and shardings of the train state."""
    boxed = jax.eval_shape(self.task.init, jax.random.key(0))
    return partitioning.sharded_shapes(boxed, self.mesh, self.rules)

  @property
  def batch_sharding(self) -> NamedSharding:
    """The sharding of every array [B, T] of a batch."""
    return partitioning.batch_sharding(self.mesh, self.rules)

  @contextlib.contextmanager
  def compiling(self) -> Iterator[None]:
    """A context in which programs of the model are compiled or first called.

    Transformer Engine asks for the mesh again while XLA partitions. Without it, the largest
    absolute values would be reduced over no axis.
    """
    with partitioning.activate(self.mesh, self.rules), self.task.context():
      yield

  def new(self, part: Callable[[TrainState], Any], like: Any) -> Any:
    """Computes `part` of a new state, and nothing else, sharded as `like` is.

    No array is ever unsharded on one device.
    """
    init = jax.jit(
      lambda rng: part(meta.unbox(self.task.init(rng))),
      out_shardings=jax.tree.map(lambda x: x.sharding, like),
      compiler_options=compiler.initial_values_options(self.mesh.devices.flat[0].platform),
    )
    with self.compiling():
      return init(jax.random.key(self.seed))

  def jitted_step(self) -> Any:
    """train_step as a jitted function of (state, batch); it donates the state."""

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
      with partitioning.activate(self.mesh, self.rules):
        return train_step(self.task, self.seed, state, batch)

    shardings = jax.tree.map(lambda x: x.sharding, self.abstract)
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))

  def lower_step(self, batch: Any) -> Any:
    """The train step, traced and lowered for a batch, or for the shapes and shardings of one."""
    with self.compiling():
      return self.jitted_step().lower(self.abstract, batch)
