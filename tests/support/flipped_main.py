"""Runs the real paxlite.main on devices of which one loses a bit (for test_verifying).

FLIPS has flips, apart by commas, each for a run of its own: WHAT:DEVICE:STEP. A bit of that
device's part is flipped

  params, opt_state   in the parameters or in the moments, once before that step
  batch               in the batch of that step
  products            in the rows that the device computes with, in each execution from that step on
  product             in the same, only in the first execution of that step

Without FLIPS it is paxlite.main. The exit code is that of the last run.
"""

import functools
import os
import sys

import jax
import numpy as np

from paxlite import main
from paxlite.training.trainer import Trainer

_train = Trainer._train


def flipped(x: jax.Array, device: int) -> jax.Array:
  """Returns an array in which a bit of a device's largest number is flipped.

  It is the last bit. Where there is one device, it is the ninth bit of a float, because an update
  may round the last one away, so that a replay has nothing to find.
  """
  is_float = jax.numpy.issubdtype(x.dtype, jax.numpy.floating)
  byte = int(is_float and jax.device_count() == 1)

  def part(shard):
    data = np.array(shard.data)
    if shard.device == jax.devices()[device]:
      largest = int(np.abs(data).argmax())
      data.reshape(-1).view(np.uint8)[largest * data.itemsize + byte] ^= 1
    return jax.device_put(data, shard.device)

  return jax.make_array_from_single_device_arrays(
    x.shape, x.sharding, [part(s) for s in x.addressable_shards]
  )


def in_field(state, field: str, device: int):
  """Returns a state with a flipped bit in the largest array of one of its fields."""
  leaves, tree = jax.tree.flatten(getattr(state, field))
  largest = max(range(len(leaves)), key=lambda i: leaves[i].size)
  leaves[largest] = flipped(leaves[largest], device)
  return state.replace(**{field: jax.tree.unflatten(tree, leaves)})


def broken(what: str, device: int, at: int):
  """Returns Trainer._train, with steps that have a fault."""

  def train(self, *arguments):
    self.do_step = functools.partial(do_step, self.do_step)
    return _train(self, *arguments)

  def do_step(whole_step, compiled, state, batch, step):
    bad = lambda batch: {**batch, 'ids': flipped(batch['ids'], device)}
    if step == at:
      print(f'{what} flipped on device {device} at step {step}', flush=True)
    if what == 'batch' and step == at:
      batch = bad(batch)
    elif what == 'product' and step == at:
      whole, left = compiled, [bad]
      compiled = lambda state, batch: whole(state, left.pop()(batch) if left else batch)
    elif what == 'products' and step >= at:
      whole = compiled
      compiled = lambda state, batch: whole(state, bad(batch))
    elif step == at:
      state = in_field(state, what, device)
    return whole_step(compiled, state, batch, step)

  return train


if __name__ == '__main__':
  if not os.environ.get('FLIPS'):
    main.run(sys.argv[1:])
  for number, flip in enumerate(os.environ['FLIPS'].split(',')):
    what, device, at = flip.split(':')
    Trainer._train = broken(what, int(device), int(at))
    arguments = [a.replace('RUN', str(number)) for a in sys.argv]
    code = main.main(arguments)
    print(f'{flip} ended with {code}', flush=True)
  sys.exit(code)
