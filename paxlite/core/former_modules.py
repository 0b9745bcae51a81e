"""Modules that have moved: their former names are understood, in imports and in dotted paths."""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import types
from collections.abc import Callable, Mapping, Sequence

# Modules of the core; leaves say theirs themselves.
_PARTS = 'paxlite.experiments.parts'
_HYBRID = 'paxlite.experiments.hybrid'
OF_THE_CORE = {
  f'{_PARTS}.backend': 'paxlite.experiments.language_model',
  f'{_PARTS}.batches': f'{_PARTS}.training_loop',
  f'{_PARTS}.context_parallelism': f'{_PARTS}.attention',
  f'{_PARTS}.faults': f'{_PARTS}.training_loop', f'{_PARTS}.feed_forward': f'{_PARTS}.stack',
  f'{_PARTS}.gated_delta_net': f'{_HYBRID}.delta_net_layers',
  f'{_PARTS}.layers_with_state': f'{_HYBRID}.layers_with_state',
  f'{_PARTS}.long_positions': 'paxlite.experiments.phi.long_positions',
  f'{_PARTS}.low_rank': f'{_PARTS}.memory_savings', f'{_PARTS}.mamba2': f'{_HYBRID}.mamba2_layers',
  f'{_PARTS}.query_growth': f'{_PARTS}.attention_temperature',
  f'{_PARTS}.residual_factor': 'paxlite.experiments.granite.residual_factor',
  f'{_PARTS}.rotary_positions': f'{_PARTS}.positions', f'{_PARTS}.samples': f'{_PARTS}.decoding',
  'paxlite.layers.attention.output_gate': 'paxlite.experiments.qwen_hybrid.output_gate',
  'paxlite.layers.linear_attention': _HYBRID,
}  # fmt: skip


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
  """Finds a module by its former name, behind all other finders: it is the same module.

  Args:
    read: Returns the present names of modules and packages by their former ones. What is in a
      package has moved with it. It is called for the first module that no other finder finds.
  """

  def __init__(self, read: Callable[[], Mapping[str, str]]):
    self._read = read
    self._present: Mapping[str, str] | None = None

  def _current(self, name: str) -> str | None:
    """Returns the name that a module has now; None if no such module has moved."""
    if not name.startswith('paxlite.'):
      return None
    if self._present is None:
      self._present = {}  # reading looks for modules too
      try:
        self._present = self._read()
      except BaseException:
        self._present = None  # the next module asks again
        raise
    package = next((p for p in self._present if f'{name}.'.startswith(f'{p}.')), None)
    return package and self._present[package] + name.removeprefix(package)

  def find_spec(
    self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
  ) -> importlib.machinery.ModuleSpec | None:
    now = self._current(name)
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
    now = self._current(spec.name)
    assert now is not None
    module = importlib.import_module(now)
    spec.loader_state = module.__spec__
    return module

  def exec_module(self, module: types.ModuleType) -> None:
    if module.__spec__ is not None and module.__spec__.loader_state is not None:
      module.__spec__ = module.__spec__.loader_state  # which the import has replaced
