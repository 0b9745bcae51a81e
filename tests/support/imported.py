"""Imports weights with the tool, and loads them as parameters."""

import fiddle as fdl
import jax
import numpy as np
from flax.linen import meta

from paxlite.checkpointing.restore import Plan, Restore
from paxlite.checkpointing.source import find_source
from paxlite.core.variable_names import path_name
from paxlite.eval.inference import experiment_of
from paxlite.tools import import_weights


def run_import(source: str, path, to, *flags: str) -> None:
  import_weights.main([f'--from={source}', f'--path={path}', f'--to={to}', *flags])


def loaded(folder):
  """Returns the model and the parameters of a folder with weights."""
  source = find_source(folder)
  experiment = experiment_of(source)
  model = fdl.build(type(experiment)(**experiment.values()).task()).model
  shapes = jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 1), np.int32))
  sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
  abstract = {'params': jax.tree.map(like, meta.unbox(shapes)['params'])}
  plan = Plan(Restore(str(folder)), abstract)
  load = lambda path, x: plan.load(path_name(path), x)
  return experiment, model, jax.tree_util.tree_map_with_path(load, abstract)['params']


def flat(tree) -> dict[str, np.ndarray]:
  """Returns the leaves of a tree by name."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {path_name(p): np.asarray(x) for p, x in leaves}
