"""paxlite attributes [TEXT]

Prints the attributes with TEXT in their names or meanings: type, default and meaning of each.
`paxlite show EXPERIMENT` prints the values of one experiment.

Example:
  paxlite attributes checkpoint
"""

import types
import typing
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from paxlite.cli.parser import Parser
from paxlite.config import attribute_kinds
from paxlite.core.errors import UserError
from paxlite.tools import listings, show

if TYPE_CHECKING:
  from paxlite.experiments.parts.part import Part

PARSER = Parser(__doc__)
PARSER.word('text', 'TEXT', 'part of a name or meaning', required=False)


def main(argv: Sequence[str]) -> None:
  text = (PARSER.parsed(argv).text or '').lower()
  found = [a for a in listings.attributes() if text in f'{a["name"]} {a["meaning"]}'.lower()]
  if not found:
    raise UserError(f'no attribute has {text!r} in its name or meaning')
  subject = ''
  for attribute in found:
    if attribute['subject'] != subject:
      subject = attribute['subject']
      print(f'## {subject}')
    print(f'{attribute["name"]}: {attribute["type"]} = {attribute["default"]}')
    print(f'    {attribute["meaning"]}')


def describe(classes: Iterable[type['Part']]) -> list[dict[str, str]]:
  """Describes the attributes of experiment classes: name, type, default, kind, meaning …

  `where` is the class that declares the attribute and its default, and `subject` the heading of its
  part. The rows are in the order of the subjects.
  """
  rows: dict[str, dict[str, str]] = {}
  subjects: list[str] = []
  for cls in classes:
    subjects += [s for s in cls.subjects() if s not in subjects]
    meanings = show.meanings(cls.declaring())
    for owner in reversed(cls.__mro__):
      for name, annotation in _declared(owner).items():
        if name in rows:
          continue
        kind, value = attribute_kinds.kind_of(annotation), vars(owner).get(name)
        rows[name] = {
          'name': name, 'subject': cls.subject_of(name),
          'where': f'{owner.__module__}.{owner.__qualname__}', 'type': type_text(annotation),
          'default': 'computed' if hasattr(value, 'fget') else repr(value),
          'decides': '' if kind is None else kind.value, 'meaning': meanings.get(name, ''),
        }  # fmt: skip
  return sorted(rows.values(), key=lambda r: (subjects.index(r['subject']), r['name']))


def _declared(cls: type) -> dict[str, object]:
  """Returns the annotations of attributes that the class itself declares or computes."""
  hints = {
    name: hint
    for name, hint in typing.get_type_hints(cls, include_extras=True).items()
    if name.isupper() and name in vars(cls).get('__annotations__', {})
  }
  for name, value in vars(cls).items():
    getter = getattr(value, 'fget', None)
    if name.isupper() and getter is not None:
      hints[name] = typing.get_type_hints(getter, include_extras=True).get('return', Any)
  return hints


def type_text(annotation: object) -> str:
  """Returns the type of an annotation as text: int, list of str, int or None, 'a', 'b'."""
  origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
  if origin is Annotated:
    return type_text(arguments[0])
  if origin is Literal:
    return ', '.join(map(repr, arguments))
  if origin in (typing.Union, types.UnionType):
    return ' or '.join(map(type_text, arguments))
  if origin is list:
    return f'list of {type_text(arguments[0])}'
  return 'None' if annotation is type(None) else getattr(annotation, '__name__', str(annotation))


def page(rows: Sequence[dict[str, str]]) -> str:
  """Returns docs/attributes.md, without the attributes of single families."""
  text = """# Attributes

Attributes of experiments by subject, from their declarations. Set one with `NAME=VALUE` after a
`paxlite` command, or with `--fdl.NAME=VALUE` after `python -m paxlite.main`. "May change" says
whether a run can continue with another value; `computed` defaults follow from other attributes.
`paxlite attributes` adds those of single families, and so does the end of this page on the site.
"""
  return f'{text}{tables(rows)}\n<!-- attributes of families -->\n'


def tables(rows: Sequence[dict[str, str]]) -> str:
  """Returns a heading and a table for each subject."""
  lines, subject = [], ''
  free = {attribute_kinds.Kind.RUN.value, attribute_kinds.Kind.GENERATION.value}
  for row in rows:
    if row['subject'] != subject:
      subject = row['subject']
      lines += ['', f'## {subject}', '', '| attribute | type | default | meaning | may change |']
      lines.append('|---|---|---|---|---|')
    kind, default = row['type'], row['default']
    changes = 'yes' if row['decides'] in free else 'no'
    cells = [f'`{row["name"]}`', kind, f'`{default}`', row['meaning'], changes]
    lines.append('| ' + ' | '.join(c.replace('|', '\\|') for c in cells) + ' |')
  return '\n'.join(lines) + '\n'
