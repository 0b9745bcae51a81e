"""Paths as users write them: on this machine, or in an object store (gs://, s3://)."""

import os
import re

from paxlite.core.errors import UserError
from paxlite.stores.addresses import SCHEMES, Address

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
    raise UserError(f'{text}: there is no user {path.partition("/")[0][1:]}')
  return kind + home


def local(text: str) -> str:
  """Returns `text`, a path on a file system, with `~` expanded.

  Raises:
    UserError: It is the address of an object store (gs://, s3:// …), or names an unknown user.
  """
  scheme = _SCHEME.match(text)
  if scheme is not None:
    raise UserError(
      f'{text} is in an object store ({scheme[2]}://), and this must be a path on this machine: '
      'copy what is needed, or mount the bucket'
    )
  return expanded(text)


def stored(text: str) -> str:
  """Returns `text`, a path on a file system or an address of gs:// or s3://, with `~` expanded.

  Raises:
    UserError: It is an address of another kind, is not a valid address, or names an unknown user.
  """
  scheme = _SCHEME.match(text)
  if scheme is None:
    return expanded(text)
  if scheme[2] not in SCHEMES:
    raise UserError(
      f'{text}: paxlite knows the object stores gs:// and s3://, and not {scheme[2]}://; copy what '
      'is needed, or mount it, and name a path on this machine'
    )
  return f'{scheme[1]}{Address.parsed(text.removeprefix(scheme[1]))}'
