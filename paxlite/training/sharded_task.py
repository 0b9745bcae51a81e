"""A task on a mesh, with the shardings of its states and batches and its jitted train step."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
from flax.linen import meta
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding

from paxlite.compilation import compiler
from paxlite.core.errors import doing
from paxlite.core.trees import PyTree
from paxlite.losses.metrics import Metrics
from paxlite.optim.moments import is_moment
from paxlite.parallel import partitioning
from paxlite.parallel.quantized_weights import Quantization, num_parameters, quantizations
from paxlite.training.step import train_step
from paxlite.training.task import Batch, Task
from paxlite.training.train_state import TrainState


@dataclasses.dataclass(frozen=True)
class ShardedTask:
  """A task with states and batches sharded over a mesh."""

  task: Task  # the model, its loss and its optimizer
  mesh: Mesh  # the devices
  rules: partitioning.Rules  # maps logical axes to mesh axes
  seed: int  # seed of the initial values and of dropout

  @functools.cached_property
  def abstract(self) -> TrainState:
    """The shapes, dtypes and shardings of the train state."""
    boxed = self._traced_init.out_info
    state: TrainState = partitioning.sharded_shapes(boxed, self.mesh, self.rules)
    if not self.task.optimizer.on_host:
      return state
    put = lambda x: partitioning.on_host(x) if is_moment(x) else x
    return dataclasses.replace(state, opt_state=jax.tree.map(put, state.opt_state))

  @property
  def quantizations(self) -> dict[str, Quantization]:
    """How weights that are kept in another form are made of float32 ones, by name in the state."""
    return quantizations(self._traced_init.out_info, self.mesh, self.rules)

  @property
  def boxed_params(self) -> PyTree:
    """The shapes of the parameters, in the boxes of their layers."""
    return self._traced_init.out_info.params

  @property
  def num_parameters(self) -> int:
    """The number of parameters; a weight in another form has as many as in float32."""
    return num_parameters(self.boxed_params)

  @functools.cached_property
  def _traced_init(self) -> jax.stages.Traced:
    """The task's init, which is traced once for the shapes of a state and its initial values."""
    with doing('Tracing the model'), partitioning.declared_by(self.rules):
      return jax.jit(self.task.init).trace(jax.random.key(self.seed))

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

  def new(self, part: Callable[[TrainState], PyTree], like: PyTree) -> PyTree:
    """Computes only `part` of a new state, with the shardings of `like`.

    No device ever holds the unsharded arrays. What is kept on the host is computed array by array,
    because a device may not have the memory for all of it.
    """
    leaves, tree = jax.tree.flatten(like)
    on_host = [i for i, x in enumerate(leaves) if partitioning.is_on_host(x)]
    rest = [i for i in range(len(leaves)) if i not in on_host]
    computed = jaxpr_as_fun(self._traced_init.jaxpr)
    state = jax.tree.structure(meta.unbox(self._traced_init.out_info))
    values = lambda rng: jax.tree.leaves(part(jax.tree.unflatten(state, computed(rng))))
    found: dict[int, jax.Array] = {}
    for group in filter(None, (rest, *([i] for i in on_host))):
      init = jax.jit(
        lambda rng, group=group: [x for i, x in enumerate(values(rng)) if i in group],
        out_shardings=[leaves[i].sharding for i in group],
        compiler_options=compiler.initial_values_options(self.mesh.devices.flat[0].platform),
      )
      with self.compiling():
        found |= dict(zip(group, init(jax.random.key(self.seed)), strict=True))
    return jax.tree.unflatten(tree, [found[i] for i in range(len(leaves))])

  def jitted_step(self) -> jax.stages.Wrapped:
    """Returns train_step as a jitted function of (state, batch), which donates the state."""

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
      with partitioning.activate(self.mesh, self.rules):
        return train_step(self.task, self.seed, state, batch)

    shardings = jax.tree.map(lambda x: x.sharding, self.abstract)
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))

  def lower_step(self, batch: PyTree) -> jax.stages.Lowered:
    """Returns the train step lowered for `batch`, which may be its shapes and shardings alone."""
    with self.compiling():
      return self.jitted_step().lower(self.abstract, batch)
