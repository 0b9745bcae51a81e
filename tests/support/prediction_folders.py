"""Folders of models with modules that predict further tokens, and changes of them."""

import json

import jax
import numpy as np
from safetensors import safe_open


def tensors_of(path) -> dict[str, np.ndarray]:
  with safe_open(path / 'model.safetensors', 'np') as f:
    return {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118 - not a dict


def write(path, tensors, **config) -> None:
  """Writes tensors, and changes config.json."""
  from safetensors.numpy import save_file

  save_file(tensors, path / 'model.safetensors', {'format': 'pt'})
  file = path / 'config.json'
  file.write_text(json.dumps(json.loads(file.read_text()) | config))


def computed(function, *args):
  """Compiles and calls a function, with products in float32."""
  with jax.default_matmul_precision('highest'):
    return jax.jit(function)(*args)


def changed(published, to, change, **config):
  """Returns a folder with changed tensors."""
  to.mkdir()
  for file in published.path.iterdir():
    if file.suffix == '.json':
      (to / file.name).write_text(file.read_text())
  tensors = dict(published.tensors)
  change(tensors)
  write(to, tensors, **config)
  return to


def drop(tensors, *parts: str) -> None:
  for name in [n for n in tensors if any(part in n for part in parts)]:
    del tensors[name]
