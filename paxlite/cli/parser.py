"""The parser of all command lines: `paxlite COMMAND` and `python -m paxlite.main`.

Flags may be written as Pax writes them: with one hyphen or two, `--flag value` or `--flag=value`,
and `--noflag` or `--flag=false` for what is on or off. Flags and words come in any order. The type
of an argument is a function of its text. That of a path is `stored` where it may be in an object
store, and `local` elsewhere.
"""

import argparse
import pathlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NoReturn

from paxlite import extensions
from paxlite.core.errors import UserError
from paxlite.core.near_names import did_you_mean
from paxlite.files.paths import expanded, local, stored

Type = Callable[[str], object]  # of an argument's text; its UserError says what is wrong
HELP = frozenset(('-h', '--help', '-help', '--helpfull', '--helpshort'))

_FLAG = re.compile(r'--?([A-Za-z][\w.-]*)(?:=(.*))?', re.DOTALL)
_KINDS = {int: 'a whole number', float: 'a number'}
_METAVARS = {int: 'N', float: 'X', stored: 'PATH', local: 'PATH', expanded: 'PATH'}
_TRUE, _FALSE = {'true', 't', '1'}, {'false', 'f', '0'}  # the words of absl


def experiment_name(text: str) -> str:
  """The type of a word that names an experiment, so that names of experiments complete it."""
  return text


def _switch(text: str) -> bool:
  """The type of what is on or off: --name, --noname, --name=true, --name=false."""
  if text.lower() not in _TRUE | _FALSE:
    raise UserError(f'{text} must be true or false')
  return text.lower() in _TRUE


class _Formatter(argparse.RawDescriptionHelpFormatter):
  """Writes an option and its help on one line where they fit."""

  def __init__(self, prog: str):
    super().__init__(prog, max_help_position=32, width=100)

  def _format_action_invocation(self, action: argparse.Action) -> str:
    if action.type is _switch:
      return f'--[no]{action.dest}' if action.default else action.option_strings[0]
    if not action.option_strings or action.nargs == 0:
      return super()._format_action_invocation(action)
    values = self._format_args(action, _METAVARS.get(action.type, action.dest.upper()))
    return f'{", ".join(action.option_strings)} {values}'


