"""The published sizes of a family, whose classes have nothing but a base and values.

models.json in the folder of a family has a row for each: the name of the class, its base, which is
a class of the family's module or of an earlier row, its docstring, and its values.
"""

import pathlib
from collections.abc import Callable
from typing import Any

from paxlite.core.json_text import parsed
from paxlite.experiments.registry import register


def define(module: dict[str, Any]) -> Callable[[str], Any]:
  """Puts the classes of models.json into a family's module, and registers them.

  Args:
    module: The globals of the module.

  Returns:
    A `__getattr__` of the module, from which type checkers know that it has more names.
  """
  package = module['__name__']
  rows = pathlib.Path(module['__file__']).with_name('models.json').read_text('utf-8')
  for name, (base, about, values) in parsed(rows).items():
    own = {'__module__': package, '__doc__': about, **values}
    made: Any = type(name, (module[base],), own)
    module[name] = register(made)

  def missing(name: str) -> Any:
    raise AttributeError(f'module {package!r} has no attribute {name!r}')

  return missing
