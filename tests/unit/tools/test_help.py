"""The help of the commands names attributes that exist."""

import ast
import pathlib
import re

from paxlite import tools
from paxlite.config.attributes import attribute_types
from paxlite.experiments.registry import experiments
from paxlite.tools import modes

_FOLDER = pathlib.Path(tools.__path__[0])


def test_names_of_attributes_in_help_exist():
  texts = [*modes._HELP.values()]
  texts += [ast.get_docstring(ast.parse(p.read_text())) or '' for p in _FOLDER.glob('*.py')]
  known = {name for cls in experiments().values() for name in attribute_types(cls)}
  named = {name for text in texts for name in re.findall(r'\b[A-Z]+(?:_[A-Z]+)+\b', text)}
  assert 'DECODE_FILES' in named
  assert named - known == {'XLA_FLAGS'}  # of the environment
