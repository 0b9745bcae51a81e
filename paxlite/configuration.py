"""What a run is: shown, written into its folder, and compared with what is there."""

import contextlib
import json
import math
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import fiddle as fdl
import jax
from flax.linen import meta

from paxlite import partitioning
from paxlite.checkpoint_source import Source, read_values
from paxlite.errors import UnreadableError, UserError
from paxlite.experiment import Experiment
from paxlite.experiments.backend import PLAIN_XLA
from paxlite.inputs.files import read_object
from paxlite.params import derived, parameter_types
from paxlite.run_files import write_file
from paxlite.summaries import versions
from paxlite.templates import config_text

_VALUES = 'experiment.json'


def configs(experiment: Experiment) -> dict[str, fdl.Config]:
  """The configs of the task and of the inputs, by name; no inputs where there is no dataset."""
  found = {'task': experiment.training_task()}
  with contextlib.suppress(UserError):
    found['train_input'] = experiment.train_input()
    found |= {f'eval_inputs.{name}': cfg for name, cfg in experiment.eval_inputs().items()}
  return found


def configs_text(experiment: Experiment) -> str:
  return '\n'.join(config_text(cfg, name) for name, cfg in configs(experiment).items())


def requirements(experiment: Experiment) -> str:
  """Parameters, bytes per device, tokens and FLOPs of a step."""
  e = experiment
  task = fdl.build(e.training_task())
  boxed = jax.eval_shape(task.init, jax.random.key(0))
  specs = partitioning.param_specs(boxed, e.rules)
  state = meta.unbox(boxed)
  trainable, _ = task.optimizer.split(state.params)
  trainable_specs, _ = task.optimizer.split(specs.params)
  sizes = e.mesh_sizes
  count = sum(x.size for x in jax.tree.leaves(state.params))
  trained = sum(x.size for x in jax.tree.leaves(trainable))
  per_device = lambda tree, tree_specs: f'{_bytes_per_device(tree, tree_specs, sizes):,} bytes'
  tokens = e.batch_size * e.MAX_SEQ_LEN
  lines = [
    f'parameters {count:,}',
    f'trainable parameters {trained:,}',
    f'mesh {sizes}: {e.num_devices:,} devices, {jax.device_count():,} present',
    f'per device: parameters {per_device(state.params, specs.params)}',
    f'per device: optimizer {per_device(state.opt_state, specs.opt_state)}',
    f'per device: gradients {per_device(trainable, trainable_specs)}',
    f'global batch {e.batch_size:,} × {e.MAX_SEQ_LEN:,} = {tokens:,} tokens per step',
    f'model FLOPs per step {e.flops_per_token * tokens:.4g} (attention counted causally)',
  ]
  return '\n'.join(lines)


def values_text(experiment: Experiment) -> str:
  """One `NAME = value` a line."""
  return '\n'.join(
    [
      f'# {_name(type(experiment))}',
      f'# backend {experiment.backend}',
      *(f'{k} = {v!r}' for k, v in experiment.values().items()),
      '',
    ]
  )


def dry_run(experiment: Experiment) -> str:
  """The experiment's values, its built configs, and what it needs; reads and writes no file."""
  return '\n'.join(
    [
      values_text(experiment),
      configs_text(experiment),
      '',
      requirements(experiment),
      *experiment.remarks,
    ]
  )


def write_configuration(e: Experiment, folder: pathlib.Path) -> None:
  """Writes what the run is into its folder: values, built config, versions."""
  if jax.process_index() != 0:
    return
  from fiddle.experimental import serialization

  built = {name: json.loads(serialization.dump_json(cfg)) for name, cfg in configs(e).items()}
  for name, text in {
    _VALUES: json.dumps(_identity(e), indent=2),
    'experiment.txt': values_text(e),
    'config.txt': configs_text(e),
    'config.json': json.dumps(built, indent=1),
    'versions.json': json.dumps(versions(), indent=2),
  }.items():
    write_file(folder / name, (text.rstrip('\n') + '\n').encode())


