"""python -m paxlite.tools

Prints the tools, one per line. Each tool explains its flags with --help.
"""

import ast
import pathlib
import re

from paxlite.core import command_line


def listing() -> str:
  """Returns every tool with its purpose, read from the files so that nothing is imported."""
  files = sorted(pathlib.Path(__file__).parent.glob('[a-z]*.py'))
  return '\n'.join(
    line(f'paxlite.tools.{file.stem}', _purpose(file)) for file in files if file.stem != 'cli'
  )


def line(module: str, purpose: str) -> str:
  return f'  python -m {module:<28} {purpose}'


def _purpose(file: pathlib.Path) -> str:
  """Returns the first clause below the usage in a module's docstring."""
  text = ast.get_docstring(ast.parse(file.read_text())) or ''
  paragraph = ' '.join(text.partition('\n\n')[2].partition('\n\n')[0].split())
  return re.split(r'[.,:;] |\.$', paragraph)[0]


if __name__ == '__main__':
  with command_line.printing():
    print(listing())
