"""Objects of a bucket of Google Cloud Storage or S3, by the package obstore.

This is the only module that calls obstore. Requests that fail for a reason that may pass (429, 5xx,
a reset, a timeout) are tried again with growing pauses until `patience` is used up. Then they raise
OSError. Failures that a repetition cannot mend (credentials, permission, a missing bucket) raise
StoreError at once.
"""

import contextlib
import dataclasses
import datetime
import errno
import os
import pathlib
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Self

from paxlite.core import shell
from paxlite.core.errors import UserError
from paxlite.stores.addresses import Address
from paxlite.stores.store_errors import StoreError, translated
from paxlite.stores.store_settings import gs_settings, s3_settings

PATIENCE = 120.0  # seconds during which a request is tried again
_CONNECT_SECONDS, _SILENT_SECONDS, _REQUEST_SECONDS = 5, 30, 300
_PART = 8 << 20  # bytes of a part of a large upload
_PARTS = 9000  # S3 allows 10,000
_AT_ONCE = 2  # parts of one upload
_DELETED_AT_ONCE = {'s3': 1000, 'gs': 20}  # S3 deletes many by one request
_TRIES = 3  # to write an object that another process seems to have changed
_PAGE = 1000  # objects of a page of a list
_proven: set[tuple[str, str, str]] = set()  # scheme, bucket and endpoint of what is a store
# objects of which one is in each folder of a run, a checkpoint, weights or a dataset
_USUAL = ('lease.json', 'experiment.json', 'checksums.json', 'config.json', 'meta.json')


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
    guard: Is called before each request that writes or deletes; it raises OSError if this process
      may not do so any more.
    endpoint: The server; '' for that of the cloud.
  """

  def __init__(
    self,
    scheme: str,
    bucket: str,
    client: object,
    guard: Callable[[], None] | None = None,
    endpoint: str = '',
  ):
    self.scheme, self.bucket = scheme, bucket
    self._name = scheme, bucket, endpoint
    self._client = client
    self._guard = guard or (lambda: None)
    self._is_guarded = guard is not None

  @classmethod
  def opened(
    cls,
    address: str | Address,
    patience: float = PATIENCE,
    environment: Mapping[str, str] = os.environ,
    guard: Callable[[], None] | None = None,
  ) -> Self:
    """Opens the bucket of an address; nothing is sent yet.

    Args:
      address: An address in the bucket.
      patience: Seconds during which a request is tried again.
      environment: Variables that name the endpoint and the credentials.
      guard: See the class.

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
      s3_settings(environment) if address.scheme == 's3' else gs_settings(environment)
    )
    endpoint = str(config.get('endpoint') or config.get('base_url') or '')
    make = S3Store if address.scheme == 's3' else GCSStore
    with translated(address):
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
    return cls(address.scheme, address.bucket, client, guard, endpoint)

  def address(self, key: str) -> Address:
    return Address(self.scheme, self.bucket, key)

  def check(self) -> None:
    """Raises StoreError if the bucket is not there or may not be read, OSError if it is silent."""
    import obstore

    absent = '.paxlite-does-not-exist'
    with translated(self.address('')):
      next(iter(obstore.list(self._client, absent)), None)
    self._check_absent(absent)

  def read(self, key: str, size: int | None = None) -> bytes:
    """Returns an object; raises FileNotFoundError if there is none.

    Args:
      key: Its name.
      size: Its bytes, as they were listed; an answer of another size raises OSError.
    """
    content, _ = self.read_tagged(key)
    self._check_size(key, len(content), size)
    return content

  def read_tagged(self, key: str) -> tuple[bytes, str]:
    """Returns an object and its tag; raises FileNotFoundError if there is none."""
    import obstore

    with translated(self.address(key)):
      found = obstore.get(self._client, key)
      return found.bytes().to_bytes(), _tag(found.meta)

  def read_range(self, key: str, start: int, stop: int, tag: str) -> bytes:
    """Returns the bytes from `start` to `stop` of an object; fewer if it is shorter.

    Raises:
      OSError: The object no longer has `tag`.
    """
    import obstore

    name = {'s3': 'if_match', 'gs': 'version'}[self.scheme]
    with translated(self.address(key)):
      options: dict[str, object] = {'range': (start, stop), name: tag}
      return obstore.get(self._client, key, options=options).bytes().to_bytes()

  def head(self, key: str) -> Object:
    """Returns the size and the tag of an object; raises FileNotFoundError if there is none."""
    found = self._head(key)
    if self._name not in _proven:
      self._check_absent(key.rpartition('/')[0])
    return found

  def _head(self, key: str) -> Object:
    import obstore

    with translated(self.address(key)):
      meta = obstore.head(self._client, key)
    return Object(key, meta['size'], _tag(meta))

  def below(self, prefix: str, known: str | None = None) -> Iterator[Object]:
    """Yields the objects below a prefix, as those in a folder and its folders.

    Markers of folders, which consoles and file systems over stores make, are left out: objects
    without content whose name ends in / or in _$folder$.

    Args:
      prefix: The prefix, without a slash at its end.
      known: The key of an object that is there. A list without it is not believed.

    Raises:
      OSError: The store does not answer, or the answer is no list.
      StoreError: The bucket cannot be used, or has a name that no path can have.
    """
    count, is_known = 0, known is None
    for found in self._listed(prefix):
      count += 1
      is_known |= found.key == known
      if self._is_file(prefix, found):
        yield found
    if not is_known:
      raise self._no_list(prefix, f'{self.address(known or "")} is missing in its list')
    self._check_end(prefix, count)

  def names(self, prefix: str) -> tuple[list[str], list[str]]:
    """Returns the names of the folders and of the objects directly below a prefix.

    Markers of folders are no objects, as in `below`, which says what is raised.
    """
    folders, objects = self._names(prefix)
    self._check_end(prefix, len(folders) + len(objects))
    names = [o.key.rpartition('/')[2] for o in objects if self._is_file(prefix, o)]
    return folders, names

  def folders(self, prefix: str, known: str) -> list[str]:
    """Returns the names of the folders directly below a prefix, which need not be there.

    Args:
      prefix: The prefix.
      known: The key of an object that is there, in a folder above. It proves that there is nothing
        below the prefix: each list must show what the list above it has shown.

    Raises:
      As `below` does.
    """
    at = known.rpartition('/')[0]
    folders, objects = self._names(at)
    if known not in {o.key for o in objects}:
      raise self._no_list(at, f'{self.address(known)} is missing in its list')
    for part in prefix[len(at) :].strip('/').split('/'):
      if part not in folders:
        return []
      at = f'{at}/{part}'.lstrip('/')
      folders, objects = self._names(at)
      if not folders and not objects:
        raise self._no_list(at, 'its list is empty, and the one above it names it')
    return folders

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

  def write_own(self, key: str, content: bytes, tag: str | None = None) -> str:
    """Writes an object that only one process may write, on the condition that it is unchanged.

    A request that arrives late, when the process may not write any more, then changes nothing that
    another process has written in the meantime.

    Args:
      key: Its name.
      content: Its content.
      tag: The tag that the object has, if it is known; None for a new object.

    Returns:
      Its new tag.

    Raises:
      OSError: The store does not answer, or the object changes all the time.
    """
    for _ in range(_TRIES):
      new = self.create(key, content) if tag is None else self.replace(key, content, tag)
      if new is not None:
        return new
      try:  # It was left by a process that held the lease before, or by this one.
        tag = self.head(key).tag
      except FileNotFoundError:
        tag = None
    reason = 'the store says at each try that another process has changed it'
    raise OSError(errno.EBUSY, reason, str(self.address(key)))

  def enforces_conditions(self, key: str, content: bytes) -> bool:
    """Returns whether the store refuses a write whose condition does not hold.

    Args:
      key: An object that is there, and that only this process may write.
      content: What may be written if the store does not refuse it; unlike what is there.
    """
    wrong = {'s3': '"00000000000000000000000000000000"', 'gs': '1'}[self.scheme]
    return self.create(key, content) is None and self.replace(key, content, wrong) is None

  def upload(self, key: str, path: pathlib.Path) -> None:
    """Writes a file as an object, which appears when it is complete."""
    import obstore

    size = path.stat().st_size
    if size <= _PART:
      (self.write_own if self._is_guarded else self.write)(key, path.read_bytes())
      return
    length = max(_PART, -(-size // _PARTS))

    def parts() -> Iterator[bytes]:
      with path.open('rb') as f:
        while part := f.read(length):
          self._guard()
          yield part
      self._guard()  # An error here aborts the upload, so that the object does not appear.

    with translated(self.address(key)):
      obstore.put(self._client, key, parts(), chunk_size=length, max_concurrency=_AT_ONCE)

  def chunks(self, key: str, size: int | None = None) -> Iterator[bytes]:
    """Yields the bytes of an object in parts of about 8 MiB; raises as `read` does."""
    import obstore

    done = 0
    with translated(self.address(key)):
      for part in obstore.get(self._client, key).stream(min_chunk_size=_PART):
        done += len(part)
        yield bytes(part)
    self._check_size(key, done, size)

  def delete(self, keys: Sequence[str]) -> None:
    """Deletes objects; those that are not there are left out."""
    import obstore

    count = _DELETED_AT_ONCE[self.scheme]
    for i in range(0, len(keys), count):
      self._guard()
      with translated(self.address(keys[i])), contextlib.suppress(FileNotFoundError):
        obstore.delete(self._client, list(keys[i : i + count]))

  def delete_below(self, prefix: str) -> None:
    """Deletes all objects below a prefix."""
    self.delete([found.key for found in self._listed(prefix) if found.key != prefix])

  def _listed(self, prefix: str) -> Iterator[Object]:
    """Yields what a list of everything below a prefix has, with markers of folders."""
    import obstore

    with translated(self.address(prefix)):
      for part in obstore.list(self._client, prefix or None, chunk_size=1000):
        for meta in part:
          yield Object(meta['path'], meta['size'], _tag(meta))

  def _names(self, prefix: str) -> tuple[list[str], list[Object]]:
    """Returns the folders and the objects directly below a prefix, with markers of folders."""
    import obstore

    with translated(self.address(prefix)):
      found = obstore.list_with_delimiter(self._client, prefix or None)
    folders = [p.rstrip('/').rpartition('/')[2] for p in found['common_prefixes']]
    return folders, [Object(meta['path'], meta['size'], _tag(meta)) for meta in found['objects']]

  def _is_file(self, prefix: str, found: Object) -> bool:
    """Returns whether a listed object is not the marker of a folder.

    The list has lost the slash at the end of a marker's name, so it is asked for by that name.
    """
    if found.key == prefix or found.size:
      return found.key != prefix
    if found.key.endswith('_$folder$'):
      return False
    try:
      return not self.head(found.key).size  # or else the marker beside a file of the same name
    except FileNotFoundError:
      return False

  def _check_end(self, prefix: str, count: int) -> None:
    """Checks that a list ended because nothing follows: a page of HTML looks like an empty one."""
    if count % _PAGE == 0:
      self._check_empty(prefix)

  def _check_empty(self, prefix: str) -> None:
    """Raises OSError if an empty list below a prefix is not to be believed."""
    self._check_absent(prefix)
    for key in (f'{prefix}/{name}'.lstrip('/') for name in _USUAL):
      with contextlib.suppress(FileNotFoundError):
        self._head(key)
        if all(o.key != key for o in self._names(prefix)[1]):  # It may have been written just now.
          raise self._no_list(prefix, f'{self.address(key)} is missing in its list')

  def _check_absent(self, prefix: str) -> None:
    """Raises OSError if there seems to be an object with a random name."""
    try:
      self._head(f'{prefix}/.paxlite-{uuid.uuid4().hex}'.lstrip('/'))
    except (FileNotFoundError, StoreError):  # A store may refuse what is absent to some users.
      _proven.add(self._name)
      return
    raise self._no_list(prefix, 'it claims to have an object with a random name')

  def _no_list(self, prefix: str, why: str) -> OSError:
    reason = f'the server is not an object store, or hides a part of it ({why}): look for a proxy'
    return OSError(errno.EIO, reason, str(self.address(prefix)))

  def _check_size(self, key: str, size: int, listed: int | None) -> None:
    if listed is not None and size != listed:
      reason = f'the answer has {size:,} bytes, and the list of the store says {listed:,}'
      raise OSError(errno.EIO, reason, str(self.address(key)))

  def _put(self, key: str, content: bytes, mode: str | dict[str, str]) -> str:
    import obstore

    self._guard()
    with translated(self.address(key)):
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
