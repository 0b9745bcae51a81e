"""Objects of a bucket of Google Cloud Storage or S3, by the package obstore.

This is the only module that knows obstore. Requests that fail for a reason that may pass (429, 5xx,
a reset, a timeout) are tried again with growing pauses until `patience` is used up. Then they raise
OSError. Failures that a repetition cannot mend (credentials, permission, a missing bucket) raise
StoreError at once.
"""

import configparser
import contextlib
import dataclasses
import datetime
import errno
import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Self

from paxlite.core import shell
from paxlite.core.addresses import Address
from paxlite.core.errors import UserError

PATIENCE = 120.0  # seconds during which a request is tried again
_CONNECT_SECONDS, _SILENT_SECONDS, _REQUEST_SECONDS = 5, 30, 300
_PART = 8 << 20  # bytes of a part of a large upload
_PARTS = 9000  # S3 allows 10,000
_AT_ONCE = 2  # parts of one upload
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


class StoreError(UserError):
  """A bucket cannot be used: it is not there, or its owner does not allow it."""


@dataclasses.dataclass(frozen=True)
class Object:
  """An object of a bucket.

  Attributes:
    key: Its name.
    size: Bytes.
    tag: Changes with every write of the object. In lists it may be another one than elsewhere.
  """

  key: str
  size: int
  tag: str


