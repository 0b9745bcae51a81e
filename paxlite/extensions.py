"""The extensions: leaves of paxlite, and installed packages that add to it.

A package adds its own by an entry point, as in its pyproject.toml:

    [project.entry-points.'paxlite.extensions']
    mine = 'my_package.extension:EXTENSION'

Nothing else in the core names a leaf. A leaf that is not in the table, or whose folder is not
there, is absent: nothing but what it adds needs it.
"""

import functools
import importlib
import operator
import os
import sys
from collections.abc import Iterator
from typing import Any

from paxlite.core.errors import UserError, line_of
from paxlite.core.extension import Extension, imported
from paxlite.core.former_modules import OF_THE_CORE

# The leaves, each with a module `paxlite.<leaf>.extension`, and what they add, for messages about
# one that is absent. Callbacks are called in this order.
OFFERED = {
  'stores': ('gs://', 's3://'),
  'quantization': (
    'USE_FP8', 'USE_INT8', 'FROZEN_DTYPE', 'FROZEN_DTYPE of a task', 'ADAM_MOMENTS_DTYPE',
  ),
  'adapters': (
    'USE_LORA', 'a model without factors', 'LORA_ALPHA', 'LORA_RS', 'LORA_DROPOUT', 'LORA_TARGETS',
    'LORA_RANK_PATTERN', 'LORA_ALPHA_PATTERN', 'LORA_LAYERS', 'LORA_MODULES_TO_SAVE', 'LORA_TOKENS',
  ),
  'more_optimizers': (
    'OPTIMIZER=soap', 'OPTIMIZER=lion', 'OPTIMIZER=sgd', 'OPTIMIZER=adafactor',
    'OPTIMIZER=schedule_free', 'QK_CLIP',
  ),
  'chats': (),
  'generation': ('generate', 'chat', 'TrainedModel.inference'),
  'serving': ('serve',),
  'training_api': ('serve --train',),
  'eval': ('zero-shot', 'lm-eval', 'decode', 'EVAL_TASKS'),
  'weights': ('import', 'export', 'families', 'names of peft'),
  'report': ('report', 'goodput', 'diff'),
  'transformer_engine': ('convert-te', 'USE_TE'),
  'trackers': ('TRACKERS',),
  'doctor': ('doctor',),
  'ladder': ('ladder',),
  'recipes': ('recipe',),
  'run_data': ('data', 'LEAVE_OUT'),
  'tokenization': ('tokenize', 'train-tokenizer'),
  'local_checkpoints': (),
  'finetuning': ('finetune', 'data of examples', 'a reference model', 'SftFiles'),
  'environments': (),
  'proof': ('verify', 'bisect', 'prove', 'export --proof'),
  'context_parallelism': ('the mesh axis context', 'CONTEXT_ATTENTION'),
  'pipeline': ('the mesh axis stage',),
  'aot': ('plan', 'compile', 'explain', 'CHECKPOINT_POLICY=AUTO'),
  'hub': ('export --push',),
  'other_systems': (),
  'contrib': ('SeqioTask',),
}  # fmt: skip
BUILT_IN = [*OFFERED]  # the table: a leaf that is taken out of it is absent
_GROUP = 'paxlite.extensions'


@functools.cache
def found() -> tuple[Extension, ...]:
  """Returns the extensions: those of the table in its order, and then those of packages by name.

  Raises UserError if the extension of a package cannot be imported, or adds what another one has.
  """
  extensions = [*_of_leaves(), *_of_packages()]
  owners: dict[str, str] = {}
  for extension in extensions:
    for name in extension.added:
      if name in owners:
        raise UserError(
          f'the extensions {owners[name]} and {extension.name} both add {name}: uninstall one'
        )
      owners[name] = extension.name
  return tuple(extensions)


def added(kind: str) -> list[Any]:
  """Returns what all extensions add of a kind that is a tuple, such as 'parts', imported."""
  return [imported(name) for extension in found() for name in getattr(extension, kind)]


def hook(name: str) -> Any:
  """Returns the function that an extension has for `name`; see Extension.hooks.

  Raises UserError if no extension has one.
  """
  reference = next((e.hooks[name] for e in found() if name in e.hooks), None)
  if reference is None:
    raise UserError(missing(name) or f'no extension has {name}')
  return imported(reference)


def hint(kind: str, *written: object) -> Any:
  """Returns what an extension answers to what a user has written; '' if none knows it.

  Args:
    kind: What it is; see Extension.hints.
    written: The arguments of such a function.
  """
  answers = (imported(e.hints[kind])(*written) for e in found() if kind in e.hints)
  return next(filter(None, answers), '')


def former_modules() -> dict[str, str]:
  """Returns the present names of modules of leaves by their former ones."""
  of_leaves = (leaf.former_modules for leaf in _of_leaves())
  return functools.reduce(operator.or_, map(dict, of_leaves), OF_THE_CORE)


def missing(name: str) -> str:
  """Returns a sentence on the absent leaf that adds a command, a hook or a scheme; '' for others.

  Args:
    name: What is asked for and was not found.
  """
  leaf = next((leaf for leaf, names in OFFERED.items() if name in names), None)
  if leaf is None:
    return ''
  return f'{name} needs the extension {_lacking(leaf) or leaf}, which is not installed'


def lacking(name: str) -> str:
  """Returns the same sentence, and '' where the leaf is there."""
  return missing(name) if all(name not in e.added for e in found()) else ''


def _lacking(name: str) -> str:
  """Returns the name of a leaf, or of one that it needs, that is not installed; or ''."""
  leaf = _leaf(name) if name in BUILT_IN else None
  return name if leaf is None else next(filter(None, map(_lacking, leaf.needs)), '')


def _of_leaves() -> list[Extension]:
  leaves = [*filter(None, map(_leaf, BUILT_IN))]
  names = {leaf.name for leaf in leaves}
  while lacking := {leaf.name for leaf in leaves if not names.issuperset(leaf.needs)}:
    leaves = [leaf for leaf in leaves if leaf.name not in lacking]
    names -= lacking
  return leaves


def _leaf(name: str) -> Extension | None:
  try:
    found: Extension = importlib.import_module(f'paxlite.{name}.extension').EXTENSION
  except ModuleNotFoundError as e:
    if e.name not in (f'paxlite.{name}', f'paxlite.{name}.extension'):
      raise
    return None
  return found


def _of_packages() -> Iterator[Extension]:
  if not _any_installed():
    return
  from importlib import metadata

  for entry in sorted(metadata.entry_points(group=_GROUP)):
    try:
      extension = entry.load()
    except Exception as e:  # of any kind, in the module of another
      raise UserError(
        f'the extension {entry.name} ({entry.value}) cannot be imported: {line_of(e)}. Repair or '
        'uninstall its package'
      ) from None
    if not isinstance(extension, Extension):
      raise UserError(
        f'the extension {entry.name}: {entry.value} is not a paxlite.core.extension.Extension'
      )
    yield extension


def _any_installed() -> bool:
  """Whether a package has entry points for paxlite; to import importlib.metadata takes 50 ms."""
  for folder in sys.path:
    try:
      names = os.listdir(folder or '.')
    except OSError:
      continue
    for name in names:
      if name.endswith(('.dist-info', '.egg-info')):
        try:
          with open(os.path.join(folder, name, 'entry_points.txt'), 'rb') as f:
            if f'[{_GROUP}]'.encode() in f.read():
              return True
        except OSError:
          continue
  return False
