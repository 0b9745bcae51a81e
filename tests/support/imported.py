"""Imports weights with the tool, and loads them as parameters."""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import fiddle as fdl
import jax
import numpy as np
from flax.linen import meta

from paxlite.checkpointing.restore import Restore, RestorePlan
from paxlite.checkpointing.source import find_source
from paxlite.core.variable_names import path_name
from paxlite.generation.inference import experiment_of
from paxlite.weights import huggingface
from paxlite.weights.commands import import_weights
from paxlite.weights.folder import ORIGIN, write_weights
from paxlite.weights.tensor_entries import Entry


def run_import(source: str, path, to, *flags: str) -> None:
  import_weights.main([f'--from={source}', f'--path={path}', f'--to={to}', *flags])


class _Trained:
  """The tensors of a folder, some of which have other values."""

  def __init__(self, tensors, changed):
    self.shapes, self._tensors, self._changed = tensors.shapes, tensors, changed

  def read(self, name):
    value = self._tensors.read(name)
    if name not in self._changed:
      return value
    noise = np.random.default_rng(0).normal(0, 0.05, value.shape)
    return (value.astype(np.float32) + noise).astype(value.dtype)


def write_trained(folder, weights, to, changed: set[str]) -> None:
  """Writes the imported weights of a folder as after a training that has changed some tensors."""
  experiment, entries, tensors = huggingface.read_folder(folder)
  origin = json.loads((weights / ORIGIN).read_text())
  trained, silent = _Trained(tensors, changed), lambda done, total: None
  write_weights(to, experiment, entries, trained, None, silent, origin)


def loaded(folder):
  """Returns the model and the parameters of a folder with weights."""
  source = find_source(folder)
  experiment = experiment_of(source)
  model = fdl.build(type(experiment)(**experiment.values()).build_task()).model
  shapes = jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 1), np.int32))
  sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
  abstract = {'params': jax.tree.map(like, meta.unbox(shapes)['params'])}
  plan = RestorePlan(Restore(str(folder)), abstract)
  load = lambda path, x: plan.load(path_name(path), x)
  return experiment, model, jax.tree_util.tree_map_with_path(load, abstract)['params']


def flat(tree) -> dict[str, np.ndarray]:
  """Returns the leaves of a tree by name."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {path_name(p): np.asarray(x) for p, x in leaves}


def variables_of(
  entries: Sequence[Entry], read: Callable[[str], np.ndarray]
) -> dict[str, np.ndarray]:
  """Returns the variables of entries by name, from a function that reads their tensors."""
  found: dict[str, np.ndarray] = {}
  for entry in entries:
    value = entry.to_ours(entry.view(read(entry.theirs)))
    if entry.part is None:
      found[entry.ours] = value.reshape(entry.our_shape)
    else:
      whole = found.setdefault(entry.ours, np.empty(entry.our_shape, value.dtype))
      whole[entry.part] = value.reshape(entry.our_shape[1:])
  return found


def nested(variables: dict[str, np.ndarray]) -> dict[str, Any]:
  """Reverses flat."""
  tree: dict[str, Any] = {}
  for name, value in variables.items():
    *path, leaf = name.split('/')
    node = tree
    for part in path:
      node = node.setdefault(part, {})
    node[leaf] = value
  return tree


def unrolled(variables: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Returns variables of a repeated stack as those of an unrolled one."""
  found = {}
  for name, value in variables.items():
    before, repeat, after = name.partition('repeat/')
    parts = {f'{before}x_layers_{i}/{after}': x for i, x in enumerate(value)}
    found |= parts if repeat else {name: value}
  return found


def repeated(variables: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Reverses unrolled."""
  layers: dict[str, list[np.ndarray]] = {}
  for name, value in variables.items():
    layers.setdefault(
      re.sub(r'^transformer/x_layers_\d+/', 'transformer/repeat/', name), []
    ).append(value)
  return {name: np.stack(x) if '/repeat/' in name else x[0] for name, x in layers.items()}
