"""python -m tests.support.without PACKAGE FOLDER

Trains a TinyGPT on text for two steps, continues to the third and evaluates, in a process that has
no PACKAGE: its line is out of the table of extensions, and its folder cannot be imported. With
--help as FOLDER, it prints how `paxlite COMMAND --help` ends, for each command that there may be.
"""

import contextlib
import io
import json
import sys

from paxlite import __main__, extensions
from paxlite.tools import commands


class Absent:
  """A finder for which a package and its modules are not there.

  Args:
    package: The package's name, such as 'paxlite.serving'; '': nothing is absent.
  """

  def __init__(self, package: str):
    self._package = package

  def find_spec(self, name, path=None, target=None):
    if self._package and f'{name}.'.startswith(f'{self._package}.'):
      raise ModuleNotFoundError(f'No module named {name!r}', name=name)


if __name__ == '__main__':  # before the extensions are read, as experiments are imported
  absent, folder = sys.argv[1:]
  ALL = [name for name, c in commands.commands().items() if c.has_parser]
  extensions.found.cache_clear()
  for name in [name for name in sys.modules if f'{name}.'.startswith(f'{absent}.')]:
    del sys.modules[name]
  sys.meta_path.insert(0, Absent(absent))
  extensions.BUILT_IN[:] = [n for n in extensions.BUILT_IN if f'paxlite.{n}' != absent]

from paxlite import main  # noqa: E402
from paxlite.experiments.datasets import EmbeddedText  # noqa: E402
from paxlite.experiments.demo import TinyGPT  # noqa: E402


class TinyText(EmbeddedText, TinyGPT):
  """TinyGPT on the embedded text, evaluated on two batches of it."""

  VOCAB_SIZE = 8192
  NUM_LAYERS = 1
  MAX_EVAL_BATCHES = 2


if __name__ == '__main__':
  if folder == '--help':
    ends = {}
    for command in ALL:
      sys.argv = ['paxlite', command, '--help']
      said, printed = io.StringIO(), io.StringIO()
      with contextlib.redirect_stderr(said), contextlib.redirect_stdout(printed):
        try:
          code = __main__.main()
        except SystemExit as e:
          code = e.code
      ends[command] = code or 0, said.getvalue()
    print(json.dumps(ends))
    sys.exit()
  flags = f'--job_log_dir={folder}', f'--fdl_config={__spec__.name}.TinyText'
  for more in ('--fdl.MAX_STEPS=2',), ('--fdl.MAX_STEPS=3',), ('--fdl.MAX_STEPS=3', '--mode=eval'):
    if code := main.main(['main', *flags, *more]):
      sys.exit(code)
