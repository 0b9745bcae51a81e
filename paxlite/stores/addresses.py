"""Addresses in object stores: gs://bucket/key and s3://bucket/key."""

import re

from paxlite.core.errors import UserError

_START = re.compile(r'(gs|s3)://')
_BUCKET = re.compile(r'[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]')


def parsed(address: str) -> tuple[str, str, str]:
  """Returns the scheme of an address, its bucket, and its key; '' is the whole bucket.

  Raises UserError if it is not an address of gs:// or s3:// with a bucket.
  """
  found = _START.match(address)
  if found is None:
    raise UserError(
      f'{address} is not an address of an object store: write gs://bucket/name or s3://…'
    )
  bucket, _, key = address[found.end() :].partition('/')
  if not _BUCKET.fullmatch(bucket):
    raise UserError(
      f'{address} names no bucket: write {found[0]}bucket/name, with at least 3 lower-case letters '
      'or digits'
    )
  parts = [part for part in key.split('/') if part]
  if any(part in ('.', '..') or not part.isprintable() for part in parts):
    raise UserError(
      f'{address}: object names cannot contain the parts . or .., or control characters'
    )
  return found[1], bucket, '/'.join(parts)


def checked(address: str) -> str:
  """Returns an address without superfluous slashes; raises as `parsed` does."""
  scheme, bucket, key = parsed(address)
  return f'{scheme}://{bucket}/{key}'.rstrip('/')
