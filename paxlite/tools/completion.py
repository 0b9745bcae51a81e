"""paxlite completion bash|zsh|fish

Prints a script that completes commands, flags, experiments, attributes and files. To use it:

  bash   eval "$(paxlite completion bash)"        in ~/.bashrc
  zsh    eval "$(paxlite completion zsh)"         in ~/.zshrc, after compinit
  fish   paxlite completion fish | source         in ~/.config/fish/config.fish

Example:
  paxlite completion bash >> ~/.bashrc
"""

import ast
import functools
import pathlib
from collections.abc import Iterable, Sequence

from paxlite import extensions
from paxlite.cli.parser import Parser
from paxlite.config.experiment_file import FINE_TUNING
from paxlite.tools import listings
from paxlite.tools.commands import commands, find

_SCRIPTS = {
  'bash': """_paxlite() {
  local word=${COMP_WORDS[COMP_CWORD]}
  COMPREPLY=($(compgen -W "$(paxlite completion words "${COMP_WORDS[@]:1:COMP_CWORD}")" -- "$word"))
  [[ ${COMPREPLY[0]} == *= ]] && compopt -o nospace
}
complete -o default -F _paxlite paxlite""",
  'zsh': """_paxlite() {
  local -a found
  found=(${(f)"$(paxlite completion words "${(@)words[2,CURRENT]}")"})
  compadd -S '' -- ${(M)found:#*=}
  compadd -- ${found:#*=}
  _files
}
compdef _paxlite paxlite""",
  'fish': """function __paxlite_words
  paxlite completion words (commandline -opc)[2..-1] (commandline -ct)
end
complete -c paxlite -a '(__paxlite_words)'""",
}

PARSER = Parser(__doc__)
PARSER.option('shell', 'shell', choices=tuple(_SCRIPTS))


def main(argv: Sequence[str]) -> None:
  if argv[:1] == ['words']:
    print('\n'.join(words(argv[1:])))
  else:
    print(_SCRIPTS[PARSER.parsed(argv).shell])


def words(typed: Sequence[str]) -> list[str]:
  """Returns what the last of the typed words may become; the first one is the command."""
  *before, last = typed or ['']
  if before[:1] == ['finetune'] and len(before) > 1:  # the attributes are not those of the model
    method = next((m for m in FINE_TUNING if f'--method={m}' in before), 'sft')
    before[1:] = [FINE_TUNING[method]]
  if not before:
    return _beginning(last, [*commands(), '--help', '--version'])
  command = find(before[0])
  parser = None if command is None else command.parser
  if parser is None:
    return []
  if last.startswith('--fdl.') and parser.takes_attributes:
    return [f'--fdl.{name}' for name in _attributes(last.removeprefix('--fdl.'), before[1:])]
  if last.startswith('-'):
    return _beginning(last, parser.flags())
  found: list[str] = []
  if parser.names_experiment:
    names = (row[1] for row in listings.experiments())
    found = _beginning(last, names) + _own_classes(last)
  if parser.takes_attributes and len(before) > 1:
    found += _attributes(last, before[1:])
  return found


def _attributes(text: str, before: Sequence[str]) -> list[str]:
  """Returns NAME= for the attributes that begin with a text: those of the experiment before it."""
  known = next(filter(None, map(_names_of, before)), None)
  if known is None:
    known = sorted(a['name'] for a in listings.attributes())
  return [f'{name}=' for name in _beginning(text, known)]


def _names_of(word: str) -> list[str]:
  """Returns the attributes of the experiment that a word names; [] if it names none here.

  The classes are read and not imported, which would take seconds.
  """
  name = word.removeprefix('--fdl_config=')
  classes = _published()
  if name not in classes:
    return []
  found: set[str] = set()
  owners = [name]
  for owner in owners:
    bases, attributes_of_class = classes.get(owner, ([], []))
    found.update(attributes_of_class)
    owners += bases
  # those of an optimizer, or of an extension, are in no class of these modules
  owners += [part.rpartition(':')[2] for e in extensions.found() for part in e.parts]
  where = {row['name']: row['where'].rpartition('.')[2] for row in listings.attributes()}
  return sorted(found | {name for name, cls in where.items() if cls in owners})


@functools.cache
def _published() -> dict[str, tuple[list[str], list[str]]]:
  """Returns the bases and the attributes of each class in the modules of experiments, by name."""
  found = {}
  package = pathlib.Path(__file__).parent.parent
  folders = 'experiments', *extensions.OFFERED
  paths = (path for folder in folders for path in (package / folder).rglob('*.py'))
  codes = (path.read_bytes() for path in paths)
  for code in (code for code in codes if b'paxlite.experiments' in code):
    for node in ast.parse(code).body:
      if isinstance(node, ast.ClassDef):
        bases = [ast.unparse(base).rpartition('.')[2] for base in node.bases]
        found[node.name] = bases, [n for n in map(_declared, node.body) if n.isupper()]
  return found


def _declared(statement: ast.stmt) -> str:
  """Returns the name that a statement of a class declares as an attribute; '' if it does not."""
  if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
    return statement.target.id
  return statement.name if isinstance(statement, ast.FunctionDef) and statement.returns else ''


def _own_classes(text: str) -> list[str]:
  """Returns the dotted names of classes in a module of the current folder that begin with a text.

  The file is read and not imported. Classes without a base are no experiments.
  """
  module, dot, _ = text.rpartition('.')
  parts = module.split('.')
  if not dot or not all(map(str.isidentifier, parts)):
    return []
  path = pathlib.Path(*parts[:-1], f'{parts[-1]}.py')
  try:
    tree = ast.parse(path.read_bytes())
  except (OSError, SyntaxError, ValueError):
    return []
  classes = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.bases)
  return _beginning(text, [f'{module}.{node.name}' for node in classes])


def _beginning(text: str, candidates: Iterable[str]) -> list[str]:
  return [c for c in candidates if c.startswith(text)]
