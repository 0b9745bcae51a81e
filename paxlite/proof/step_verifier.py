"""Repeats a training step now and then, and compares every bit.

A device that computes wrong, or whose memory loses a bit, does not say so. What it computes looks
like numbers of training, and the sums over all devices carry it everywhere. Three comparisons find
it (VERIFY_EVERY_N_STEPS):

1. Copies. An array that several devices hold must have the same bits on all of them.
2. The batch on the devices must be the one that the data has at this step.
3. The step itself is done again from a copy of the state: on the same devices, and with the rows of
   one group of devices computed by the next one. All other rows have the weight 0 in both, so that
   sums over groups add zeros, and the order of the groups cannot change a bit. Each time it is
   another group's turn.
"""

import dataclasses
import logging
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.stages import Compiled

from paxlite.core.errors import WrongBitsError
from paxlite.losses.metrics import Metrics
from paxlite.processes.process_messages import gathered
from paxlite.proof.shard_sums import ShardSums, described, minority, odd_copies, on_devices
from paxlite.training.train_state import TrainState

log = logging.getLogger('paxlite')

Batch = Mapping[str, jax.Array]


@dataclasses.dataclass
class StepVerifier:
  """Does the steps of a run, and verifies some of them."""

  every: int  # each how many steps one is verified
  sharding: NamedSharding  # the sharding of the arrays of a batch
  # returns the rows of this process of the batch of a step, drawn again; None where the data cannot
  # do that
  redrawn: Callable[[int], Mapping[str, np.ndarray] | None]
  # whether the result depends on the places of rows in the batch, as with dropout, or with experts
  # that have room for so many tokens
  depends_on_places: bool = False

  def __post_init__(self) -> None:
    self._sums = ShardSums(self._mesh)
    self._turn = 0
    self._verified = 0  # the last step that was
    self._agreed: dict[int, int] = {}  # the last step in which a group gave the bits of another
    self._swaps = not self.depends_on_places
    self._moved: Callable[..., Batch] | None = None

  @property
  def _mesh(self) -> Mesh:
    mesh = self.sharding.mesh
    assert isinstance(mesh, Mesh)
    return mesh

  def __call__(
    self, compiled: Compiled, state: TrainState, batch: Batch, step: int
  ) -> tuple[TrainState, Metrics]:
    """Does step number `step`, which is verified if it is its turn.

    Args:
      compiled: The executable of the train step, which overwrites the state.
      state: The state before the step.
      batch: The batch of the step.
      step: The number of the step, from 1.

    Raises:
      WrongBitsError: Bits differ. The message names the devices.
    """
    if step % self.every:
      return compiled(state, batch)
    self._check_copies(state, step)
    self._check_batch(batch, step)
    once = self._repeated(compiled, state, batch)
    self._check_groups(compiled, state, batch, step)
    after, metrics = compiled(state, batch)
    self._compare(once, self._result(after, metrics), step)
    self._verified = step
    return after, metrics

  def _what_now(self, sure: int | None = None) -> str:
    """Returns the end of a message; `sure` is the last step without the fault, if not all are."""
    verified = self._verified if sure is None else sure
    since = f'Step {verified:,} was' if verified else 'No step before was'
    return (
      f'{since} verified, and checkpoints since then may be wrong: continue from an older one, '
      'without that device (docs/verifying.md)'
    )

  def _check_copies(self, state: TrainState, step: int) -> None:
    names, arrays = on_devices(state)
    found = odd_copies(names, arrays, self._sums(arrays), self._mesh)
    if found:
      more = f' and {len(found) - 1} arrays more' if len(found) > 1 else ''
      raise WrongBitsError(
        f'before step {step:,}, copies differ: {found[0]}{more}. {self._what_now()}'
      )

  def _check_batch(self, batch: Batch, step: int) -> None:
    """Compares each device's part of a batch with the data."""
    rows = self.redrawn(step)
    if rows is None:
      return
    position = {device: i for i, device in enumerate(self._mesh.devices.flat)}
    wrong = np.zeros(len(position), np.int32)
    start = min(
      (part.index[0].indices(len(x))[0] for x in batch.values() for part in x.addressable_shards),
      default=0,
    )
    for name, x in batch.items():
      for part in x.addressable_shards:
        low, high, _ = part.index[0].indices(len(x))
        expected = rows[name][(slice(low - start, high - start), *part.index[1:])]
        wrong[position[part.device]] |= np.asarray(part.data).tobytes() != expected.tobytes()
    found = gathered(wrong)().any(axis=0)
    if found.any():
      where = described([self._mesh.devices.flat[i] for i in np.flatnonzero(found)])
      raise WrongBitsError(
        f'the batch of step {step:,} differs from the data, on {where}. {self._what_now()}'
      )

  def _check_groups(self, compiled: Compiled, state: TrainState, batch: Batch, step: int) -> None:
    """Lets another group of devices compute the rows of one, and compares the results."""
    groups = self._groups(batch)
    if not self._swaps or len(groups) == 1:
      return
    own = self._turn % len(groups)
    self._turn += 1
    result_on = lambda place: self._repeated(
      compiled, state, self._placed(batch, len(groups), own, place)
    )
    order = [(own + i) % len(groups) for i in range(len(groups))]
    found = [result_on(place) for place in order[:2]]
    if found[0] == found[1]:
      self._agreed |= dict.fromkeys(order[:2], step)
      return
    found += [result_on(place) for place in order[2:]]
    odd = minority(found)
    if len(odd) > len(groups) // 2 and not self._agreed:
      # on a machine without a fault, too, as with losses that do not only sum over rows
      log.warning(
        'VERIFY_EVERY_N_STEPS: the result of this step depends on the devices of its sequences. '
        'From now on, steps repeat only on the same devices'
      )
      self._swaps = False
      return
    where = described([device for i in odd for device in groups[order[i]]])
    which = 'one of them computes wrong' if len(groups) == 2 else 'there the results are wrong'
    # in the verified steps since then it was the turn of other groups
    sure = min(self._agreed.get(order[i], 0) for i in odd)
    raise WrongBitsError(
      f'step {step:,}: the same rows gave other bits on other devices: {where}: {which}. '
      f'{self._what_now(sure)}'
    )

  def _groups(self, batch: Batch) -> list[list[jax.Device]]:
    """Returns the devices that compute the same rows, in the order of the rows."""
    ids = batch['ids']
    found: dict[int, list[jax.Device]] = {}
    for device, index in ids.sharding.devices_indices_map(ids.shape).items():
      found.setdefault(index[0].indices(len(ids))[0], []).append(device)
    return [found[start] for start in sorted(found)]

  def _placed(self, batch: Batch, groups: int, own: int, place: int) -> Batch:
    """Returns the batch with the rows of group `own` at `place`; all others have the weight 0."""

    if self._moved is None:  # compiled once, as all batches have the same shapes
      shardings = {name: x.sharding for name, x in batch.items()}
      self._moved = jax.jit(_moved, static_argnums=1, out_shardings=shardings)
    moved: Batch = self._moved(dict(batch), groups, np.int32(own), np.int32(place))
    return moved

  def _repeated(self, compiled: Compiled, state: TrainState, batch: Batch) -> '_Result':
    copy = jax.tree.map(lambda x: x.copy(), state)
    return self._result(*compiled(copy, batch))

  def _result(self, after: TrainState, metrics: Metrics) -> '_Result':
    _, arrays = on_devices(after)
    numbers = [np.asarray(x).tobytes() for x in jax.tree.leaves(metrics)]
    return _Result(self._sums(arrays), b''.join(numbers))

  def _compare(self, once: '_Result', again: '_Result', step: int) -> None:
    if once == again:
      return
    devices = list(self._mesh.devices.flat)
    other = np.flatnonzero((once.sums != again.sums).any(axis=(1, 2)))
    where = (
      'all devices' if len(other) in (0, len(devices)) else described([devices[i] for i in other])
    )
    raise WrongBitsError(
      f'step {step:,} gave other bits when it was repeated on the same devices; they differ on '
      f'{where}. If this happens each time, kernels have no fixed order of sums: '
      f'DETERMINISTIC=True. {self._what_now()}'
    )


def _moved(batch: Batch, groups: int, own: jax.Array, place: jax.Array) -> Batch:
  """Returns a batch with the rows of one group in the place of another; see _placed."""
  rows = len(batch['weights']) // groups
  is_own = jnp.arange(len(batch['weights'])) // rows == own
  masked = {**batch, 'weights': jnp.where(is_own[:, None], batch['weights'], 0)}
  return {name: jnp.roll(x, (place - own) * rows, axis=0) for name, x in masked.items()}


@dataclasses.dataclass(frozen=True, eq=False)
class _Result:
  """The result of a step: sums of the state's bits on each device, and the metrics' bits."""

  sums: np.ndarray
  metrics: bytes

  def __eq__(self, other: object) -> bool:
    return isinstance(other, _Result) and self._key == other._key

  def __hash__(self) -> int:
    return hash(self._key)

  @property
  def _key(self) -> tuple[bytes, bytes]:
    return self.sums.tobytes(), self.metrics
