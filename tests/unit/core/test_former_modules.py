"""Modules that have moved are found by their former names, and are the same modules."""

import importlib

import pytest

from paxlite import extensions


@pytest.mark.parametrize(('name', 'present'), extensions.former_modules().items())
def test_a_former_name_is_that_of_the_same_module(name, present):
  now = importlib.import_module(present)
  spec = now.__spec__
  former = importlib.import_module(name)
  if not hasattr(now, '__path__'):  # a package is another one, with the same modules
    assert former is now
  assert now.__spec__ is spec


def test_a_module_of_a_former_package():
  former = importlib.import_module('paxlite.reinforcement.environment')
  assert former is importlib.import_module('paxlite.finetuning.reinforcement.environment')


def test_what_was_never_there():
  with pytest.raises(ModuleNotFoundError, match=r'paxlite\.reinforcement\.nothing'):
    importlib.import_module('paxlite.reinforcement.nothing')