class ObjectStore:
  """Reads and writes the objects of one bucket. It can be used by several threads.

  Args:
    scheme: gs or s3.
    bucket: Name of the bucket.
    client: obstore's object for the bucket.
  """

  def __init__(self, scheme: str, bucket: str, client: object):
    self.scheme, self.bucket = scheme, bucket
    self._client = client

  @classmethod
  def opened(
    cls,
    address: str | Address,
    patience: float = PATIENCE,
    environment: Mapping[str, str] = os.environ,
  ) -> Self:
    """Opens the bucket of an address; nothing is sent yet.

    Args:
      address: An address in the bucket.
      patience: Seconds during which a request is tried again.
      environment: Variables that name the endpoint and the credentials.

    Raises:
      UserError: The package obstore is missing.
    """
    if isinstance(address, str):
      address = Address.parsed(address)
    try:
      from obstore.store import GCSStore, S3Store
    except ImportError:
      extra = {'gs': 'gcs', 's3': 's3'}[address.scheme]
      raise UserError(f'{address} needs the package obstore: {shell.install(extra)}') from None
    config: Mapping[str, str | bool] = (
      _s3_config(environment) if address.scheme == 's3' else _gs_config(environment)
    )
    endpoint = str(config.get('endpoint') or config.get('base_url') or '')
    make = S3Store if address.scheme == 's3' else GCSStore
    with _translated(address):
      client = make(
        address.bucket,
        config=config,
        client_options={
          'allow_http': endpoint.startswith('http://'),
          'connect_timeout': f'{_CONNECT_SECONDS}s',
          'read_timeout': f'{_SILENT_SECONDS}s',
          'timeout': f'{_REQUEST_SECONDS}s',
        },
        retry_config={
          'max_retries': 1000,  # The time is the limit.
          'retry_timeout': datetime.timedelta(seconds=patience),
          'backoff': {
            'init_backoff': datetime.timedelta(milliseconds=100),
            'max_backoff': datetime.timedelta(seconds=10),
            'base': 2,
          },
        },
      )
    return cls(address.scheme, address.bucket, client)

  def address(self, key: str) -> Address:
    return Address(self.scheme, self.bucket, key)

  def check(self) -> None:
    """Raises StoreError if the bucket is not there or may not be read, OSError if it is silent."""
    import obstore

    with _translated(self.address('')):
      next(iter(obstore.list(self._client, '.paxlite-does-not-exist')), None)

  def read(self, key: str) -> bytes:
    """Returns an object; raises FileNotFoundError if there is none."""
    return self.read_tagged(key)[0]

  def read_tagged(self, key: str) -> tuple[bytes, str]:
    """Returns an object and its tag; raises FileNotFoundError if there is none."""
    import obstore

    with _translated(self.address(key)):
      found = obstore.get(self._client, key)
      return found.bytes().to_bytes(), _tag(found.meta)

  def read_range(self, key: str, start: int, stop: int, tag: str) -> bytes:
    """Returns the bytes from `start` to `stop` of an object; fewer if it is shorter.

    Raises:
      OSError: The object no longer has `tag`.
    """
    import obstore

    name = {'s3': 'if_match', 'gs': 'version'}[self.scheme]
    with _translated(self.address(key)):
      options: dict[str, object] = {'range': (start, stop), name: tag}
      return obstore.get(self._client, key, options=options).bytes().to_bytes()

  def head(self, key: str) -> Object:
    """Returns the size and the tag of an object; raises FileNotFoundError if there is none."""
    import obstore

    with _translated(self.address(key)):
      meta = obstore.head(self._client, key)
    return Object(key, meta['size'], _tag(meta))

  def below(self, prefix: str) -> Iterator[Object]:
    """Yields the objects below a prefix, as those in a folder and its folders."""
    import obstore

    with _translated(self.address(prefix)):
      for part in obstore.list(self._client, prefix or None, chunk_size=1000):
        for meta in part:
          yield Object(meta['path'], meta['size'], _tag(meta))

  def names(self, prefix: str) -> tuple[list[str], list[str]]:
    """Returns the names of the folders and of the objects directly below a prefix."""
    import obstore

    with _translated(self.address(prefix)):
      found = obstore.list_with_delimiter(self._client, prefix or None)
    folders = [p.rstrip('/').rpartition('/')[2] for p in found['common_prefixes']]
    return folders, [meta['path'].rpartition('/')[2] for meta in found['objects']]

  def write(self, key: str, content: bytes) -> str:
    """Writes a small object, and replaces one that is there; returns its tag."""
    return self._put(key, content, 'overwrite')

  def create(self, key: str, content: bytes) -> str | None:
    """Writes an object unless there is one; returns its tag, or None if there is one.

    The content must be unlike that of any other writer: if an answer is lost, a repeated request
    finds the object of the first one.
    """
    return self._put_if(key, content, 'create')

  def replace(self, key: str, content: bytes, tag: str) -> str | None:
    """Writes an object if it still has `tag`; returns the new tag, or None if it has another one.

    The content must be unlike that of any other writer, as for `create`.
    """
    return self._put_if(key, content, {_TAG_OF[self.scheme]: tag})

  def upload(self, key: str, path: pathlib.Path) -> None:
    """Writes a file as an object, which appears when it is complete."""
    import obstore

    size = path.stat().st_size
    if size <= _PART:
      self.write(key, path.read_bytes())
      return
    part = max(_PART, -(-size // _PARTS))
    with _translated(self.address(key)):
      obstore.put(self._client, key, path, chunk_size=part, max_concurrency=_AT_ONCE)

  def chunks(self, key: str) -> Iterator[bytes]:
    """Yields the bytes of an object in parts of about 8 MiB; FileNotFoundError if there is none."""
    import obstore

    with _translated(self.address(key)):
      for part in obstore.get(self._client, key).stream(min_chunk_size=_PART):
        yield bytes(part)

  def delete(self, keys: Sequence[str]) -> None:
    """Deletes objects; those that are not there are left out."""
    import obstore

    for i in range(0, len(keys), 1000):
      with _translated(self.address(keys[i])), contextlib.suppress(FileNotFoundError):
        obstore.delete(self._client, list(keys[i : i + 1000]))

  def delete_below(self, prefix: str) -> None:
    """Deletes all objects below a prefix."""
    self.delete([found.key for found in self.below(prefix)])

  def _put(self, key: str, content: bytes, mode: str | dict[str, str]) -> str:
    import obstore

    with _translated(self.address(key)):
      # One request, because a condition cannot be put on several.
      found = obstore.put(self._client, key, content, mode=mode, use_multipart=False)
      return _tag(found)

  def _put_if(self, key: str, content: bytes, mode: str | dict[str, str]) -> str | None:
    from obstore.exceptions import AlreadyExistsError, PreconditionError

    try:
      return self._put(key, content, mode)
    except FileNotFoundError:
      return None  # S3 says so if the object to replace is gone.
    except OSError as e:
      if not isinstance(e.__cause__, AlreadyExistsError | PreconditionError):
        raise
    try:
      found, tag = self.read_tagged(key)
    except FileNotFoundError:
      return None
    return tag if found == content else None


_TAG_OF = {'s3': 'e_tag', 'gs': 'version'}


def _tag(meta: Mapping[str, object]) -> str:
  """Returns the generation of an object of GCS, or the ETag of one of S3."""
  return str(meta.get('version') or meta.get('e_tag') or '')


def _s3_config(environment: Mapping[str, str]) -> dict[str, str]:
  """Returns the settings in the profiles of ~/.aws, which obstore does not read itself."""
  names = {
    'endpoint': ('AWS_ENDPOINT_URL_S3', 'AWS_ENDPOINT_URL', 'AWS_ENDPOINT'),
    'access_key_id': ('AWS_ACCESS_KEY_ID',),
    'secret_access_key': ('AWS_SECRET_ACCESS_KEY',),
    'session_token': ('AWS_SESSION_TOKEN',),
    'region': ('AWS_REGION', 'AWS_DEFAULT_REGION'),
  }
  config = {
    name: next(environment[v] for v in variables if environment.get(v))
    for name, variables in names.items()
    if any(environment.get(v) for v in variables)
  }
  profile = environment.get('AWS_PROFILE', 'default')
  home = pathlib.Path('~/.aws').expanduser()
  credentials = environment.get('AWS_SHARED_CREDENTIALS_FILE', str(home / 'credentials'))
  settings = environment.get('AWS_CONFIG_FILE', str(home / 'config'))
  section = _section(credentials, profile)
  if 'access_key_id' not in config and 'aws_access_key_id' in section:
    keys = {'access_key_id', 'secret_access_key', 'session_token'}
    config |= {k: section[f'aws_{k}'] for k in keys if f'aws_{k}' in section}
  section = _section(settings, profile if profile == 'default' else f'profile {profile}')
  for name, setting in (('region', 'region'), ('endpoint', 'endpoint_url')):
    if name not in config and setting in section:
      config[name] = section[setting]
  return config


def _section(path: str, name: str) -> Mapping[str, str]:
  """Returns a section of a file of settings; it is empty if there is none."""
  parser = configparser.ConfigParser(interpolation=None)
  try:
    parser.read(path)
    return parser[name] if parser.has_section(name) else {}
  except (configparser.Error, UnicodeDecodeError) as e:
    raise StoreError(f'{path} is damaged ({str(e).splitlines()[0]})') from None


def _gs_config(environment: Mapping[str, str]) -> dict[str, str | bool]:
  """Returns the settings for an emulator's endpoint, which obstore does not read itself."""
  token = environment.get('GOOGLE_BEARER_TOKEN')
  config: dict[str, str | bool] = {'bearer_token': token} if token else {}
  if base := environment.get('GOOGLE_BASE_URL'):
    return {**config, 'base_url': base}
  emulator = environment.get('STORAGE_EMULATOR_HOST')
  if not emulator:
    return config
  url = emulator if '://' in emulator else f'http://{emulator}'
  return {**config, 'base_url': url.rstrip('/'), 'skip_signature': not token}


@contextlib.contextmanager
def _translated(address: Address) -> Iterator[None]:
  """Turns obstore's errors into FileNotFoundError, OSError or StoreError."""
  try:
    yield
  except (UserError, GeneratorExit, KeyboardInterrupt):
    raise
  except FileNotFoundError as e:
    if _NO_BUCKET.search(str(e)):
      raise _no_bucket(address) from None
    raise FileNotFoundError(errno.ENOENT, 'there is no such object', str(address)) from None
  except Exception as e:
    if not type(e).__module__.startswith(('obstore', 'builtins')):
      raise
    raise _translation(e, address) from e


def _translation(error: Exception, address: Address) -> Exception:
  from obstore import exceptions

  text = str(error).partition('\n\nDebug source')[0]
  if isinstance(error, exceptions.AlreadyExistsError | exceptions.PreconditionError):
    return FileExistsError(errno.EEXIST, 'it has been changed by another process', str(address))
  if isinstance(error, OSError) and error.filename is not None:
    return error  # It is of a file on this machine.
  if _NO_BUCKET.search(text):
    return _no_bucket(address)
  refused = isinstance(
    error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError
  ) or _REFUSED.search(text)
  if _NO_CREDENTIALS.search(text):
    return StoreError(f'{address}: {_CREDENTIALS[address.scheme]}')
  if refused:
    code = _CODE.search(text)
    said = f' ({code[1]})' if code else ''
    return StoreError(
      f'{address}: the store refuses these credentials{said}: they are wrong or expired, or lack '
      'the permission to read, write, list and delete objects there'
    )
  return OSError(errno.EIO, _reason(text), str(address))


def _no_bucket(address: Address) -> StoreError:
  return StoreError(
    f'{address}: there is no bucket {address.bucket}: make it first, or correct the name'
  )


def _reason(text: str) -> str:
  """Returns the reason in an error of obstore, which names the request and the whole answer."""
  first = text.strip().splitlines()[0] if text.strip() else 'it failed'
  status = re.search(r'status code: (\d{3} [A-Za-z ]+)', first)
  if status:
    return f'the store answered {status[1].strip()}'
  return f'the store does not answer ({first.rpartition(" - ")[2][:200]})'
