"""The help of the commands names attributes and flags that exist."""

import ast
import importlib.util
import pathlib
import re

import pytest

from paxlite import main
from paxlite.config.attributes import attribute_types
from paxlite.experiments.registry import experiments
from paxlite.tools.commands import commands

PARSERS = {c.name: c.parser for c in commands().values() if c.parser} | {'main': main.PARSER}
OF_OTHERS = {
  'list': 'import',  # which every command takes
  'compile': 'compiled_step xla_dump_to',
  'import': 'base pax',
  'convert-te': 'input-path',
}


def test_names_of_attributes_in_help_exist():
  found = [importlib.util.find_spec(command.module) for command in commands().values()]
  paths = [pathlib.Path(spec.origin) for spec in found]
  texts = [ast.get_docstring(ast.parse(path.read_text())) or '' for path in paths]
  known = {name for cls in experiments().values() for name in attribute_types(cls)}
  named = {name for text in texts for name in re.findall(r'\b[A-Z]+(?:_[A-Z]+)+\b', text)}
  assert 'DECODE_FILES' in named
  assert named - known == {'XLA_FLAGS'}  # of the environment


@pytest.mark.parametrize('name', PARSERS)
def test_flags_in_help_exist(name):
  """A flag of another command is named after that command, or is in OF_OTHERS."""
  text = PARSERS[name].format_help()
  own = re.sub(rf'(?:paxlite|python -m) (?!{name}\b)[a-z].*', '', text)
  known = {flag.lstrip('-') for flag in PARSERS[name]._option_string_actions}
  named = set(re.findall(r'(?<![\w-])--([a-z][\w-]*)', own)) - known - {'fdl'}
  assert named == set(OF_OTHERS.get(name, '').split())
