"""Compares the tables of names in docs/migrating_from_*.md with those that hints come from.

`python -m tests.rules.test_names --update` rewrites the tables.
"""

import pathlib
import re
import sys

import pytest

from paxlite.other_systems.answers import Answer, Names, names_of
from tests.support import runs

PAGES = sorted((runs.ROOT / 'docs').glob('migrating_from_*.md'))
BLOCK = re.compile(r'(<!-- names_of_(\w+)\.(\w+) -->\n).*?(<!-- end -->)', re.DOTALL)


def cell(answer: Answer) -> str:
  start = {
    'same': 'the same', 'renamed': answer.target, 'instead': '', 'needless': 'omit',
    'absent': 'not supported',
  }[answer.kind]  # fmt: skip
  text = f'{start}: {answer.text}' if start and answer.text else start or answer.text
  text = re.sub(r'(?<![\w-])(--[a-z][\w.]*(?:=[\w.]+)?)', r'`\1`', text)
  return re.sub(r'docs/(\w+\.md)', r'[\1](\1)', text)


def table(names: Names) -> str:
  """Returns a Markdown table, in which names with the same answer share a row.

  It leaves out names that are the same in paxlite, unless there is more to say.
  """
  rows: dict[str, list[str]] = {}
  for name, answer in names.items():
    if (text := cell(answer)) != 'the same':
      rows.setdefault(text, []).append(name)
  lines = [f'| {", ".join(names)} | {text} |' for text, names in rows.items()]
  return '\n'.join(['', '| name | in paxlite |', '|---|---|', *lines, '', ''])


def updated(page: pathlib.Path) -> str:
  def block(match: re.Match[str]) -> str:
    return match[1] + table(names_of(match[2])[match[3]]) + match[4]

  return BLOCK.sub(block, page.read_text())


@pytest.mark.parametrize('page', PAGES, ids=lambda p: p.stem)
def test_the_tables_are_those_of_the_hints(page):
  assert page.read_text() == updated(page), 'python -m tests.rules.test_names --update'


def test_every_table_is_on_a_page():
  shown = {(m[2], m[3]) for page in PAGES for m in BLOCK.finditer(page.read_text())}
  files = (runs.ROOT / 'paxlite' / 'other_systems').glob('names_of_*.json')
  libraries = [path.stem.removeprefix('names_of_') for path in files]
  there = {(library, name) for library in libraries for name in names_of(library)}
  assert shown == there


if __name__ == '__main__' and '--update' in sys.argv:
  for path in PAGES:
    path.write_text(updated(path))
