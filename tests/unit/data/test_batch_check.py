"""What an input of one's own may not yield: it ends a run in one line."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from paxlite.core.errors import UserError
from paxlite.data.base import RowInput
from paxlite.data.batch_check import problem
from paxlite.data.device_batches import DeviceBatches

IDS = np.arange(12, dtype=np.int32).reshape(3, 4)
RIGHT = {'ids': IDS, 'labels': IDS, 'weights': np.ones((3, 4), np.float32), 'segment_ids': IDS}


class Rows:
  """A source that yields the same batch again and again."""

  name, max_token_id = 'mine', 11

  def __init__(self, batch):
    self.batch = batch

  def __len__(self):
    return 9

  def read(self, indices):
    return self.batch


@pytest.mark.parametrize(
  ('batch', 'found'),
  [
    ([IDS], 'an object of the type list in place of a dict'),
    ({'ids': IDS}, 'no labels and no weights'),
    (RIGHT | {'ids': IDS.tolist()}, 'ids of the type list'),
    (RIGHT | {'ids': IDS[:1]}, 'ids of shape [1, 4]'),
    (RIGHT | {'labels': IDS[:, :3]}, 'labels of shape [3, 3]'),
    (RIGHT | {'ids': IDS[0]}, 'ids of shape [4]'),
    (RIGHT | {'ids': IDS.astype(np.float32)}, 'ids of the type float32'),
    (RIGHT | {'labels': IDS - 100}, 'labels of -100 (the weight 0 leaves a target out'),
    (RIGHT | {'ids': IDS + 1}, 'ids of 12, and its max_token_id is 11'),
    ({'labels': IDS, 'weights': IDS, 'ids': IDS.tolist()}, 'ids of the type list'),
    (dict.fromkeys(('ids', 'labels', 'weights'), IDS[:, 0]), 'ids of shape [3]'),
    (RIGHT | {'teacher': np.zeros((2, 4, 7))}, 'teacher of shape [2, 4, 7]'),
    (RIGHT | {'teacher': np.zeros((3, 4, 7))}, ''),
    (RIGHT, ''),
  ],
)
def test_a_batch_that_is_none_ends_a_run(batch, found):
  said = problem(batch, 3, 11)
  assert said.startswith(found)
  assert bool(said) == bool(found)
  mesh = Mesh(np.array(jax.devices()[:1]), ('data',))
  data = RowInput(Rows(batch), 3)  # type: ignore[arg-type]
  for start in (0, None):
    batches = DeviceBatches(data, NamedSharding(mesh, PartitionSpec('data')), start)
    if not found:
      np.testing.assert_array_equal(next(batches)['ids'], IDS)
      continue
    with pytest.raises(UserError, match='the data mine yields '):
      next(batches)
