"""The commands of `paxlite`, from the core and from extensions."""

from collections.abc import Mapping, Sequence

from paxlite import extensions
from paxlite.core.extension import Command

_CORE = {
  'Runs': (
    ('train', 'train an experiment, or continue its run', 'train'),
    ('eval', 'evaluate the last checkpoint of a run', 'eval'),
  ),
  'Experiments': (
    ('list', 'all experiments, with their sizes', 'experiments'),
    ('show', "an experiment's values and what they mean", 'show'),
    ('attributes', 'what every attribute means', 'attributes'),
    ('new', 'write a file with your own experiment', 'new'),
  ),
  'Models': (),  # extensions have these and those for data
  'Data': (),
  'Machines': (('completion', 'complete commands and names in bash, zsh or fish', 'completion'),),
}
_RUNS = 'train', 'eval'
_BY_NAME = {
  name: Command(name, purpose, f'paxlite.tools.{module}', group, name in _RUNS)
  for group, members in _CORE.items()
  for name, purpose, module in members
}


def find(name: str) -> Command | None:
  """Returns the command of a name, or None; extensions are read where the core has none."""
  return _BY_NAME.get(name) or commands().get(name)


def commands() -> Mapping[str, Command]:
  """Returns all commands by name, as `groups` has them."""
  return {command.name: command for group in groups().values() for command in group}


def groups() -> Mapping[str, Sequence[Command]]:
  """Returns all commands by the headings below which they are listed.

  In each group those of the core come first, and then those of the extensions in their order. One
  of an extension with the name of one of the core is left out.
  """
  added = [c for e in extensions.found() for c in e.commands if c.name not in _BY_NAME]
  found: dict[str, list[Command]] = {group: [] for group in _CORE}
  for command in (*_BY_NAME.values(), *added):
    found.setdefault(command.group, []).append(command)
  return {group: members for group, members in found.items() if members}


def listing() -> str:
  """Returns the list of commands by group."""
  width = max(map(len, commands()))
  blocks = [
    '\n'.join([f'{group}:', *(f'  {c.name:<{width}}  {c.purpose}' for c in members)])
    for group, members in groups().items()
  ]
  return '\n'.join(blocks)
