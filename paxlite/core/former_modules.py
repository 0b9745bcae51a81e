"""Modules that have moved: their former names are understood, in imports and in dotted paths."""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import types
from collections.abc import Sequence

_TUNING = 'paxlite.finetuning'
# Names of modules and packages. What is in a package has moved with it.
FORMER = {
  'paxlite.data.chat_format': 'paxlite.chats.chat_format',
  'paxlite.data.conversations': 'paxlite.chats.conversations',
  'paxlite.data.labelled_answers': f'{_TUNING}.preferences.labelled_answers',
  'paxlite.data.preferences': f'{_TUNING}.preferences.preference_rows',
  'paxlite.data.rollouts': f'{_TUNING}.reinforcement.rollouts',
  'paxlite.data.sft': f'{_TUNING}.chats.sft',
  'paxlite.data.sft_formats': 'paxlite.chats.sft_formats',
  'paxlite.eval.inference': 'paxlite.generation.inference',
  'paxlite.experiments.distillation': f'{_TUNING}.distillation.experiment',
  'paxlite.experiments.parts.policy': f'{_TUNING}.reinforcement.attributes',
  'paxlite.experiments.parts.preferences': f'{_TUNING}.preferences.attributes',
  'paxlite.experiments.parts.stored_values': f'{_TUNING}.stored_values',
  'paxlite.experiments.preference_datasets': f'{_TUNING}.preferences.datasets',
  'paxlite.experiments.reward_model': f'{_TUNING}.preferences.reward_model',
  'paxlite.experiments.rollout_datasets': f'{_TUNING}.reinforcement.datasets',
  'paxlite.losses.distillation_losses': f'{_TUNING}.distillation.distillation_losses',
  'paxlite.losses.kto_loss': f'{_TUNING}.preferences.kto_loss',
  'paxlite.losses.policy_loss': f'{_TUNING}.reinforcement.policy_loss',
  'paxlite.losses.preference_losses': f'{_TUNING}.preferences.preference_losses',
  'paxlite.losses.reward_loss': f'{_TUNING}.preferences.reward_loss',
  'paxlite.reinforcement': f'{_TUNING}.reinforcement',
  'paxlite.tools.lm_eval': 'paxlite.eval.commands.lm_eval',
  'paxlite.tools.report_page': 'paxlite.report',
  'paxlite.training.reference': f'{_TUNING}.reference',
}


def current(name: str) -> str | None:
  """Returns the name that a module has now; None if no such module has moved."""
  package = next((p for p in FORMER if f'{name}.'.startswith(f'{p}.')), None)
  return package and FORMER[package] + name.removeprefix(package)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
  """Finds a module by its former name, behind all other finders: it is the same module."""

  def find_spec(
    self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
  ) -> importlib.machinery.ModuleSpec | None:
    now = current(name)
    found = now and importlib.util.find_spec(now)
    if not found:
      return None
    spec = importlib.machinery.ModuleSpec(name, self)
    if found.submodule_search_locations is not None:
      spec.submodule_search_locations = []  # what is in it is found here
    return spec

  def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
    if spec.submodule_search_locations is not None:
      return None
    now = current(spec.name)
    assert now is not None
    module = importlib.import_module(now)
    spec.loader_state = module.__spec__
    return module

  def exec_module(self, module: types.ModuleType) -> None:
    if module.__spec__ is not None and module.__spec__.loader_state is not None:
      module.__spec__ = module.__spec__.loader_state  # which the import has replaced
