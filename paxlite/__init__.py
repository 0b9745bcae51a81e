"""paxlite trains language models in JAX, in the way of Pax.

    import paxlite

    experiment = paxlite.get('DemoGPT')(MAX_STEPS=100)
    run = paxlite.train(experiment, 'runs/demo')
    run.metrics['loss']
    run.generate('And it came to pass')

`__all__` is the public interface. Its names load on first use; importing paxlite alone loads no
JAX.
"""

import sys

# `python -m paxlite…` has put the current folder first on the path, and so before the modules that
# are imported from here on; cli/user_modules.py imports the user's modules from there. While Python
# looks for the module, argv[0] is '-m'.
if sys.argv[:1] == ['-m'] and not sys.flags.safe_path:
  _program = sys.orig_argv[len(sys.orig_argv) - len(sys.argv)].rpartition('-m')[2]
  if _program == 'paxlite' or _program.startswith('paxlite.'):
    del sys.path[0]

import importlib
from typing import TYPE_CHECKING

from paxlite.core import former_modules

sys.meta_path.append(
  former_modules.Finder(lambda: importlib.import_module('paxlite.extensions').former_modules())
)

if TYPE_CHECKING:
  from paxlite.config.generation import Sampling
  from paxlite.core.errors import Interrupted, TrainingError, UserError
  from paxlite.experiments.base import Experiment
  from paxlite.experiments.registry import register
  from paxlite.programs.library import TrainedModel, get, list_experiments, load, train
  from paxlite.training.callbacks import Callback

__version__ = '0.2.0'

_WHERE = {
  'Callback': 'paxlite.training.callbacks', 'Experiment': 'paxlite.experiments.base',
  'Interrupted': 'paxlite.core.errors', 'Sampling': 'paxlite.config.generation',
  'TrainedModel': 'paxlite.programs.library', 'TrainingError': 'paxlite.core.errors',
  'UserError': 'paxlite.core.errors', 'get': 'paxlite.programs.library',
  'list_experiments': 'paxlite.programs.library', 'load': 'paxlite.programs.library',
  'register': 'paxlite.experiments.registry', 'train': 'paxlite.programs.library',
}  # fmt: skip

__all__ = [
  'Callback', 'Experiment', 'Interrupted', 'Sampling', 'TrainedModel', 'TrainingError', 'UserError',
  'get', 'list_experiments', 'load', 'register', 'train',
]  # fmt: skip


def __getattr__(name: str) -> object:
  if name not in _WHERE:
    raise AttributeError(f'module paxlite has no attribute {name!r}')
  importlib.import_module('paxlite.core.errors').check_interpreter()
  return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
  return [*__all__, '__version__']
