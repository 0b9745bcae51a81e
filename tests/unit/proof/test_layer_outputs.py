"""The first layer with another output is the one whose weight was changed."""

import jax
import pytest

import paxlite
from paxlite.programs.run import Run
from paxlite.proof.layer_outputs import first_difference, layer_outputs

W = 'ffn_layer2'


def outputs(folder, changed: bool, values: dict) -> dict[str, int]:
  e = paxlite.get('TinyGPT')(NUM_LAYERS=3, DROPOUT_PROB=0.1, **values)
  trainer = Run(e, folder, save=False).trainer()
  state, _ = trainer.store.initial()
  task = trainer.store.task
  batches = trainer.data.batches(0, task.batch_sharding)
  batch = batches.draw(state.params)
  batches.close()
  params = jax.tree.map(lambda x: x, state.params)
  if changed:
    stack = params['transformer']
    layer = stack['repeat'] if e.USE_REPEATED_LAYER else stack['x_layers_1']
    layer['ff_layer'][W]['w'] = layer['ff_layer'][W]['w'] * 1.0001
  return layer_outputs(task, state.replace(params=params), batch, jax.random.key(3))


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize(
  ('values', 'first'),
  [
    ({}, f'transformer/x_layers_1/ff_layer/{W}/einsum'),
    ({'CHECKPOINT_POLICY': 'SAVE_NOTHING'}, f'transformer/x_layers_1/ff_layer/{W}/einsum'),
    ({'USE_REPEATED_LAYER': True}, 'transformer'),
  ],
)
def test_the_first_layer_with_another_weight(values, first, tmp_path):
  one, same, other = (outputs(tmp_path, changed, values) for changed in (False, False, True))
  assert one == same
  assert list(one) == list(other)
  assert first_difference(one, same) is None
  assert first_difference(one, other) == first
  names = list(one)
  after = names[names.index(first) :]
  assert {'final_ln'} <= set(after)
  assert all(one[name] == other[name] for name in names[: names.index(first)])
