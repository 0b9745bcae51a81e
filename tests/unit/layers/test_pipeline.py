"""The schedule of a pipeline, and the ways of layers to their stages."""

import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from paxlite.layers.pipeline_schedule import Schedule
from paxlite.layers.stage_weights import StageLayout


@pytest.mark.parametrize('latency', [1, 2])
@pytest.mark.parametrize(
  ('stages', 'microbatches', 'repeats'), [(4, 8, 1), (4, 4, 3), (4, 2, 3), (3, 7, 2), (4, 2, 1)]
)
def test_groups_are_computed_in_order_and_as_soon_as_possible(
  stages, microbatches, repeats, latency
):
  schedule = Schedule(stages, microbatches, repeats, latency)
  when = {}
  for t in range(schedule.ticks):
    for z in range(stages):
      repeat, microbatch, works = (int(x) for x in schedule.work(jnp.array(t), jnp.array(z)))
      if works:
        assert (repeat, microbatch, z) not in when
        when[repeat, microbatch, z] = t
  assert len(when) == repeats * microbatches * stages
  for (repeat, microbatch, z), t in when.items():
    if z:
      assert when[repeat, microbatch, z - 1] == t - latency
    elif repeat:
      assert when[repeat - 1, microbatch, stages - 1] <= t - latency
  if microbatches >= latency * stages or repeats == 1:
    assert schedule.ticks == microbatches * repeats + latency * (stages - 1)


@pytest.mark.parametrize(('stages', 'repeats'), [(4, 4), (4, 2), (2, 4), (3, 2), (6, 4), (4, 6)])
def test_every_group_of_layers_reaches_its_stage(stages, repeats):
  layout = StageLayout(stages, repeats, PartitionSpec(), ())
  stored = [[z * repeats + k for k in range(repeats)] for z in range(stages)]
  found = [[-1] * repeats for _ in range(stages)]
  for turn in layout.turns():
    assert sorted(turn.to) == list(range(stages))  # each stage receives one
    for z, to in enumerate(turn.to):
      found[to][turn.put[to]] = stored[z][turn.taken[z]]
  assert found == [[r * stages + z for r in range(repeats)] for z in range(stages)]
