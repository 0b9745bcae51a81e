"""Builds the experiment that a command line names, and runs what its options ask for.

`paxlite.cli.run_options` declares the options.
"""

import argparse
import copy
import dataclasses
import functools
import os
import pathlib
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import fiddle as fdl

from paxlite import extensions
from paxlite.checkpointing.source import weights_facts
from paxlite.cli.command_line import this_command
from paxlite.cli.terminal import warn
from paxlite.config.attributes import attribute_types, parse
from paxlite.config.edits import EDITS
from paxlite.config.experiment_file import WeightsFacts
from paxlite.config.former_names import current, refuse_both
from paxlite.config.placed_paths import placed
from paxlite.core.errors import AbsentError, UserError, located
from paxlite.core.json_text import Json, JsonObject
from paxlite.experiments import options as optional_parts
from paxlite.experiments.base import Experiment, full_name
from paxlite.experiments.identity import run_values, stated_values
from paxlite.experiments.registry import apply_fiddler, find, find_known
from paxlite.files.schemes import is_address, records_of
from paxlite.files.text_files import check_file, expanded
from paxlite.processes import preemption
from paxlite.programs import kept_tokenizer


def launch(options: argparse.Namespace) -> None:
  """Runs the experiment that the options name; a run is evaluated as the experiment that it is."""
  data = options.tfds_data_dir
  if data is not None:
    try:
      os.environ['TFDS_DATA_DIR'] = data
    except ValueError as e:
      raise UserError(f'--tfds_data_dir={data!r} is not a folder: {e}') from None
  is_new = options.mode == 'train' or not options.job_log_dir
  run = None if is_new else run_in(options.job_log_dir)
  name = options.fdl_config
  if name is None:
    if run is None:
      raise UserError(
        f'--fdl_config=EXPERIMENT is missing, and --job_log_dir={options.job_log_dir} holds no '
        'experiment.json to name one'
      )
    name = run['experiment']  # a name in a file must not cause the import of a module
    find_known(name, way_out='--import={0}')
  facts = functools.partial(_facts_of, folder=options.job_log_dir)
  experiment = build_experiment(name, options.fiddler, options.attributes, run, facts)
  run_experiment(experiment, options)


def build_experiment(
  name: str,
  fiddlers: Sequence[str],
  overrides: Mapping[str, str],
  run: Mapping[str, Json] | None = None,
  known_weights: Callable[[str], WeightsFacts] = weights_facts,
) -> Experiment:
  """Returns the experiment `name` after `fiddlers` and then `overrides` were applied; validated.

  It knows what the files beside its weights say.

  Args:
    name: A bare name or a dotted path.
    fiddlers: Names of functions that edit its config.
    overrides: Values as text, by attribute, or by the path of a value of the built config.
    run: identity.run_values of a run. If the run has the same experiment, it gives the values of
      all attributes that neither fiddlers nor overrides set.
    known_weights: Returns what is known of the weights at a path.
  """
  cls, key, facts = find(name), 'CHECKPOINT_RESTORE_PATH', functools.cache(known_weights)
  is_same = run is not None and run['experiment'] == full_name(cls)
  known = dict(run['values']) if run is not None and is_same else {}
  if 'MODEL' in overrides:
    known['MODEL'] = parse(cls, 'MODEL', overrides['MODEL'])
    if '.' in known['MODEL']:
      find(known['MODEL'])  # imports what the user names
  cls = cls.of_values(known)
  path = str(parse(cls, key, overrides[key])) if key in overrides else getattr(cls, key)
  if path and not (os.path.isabs(path) or os.path.exists(path) or is_address(path)):
    _check_stated(cls, overrides)
  cls, values = cls.chosen(facts(path))
  cls = optional_parts.with_attributes(cls, overrides.keys())
  cfg = cls.config()
  for attribute, value in values.items():
    setattr(cfg, attribute, value)
  before = copy.copy(cfg)
  for fiddler in fiddlers:
    apply_fiddler(cfg, fiddler)
  if run is not None and is_same:
    began_with = facts(run['values'].get(key) or '')
    for attribute, value in stated_values(cls, run['values'], began_with).items():
      if getattr(cfg, attribute) == getattr(before, attribute):
        setattr(cfg, attribute, placed(cls, attribute, value, run.get('started_in', '')))
  for attribute, value in values_of(cls, overrides, cfg.CONFIG_EDITS).items():
    setattr(cfg, attribute, value)
  if 'MAX_STEPS' in overrides and cfg.NUM_EPOCHS is not None:
    raise UserError(
      f'MAX_STEPS={cfg.MAX_STEPS} and NUM_EPOCHS={cfg.NUM_EPOCHS:g} both set the end of training: '
      'leave one out (NUM_EPOCHS=None, if the experiment states it)'
    )
  experiment = fdl.build(cfg)
  experiment = experiment.knowing(*map(facts, experiment.paths_of_weights))
  experiment.validate()
  experiment.check_edits()
  return experiment


