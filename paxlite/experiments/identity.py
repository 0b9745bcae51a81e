"""The identity of a run, which is printed, written into its folder, and compared with it."""

import json
import os
import pathlib
import zlib
from collections.abc import Iterable, Mapping

import fiddle as fdl
import jax

from paxlite.compilation.versions import versions
from paxlite.config.attribute_kinds import Kind
from paxlite.config.attributes import attribute_types, derived
from paxlite.config.experiment_file import (
  EXPERIMENT,
  UNKNOWN,
  WeightsFacts,
  read_experiment,
  renewed,
)
from paxlite.config.former_names import FINGERPRINTED
from paxlite.config.placed_paths import absolute, is_of_paths
from paxlite.core import shell
from paxlite.core.errors import UnreadableError, UserError, line_of, located
from paxlite.core.json_text import JsonObject, parsed
from paxlite.core.run_files import write_file
from paxlite.experiments import options
from paxlite.experiments.base import Experiment, full_name
from paxlite.experiments.description import configs, configs_text, values_text
from paxlite.experiments.user_sources import SOURCES, recorded
from paxlite.files.json_files import read_object
from paxlite.files.schemes import is_address
from paxlite.files.text_files import expanded


def write_configuration(e: Experiment, folder: pathlib.Path) -> None:
  """Writes the identity of the run into its folder: values, built config, sources, versions.

  Raises UserError if a config holds what no file can hold, such as a lambda.
  """
  if jax.process_index() != 0:
    return
  from fiddle.experimental import serialization

  built, cfgs = {}, configs(e)
  for name, cfg in cfgs.items():
    try:
      built[name] = parsed(serialization.dump_json(cfg))
    except Exception as error:  # Fiddle has no one class of errors for what it cannot write
      raise UserError(
        f'the config of {full_name(type(e))}.{name} cannot be written into the run folder: '
        f'{line_of(error)}. Use functions and classes of a module, not lambdas or objects'
      ) from None
  further = {
    'losses': _stated_by(cfgs['task']), 'started_in': os.getcwd(), 'files': files_of(e)
  }  # fmt: skip
  for name, text in {
    EXPERIMENT: json.dumps(identity_of(e) | further, indent=2),
    'experiment.txt': values_text(e),
    'config.txt': configs_text(e),
    'config.json': json.dumps(built, indent=1),
    SOURCES: json.dumps(recorded(cfgs), indent=1),
    'versions.json': json.dumps(versions(), indent=2),
  }.items():
    write_file(folder / name, (text.rstrip('\n') + '\n').encode())


def _stated_by(task: fdl.Config) -> JsonObject:
  """Returns, for each loss by its name, the metrics of which it says that larger is better."""
  losses = getattr(task, 'losses', None) or {}
  kinds = {k: fdl.get_callable(x) for k, x in losses.items() if isinstance(x, fdl.Buildable)}
  return {name: list(getattr(kind, 'larger_is_better', ())) for name, kind in kinds.items()}


def refuse_other_experiment(e: Experiment, folder: pathlib.Path) -> None:
  """Raises UserError if a folder has checkpoints of a different experiment."""
  path = folder / EXPERIMENT
  if not path.exists():
    return
  try:
    before = renewed(read_object(path))
    old = {'experiment': before['experiment'], **options.kept(type(e), before['values'])}
  except UnreadableError:
    raise
  except UserError as error:
    raise UserError(f'{error}; --accept_changes continues without it') from None
  except (KeyError, TypeError) as error:
    raise UserError(
      f'{path} is damaged ({error!r}); --accept_changes continues without it'
    ) from None
  identity = identity_of(e)
  new = {'experiment': identity['experiment'], **identity['values']}
  for name in new.keys() - old.keys():  # the attribute is newer than the run
    default = e.plain_backend.get(name, getattr(type(e), name))
    old[name] = new[name] if isinstance(default, derived) else default
  free = e.values_of(Kind.RUN, Kind.GENERATION)
  missing = object()
  changed = [
    f'{name} {old.get(name, "unset")!r} → {new.get(name, "unset")!r}'
    for name in sorted(old.keys() | new.keys())
    if name not in free
    and old.get(name, missing) != new.get(name, missing)
    and absolute(type(e), name, old.get(name), before.get('started_in', ''))
    != absolute(type(e), name, new.get(name), os.getcwd())
  ]
  if changed:
    raise UserError(
      f'{folder} holds checkpoints of a different experiment: {"; ".join(changed)}. '
      'Choose another folder, or continue with the change: --accept_changes'
    )


