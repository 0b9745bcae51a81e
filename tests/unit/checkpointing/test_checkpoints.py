"""Save, restore, retention and structure checks; test_resume has killed runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxlite.checkpointing import checkpoints, checksums
from paxlite.checkpointing.checkpoints import Checkpoints
from paxlite.core.errors import TrainingError, UserError


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
  assert c.steps() == [3, 4]


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
    (lambda s: s | {'w': jnp.zeros((3, 4), jnp.float16)}, r'the model has float16\[3, 4\]'),
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
  """A disk is full for a while. No error is raised during training; the end reports it."""
  real = checksums.checksum

  def full(path):
    raise OSError(28, 'No space left on device')

  c = Checkpoints(tmp_path)
  c.save(1, state(1.0), {})
  c.wait()
  monkeypatch.setattr(checksums, 'checksum', full)
  c.save(2, state(2.0), {})
  c.wait()
  assert 'saving failed, training continues: step 2: No space left on device' in caplog.text
  with pytest.raises(TrainingError, match='the last checkpoint was not saved: step 2'):
    c.raise_failure()
  monkeypatch.setattr(checksums, 'checksum', real)
  c.save(3, state(3.0), {})
  c.close()
  c.raise_failure()
  assert c.steps() == [1, 3]
  assert c.latest_good_step() == 3


def test_every_flipped_bit_is_found(tmp_path):
  """Bits flip in every file of the items, at three places in each."""
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
      path.write_bytes(good)
  assert Checkpoints(tmp_path).latest_good_step() == 1


def test_the_newest_good_step_is_checked_while_it_is_restored(tmp_path, monkeypatch, caplog):
  """Results and errors of restoring count only for undamaged files."""
  monkeypatch.setattr(checkpoints, '_DESCRIPTION', -1)  # treats these descriptions as large files
  c = Checkpoints(tmp_path)
  for step in (1, 2, 3, 4):
    c.save(step, state(float(step)), {})
  c.close()
  found = lambda step, name: max((tmp_path / f'checkpoint_{step:08}/state').rglob(name))
  flip(found(2, '0*'))  # Orbax reads another value
  flip(found(3, '.zarray'))  # Orbax raises an error
  found(4, '0*').write_bytes(b'short')  # Orbax does not notice
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


def test_damaged_checkpoints_are_refused_until_a_run_may_start_over(tmp_path, caplog):
  """Nothing is moved before that, so a repaired checkpoint is found again."""
  c = Checkpoints(tmp_path)
  c.start_over(accepted=False)  # the run is new
  for step in (1, 2):
    c.save(step, state(), {'step': step})
  c.close()
  (tmp_path / 'checkpoint_00000002').rename(tmp_path / 'rolled_back_checkpoint_00000002')
  manifest = tmp_path / 'checkpoint_00000001' / 'checksums.json'
  before = manifest.read_bytes()
  manifest.unlink()
  for _ in range(2):
    c = Checkpoints(tmp_path)
    assert c.restore_latest(lambda step: 1 / 0) is None
    assert c.latest_good_step() is None
    with pytest.raises(
      UserError, match=r'no good checkpoint: checkpoint_00000001\. .* --start_over'
    ):
      c.start_over(accepted=False)
    assert c.steps() == [1]
  assert 'checkpoint of step 1: checksums.json is missing' in caplog.text
  manifest.write_bytes(before)
  assert c.latest_good_step() == 1
  manifest.unlink()
  c.start_over(accepted=True)
  assert c.steps() == []
  assert (tmp_path / 'damaged_checkpoint_00000001').is_dir()
  c.close()
  c = Checkpoints(tmp_path)
  with pytest.raises(UserError, match=r'no good checkpoint: damaged_checkpoint_00000001\. '):
    c.start_over(accepted=False)  # nothing was saved since then
  c.start_over(accepted=True)
  c.save(1, state(3.0), {'step': 1})
  c.close()
  assert Checkpoints(tmp_path).latest_good_step() == 1


def test_a_step_that_went_back_by_a_spike_is_not_damaged(tmp_path):
  (tmp_path / 'rolled_back_checkpoint_00000002').mkdir()
  Checkpoints(tmp_path).start_over(accepted=False)


@pytest.mark.parametrize('with_restore', [False, True])
def test_a_step_under_the_name_of_another_is_left_out(tmp_path, with_restore):
  c = Checkpoints(tmp_path)
  for step in (1, 2):
    c.save(step, state(float(step)), {'step': step})
  c.close()
  (tmp_path / 'checkpoint_00000002').rename(tmp_path / 'checkpoint_00000010')
  c = Checkpoints(tmp_path)
  if with_restore:
    step, _ = c.restore_latest(lambda step: c.restore(step, abstract(state())))
  else:
    step = c.latest_good_step()
  assert step == 1
  assert c.steps() == [1]
  assert (tmp_path / 'damaged_checkpoint_00000010').is_dir()
  c.save(3, state(), {'step': 3})
  c.close()
  assert c.steps() == [1, 3]


def test_odd_names_are_no_steps(tmp_path):
  c = Checkpoints(tmp_path, max_to_keep=2)
  c.save(1, state(), {'step': 1})
  c.close()
  names = ['checkpoint_11', 'checkpoint_²', 'checkpoint_', 'checkpoint_0000001x', 'checkpoint_-1']
  for name in names:
    (tmp_path / name).mkdir()
  c = Checkpoints(tmp_path, max_to_keep=2)
  assert c.restore_latest(lambda step: c.restore(step, abstract(state())))[0] == 1
  for step in (2, 3):
    c.save(step, state(), {'step': step})
  c.close()
  c.raise_failure()
  assert c.steps() == [2, 3]
  assert all((tmp_path / name).is_dir() for name in names)


def test_a_last_save_that_fails_once_is_tried_again(tmp_path, monkeypatch, caplog):
  real, calls = checkpoints.write_checksums, []

  def busy_once(folder):
    calls.append(folder)
    if len(calls) == 1:
      raise OSError(16, 'Device or resource busy', str(folder))
    real(folder)

  monkeypatch.setattr(checkpoints, 'write_checksums', busy_once)
  monkeypatch.setattr(checkpoints, '_PAUSES', (0.01, 0.01))
  c = Checkpoints(tmp_path)
  c.save(1, state(), {'step': 1})
  c.close()
  c.raise_failure()
  assert len(calls) == 2
  assert c.latest_good_step() == 1
  assert caplog.messages.count('step 1 was saved at the second attempt') == 1


def test_a_save_whose_state_was_overwritten_is_not_tried_again(tmp_path, monkeypatch, caplog):
  calls = []

  def full(folder):
    calls.append(folder)
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr(checkpoints, 'write_checksums', full)
  monkeypatch.setattr(checkpoints, '_PAUSES', (0.01, 0.01))
  c = Checkpoints(tmp_path)
  first, second = state(), state()
  c.save(1, first, {'step': 1})
  jax.tree.map(lambda x: x.delete(), first)  # as the next step does
  c.finish()
  assert len(calls) == 1
  c.save(2, second, {'step': 2})
  c.close()
  assert len(calls) == 1 + 3
  assert caplog.text.count('saving failed') == 2, 'what fails in the same way is told once'
  with pytest.raises(TrainingError, match='the last checkpoint was not saved: step 2'):
    c.raise_failure()
  assert list(tmp_path.iterdir()) == []


def flip(path):
  """Flips one bit of a file's first byte."""
  data = bytearray(path.read_bytes())
  data[0] ^= 1
  path.write_bytes(data)
