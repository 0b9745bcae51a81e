"""Tensors of safetensors files here and in a bucket, and folders that commands write there."""

import json
import random

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from paxlite.core.errors import UserError
from paxlite.files.output import output_folder
from paxlite.stores import object_blocks
from paxlite.weights.huggingface import Safetensors


def test_tensors_are_read_by_ranges(store, tmp_path, monkeypatch):
  monkeypatch.setattr(object_blocks, '_RANGE', 1000)
  rng = np.random.default_rng(0)
  tensors = {
    'a': rng.standard_normal((30, 20)).astype(np.float32),
    'b': rng.standard_normal(7).astype(ml_dtypes.bfloat16),
    'c': np.zeros((0, 3), np.int64),
    'd': rng.standard_normal((4, 4)).astype(ml_dtypes.float8_e4m3fn),
  }
  safetensors.numpy.save_file(tensors, tmp_path / 'model.safetensors', {'format': 'pt'})
  store.upload('w/model.safetensors', tmp_path / 'model.safetensors')
  here = Safetensors(tmp_path)
  there = Safetensors(tmp_path / 'without', 'gs://bkt/w')
  assert (there.shapes, there.dtypes) == (here.shapes, here.dtypes)
  for name, value in tensors.items():
    np.testing.assert_array_equal(there.read(name).view(np.uint8), value.view(np.uint8))
    assert there.read(name).dtype == value.dtype


def test_a_damaged_file_is_named(store, tmp_path):
  whole = safetensors.numpy.save({'a': np.zeros(100, np.float32)})
  wrong = {'cut': whole[:-1], 'empty': b'', 'table': whole.replace(b'"F32"', b'"F16"'),
           'json': whole[:8] + b'x' + whole[9:], 'length': b'\xff' * 8 + whole[8:]}  # fmt: skip
  for name, content in wrong.items():
    store.write(f'{name}/model.safetensors', content)
    with pytest.raises(UserError, match=rf'gs://bkt/{name}/model\.safetensors is damaged'):
      Safetensors(tmp_path, f'gs://bkt/{name}')
  with pytest.raises(UserError, match=r'holds no \.safetensors file'):
    Safetensors(tmp_path, 'gs://bkt/nothing')


@pytest.mark.parametrize('seed', range(10))
def test_tensors_that_overlap_or_leave_a_hole_are_refused(tmp_path, seed):
  draw = random.Random(seed)
  tensors = {f't{i}': np.ones(draw.randint(1, 9), np.float32) for i in range(draw.randint(1, 5))}
  whole = safetensors.numpy.save(tensors)
  length = int.from_bytes(whole[:8], 'little')
  table = json.loads(whole[8 : 8 + length])
  moved = table[draw.choice([*tensors])]
  shift = draw.choice([-8, -4, 4, 8, 400])
  moved['data_offsets'] = [x + shift for x in moved['data_offsets']]
  text = json.dumps(table).encode()
  path = tmp_path / 'model.safetensors'
  path.write_bytes(len(text).to_bytes(8, 'little') + text + whole[8 + length :])
  with pytest.raises(UserError, match=r'model\.safetensors is damaged'):
    Safetensors(tmp_path)


@pytest.mark.parametrize('seed', range(3))
def test_a_name_that_a_file_has_twice_is_refused(tmp_path, seed):
  draw = random.Random(seed)
  tensors = {f't{i}': np.ones(draw.randint(1, 9), np.float32) for i in range(draw.randint(2, 5))}
  whole = safetensors.numpy.save(tensors)
  one, other = draw.sample([*tensors], 2)
  path = tmp_path / 'model.safetensors'
  path.write_bytes(whole.replace(f'"{one}"'.encode(), f'"{other}"'.encode()))
  with pytest.raises(UserError, match=rf'model\.safetensors is damaged .*{other} appears twice'):
    Safetensors(tmp_path)


def test_a_folder_is_written_with_its_last_file_last(store, tmp_path):
  with output_folder('gs://bkt/out', last='a') as folder:
    (folder / 'sub').mkdir(parents=True)
    for name in ('a', 'b', 'sub/c'):
      (folder / name).write_text(name)
  found = sorted((int(store.head(o.name).tag), o.name) for o in store.below('out'))
  assert [key for _, key in found] == ['out/b', 'out/sub/c', 'out/a']
  assert not folder.exists()
  with pytest.raises(UserError, match='holds objects already'), output_folder('gs://bkt/out', 'a'):
    pass
