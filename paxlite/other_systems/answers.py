"""Answers to a user who gives a name of another library: a flag, an attribute, a class, a variable.

The tables of names are in names_of_pax.py and its neighbors. other_names.py looks names up in them,
and the pages docs/migrating_from_*.md show them.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal

Names = Mapping[str, 'Answer']
Kind = Literal['same', 'renamed', 'instead', 'needless', 'absent']
Accepted = Literal['', 'false', 'any']


@dataclasses.dataclass(frozen=True)
class Answer:
  """The paxlite equivalent of a name in another library."""

  # whether paxlite has this name, has another one for it, does the same in another way, needs none,
  # or has nothing like it
  kind: Kind
  target: str = ''  # the name in paxlite, of kind 'renamed'
  text: str = ''  # an explanation, the way to do it here, or the reason, without a full stop
  # the values with which a flag of Pax's main is accepted: none, false, or any
  accepted: Accepted = ''

  def sentence(self) -> str:
    """Returns the answer as the end of a message; '' if there is nothing to say."""
    if self.kind == 'renamed':
      note = f' ({self.text})' if self.text else ''
      return f'It is {self.target} here{note}.'
    start = {'needless': 'Leave it out: ', 'absent': 'Not supported: '}
    return f'{start.get(self.kind, "")}{self.text}.' if self.text else ''


SAME = Answer('same')


def same(text: str) -> Answer:
  """Returns the answer for a name that paxlite has, with an explanation."""
  return Answer('same', text=text)


def renamed(target: str, text: str = '') -> Answer:
  """Returns the answer for a name that is `target` in paxlite."""
  return Answer('renamed', target, text)


def instead(text: str, accepted: Accepted = '') -> Answer:
  """Returns the answer for what is done in another way, which `text` says in a sentence."""
  return Answer('instead', text=text, accepted=accepted)


def needless(text: str, accepted: Accepted = '') -> Answer:
  """Returns the answer for a name that can be left out, because of `text`."""
  return Answer('needless', text=text, accepted=accepted)


def absent(text: str, accepted: Accepted = '') -> Answer:
  """Returns the answer for what paxlite does not have; `text` says what it has."""
  return Answer('absent', text=text, accepted=accepted)


def each(names: str, answer: Answer) -> dict[str, Answer]:
  """Returns the same answer for several names, which blanks separate."""
  return dict.fromkeys(names.split(), answer)