def _check_stated(cls: type[Experiment], given: Mapping[str, str]) -> None:
  """Checks values and files of a command line before weights are downloaded."""
  for name in sorted(given.keys() & attribute_types(cls).keys()):
    value = parse(cls, name, given[name])
    if name.endswith(('_FILES', '_SOURCES')) and isinstance(value, list):
      for file in expanded(value):
        if ':' not in file and not os.path.exists(file):
          with located(name):
            check_file(file)


def values_of(cls: type[Experiment], given: Mapping[str, str], edits: Any) -> dict[str, Any]:
  """Returns the values of the attributes that a command line sets.

  Args:
    cls: The class of the experiment.
    given: Texts by the names of attributes, and by the paths of values of the built config.
    edits: Its CONFIG_EDITS, to which paths are added. The last edit of a path counts.
  """
  texts = {name: text for name, text in given.items() if '.' not in name}
  refuse_both(texts)
  values: dict[str, Any] = {current(n): parse(cls, n, text) for n, text in texts.items()}
  if paths := {name: text for name, text in given.items() if name not in texts}:
    before = dict(edit.partition('=')[::2] for edit in values.get(EDITS, edits))
    values[EDITS] = [f'{path}={text}' for path, text in sorted({**before, **paths}.items())]
  return values


def run_experiment(experiment: Experiment, options: argparse.Namespace) -> None:
  """Trains, evaluates or decodes an experiment with the options of a run, or describes it.

  Raises UserError if the options do not fit the mode, or the experiment cannot be run with them.
  """
  mode, step = options.mode, options.compiled_step
  if step is not None and (mode != 'train' or options.dry_run):
    raise UserError('--compiled_step is for training: leave it out')
  if options.before and mode != 'eval':
    raise UserError('--before is for --mode=eval: leave it out')
  if (options.from_step, options.to_step) != (None, None) and mode != 'verify':
    raise UserError('--from_step and --to_step are for --mode=verify: leave them out')
  from paxlite.compilation import cache
  from paxlite.experiments.description import dry_run
  from paxlite.parallel import devices
  from paxlite.processes import join
  from paxlite.programs.agreement import statement
  from paxlite.programs.evaluation import evaluate
  from paxlite.programs.run import Run
  from paxlite.programs.run_folder import located_run
  from paxlite.programs.training import train

  if options.dry_run:
    devices.present()
    print(dry_run(experiment))
    return
  modes: dict[str, Callable[[Run], object]] = {
    'train': train,
    'eval': functools.partial(evaluate, before=options.before),
  }
  act = modes.get(mode)
  if act is None:  # of an extension
    act = functools.partial(extensions.hook(mode.removesuffix('_once')), options=options)
  folder, address = located_run(options.job_log_dir, options.local_dir)
  run = Run(
    experiment, folder, address=address, save=options.enable_checkpoint_saving,
    accept_changes=options.accept_changes, start_over=options.start_over,
    check_memory=options.check_memory, compiled_step=None if step is None else pathlib.Path(step),
    command=this_command(),
  )  # fmt: skip
  peers = join.join(
    options.server_addr, options.num_hosts, options.host_idx, required=options.multiprocess_gpu,
    statement=lambda: statement(run, mode),
  )  # fmt: skip
  _drop_debugging_of_jax()
  if peers.count == 1:
    cache.enable()
    devices.present()
  if mode != 'train':  # replaces JAX's handler, because there is nothing to save
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
  if options.jax_profiler_port:
    import jax

    jax.profiler.start_server(options.jax_profiler_port)
  with peers, join.leaving_together():
    preemption.check()
    act(dataclasses.replace(run, peers=peers))


def _drop_debugging_of_jax() -> None:
  """Warns of JAX_DEBUG_NANS and JAX_DEBUG_INFS, which would end a run in JAX's own code."""
  import jax

  for name in ('jax_debug_nans', 'jax_debug_infs'):
    if getattr(jax.config, name):
      jax.config.update(name, False)
      warn(
        f'{name.upper()} is ignored: MAX_SKIPPED_STEPS=1 ends a run at the first non-finite step '
        'and names the operation, layer and line that caused it'
      )


def run_in(folder: str) -> JsonObject | None:
  """Returns the experiment of the run in a folder and its values, or None if there is no run.

  The VOCAB_PATH is that of the run's own copy.
  """
  try:
    place = records_of(folder)
  except AbsentError:
    return None
  found = run_values(place)
  return found and kept_tokenizer.to_read(found, place)


def _facts_of(path: str, folder: str | None) -> WeightsFacts:
  """Returns what is known of weights; of those that are gone, what a run that they began knows."""
  facts = weights_facts(path)
  if facts.experiment or not path or not folder:
    return facts
  run = run_in(folder)
  began_with = run and run['values'].get('CHECKPOINT_RESTORE_PATH')
  if not run or began_with not in (path, os.path.abspath(path)) or run['values'].get('USE_LORA'):
    return facts  # without frozen weights, no run goes on
  tokenizer = str(run['values'].get('VOCAB_PATH') or '')
  return WeightsFacts(path, run['experiment'], run['values'], tokenizer, facts.problem)