def files_of(e: Experiment) -> dict[str, list[str]]:
  """Returns the files that each attribute names which is a list of paths, patterns expanded."""
  lists = {name: value for name, value in e.values().items() if isinstance(value, list) and value}
  types = attribute_types(type(e))
  return {k: expanded(x, strict=False) for k, x in lists.items() if is_of_paths(types[k])}


def former_files(e: Experiment, folder: pathlib.Path) -> str:
  """Returns the flags of the files of a run's last start, of those that are others now; ''."""
  path = folder / EXPERIMENT
  before = read_object(path).get('files', {}) if path.is_file() else {}
  return shell.flags({k: before[k] for k, x in files_of(e).items() if before.get(k, x) != x})


def fingerprint(e: Experiment) -> int:
  """Returns a checksum of what refuse_other_experiment compares."""
  free = e.values_of(Kind.RUN, Kind.GENERATION)
  values = {FINGERPRINTED.get(k, k): v for k, v in e.values().items() if k not in free}
  text = json.dumps([full_name(type(e)), values], sort_keys=True, default=repr)
  return zlib.crc32(text.encode())


def run_values(folder: pathlib.Path) -> JsonObject | None:
  """Returns the identity in a run's folder, {'experiment': dotted path, 'values': {…}}, or None.

  Raises UserError if the file that holds it is damaged.
  """
  path = folder / EXPERIMENT
  return read_experiment(path) if path.is_file() else None


def stated_values(
  cls: type[Experiment], values: Mapping[str, object], weights: WeightsFacts = UNKNOWN
) -> dict[str, object]:
  """Returns the values of a run that were set, without the values that derive from them.

  Attributes that no longer exist are omitted, unless the model would be another one without them.
  Raises UserError if the run had a value of an attribute that other models alone have now.

  Args:
    cls: The experiment of the run.
    weights: What is known of the weights that it began with, from which values derive too.
  """
  types = attribute_types(cls)
  options.refuse_lost(cls, values)
  known = {k: v for k, v in values.items() if k in types}
  stated = {k: v for k, v in known.items() if not isinstance(getattr(cls, k), derived)}
  e = cls(**stated).knowing(weights)
  return stated | {k: v for k, v in known.items() if k not in stated and getattr(e, k) != v}


def is_of(e: Experiment, folder: pathlib.Path) -> bool:
  """Returns whether the run in a folder has the same experiment class."""
  found = run_values(folder)
  return found is not None and found['experiment'] == full_name(type(e))


def refuse_other_model(e: Experiment, folder: pathlib.Path, also: Iterable[str] = ()) -> None:
  """Raises UserError if a folder has checkpoints of a model with other values.

  Zero-shot tasks have their own experiments (Lambada126M), which evaluate another experiment's run.

  Args:
    e: The experiment to evaluate.
    folder: The folder of the run.
    also: Further attributes that must equal the run's, if e has them.
  """
  found = run_values(folder)
  if found is None:
    return
  before = found['values']
  with located(f'{folder} holds checkpoints of another model'):
    options.refuse_lost(type(e), before)
  ours = {k: v for values in e.model_values for k, v in values.items()}
  ours |= {k: v for k, v in e.values().items() if k in also}
  changed = [
    f'{k} {before[k]!r} → {v!r}' for k, v in ours.items() if k in before and before[k] != v
  ]
  if changed:
    raise UserError(f'{folder} holds checkpoints of another model: {"; ".join(changed)}')


def identity_of(e: Experiment) -> JsonObject:
  """Returns what experiment.json holds: the class of an experiment, its backend and its values."""
  paths = set(e.paths_of_weights)  # which are read again, from any folder
  # an address, or the name of what an extension copies, is no path of this machine
  is_here = lambda path: not is_address(path) and os.path.exists(path)
  absolute = lambda path: str(pathlib.Path(path).absolute()) if is_here(path) else path
  places = e.values_of(Kind.RUN)
  is_path = lambda k, v: k in places and isinstance(v, str) and v != '' and v in paths
  values = {k: absolute(v) if is_path(k, v) else v for k, v in e.values().items()}
  return {'experiment': full_name(type(e)), 'backend': str(e.backend), 'values': values}
