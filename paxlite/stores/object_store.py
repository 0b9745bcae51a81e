"""Objects of a Google Cloud Storage or S3 bucket, by the package obstore.

This is the only module that calls obstore. Requests that fail for a reason that may pass (429, 5xx,
a reset, a timeout) are tried again with growing pauses until `patience` is used up. Then they raise
OSError, as does an answer that is none of a store, and FileNotFoundError for an absent object.
Failures that a repetition cannot mend (credentials, permission, a missing bucket, a name that no
path can have) raise StoreError at once.
"""

import contextlib
import dataclasses
import datetime
import errno
import os
import pathlib
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence

from paxlite.core import shell
from paxlite.core.errors import UserError
from paxlite.stores.addresses import parsed
from paxlite.stores.store_errors import StoreError, translated
from paxlite.stores.store_settings import gs_settings, s3_settings

PATIENCE = 120.0  # seconds during which a request is tried again
_CONNECT_SECONDS, _SILENT_SECONDS, _REQUEST_SECONDS = 5, 30, 300
_FIRST_PAUSE, _LAST_PAUSE = datetime.timedelta(seconds=0.1), datetime.timedelta(seconds=10)
_PART = 8 << 20  # bytes of a part of a large upload
_PARTS = 9000  # S3 allows 10,000
_AT_ONCE = 2  # parts of one upload
_DELETED_AT_ONCE = {'s3': 1000, 'gs': 20}  # S3 deletes many by one request
_TRIES = 3  # to write an object that another process seems to have changed
_PAGE = 1000  # objects of a page of a list
_EXTRA = {'gs': 'gcs', 's3': 's3'}
_CONDITION = {'s3': 'if_match', 'gs': 'version'}  # of a read
_TAG = {'s3': 'e_tag', 'gs': 'version'}  # the condition of a write
_NO_TAG = {'s3': '"00000000000000000000000000000000"', 'gs': '1'}
_proven: set[tuple[str, str, str]] = set()  # scheme, bucket and endpoint of what is a store
# objects of which one is in each folder of a run, a checkpoint, weights or a dataset
_USUAL = ('lease.json', 'experiment.json', 'checksums.json', 'config.json', 'meta.json')


@dataclasses.dataclass(frozen=True)
class Object:
  """An object of a bucket."""

  name: str  # its name, relative to the address of the ObjectStore
  size: int  # bytes
  # Changes with every write of the object. In lists it may be another one than elsewhere.
  tag: str


