"""Answers users who come with the names of Pax, MaxText, transformers, TRL or seqax.

The tables are in names_of_pax.json and its neighbors; the pages docs/migrating_from_*.md show them,
and a test compares both. Apart from flags of Pax that change nothing here, and those of converters,
paxlite does not accept the names: a message says what they are called.
"""

import itertools
from collections.abc import Iterable, Sequence

from paxlite.core.errors import UserError
from paxlite.other_systems.answers import Answer, Names, names_of

_PAX, _TRL = names_of('pax'), names_of('trl')
# Libraries with attributes, in the order in which their answers are given.
LIBRARIES: dict[str, Names] = {
  'Pax': _PAX['ATTRIBUTES'],
  'MaxText': names_of('maxtext')['KEYS'],
  'transformers': names_of('transformers')['ARGUMENTS'],
  'TRL': {name: answer for table in _TRL.values() for name, answer in table.items()},
  'seqax': names_of('seqax')['KEYS'],
}
_ATTRIBUTES = {
  library: {name.upper(): answer for name, answer in names.items()}
  for library, names in LIBRARIES.items()
}
_CONVERTERS: dict[str, Names] = {  # by the command that takes their flags
  'import': {**_PAX['CONVERT_LLAMA'], **names_of('maxtext')['CONVERT_LLAMA']},
  'convert-te': _PAX['CONVERT_TE'],
}
_PAX_CONFIGS = 'paxml.contrib.gpu.scripts_gpu.configs.'
_FALSE = {'false', 'f', '0', 'no', 'n', 'off'}


def attribute_answers(name: str) -> dict[str, Answer]:
  """The answers for an attribute by library, for example {'Pax': …}; without equal sentences.

  A key of seqax is found without the groups that it is in, too: `d_ff` is `model.d_ff`.
  """
  upper = name.upper().lstrip('+')
  found: dict[str, Answer] = {}
  for library, names in _ATTRIBUTES.items():
    keys = upper, f'MODEL.{upper}', f'TRAINING.{upper}'
    answer = next((names[key] for key in keys if key in names), None)
    if answer and answer.sentence() not in {a.sentence() for a in found.values()}:
      found[library] = answer
  return {k: a for k, a in found.items() if a.sentence()}


def attribute_hint(name: str) -> str:
  """A sentence and a blank, with what an attribute of another library is here; '' for others.

  Libraries are named where they mean different things by it.
  """
  found = attribute_answers(name)
  targets = {a.target for a in found.values()}
  if len(targets) > 1 or (len(found) > 1 and not all(targets)):
    return ''.join(f'In {k}: {a.sentence()} ' for k, a in found.items())
  for answer in found.values():
    if answer.target == name:  # it is the name here, and this class lacks it
      return f'{answer.text[:1].upper()}{answer.text[1:]}. ' if answer.text else ''
    return f'{answer.sentence()} '
  return ''


def flag_hint(name: str) -> str:
  """A sentence with what a flag or argument of another library is here; '' for other names."""
  name = name.replace('-', '_')
  if name in _PAX['FLAGS']:
    return _PAX['FLAGS'][name].sentence()
  if name.isupper() and not attribute_answers(name):
    return f'If it is an attribute, write {name}=VALUE.'
  targets = {a.target for a in attribute_answers(name).values()} - {''}
  written = f'Write {min(targets)}=VALUE.' if len(targets) == 1 else ''
  return (attribute_hint(name) + written).rstrip()


def arguments_hint(arguments: Sequence[str]) -> str:
  """A sentence for each argument of the form key=value that another library knows."""
  hints: list[str] = []
  for argument in arguments:
    name = argument.partition('=')[0]
    hint = flag_hint(name)
    if argument.endswith(('.yml', '.yaml')):
      hint = '--fdl_config=EXPERIMENT is used in place of a YAML file.'
    if hint:
      hints.append(f'{name}: {hint}' if hints else hint)
  return ' '.join(hints)


def mode_hint(mode: str) -> str:
  """A sentence about a --mode of Pax that paxlite does not have; '' for other values."""
  answer = _PAX['MODES'].get(mode)
  return answer.sentence() if answer else ''


def experiment_hint(name: str) -> str:
  """A sentence about the experiment of Pax whose path is `name`; '' for other names."""
  module, _, last = name.rpartition('.')
  if last in _PAX['EXPERIMENTS']:
    return _PAX['EXPERIMENTS'][last].sentence()
  if module.startswith(('paxml', 'praxis', 'paxlite.tasks')):
    return "paxlite has the experiments of Pax's GPU scripts: docs/migrating_from_pax.md."
  return ''


def path_here(path: str) -> str:
  """The path or name of the class of Pax's configs.py that `path` names; '' for other paths."""
  if not path.startswith(_PAX_CONFIGS):
    return ''
  # In Pax, these two names are older ones of experiments with data.
  older = {'GPT5B': 'Pile5B', 'GPT175B': 'Pile175B'}
  return older.get(path.removeprefix(_PAX_CONFIGS), path.replace('paxml', 'paxlite', 1))


def warning_about(argument: str) -> str | None:
  """Returns a warning about a flag of Pax that changes nothing here; None for other arguments.

  The warning is '' where the flag turns off what paxlite does not have.
  """
  if not argument.startswith('-'):
    return None
  name, _, text = argument.lstrip('-').replace('-', '_').partition('=')
  flags = _PAX['FLAGS']
  off = text.lower() in _FALSE
  if name not in flags and name.startswith('no'):
    name, off = name.removeprefix('no'), not text
  answer = flags.get(name)
  if answer is None or not answer.accepted or (answer.accepted == 'false' and not off):
    return None
  return '' if answer.accepted == 'false' else f'--{name} does nothing here: {answer.text}.'


def left_out(arguments: Iterable[str]) -> tuple[set[str], list[str]]:
  """Returns the flags of Pax that change nothing here, and warnings about them."""
  said = {argument: warning_about(argument) for argument in arguments}
  return {a for a, warning in said.items() if warning is not None}, [*filter(None, said.values())]


def understood(command: str, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
  """Returns the arguments that a command understands, and warnings; see Extension."""
  return translated(arguments, _CONVERTERS.get(command, {}))


def translated(argv: Sequence[str], names: Names) -> tuple[list[str], list[str]]:
  """Replaces the flags of another converter in a command line.

  Raises UserError if a flag asks for what paxlite does not have.

  Args:
    names: The answers for its flags, in which blanks are underscores.

  Returns:
    The arguments with paxlite's flags, and warnings about flags that are left out.
  """
  kept: list[str] = []
  warnings: list[str] = []
  rest = list(argv)
  while rest:
    argument = rest.pop(0)
    flag, equals, _ = argument.partition('=')
    answer = names.get(flag.removeprefix('--').replace('-', '_'))
    if not flag.startswith('--') or answer is None or answer.kind == 'same':
      kept.append(argument)
      continue
    if answer.kind == 'absent':
      raise UserError(f'{flag}: {answer.sentence()}')
    if answer.kind == 'renamed':
      kept += (answer.target + argument.removeprefix(flag)).split(' ', answer.target.count(' '))
      continue
    warnings.append(f'{flag} does nothing here: {answer.text}.')
    if not equals:  # its value is the next word
      del rest[: len(list(itertools.takewhile(lambda a: not a.startswith('-'), rest[:1])))]
  return kept, warnings
