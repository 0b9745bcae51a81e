"""Options of a run: `python -m paxlite.main`, `paxlite train`, eval and decode."""

import argparse
import pathlib
import re
from collections.abc import Collection, Sequence

from paxlite import extensions
from paxlite.cli.parser import Parser, expanded, experiment_name, local, stored
from paxlite.core.errors import UserError
from paxlite.files.schemes import is_address

_MODES = 'train', 'eval', 'verify', 'decode', 'decode_once'
_OF_RUN = 'RUN', 'run folder, or experiment'
_WORDS = {
  'train': ('EXPERIMENT', 'a name of `paxlite list`, or my_module.MyGPT'), 'eval': _OF_RUN,
  'decode': _OF_RUN, 'verify': ('RUN', 'run folder'),
}  # fmt: skip


class RunParser(Parser):
  """The parser of a command that runs an experiment.

  Its options have Pax's names. `paxlite.programs.launch` does what they ask for.

  Args:
    doc: The docstring of the command's module.
    mode: The mode of a command that names an experiment or a run by a word. None: the command is
      paxlite.main, which names them by flags, as Pax does.
    word: What the word names, and its meaning. None: what the mode works on.
    folder: The folder of the run where no flag names one.
  """

  _takes_flags_of_pax = True

  def __init__(
    self,
    doc: str | None,
    mode: str | None = None,
    word: tuple[str, str] | None = None,
    folder: str = 'runs/EXPERIMENT',
  ):
    super().__init__(doc)
    self._mode = mode
    if mode is not None:
      # small letters get a hint
      self._attribute = re.compile(r'--?fdl\.|(?=([A-Za-z]\w*|task\.[\w.[\]]+)=)')
      self._word, meaning = word or _WORDS[mode]
      self.option('name', meaning, experiment_name, nargs='?', metavar=self._word)
    self.attributes()
    add = self.option
    # of the modes that have the option; other commands take it too, and their help leaves it out
    of = lambda text, *modes: text if mode in (None, *modes) else argparse.SUPPRESS
    flag, alias = ('--job_log_dir', '--folder')[:: 1 if mode is None else -1]
    where = 'run folder' + (f' ({folder})' if mode else '')
    add('--fdl_config', of('experiment: TinyGPT, or my.module.MyGPT'), alias='--exp')
    add('--mode', of(f'{", ".join(_MODES)} (train)'), _mode, default=mode or 'train')
    add(flag, where, stored, alias=alias, dest='job_log_dir', metavar='FOLDER')
    where = 'local copy of a gs:// or s3:// run (~/.cache/paxlite/runs)'
    add('--local_dir', of(where, 'train', 'eval', 'decode'), local)
    add('--fiddler', 'function that edits the config', action='append', default=[])
    meaning = 'your module with the class of a run or of weights'
    add('--import', meaning, action='append', default=[], dest='imports', metavar='MODULE')
    add('--dry_run', 'print the configuration and its needs, and stop', bool)
    add('--before', of('evaluate the initial weights first', 'eval'), bool)
    add('--from_step', of('checkpoint to start from; 0: the beginning', 'verify'), int)
    add('--to_step', of('checkpoint to compare with (the last)', 'verify'), int)
    add('--accept_changes', of('continue with changed values or data', 'train'), bool)
    add('--start_over', of('start over if no checkpoint is good', 'train'), bool)
    add('--enable_checkpoint_saving', of('write checkpoints', 'train'), bool, default=True)
    add('--check_memory', 'refuse runs that exceed free memory', bool, default=True)
    add('--compiled_step', of('step from `paxlite compile --save=PATH`', 'train'), local)
    add('--alsologtostderr', of('does nothing: logs go to stderr anyway'), bool, default=True)
    # TFDS reads from object stores
    add('--tfds_data_dir', 'folder of TFDS datasets, like TFDS_DATA_DIR', expanded)
    self.processes()
    add('--jax_profiler_port', 'port of the JAX profiler server', _port, metavar='PORT')
    add('--flagfile', 'file of further flags, one per line')

  def complete(self, options: argparse.Namespace, stated: Collection[str]) -> None:
    """Sets the experiment or the folder that the word of the command names."""
    if self._mode is None:
      return
    name, mode = options.name, self._mode
    if name is None:
      if options.fdl_config is None and options.job_log_dir is None:
        raise UserError(f'{self._word} is missing: see {self.prog} --help')
    elif mode != 'train' and (pathlib.Path(name).is_dir() or '/' in name):
      options.job_log_dir = stored(name)
      if not (is_address(name) or pathlib.Path(options.job_log_dir).is_dir()):
        raise UserError(f'{name} is not a folder: name a run folder, as in {self.prog} runs/mine')
    else:
      options.fdl_config = name
      if options.job_log_dir is None and not options.dry_run:
        options.job_log_dir = f'runs/{name.rpartition(".")[2]}'

  def excess(self, words: Sequence[str]) -> str:
    if self._mode is not None:
      return super().excess(words)
    hint = extensions.hint('words', words)
    return f'unexpected argument {words[0]!r}: flags are written --name=value. {hint}'


def _mode(text: str) -> str:
  if text not in _MODES:
    hint = extensions.hint('mode', text) or 'See python -m paxlite.main --help'
    raise UserError(f'{text}: value should be one of <{"|".join(_MODES)}>. {hint}')
  return text


def _port(text: str) -> int:
  if not text.isdecimal() or not 1 <= int(text) <= 65535:
    raise UserError(f'{text} must be from 1 to 65535')
  return int(text)
