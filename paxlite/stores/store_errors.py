"""Translates errors of object stores to OSError, FileNotFoundError or StoreError."""

import contextlib
import errno
import re
from collections.abc import Iterator

from paxlite.core.errors import UnreadableError, UserError

_CREDENTIALS = {
  's3': (
    'no credentials for s3:// were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a '
    'profile in ~/.aws/credentials, or give the machine a role'
  ),
  'gs': (
    'no credentials for gs:// were found: gcloud auth application-default login, '
    'GOOGLE_APPLICATION_CREDENTIALS=FILE, or give the machine a service account'
  ),
}
# parts of obstore's messages: XML answers, paths of metadata servers, statuses
_NO_BUCKET = re.compile(r'NoSuchBucket|The specified bucket does not exist')
_NO_CREDENTIALS = re.compile(
  r'/latest/api/token|/latest/meta-data|computeMetadata|169\.254\.169\.254|metadata\.google'
  r'|[Mm]issing ?(secret|access|credential)|InvalidCredential|not find credential'
)
_REFUSED = re.compile(r'\b(401 Unauthorized|403 Forbidden)|oauth|OAuth|invalid_grant')
_CODE = re.compile(r'<Code>(\w+)</Code>')
_BAD_NAME = re.compile(r'invalid path: .*?[Pp]ath "([^"]*)"', re.DOTALL)
_NO_STORE = re.compile(r'invalid list response|missing from response|non-partial response')
_SKEWED = 'RequestTimeTooSkewed'


class StoreError(UserError):
  """A bucket does not exist, or access to it is denied.

  Args:
    address: What was asked for.
    reason: What is wrong. It is the same for all objects, so that it can be said once.
  """

  def __init__(self, address: str, reason: str):
    super().__init__(f'{address}: {reason}')
    self.reason = reason


def reason_of(error: Exception) -> str:
  """Returns the error without the object's name, so that it can be reported once."""
  reason = error.reason if isinstance(error, StoreError) else getattr(error, 'strerror', None)
  return reason or str(error) or repr(error)


@contextlib.contextmanager
def reading(address: str) -> Iterator[None]:
  """Turns OSErrors from the block into UnreadableErrors that name the address."""
  try:
    yield
  except OSError as e:
    place = e.filename or address
    raise UnreadableError(f'{place} cannot be read: {e.strerror or e}') from None


@contextlib.contextmanager
def translated(address: str) -> Iterator[None]:
  """Turns obstore's errors into FileNotFoundError, OSError or StoreError."""
  try:
    yield
  except Exception as e:
    if not type(e).__module__.startswith(('obstore', 'builtins')):
      raise
    raise _translation(e, address) from e


def _translation(error: Exception, address: str) -> Exception:
  from obstore import exceptions

  text = str(error).partition('\n\nDebug source')[0]
  if _NO_BUCKET.search(text):
    bucket = address.split('/')[2]
    return StoreError(address, f'bucket {bucket} does not exist: create it, or correct the name')
  if isinstance(error, FileNotFoundError):
    return FileNotFoundError(errno.ENOENT, 'the object does not exist', address)
  if isinstance(error, exceptions.AlreadyExistsError | exceptions.PreconditionError):
    return FileExistsError(errno.EEXIST, 'it has been changed by another process', address)
  if isinstance(error, OSError) and error.filename is not None:
    return error  # It is of a file on this machine.
  if _NO_CREDENTIALS.search(text):
    return StoreError(address, _CREDENTIALS[address.partition(':')[0]])
  if name := _BAD_NAME.search(text):
    return StoreError(
      address,
      f'an object below it is named {name[1][:200]!r}, which cannot be a file path (an empty '
      'part, . or .., or a control character): rename or delete it',
    )
  code = _CODE.search(text)
  if code and code[1] == _SKEWED:
    return StoreError(address, f'the clock of this machine is wrong ({_SKEWED}): set it')
  denied = exceptions.PermissionDeniedError | exceptions.UnauthenticatedError
  if isinstance(error, denied) or _REFUSED.search(text):
    said = f' ({code[1]})' if code else ''
    return StoreError(
      address,
      f'the store refuses these credentials{said}: they are wrong or expired, or lack the '
      'permission to read, write, list and delete objects there',
    )
  return OSError(errno.EIO, _reason(text), address)


def _reason(text: str) -> str:
  """Returns the reason in an error of obstore, which names the request and the whole answer."""
  first = (text.strip() or 'it failed').splitlines()[0]
  if status := re.search(r'status code: (\d{3} [A-Za-z ]+)', first):
    return f'the store answered {status[1].strip()}'
  if _NO_STORE.search(first):
    said = first.rpartition(': ')[2][:200]
    return f'the server is not an object store ({said}): look for a proxy'
  return f'the store does not answer ({first.rpartition(" - ")[2][:200]})'
