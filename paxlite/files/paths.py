"""Paths as users write them: on this machine, or with a scheme that an extension adds."""

import os
import re

from paxlite.core.errors import UserError
from paxlite.extensions import missing
from paxlite.files import schemes

# sft:~/a.jsonl and lambada:~/b.jsonl name a kind of file before its path
_KIND = re.compile(r'((?:[a-z_]+:)?)(~.*)', re.DOTALL)
_SCHEME = re.compile(r'((?:[a-z_]+:)?)([A-Za-z][A-Za-z0-9+.-]*)://')


def expanded(text: str) -> str:
  """`text` with a `~` or `~user` at the beginning of its path replaced by the home folder.

  Raises:
    UserError: There is no such user. A folder that is called `~` is never meant.
  """
  found = _KIND.fullmatch(text)
  if found is None:
    return text
  kind, path = found.groups()
  home = os.path.expanduser(path)
  if home.startswith('~'):
    raise UserError(f'{text}: user {path.partition("/")[0][1:]} does not exist')
  return kind + home


def local(text: str) -> str:
  """Returns `text`, a path on a file system, with `~` expanded.

  Raises UserError if it has a scheme (gs:// …), or names an unknown user.
  """
  scheme = _SCHEME.match(text)
  if scheme is not None:
    raise UserError(
      f'{text} is in an object store ({scheme[2]}://), but this must be a path on this machine: '
      'copy it, or mount the bucket'
    )
  return expanded(text)


def stored(text: str) -> str:
  """Returns `text`, a path on a file system or an address (gs:// …), with `~` expanded.

  Raises:
    UserError: No extension has its scheme, it is not a valid address, or names an unknown user.
  """
  found = _SCHEME.match(text)
  if found is None:
    return expanded(text)
  kind, scheme = found.groups()
  if f'{scheme}://' not in schemes.known():
    raise UserError(
      f'{text}: {_unknown(f"{scheme}://")}; copy or mount it, and name a path on this machine'
    )
  address = text.removeprefix(kind)
  return kind + schemes.scheme_of(address).checked(address)


def _unknown(scheme: str) -> str:
  known = ' and '.join(schemes.known()) or 'none'
  return missing(scheme) or f'{scheme} is not supported; paxlite reads the object stores {known}'
