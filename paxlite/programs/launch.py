"""Runs what the options of a command line ask for; `paxlite.cli.run_options` declares them."""

import argparse
import dataclasses
import functools
import os
import pathlib
import signal
from collections.abc import Callable

from paxlite import extensions
from paxlite.cli.command_line import this_command
from paxlite.cli.terminal import warn
from paxlite.core.errors import AbsentError, UserError
from paxlite.core.json_text import JsonObject
from paxlite.experiments.base import Experiment
from paxlite.experiments.identity import run_values
from paxlite.experiments.registry import find_known
from paxlite.files.schemes import records_of
from paxlite.processes import preemption
from paxlite.programs.weights_model import build_experiment


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
        'experiment.json that names one'
      )
    name = run['experiment']  # a name in a file must not cause the import of a module
    find_known(name, way_out=f'--fdl_config={name}')
  run_experiment(build_experiment(name, options.fiddler, options.attributes, run), options)


def run_experiment(experiment: Experiment, options: argparse.Namespace) -> None:
  """Trains, evaluates or decodes an experiment with the options of a run, or describes it.

  Raises:
    UserError: The options do not fit the mode, or the experiment cannot be run with them.
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
    experiment,
    folder,
    address=address,
    save=options.enable_checkpoint_saving,
    accept_changes=options.accept_changes,
    start_over=options.start_over,
    check_memory=options.check_memory,
    compiled_step=None if step is None else pathlib.Path(step),
    command=this_command(),
  )
  peers = join.join(
    options.server_addr,
    options.num_hosts,
    options.host_idx,
    required=options.multiprocess_gpu,
    statement=lambda: statement(run, mode),
  )
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
        f'{name.upper()} is ignored: MAX_SKIPPED_STEPS=1 ends a run at the first step that is not '
        'finite, and names the operation, the layer and the line where that began'
      )


def run_in(folder: str) -> JsonObject | None:
  """Returns the experiment of the run in a folder and its values, or None if there is no run."""
  try:
    return run_values(records_of(folder))
  except AbsentError:
    return None
