"""The facts that a run's first start determines and later starts read from its folder."""

import dataclasses
import datetime
import logging
import os
from collections.abc import Callable

import fiddle as fdl
import jax
import numpy as np
from jax.experimental import multihost_utils

from paxlite import extensions
from paxlite.cli.terminal import say
from paxlite.config.attributes import derived
from paxlite.data import tokenizer_copies
from paxlite.data.base import Input
from paxlite.data.data_summary import thinking
from paxlite.experiments.epochs import max_steps
from paxlite.experiments.identity import run_values
from paxlite.experiments.language_model import LanguageModel
from paxlite.files.schemes import is_address
from paxlite.programs import kept_tokenizer
from paxlite.programs.run import Run

log = logging.getLogger('paxlite')

_NAMES = ('CHAT_DATE', 'CHAT_THINKING', 'CHECKPOINT_POLICY')


def as_begun(run: Run) -> Run:
  """Returns the run with what its first start has found out, unless the experiment states it."""
  e = run.experiment
  before = run_values(run.folder) if isinstance(e, LanguageModel) else None
  values = before['values'] if before else {}
  found = {
    name: values[name]
    for name in _NAMES
    if values.get(name) is not None and getattr(e, name) in (None, '', 'AUTO')
  }
  return dataclasses.replace(run, experiment=e.replaced(**found)) if found else run


def dated(run: Run) -> Run:
  """Returns the run with the day that its chat template sees, if that writes the day.

  It is the day of the run's first start, so that the data stay the same on all days.
  """
  e = run.experiment
  if not isinstance(e, LanguageModel) or e.CHAT_DATE or not e.reads_clock:
    return run
  day = as_begun(run).experiment.values()['CHAT_DATE']
  if not day:
    today = np.int32(datetime.datetime.now().toordinal())
    if jax.process_count() > 1:
      today = multihost_utils.broadcast_one_to_all(today)
    day = datetime.date.fromordinal(int(today)).isoformat()
  return dataclasses.replace(run, experiment=e.replaced(CHAT_DATE=day))


def noting(run: Run, data: Input) -> Run:
  """Returns the run with what its training data say of prompts, for its folder and samples."""
  e = run.experiment
  if isinstance(e, LanguageModel) and e.CHAT_THINKING is None and thinking(data) is False:
    return dataclasses.replace(run, experiment=e.replaced(CHAT_THINKING=False))
  return run


def with_positions(run: Run) -> Run:
  """Returns the run with the positions that it began with, as the weights may be gone by now."""
  e, name = run.experiment, 'MAX_POSITION_EMBEDDINGS'
  before = run_values(run.folder) if run.checkpoints().steps() else None
  values = before['values'] if before else {}
  if name not in e.values() or name in vars(e) or name not in values:
    return run
  positions = max(values[name], e.MAX_SEQ_LEN)
  return dataclasses.replace(run, experiment=e.replaced(**{name: positions}))


def with_tokenizer(run: Run) -> Run:
  """Returns a run that continues with its own copy, if the tokenizer that it names is gone."""
  e, path = run.experiment, kept_tokenizer.path_of(run.experiment)
  if kept_tokenizer.NAME not in e.values() or is_address(path) or os.path.exists(path):
    return run
  own = tokenizer_copies.kept(run.folder) if run.checkpoints().steps() else None
  if own is None:
    return run
  if jax.process_index() == 0:
    log.warning('the tokenizer of the run is gone: it continues with its own copy, %s', own)
  return dataclasses.replace(run, experiment=e.replaced(**{kept_tokenizer.NAME: str(own)}))


def with_warmup(run: Run) -> Run:
  """Returns the run with the warmup that it began with, if that follows from MAX_STEPS."""
  e, name = run.experiment, 'LR_COS_WARMUP'
  if name in vars(e) or not isinstance(getattr(type(e), name, None), derived):
    return run
  before = run_values(run.folder) if run.checkpoints().steps() else None
  values = before['values'] if before else {}
  if values.get(name) in (None, e.values()[name]):
    return run
  return dataclasses.replace(run, experiment=e.replaced(**{name: values[name]}))


def with_policy(run: Run, beat: Callable[[], None]) -> Run:
  """Returns the run with the checkpoint policy that it began with, if CHECKPOINT_POLICY is AUTO.

  A new run takes the policy that `paxlite plan` would choose for its devices, if their memory is
  known. It calls `beat` before and after each program that it compiles to find out.
  """
  e, name = run.experiment, 'CHECKPOINT_POLICY'
  if e.values().get(name) != 'AUTO' or run.compiled_step is not None:
    return run
  before = run_values(run.folder) if run.checkpoints().steps() else None
  policy, said = before['values'].get(name, 'AUTO') if before else 'AUTO', ''
  if before is None and not extensions.lacking(f'{name}=AUTO'):
    policy, said = extensions.hook(f'{name}=AUTO')(e, beat)
  if said and jax.process_index() == 0:
    say(said)
  if policy == 'AUTO':
    return run
  return dataclasses.replace(run, experiment=e.replaced(**{name: policy}))


def in_steps(run: Run) -> Run:
  """Returns the run with the MAX_STEPS that NUM_EPOCHS means, and so with its whole schedule.

  A run that continues keeps the number that it began with. Otherwise the training data are read,
  before anything is written or compiled. Without NUM_EPOCHS, the run is returned as it is. Raises
  UserError if the number of rows is not known.
  """
  e = run.experiment
  if e.NUM_EPOCHS is None:
    return run
  before = run_values(run.folder) if run.checkpoints().steps() else None
  values = before['values'] if before else {}
  if values.get('NUM_EPOCHS') == e.NUM_EPOCHS and 'MAX_STEPS' in values:
    return dataclasses.replace(run, experiment=e.replaced(MAX_STEPS=values['MAX_STEPS']))
  data = fdl.build(e.train_input())
  counted = e.replaced(MAX_STEPS=max_steps(e, data))
  counted.validate()
  return dataclasses.replace(run, experiment=counted, data=data)