class ObjectStore:
  """Reads and writes the objects below an address. It can be used by several threads.

  Names are relative to the address; '' is the object at the address itself. Nothing is sent before
  the first method is called. Raises UserError if the package obstore is missing.

  Args:
    address: The bucket, or a prefix in it, which is like a folder.
    patience: Seconds during which a request is tried again.
    environment: Variables that name the endpoint and the credentials.
    guard: Called before each request that writes or deletes; it raises OSError if this process may
      not do so any more.
  """

  def __init__(
    self,
    address: str,
    patience: float = PATIENCE,
    environment: Mapping[str, str] = os.environ,
    guard: Callable[[], None] | None = None,
  ):
    self._scheme, self._bucket, self._prefix = parsed(address)
    try:
      from obstore.store import GCSStore, S3Store
    except ImportError:
      install = shell.install(_EXTRA[self._scheme])
      raise UserError(f'{address} needs the package obstore: {install}') from None
    is_s3 = self._scheme == 's3'
    config: Mapping[str, str | bool] = (
      s3_settings(environment) if is_s3 else gs_settings(environment)
    )
    endpoint = str(config.get('endpoint') or config.get('base_url') or '')
    with translated(address):
      self._client = (S3Store if is_s3 else GCSStore)(
        self._bucket,
        config=config,
        client_options={
          'allow_http': endpoint.startswith('http://'),
          'connect_timeout': f'{_CONNECT_SECONDS}s',
          'read_timeout': f'{_SILENT_SECONDS}s',
          'timeout': f'{_REQUEST_SECONDS}s',
        },
        retry_config={  # The time is the limit.
          'max_retries': 1000,
          'retry_timeout': datetime.timedelta(seconds=patience),
          'backoff': {'init_backoff': _FIRST_PAUSE, 'max_backoff': _LAST_PAUSE, 'base': 2},
        },
      )
    self._server = self._scheme, self._bucket, endpoint
    self.guard = guard or (lambda: None)
    self._is_guarded = guard is not None

  @property
  def is_bucket(self) -> bool:
    """Whether the address is a whole bucket, so no object has this name."""
    return not self._prefix

  def address(self, name: str = '') -> str:
    """Returns the address of an object, or of what is below a prefix."""
    return f'{self._scheme}://{self._bucket}/{self._key(name)}'.rstrip('/')

  def _key(self, name: str) -> str:
    return '/'.join(filter(None, (self._prefix, name)))

  def check(self) -> None:
    """Raises StoreError if the bucket is missing or unreadable, OSError if it does not answer."""
    import obstore

    absent = '.paxlite-does-not-exist'
    bucket = f'{self._scheme}://{self._bucket}'
    with translated(bucket):
      next(iter(obstore.list(self._client, absent)), None)
    self._check_absent('')

  def read(self, name: str, size: int | None = None) -> bytes:
    """Returns an object, and raises OSError unless it has the `size` that was listed."""
    content, _ = self.read_tagged(name)
    self._check_size(name, len(content), size)
    return content

  def read_tagged(self, name: str) -> tuple[bytes, str]:
    """Returns an object and its tag; raises FileNotFoundError if there is none."""
    import obstore

    with translated(self.address(name)):
      found = obstore.get(self._client, self._key(name))
      return found.bytes().to_bytes(), _tag(found.meta)

  def read_range(self, name: str, start: int, stop: int, tag: str) -> bytes:
    """Returns the bytes from `start` to `stop`; raises OSError if the object has another tag."""
    import obstore

    options: dict[str, object] = {'range': (start, stop), _CONDITION[self._scheme]: tag}
    with translated(self.address(name)):
      return obstore.get(self._client, self._key(name), options=options).bytes().to_bytes()

  def head(self, name: str) -> Object:
    """Returns the size and the tag of an object; raises FileNotFoundError if there is none."""
    found = self._head(name)
    if self._server not in _proven:
      self._check_absent(name.rpartition('/')[0])
    return found

  def _head(self, name: str) -> Object:
    import obstore

    with translated(self.address(name)):
      return self._object(obstore.head(self._client, self._key(name)))

  def _object(self, meta: Mapping) -> Object:
    return Object(meta['path'][len(self._prefix) :].lstrip('/'), meta['size'], _tag(meta))

  def below(self, prefix: str = '', known: str | None = None) -> Iterator[Object]:
    """Yields the objects below a prefix, as those in a folder and its folders.

    Markers of folders, which consoles and file systems over stores make, are left out: objects
    without content whose name ends in / or in _$folder$.

    Args:
      prefix: The prefix, without a slash at its end.
      known: The name of an object that is there. A list without it is not believed.
    """
    count, is_known = 0, known is None
    for found in self._listed(prefix):
      count += 1
      is_known |= found.name == known
      if self._is_file(prefix, found):
        yield found
    if not is_known:
      raise self._no_list(prefix, f'{self.address(known or "")} is missing in its list')
    self._check_end(prefix, count)

  def folders(self, prefix: str = '', known: str | None = None) -> list[str]:
    """Returns the names of the folders directly below a prefix, which need not be there.

    Args:
      known: The name of an object that is there, in a folder above. It proves that there is nothing
        below the prefix: each list must show what the list above it has shown.
    """
    if known is None:
      folders, objects = self._names(prefix)
      self._check_end(prefix, len(folders) + len(objects))
      return folders
    at = known.rpartition('/')[0]
    folders, objects = self._names(at)
    if known not in {o.name for o in objects}:
      raise self._no_list(at, f'{self.address(known)} is missing in its list')
    for part in prefix[len(at) :].strip('/').split('/'):
      if part not in folders:
        return []
      at = f'{at}/{part}'.lstrip('/')
      folders, objects = self._names(at)
      if not folders and not objects:
        raise self._no_list(at, 'its list is empty, but the parent list names it')
    return folders

  def write(self, name: str, content: bytes) -> str:
    """Writes a small object, and replaces one that is there; returns its tag."""
    return self._put(name, content, 'overwrite')

  # The content must be unlike that of any other writer in these two: if an answer is lost, a
  # repeated request finds the object of the first one.

  def create(self, name: str, content: bytes) -> str | None:
    """Writes an object unless there is one; returns its tag, or None if there is one."""
    return self._put_if(name, content, 'create')

  def replace(self, name: str, content: bytes, tag: str) -> str | None:
    """Writes an object if it still has `tag`; returns its new tag, or None if it has another."""
    return self._put_if(name, content, {_TAG[self._scheme]: tag})

  def write_own(self, name: str, content: bytes, tag: str | None = None) -> str:
    """Writes an object that only one process may write, if it is unchanged; returns its new tag.

    A request that arrives late, when the process may not write any more, then changes nothing that
    another process has written in the meantime. `tag` is the present one, if it is known.
    """
    for _ in range(_TRIES):
      new = self.create(name, content) if tag is None else self.replace(name, content, tag)
      if new is not None:
        return new
      try:  # It was left by a process that held the lease before, or by this one.
        tag = self.head(name).tag
      except FileNotFoundError:
        tag = None
    reason = 'the store reports at each try that another process changed it'
    raise OSError(errno.EBUSY, reason, self.address(name))

  def enforces_conditions(self, name: str, content: bytes) -> bool:
    """Returns whether the store refuses to write `content` to an object that is there already."""
    wrong = _NO_TAG[self._scheme]
    return self.create(name, content) is None and self.replace(name, content, wrong) is None

  def upload(self, name: str, path: pathlib.Path) -> None:
    """Writes a file as an object, which appears when it is complete."""
    import obstore

    size = path.stat().st_size
    if size <= _PART:
      (self.write_own if self._is_guarded else self.write)(name, path.read_bytes())
      return
    length = max(_PART, -(-size // _PARTS))

    def parts() -> Iterator[bytes]:
      with path.open('rb') as f:
        while part := f.read(length):
          self.guard()
          yield part
      self.guard()  # An error here aborts the upload, so that the object does not appear.

    with translated(self.address(name)):
      key, options = self._key(name), {'chunk_size': length, 'max_concurrency': _AT_ONCE}
      obstore.put(self._client, key, parts(), **options)

  def chunks(self, name: str, size: int | None = None) -> Iterator[bytes]:
    """Yields the bytes of an object in parts of about 8 MiB; raises as `read` does."""
    import obstore

    done = 0
    with translated(self.address(name)):
      for part in obstore.get(self._client, self._key(name)).stream(min_chunk_size=_PART):
        done += len(part)
        yield bytes(part)
    self._check_size(name, done, size)

  def delete(self, names: Sequence[str]) -> None:
    """Deletes objects, ignoring missing ones."""
    import obstore

    count = _DELETED_AT_ONCE[self._scheme]
    for i in range(0, len(names), count):
      self.guard()
      with translated(self.address(names[i])), contextlib.suppress(FileNotFoundError):
        obstore.delete(self._client, list(map(self._key, names[i : i + count])))

  def delete_below(self, prefix: str) -> None:
    """Deletes all objects below a prefix."""
    self.delete([found.name for found in self._listed(prefix) if found.name != prefix])

  def _listed(self, prefix: str) -> Iterator[Object]:
    """Yields what a list of everything below a prefix has, with markers of folders."""
    import obstore

    with translated(self.address(prefix)):
      for part in obstore.list(self._client, self._key(prefix) or None, chunk_size=1000):
        yield from map(self._object, part)

  def _names(self, prefix: str) -> tuple[list[str], list[Object]]:
    """Returns the folders and the objects directly below a prefix, with markers of folders."""
    import obstore

    with translated(self.address(prefix)):
      found = obstore.list_with_delimiter(self._client, self._key(prefix) or None)
    folders = [p.rstrip('/').rpartition('/')[2] for p in found['common_prefixes']]
    return folders, list(map(self._object, found['objects']))

  def _is_file(self, prefix: str, found: Object) -> bool:
    """Returns whether a listed object is not a folder marker, which loses its slash in the list."""
    if found.name == prefix or found.size:
      return found.name != prefix
    if found.name.endswith('_$folder$'):
      return False
    try:
      return not self.head(found.name).size  # or else the marker beside a file of the same name
    except FileNotFoundError:
      return False

  def _check_end(self, prefix: str, count: int) -> None:
    """Raises OSError if a list is not to be believed: a page of HTML looks like an empty one."""
    if count % _PAGE:  # The store has sent the end of the list.
      return
    self._check_absent(prefix)
    for name in (f'{prefix}/{name}'.lstrip('/') for name in _USUAL):
      with contextlib.suppress(FileNotFoundError):
        self._head(name)
        # It may have been written just now.
        if all(o.name != name for o in self._names(prefix)[1]):
          raise self._no_list(prefix, f'{self.address(name)} is missing in its list')

  def _check_absent(self, prefix: str) -> None:
    """Raises OSError if there seems to be an object with a random name."""
    try:
      self._head(f'{prefix}/.paxlite-{uuid.uuid4().hex}'.lstrip('/'))
    except (FileNotFoundError, StoreError):  # A store may refuse what is absent to some users.
      _proven.add(self._server)
      return
    raise self._no_list(prefix, 'it claims to have an object with a random name')

  def _no_list(self, prefix: str, why: str) -> OSError:
    reason = f'the server is not an object store, or hides a part of it ({why}): look for a proxy'
    return OSError(errno.EIO, reason, self.address(prefix))

  def _check_size(self, name: str, size: int, listed: int | None) -> None:
    if listed is not None and size != listed:
      reason = f'the answer has {size:,} bytes, but the store lists {listed:,}'
      raise OSError(errno.EIO, reason, self.address(name))

  def _put(self, name: str, content: bytes, mode: str | dict[str, str]) -> str:
    import obstore

    self.guard()
    with translated(self.address(name)):
      # One request, because a condition cannot be put on several.
      key = self._key(name)
      return _tag(obstore.put(self._client, key, content, mode=mode, use_multipart=False))

  def _put_if(self, name: str, content: bytes, mode: str | dict[str, str]) -> str | None:
    from obstore.exceptions import AlreadyExistsError, PreconditionError

    try:
      return self._put(name, content, mode)
    except FileNotFoundError:
      return None  # S3 says so if the object to replace is gone.
    except OSError as e:
      if not isinstance(e.__cause__, AlreadyExistsError | PreconditionError):
        raise
    try:
      found, tag = self.read_tagged(name)
    except FileNotFoundError:
      return None
    return tag if found == content else None


def _tag(meta: Mapping[str, object]) -> str:
  """Returns the generation of an object of GCS, or the ETag of one of S3."""
  return str(meta.get('version') or meta.get('e_tag') or '')