def refuse_other_experiment(e: Experiment, folder: pathlib.Path) -> None:
  """Raises UserError when a folder with checkpoints is that of a different experiment."""
  path = folder / _VALUES
  if not path.exists():
    return
  try:
    before = read_object(path)
    old = {'experiment': before['experiment'], **before['values']}
  except UnreadableError:
    raise
  except UserError as error:
    raise UserError(f'{error}; --accept_changes goes on without it') from None
  except (KeyError, TypeError) as error:
    raise UserError(f'{path} is damaged ({error!r}); --accept_changes goes on without it') from None
  identity = _identity(e)
  new = {'experiment': identity['experiment'], **identity['values']}
  for name in new.keys() - old.keys():  # an attribute that is newer than the run
    default = PLAIN_XLA.get(name, getattr(type(e), name))
    old[name] = new[name] if isinstance(default, derived) else default
  free = set(e.RESUMABLE_CHANGES)
  missing = object()
  changed = [
    f'{name} {old.get(name, "unset")!r} → {new.get(name, "unset")!r}'
    for name in sorted(old.keys() | new.keys())
    if name not in free and old.get(name, missing) != new.get(name, missing)
  ]
  if changed:
    raise UserError(
      f'{folder} holds checkpoints of a different experiment: {"; ".join(changed)}. '
      'Choose another --job_log_dir, or continue with the change: --accept_changes'
    )


def run_values(folder: pathlib.Path) -> dict[str, Any] | None:
  """What a run's folder says that it is: {'experiment': dotted path, 'values': {…}}; or None.

  Raises:
    UserError: the file that says so is damaged.
  """
  path = folder / _VALUES
  return read_values(Source(folder, path)) if path.is_file() else None


def stated_values(cls: type[Experiment], values: Mapping[str, Any]) -> dict[str, Any]:
  """Of a run's values those from which the others derive, and those that were set instead.

  Values of attributes that are no longer there are left out, and what may change in a run that is
  continued is what the experiment says now.
  """
  known = {
    k: v for k, v in values.items() if k in parameter_types(cls) and k != 'RESUMABLE_CHANGES'
  }
  stated = {k: v for k, v in known.items() if not isinstance(getattr(cls, k), derived)}
  e = cls(**stated)
  return stated | {k: v for k, v in known.items() if k not in stated and getattr(e, k) != v}


def is_of(e: Experiment, folder: pathlib.Path) -> bool:
  """Whether a folder's run is of the same experiment, with other numbers or not."""
  found = run_values(folder)
  return found is not None and found['experiment'] == _name(type(e))


def refuse_other_model(e: Experiment, folder: pathlib.Path, also: Iterable[str] = ()) -> None:
  """Raises UserError when a folder's checkpoints are of a model that is another by its numbers.

  Zero-shot tasks have experiments of their own (Lambada126M), which evaluate another's run.

  Args:
    e: What is to be evaluated.
    folder: The run's.
    also: Further attributes, if e has them, that must be those of the run.
  """
  found = run_values(folder)
  if found is None:
    return
  before = found['values']
  ours = {k: v for values in e.model_values for k, v in values.items()}
  ours |= {k: getattr(e, k) for k in also if hasattr(e, k)}
  changed = [
    f'{k} {before[k]!r} → {v!r}' for k, v in ours.items() if k in before and before[k] != v
  ]
  if changed:
    raise UserError(f'{folder} holds checkpoints of another model: {"; ".join(changed)}')


def _identity(e: Experiment) -> dict[str, Any]:
  values = e.values()
  if e.CHECKPOINT_RESTORE_PATH:  # LoRA's base is looked for there, from wherever
    values['CHECKPOINT_RESTORE_PATH'] = str(pathlib.Path(e.CHECKPOINT_RESTORE_PATH).absolute())
  return {'experiment': _name(type(e)), 'backend': str(e.backend), 'values': values}


def _name(cls: type) -> str:
  return f'{cls.__module__}.{cls.__qualname__}'


def _bytes_per_device(tree: Any, specs: Any, sizes: dict[str, int]) -> int:
  def one(x: jax.ShapeDtypeStruct, spec: jax.sharding.PartitionSpec) -> int:
    fitted = partitioning.fitting(spec, x.shape, sizes)
    axes = [a for entry in fitted for a in partitioning.axes_of(entry)]
    return x.size * x.dtype.itemsize // math.prod(sizes[a] for a in axes)

  return sum(jax.tree.leaves(jax.tree.map(one, tree, specs)))
