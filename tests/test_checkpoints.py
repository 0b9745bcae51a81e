"""Save, restore, retention, structure checks; killed runs are in test_resume."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxlite import checkpoints
from paxlite.checkpoints import Checkpoints
from paxlite.errors import TrainingError, UserError


def state(value=1.0):
  return {
    'w': jnp.full((3, 4), value),
    'layers': {'b': jnp.arange(4.0) * value},
    'step': jnp.asarray(7, jnp.int32),
  }


def abstract(tree):
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def test_round_trip_with_data(tmp_path):
  c = Checkpoints(tmp_path / 'c')
  assert c.latest_good_step() is None
  c.save(7, state(), {'step': 7, 'batch_size': 4})
  c.close()
  c = Checkpoints(tmp_path / 'c')
  assert c.latest_good_step() == 7
  restored, data = c.restore(7, abstract(state()))
  jax.tree.map(np.testing.assert_array_equal, restored, state())
  assert data == {'step': 7, 'batch_size': 4}
  assert restored['step'].dtype == jnp.int32


def test_what_is_saved_is_the_value_at_the_call(tmp_path):
  """The save runs in the background while training overwrites the donated arrays."""
  c = Checkpoints(tmp_path)
  overwrite = jax.jit(lambda x: jax.tree.map(lambda a: a * 0, x), donate_argnums=0)
  tree = {'w': jnp.arange(1 << 20, dtype=jnp.float32)}
  expected = np.asarray(tree['w']).copy()
  spec = abstract(tree)
  c.save(1, tree, {})
  tree = overwrite(tree)
  c.wait()
  np.testing.assert_array_equal(c.restore(1, spec)[0]['w'], expected)
  c.close()


def test_only_the_newest_are_kept(tmp_path):
  c = Checkpoints(tmp_path, max_to_keep=2)
  for step in (1, 2, 3, 4):
    c.save(step, state(step), {})
  c.close()
  # the first of each 12 hours stays beside the newest two
  assert c.steps() == [1, 3, 4]


def test_saving_a_step_twice_leaves_the_first(tmp_path):
  c = Checkpoints(tmp_path)
  c.save(1, state(1.0), {})
  c.wait()
  c.save(1, state(2.0), {})
  c.wait()
  assert float(c.restore(1, abstract(state()))[0]['w'][0, 0]) == 1.0
  c.close()


def test_weights_are_plain_uncompressed_zarr(tmp_path):
  import zarr

  c = Checkpoints(tmp_path)
  c.save(1, state(), {})
  c.close()
  folder = tmp_path / 'checkpoint_00000001' / 'state' / 'layers.b'
  array = zarr.open_array(str(folder), mode='r')
  np.testing.assert_array_equal(array[...], np.arange(4.0))
  assert array.metadata.compressor is None


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (
      lambda s: s | {'w': jnp.zeros((4, 3))},
      r'w is float32\[3, 4\] and the model has float32\[4, 3\]',
    ),
    (lambda s: s | {'w': jnp.zeros((3, 4), jnp.bfloat16)}, r'the model has bfloat16\[3, 4\]'),
    (
      lambda s: s | {'step': jnp.zeros((), jnp.float32)},
      r'step is int32\[\] and the model has float32',
    ),
    (lambda s: s | {'new': jnp.zeros(2)}, 'new is missing'),
    (lambda s: {k: v for k, v in s.items() if k != 'w'}, 'w is not in the model'),
  ],
)
def test_another_structure_is_refused_by_name(tmp_path, change, message):
  c = Checkpoints(tmp_path)
  c.save(1, state(), {})
  c.wait()
  with pytest.raises(UserError, match=message):
    c.restore(1, abstract(change(state())))
  c.close()


def test_a_failed_save_is_logged_and_the_next_one_tried(tmp_path, monkeypatch, caplog):
  """A disk that is full for a while: nothing is raised in the middle, the end tells."""
  real = checkpoints._checksum

  def full(path):
    raise OSError(28, 'No space left on device')

  c = Checkpoints(tmp_path)
  c.save(1, state(1.0), {})
  c.wait()
  monkeypatch.setattr(checkpoints, '_checksum', full)
  c.save(2, state(2.0), {})
  c.wait()
  assert 'saving failed, training goes on: step 2: No space left on device' in caplog.text
  with pytest.raises(TrainingError, match='the last checkpoint was not written: step 2'):
    c.raise_failure()
  monkeypatch.setattr(checkpoints, '_checksum', real)
  c.save(3, state(3.0), {})
  c.close()
  c.raise_failure()
  assert c.steps() == [1, 3]
  assert c.latest_good_step() == 3


def test_every_flipped_bit_is_found(tmp_path):
  """In every file of the items, at three places each."""
  c = Checkpoints(tmp_path)
  c.save(1, state(), {'step': 1})
  c.close()
  step = tmp_path / 'checkpoint_00000001'
  files = [p for item in ('state', 'data') for p in (step / item).rglob('*') if p.is_file()]
  assert len(files) >= 8
  for path in files:
    good = path.read_bytes()
    for position in {0, len(good) // 2, len(good) - 1} if good else ():
      bad = bytearray(good)
      bad[position] ^= 1
      path.write_bytes(bad)
      assert Checkpoints(tmp_path).latest_good_step() is None, path
      (tmp_path / 'damaged_checkpoint_00000001').rename(step)
      path.write_bytes(good)
  assert Checkpoints(tmp_path).latest_good_step() == 1


def test_the_newest_good_step_is_checked_while_it_is_restored(tmp_path, monkeypatch, caplog):
  """Whatever restoring makes of damaged files does not count; what it raises of good ones does."""
  monkeypatch.setattr(checkpoints, '_DESCRIPTION', -1)  # as if these were all large
  c = Checkpoints(tmp_path)
  for step in (1, 2, 3, 4):
    c.save(step, state(float(step)), {})
  c.close()
  found = lambda step, name: max((tmp_path / f'checkpoint_{step:08}/state').rglob(name))
  flip(found(2, '0*'))  # Orbax takes this for another value
  flip(found(3, '.zarray'))  # and refuses this
  found(4, '0*').write_bytes(b'short')  # and does not see this
  seen, failed = [], []

  def restore(step):
    seen.append(step)
    try:
      return c.restore(step, abstract(state()))
    except Exception:
      failed.append(step)
      raise

  reader = c = Checkpoints(tmp_path, read_only=True)
  assert c.restore_latest(restore)[0] == 1
  assert (reader.steps(), seen, failed) == ([1, 2, 3, 4], [3, 2, 1], [3])
  reader.close()
  caplog.clear()
  seen.clear()
  c = Checkpoints(tmp_path)
  step, (restored, _) = c.restore_latest(restore)
  assert (step, seen) == (1, [3, 2, 1])
  jax.tree.map(np.testing.assert_array_equal, restored, state(1.0))
  for step in (2, 3, 4):
    assert f'checkpoint of step {step}: ' in caplog.text
    assert (tmp_path / f'damaged_checkpoint_{step:08}').is_dir()
  c.save(2, state(2.0), {})  # a step that was moved aside can be saved again
  c.wait()
  assert c.steps() == [1, 2]
  with pytest.raises(UserError, match='does not fit'):
    c.restore_latest(lambda step: c.restore(step, abstract({'w': jnp.zeros(3)})))
  assert c.steps() == [1, 2]
  c.close()
  assert Checkpoints(tmp_path / 'none').restore_latest(restore) is None


def flip(path):
  """One bit of a file's first byte."""
  data = bytearray(path.read_bytes())
  data[0] ^= 1
  path.write_bytes(data)
