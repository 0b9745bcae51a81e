"""What checkpoints do beside folders with odd names, and in them."""

import os
import pathlib

import jax
import jax.numpy as jnp
import pytest

from paxlite.checkpointing.checkpoints import Checkpoints
from paxlite.core.errors import UserError
from paxlite.programs.run_folder import located_run


def state(step: int):
  return {'x': jnp.full(3, step, jnp.float32)}


def saved(folder: pathlib.Path, step: int, **options) -> Checkpoints:
  checkpoints = Checkpoints(folder, **options)
  checkpoints.save(step, state(step), {'step': step})
  checkpoints.close()
  checkpoints.raise_failure()
  return checkpoints


@pytest.mark.parametrize('name', ['9223372036854775807', '00000050', '11', '000000012'])
def test_an_empty_folder_that_looks_newer_does_not_keep_a_save_out(tmp_path, name):
  (tmp_path / f'checkpoint_{name}').mkdir()
  checkpoints = saved(tmp_path, 3)
  assert checkpoints.latest_good_step() == 3
  saved(tmp_path, 4, max_to_keep=2)
  assert Checkpoints(tmp_path).latest_good_step() == 4


def test_names_that_work(tmp_path):
  for name in ('a b%20c?#*[1]\'"|:{}', 'ünï', 'x' * 200, '~', 'a\nb'):
    folder, _ = located_run(str(tmp_path / name), None)
    checkpoints = saved(folder / 'checkpoints', 1)
    like = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state(1)
    )
    assert checkpoints.restore(1, like)[0]['x'].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
  ('name', 'expected'),
  [
    ('a\\b', 'a backslash would be taken for a slash: rename it'),
    (
      os.fsdecode(b'\xff'),
      r'\\udcff: checkpoints cannot be written there, its name is not UTF-8, or Python',
    ),
    ('gs:/run', 'paxlite would read gs: as the beginning of an address'),
  ],
)
def test_names_that_tensorstore_would_take_for_others(tmp_path, name, expected):
  with pytest.raises(UserError, match=expected):
    located_run(str(tmp_path / name), None)
  with pytest.raises(UserError, match='--local_dir='):
    located_run('s3://bucket/run', str(tmp_path / name))
