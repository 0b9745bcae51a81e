"""The published families: one table for each, which works in both directions.

A table is the module `weights` in the folder of a family. It has FAMILIES, by the model_type of
transformers. It may have OTHER_TYPES, names that a family has in some published files alone, and
TEXT_DEFAULTS, by the model_type of models with images: what text_config leaves out, because these
are transformers' defaults. docs/adding_a_family.md describes how to add one.
"""

import contextlib
import pkgutil
from collections.abc import Iterator
from types import ModuleType

from paxlite import experiments
from paxlite.core.json_text import JsonObject
from paxlite.experiments import registry
from paxlite.weights.family import Family


def _tables() -> Iterator[ModuleType]:
  """Yields the tables of all families that are installed."""
  for found in pkgutil.iter_modules(experiments.__path__, f'{experiments.__name__}.'):
    if found.ispkg:
      with contextlib.suppress(registry.Absent):
        yield registry.imported(f'{found.name}.weights')


_TABLES = [table for table in _tables() if hasattr(table, 'FAMILIES')]
TEXT_DEFAULTS: dict[str, JsonObject] = {
  name: values for t in _TABLES for name, values in vars(t).get('TEXT_DEFAULTS', {}).items()
}
OTHER_TYPES: dict[str, str] = {
  name: usual for t in _TABLES for name, usual in vars(t).get('OTHER_TYPES', {}).items()
}
_every = {name: family for t in _TABLES for name, family in t.FAMILIES.items()}
# those with the fewest classes first: the simplest that an experiment fits is the one to export it
FAMILIES: dict[str, Family] = dict(
  sorted(_every.items(), key=lambda item: len(item[1].experiment.__mro__))
)
