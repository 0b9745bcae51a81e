"""Describes an experiment as text: its values, its built configs, and its requirements."""

import contextlib
import math

import fiddle as fdl
import jax
from flax.linen import meta

from paxlite.config.templates import config_text
from paxlite.core.errors import UserError
from paxlite.core.trees import PyTree
from paxlite.experiments.base import Experiment, full_name
from paxlite.optim import partition_report
from paxlite.parallel import partitioning
from paxlite.parallel.quantized_weights import num_parameters
from paxlite.training.task import Task
from paxlite.training.train_state import TrainState


def configs(experiment: Experiment) -> dict[str, fdl.Config]:
  """The configs of the task and of the inputs, by name; no inputs where there is no dataset."""
  found = {'task': experiment.build_task()}
  with contextlib.suppress(UserError):
    found['train_input'] = experiment.train_input()
    found |= {f'eval_inputs.{name}': cfg for name, cfg in experiment.eval_inputs().items()}
  return found


def configs_text(experiment: Experiment) -> str:
  return '\n'.join(config_text(cfg, name) for name, cfg in configs(experiment).items())


def warnings(experiment: Experiment, task: Task, state: TrainState) -> list[str]:
  """Returns sentences about what is valid but unusual in an experiment, and in its optimizer.

  Args:
    state: A state of the task, or its shapes.
  """
  trainable, _ = task.optimizer.split(state.params)
  parts = partition_report.described(state.opt_state, trainable)
  return [*experiment.warnings, *parts]


def requirements(experiment: Experiment) -> str:
  """Returns the parameters, the bytes per device, the tokens and FLOPs of a step, and warnings.

  Raises UserError if nothing is trained, or what cannot be.
  """
  e = experiment
  task: Task = fdl.build(e.build_task())
  boxed = jax.eval_shape(task.init, jax.random.key(0))
  specs = partitioning.param_specs(boxed, e.rules)
  state = meta.unbox(boxed)
  task.optimizer.check(state.params)
  trainable, _ = task.optimizer.split(state.params)
  trainable_specs, _ = task.optimizer.split(specs.params)
  sizes = e.mesh_sizes
  count = num_parameters(boxed.params)
  trained = sum(x.size for x in jax.tree.leaves(trainable))
  per_device = lambda tree, tree_specs: f'{_bytes_per_device(tree, tree_specs, sizes):,} bytes'
  tokens = e.batch_size * e.MAX_SEQ_LEN
  of_token = e.trained_flops(task.optimizer, boxed.params)
  lines = [
    f'parameters {count:,}', f'trainable parameters {trained:,}',
    f'mesh {sizes}: {e.num_devices:,} devices, {jax.device_count():,} present',
    f'per device: parameters {per_device(state.params, specs.params)}',
    f'per device: optimizer {per_device(state.opt_state, specs.opt_state)}',
    f'per device: gradients {per_device(trainable, trainable_specs)}',
    f'global batch {e.batch_size:,} × {e.MAX_SEQ_LEN:,} = {tokens:,} tokens per step',
    f'model FLOPs per step {of_token * tokens:.4g} (attention counted causally)', *_on_epochs(e),
    *warnings(e, task, state),
  ]  # fmt: skip
  return '\n'.join(lines)


def values_text(experiment: Experiment) -> str:
  """Returns one line `NAME = value` per attribute, without those that the optimizer never reads."""
  unread = experiment.unread_attributes
  return '\n'.join(
    [
      f'# {full_name(type(experiment))}',
      f'# backend {experiment.backend}',
      *(f'{k} = {v!r}' for k, v in experiment.shown_values().items() if k not in unread),
      '',
    ]
  )


def _bytes_per_device(tree: PyTree, specs: PyTree, sizes: dict[str, int]) -> int:
  def one(x: jax.ShapeDtypeStruct, spec: jax.sharding.PartitionSpec) -> int:
    fitted = partitioning.fitting(spec, x.shape, sizes)
    axes = [a for entry in fitted for a in partitioning.axes_of(entry)]
    return x.size * x.dtype.itemsize // math.prod(sizes[a] for a in axes)

  return sum(jax.tree.leaves(jax.tree.map(one, tree, specs)))


def _on_epochs(experiment: Experiment) -> list[str]:
  if experiment.NUM_EPOCHS is None:
    return []
  stated = f'NUM_EPOCHS={experiment.NUM_EPOCHS:g} replaces MAX_STEPS={experiment.MAX_STEPS:,}'
  return [f'{stated} when a run has counted its data, and values that derive from it follow.']


def dry_run(experiment: Experiment) -> str:
  """Returns the values, built configs and requirements; reads and writes no file."""
  parts = values_text(experiment), configs_text(experiment), '', requirements(experiment)
  return '\n'.join(parts)