class Parser(argparse.ArgumentParser):
  """The parser of a command's arguments.

  Args:
    doc: The docstring of the command's module: its usage, an empty line, and its description.
  """

  _takes_flags_of_pax = False  # those that do nothing here, and --flagfile
  _attribute = re.compile(r'--?fdl\.|(?=([A-Z][A-Z0-9_]*|task\.[\w.[\]]+)=)')

  def __init__(self, doc: str | None):
    usage, _, description = (doc or '').partition('\n\n')
    super().__init__(
      prog=' '.join(usage.split()[: 2 if usage.startswith('paxlite') else 3]), usage=usage,
      description=description, formatter_class=_Formatter, allow_abbrev=False, exit_on_error=False,
    )  # fmt: skip
    self._option_string_actions['--help'].help = 'print this help'
    self.takes_attributes = False
    self._words: dict[str, str] = {}

  def option(
    self, name: str, help: str, type: Type = str, alias: str | None = None, **more: Any
  ) -> None:
    """Adds an argument, a flag if its name begins with --; the type bool is one of on or off."""
    given = {'type': _switch, 'default': False} if type is bool else {'type': type}
    self.add_argument(*filter(None, (name, alias)), help=help, **{**given, **more})

  def word(
    self, name: str, metavar: str, help: str, type: Type = str, required: bool = True
  ) -> None:
    """Adds an argument without a flag. --name=VALUE is the same."""
    self.option(name, help, type, nargs='?', default=argparse.SUPPRESS, metavar=metavar)
    self.option(f'--{name}', argparse.SUPPRESS, type)
    if required:
      self._words[name] = metavar

  def processes(self) -> None:
    """Declares the options by which the processes of a run find each other."""
    self.option('--multiprocess_gpu', 'one of several processes; implied on Slurm', bool)
    self.option('--server_addr', 'HOST:PORT of process 0')
    self.option('--num_hosts', 'number of processes', int)
    self.option('--host_idx', 'index of this process, from 0', int)

  def attributes(self) -> None:
    """Adds NAME=VALUE and --fdl.NAME=VALUE, which set attributes of the experiment.

    A path task.PATH in the place of NAME sets a value of the config that is built.
    """
    self.takes_attributes = True
    explained = 'attribute; `paxlite show EXPERIMENT` lists them'
    self.add_argument('attributes', nargs=argparse.SUPPRESS, metavar='NAME=VALUE', help=explained)

  def parsed(self, argv: Sequence[str]) -> argparse.Namespace:
    """Returns the arguments; `attributes` has the text of every NAME=text.

    `warnings` are about flags of Pax that do nothing here. Raises UserError if they are not those
    of this command.
    """
    if HELP & set(argv):
      self.print_help()
      self.exit()
    given, warnings = list(argv), list[str]()
    if self._takes_flags_of_pax:
      given = list(_with_files(argv))
      left_out, warnings = extensions.hint('arguments of a run', given) or ((), warnings)
      given = [argument for argument in given if argument not in left_out]
    flags, words, attributes = self._sorted(given)
    try:
      args, more = self.parse_known_args([*flags, *(['--', *words] if words else [])])
    except argparse.ArgumentError as e:
      raise UserError(f'{str(e).removeprefix("argument ")}. See {self.prog} --help') from None
    if more:
      raise UserError(self.excess(more))
    for name, metavar in self._words.items():
      if getattr(args, name) is None:
        raise UserError(f'{metavar} is missing: {self.usage}')
    args.attributes, args.warnings = {}, warnings
    self.complete(args, attributes.keys())
    args.attributes = {**args.attributes, **attributes}
    return args

  def complete(self, options: argparse.Namespace, stated: Collection[str]) -> None:
    """Sets what follows from the words of a command: options, and texts of `attributes`.

    Args:
      stated: Names of attributes that the command line states, which hold in any case.
    """

  def _sorted(self, argv: Sequence[str]) -> tuple[list[str], list[str], dict[str, str]]:
    """Returns the flags as argparse takes them for sure, the words, and the attributes."""
    flags: list[str] = []
    words: list[str] = []
    attributes: dict[str, str] = {}
    into, left = words, list(argv)
    while left:
      argument = left.pop(0)
      found = _FLAG.fullmatch(argument)
      if argument == '--':
        words += left
        break
      if self.takes_attributes and (start := self._attribute.match(argument)):
        name, equals, text = argument[start.end() :].partition('=')
        if not equals:
          raise UserError(f'{argument} has no value: write {argument}=VALUE')
        attributes[name] = text
      elif found is None:
        into.append(argument)
      else:
        action, value = self._switched(found[1], found[2])
        if value is None and action.nargs is None:
          is_flag = lambda text: (
            text == '--' or (text.startswith('-') and self._named(text.lstrip('-')))
          )
          if not left or is_flag(left[0]):
            raise UserError(f'Missing value for flag {argument}. See {self.prog} --help')
          value = left.pop(0)
        flag = action.option_strings[0]
        flags.append(flag if value is None else f'{flag}={value}')
        into = flags if value is None else words  # of --keep A B
    return flags, words, attributes

  def _switched(self, name: str, value: str | None) -> tuple[argparse.Action, str | None]:
    """Returns the flag of this name, and its value, which is implied by --name and --noname."""
    action, other = self._named(name), self._named(name[2:])
    if action is None and name.startswith('no') and other and other.type is _switch:
      if value is not None:
        raise UserError(f'--{name}={value}: --{name} takes no value')
      return other, 'false'
    if action is None:
      raise UserError(f'Unknown command line flag {name!r}. {self.hint(name)}')
    return action, 'true' if value is None and action.type is _switch else value

  def _named(self, name: str) -> argparse.Action | None:
    return self._option_string_actions.get(f'--{name}')

  def hint(self, name: str) -> str:
    """Returns what a flag that does not exist may mean."""
    known = [flag[2:] for flag in self._option_string_actions if flag.startswith('--')]
    other = extensions.hint('flag', name) if self.takes_attributes else ''
    return other or did_you_mean(name, known, prefix='--') or f'See {self.prog} --help'

  def excess(self, words: Sequence[str]) -> str:
    """Returns what is wrong with words for which there is no argument."""
    return f'{words[0]!r} is one name too many: see {self.prog} --help'

  def flags(self) -> list[str]:
    """Returns the flags of the help, with = after those that have a value."""
    shown = [a for a in self._actions if a.help != argparse.SUPPRESS]
    ends = lambda a: '=' if a.nargs is None and a.type is not _switch else ''
    return [flag + ends(a) for a in shown for flag in a.option_strings]

  @property
  def names_experiment(self) -> bool:
    """Whether a word of the command is the name of an experiment."""
    return any(a.type is experiment_name for a in self._actions)

  def error(self, message: str) -> NoReturn:
    """Raises UserError; argparse calls it where a required argument is missing."""
    missing = message.removeprefix('the following arguments are required: ')
    raise UserError(f'{missing} is missing: {self.usage}')

  def _get_value(self, action: argparse.Action, text: str) -> object:
    """Returns the value of a text; argparse would drop what the UserError of a type says."""
    if text is argparse.SUPPRESS:  # the default of a word
      return text
    kind: Any = action.type or str
    try:
      return kind(text)
    except UserError as e:
      said = str(e)
    except ValueError:
      said = f'{text} must be {_KINDS[kind]}'
    flag = [*action.option_strings, f'--{action.dest}'][0]
    starts = text and said.startswith(text)
    raise UserError(f'{flag}={said}' if starts else f'{flag}={text}: {said}')


def _with_files(argv: Iterable[str], within: tuple[str, ...] = ()) -> Iterator[str]:
  """Yields the arguments, and in place of --flagfile=FILE those of its lines.

  Lines that begin with # or // are comments, as in files of absl's flags.
  """
  left = iter(argv)
  for argument in left:
    found = re.fullmatch(r'--?flagfile(?:=(.*))?', argument, re.DOTALL)
    if found is None:
      yield argument
      continue
    path = expanded(next(left, '') if found[1] is None else found[1])
    if path in within:
      raise UserError(f'--flagfile={path} names itself')
    try:
      lines = map(str.strip, pathlib.Path(path).read_text(encoding='utf-8').splitlines())
    except (OSError, ValueError) as e:
      raise UserError(f'--flagfile={path} cannot be read: {e}') from None
    flags = (line for line in lines if line and not line.startswith(('#', '//')))
    yield from _with_files(flags, (*within, path))
