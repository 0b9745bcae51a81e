"""paxlite completion bash|zsh|fish

Prints a script that completes commands, experiments, attributes and files. To use it:

  bash   eval "$(paxlite completion bash)"        in ~/.bashrc
  zsh    eval "$(paxlite completion zsh)"         in ~/.zshrc, after compinit
  fish   paxlite completion fish | source         in ~/.config/fish/config.fish

Example:
  paxlite completion bash >> ~/.bashrc
"""

import ast
import pathlib
from collections.abc import Iterable, Sequence

from paxlite.core import command_line
from paxlite.core.json_text import parsed
from paxlite.tools import attributes, experiments
from paxlite.tools.commands import COMMANDS

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
# commands whose words name experiments
_OF_EXPERIMENTS = ('train', 'eval', 'decode', 'show', 'diff', 'plan', 'compile', 'explain')


def main(argv: Sequence[str]) -> None:
  if argv[:1] == ['words']:
    print('\n'.join(words(argv[1:])))
    return
  parser = command_line.Parser(__doc__)
  parser.add_argument('shell', choices=tuple(_SCRIPTS), help='the shell to complete in')
  print(_SCRIPTS[parser.parsed(argv).shell])


def words(typed: Sequence[str]) -> list[str]:
  """Returns what the last of the typed words may become; the first one is the command."""
  *before, last = typed or ['']
  if not before:
    return _beginning(last, [*COMMANDS, '--help', '--version'])
  if before[0] not in _OF_EXPERIMENTS:
    return []
  if last.startswith('--fdl.'):
    return [f'--fdl.{name}' for name in _attributes(last.removeprefix('--fdl.'), before[1:])]
  names = [row[1] for row in parsed(experiments.INDEX.read_text(encoding='utf-8'))]
  found = _beginning(last, names) + _own_classes(last)
  return found + (_attributes(last, before[1:]) if len(before) > 1 else [])


def _attributes(text: str, before: Sequence[str]) -> list[str]:
  """Returns NAME= for the attributes that begin with a text: those of the experiment before it."""
  known = next(filter(None, map(_names_of, before)), None)
  if known is None:
    known = [a['name'] for a in attributes.described()]
  return [f'{name}=' for name in _beginning(text, known)]


def _names_of(word: str) -> list[str]:
  """Returns the attributes of the experiment that a word names; [] if it names none here.

  A module of the user is not imported, because that would run its code.
  """
  from paxlite.core.attributes import attribute_types
  from paxlite.core.errors import UserError
  from paxlite.experiments.registry import find

  word = word.removeprefix('--fdl_config=')
  if word.startswith('-') or not word.isidentifier():
    return []
  try:
    return sorted(attribute_types(find(word)))
  except UserError:
    return []


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


if __name__ == '__main__':
  command_line.run(main)
