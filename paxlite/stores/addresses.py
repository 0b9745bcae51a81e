"""Addresses in object stores: gs://bucket/key and s3://bucket/key."""

import dataclasses
import re
from typing import Self

from paxlite.core.errors import UserError

SCHEMES = ('gs', 's3')
_START = re.compile(r'([A-Za-z][A-Za-z0-9+.-]*)://')
_BUCKET = re.compile(r'[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]')


@dataclasses.dataclass(frozen=True)
class Address:
  """A place in an object store: an object, or a prefix, which is like a folder.

  Attributes:
    scheme: gs or s3.
    bucket: Name of the bucket.
    key: Name of the object, or the prefix, without slashes at its ends; '' is the whole bucket.
  """

  scheme: str
  bucket: str
  key: str

  @classmethod
  def parsed(cls, text: str) -> Self:
    """Reads an address.

    Raises:
      UserError: It is not an address of gs:// or s3:// with a bucket.
    """
    found = _START.match(text)
    if found is None or found[1] not in SCHEMES:
      raise UserError(
        f'{text} is not an address of an object store: write gs://bucket/name or s3://…'
      )
    bucket, _, key = text[found.end() :].partition('/')
    if not _BUCKET.fullmatch(bucket):
      raise UserError(
        f'{text} names no bucket: write {found[1]}://bucket/name, with at least 3 lower-case '
        'letters or digits'
      )
    parts = [part for part in key.split('/') if part]
    if any(part in ('.', '..') or not part.isprintable() for part in parts):
      raise UserError(f'{text}: the name of an object has no part ., .. or control characters')
    return cls(found[1], bucket, '/'.join(parts))

  def __str__(self) -> str:
    return f'{self.scheme}://{self.bucket}/{self.key}'.rstrip('/')

  def __truediv__(self, name: str) -> Self:
    return dataclasses.replace(self, key=f'{self.key}/{name}' if self.key else name)

  @property
  def parent(self) -> Self:
    """The prefix that the key is directly below."""
    return dataclasses.replace(self, key=self.key.rpartition('/')[0])

  @property
  def name(self) -> str:
    """The last part of the key, or the bucket where there is no key."""
    return self.key.rpartition('/')[2] or self.bucket
