"""A lease: the lock of a run folder in an object store.

Stores have no locks, but they can create an object only if it is not there, and replace it only if
it is unchanged. The lease is such an object. Its holder replaces it regularly. Another run watches
it: if it stays unchanged for long enough, its holder is gone, and the other run takes the lease.
Clocks of two machines are not compared. A holder that could not renew its lease in time must not
rely on it. The time for which its machine was suspended counts.
"""

import contextlib
import dataclasses
import errno
import getpass
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable

from paxlite.cli.terminal import settle, warn
from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject, parsed
from paxlite.stores.object_store import ObjectStore
from paxlite.stores.store_errors import reason_of

NAME = 'lease.json'
_REQUEST_SECONDS = 10.0  # the time for which a request for the lease is tried again

log = logging.getLogger('paxlite')


@dataclasses.dataclass(frozen=True)
class Times:
  """How often a lease is renewed, and when it counts as abandoned, in seconds."""

  renew: float = 30.0  # between two renewals
  expires: float = 120.0  # a lease that another process sees unchanged for so long is abandoned
  sure: float = 90.0  # its holder relies on it for so long after a renewal; less than `expires`
  look: float = 5.0  # between two looks of a process that waits for it


class Lease:
  """The lease of the run at an address.

  Args:
    address: The run's job_log_dir.
    lost: Called in a thread, with a sentence that says why, when another process has taken it.
    times: How often it is renewed.
  """

  def __init__(self, address: str, lost: Callable[[str], None], times: Times | None = None):
    self.attempt = uuid.uuid4().hex
    self._address = address
    self._store = ObjectStore(address, patience=_REQUEST_SECONDS)
    self._lost = lost
    self._times = times or Times()
    self._tag: str | None = None
    self._renewals = 0
    self._renewed_at = -float('inf')
    self._problem = ''  # why the last renewal failed
    self._since = time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime())
    self._stop = threading.Event()
    self._thread = threading.Thread(target=self._renew, name='lease', daemon=True)

  @property
  def is_sure(self) -> bool:
    """Whether no other process can have taken the lease since the last renewal."""
    return self._tag is not None and _now() < self._renewed_at + self._times.sure

  def check(self) -> None:
    """Raises OSError unless the lease is sure; to be called before each write."""
    if not self.is_sure:
      why = f' ({self._problem})' if self._problem else ''
      raise _unsure(self._address, why)

  def acquire(self, own: str | None) -> str | None:
    """Acquires the lease and renews it in a thread until `release`.

    Raises UserError if another run holds it and renews it, or it cannot be replaced.

    Args:
      own: The attempt of a run on this machine that is known to have ended, or None.

    Returns:
      The attempt that held it last; None for a new run.
    """
    seen: bytes | None = None
    until = 0.0
    refused_at: float | None = None
    while True:
      asked_at = _now()
      data, content, tag = _read(self._store)
      last = content.get('attempt')
      is_free = tag is None or content.get('released') or (own is not None and last == own)
      if not is_free and seen is None:
        seen, until = data, asked_at + self._times.expires
        log.warning(
          '%s is in use by another run (%s), or by one that was killed: waiting up to %.0f s '
          'to see whether it renews its lease',
          self._address, _described(content), self._times.expires,
        )  # fmt: skip
      if not is_free and data != seen:
        raise UserError(
          f'--job_log_dir={self._address} is in use by another run ({_described(content)}). Wait '
          'for it or end it, or choose another folder'
        )
      if is_free or asked_at >= until:
        mine, store = self._content(), self._store
        taken = store.create(NAME, mine) if tag is None else store.replace(NAME, mine, tag)
        if taken is not None:
          self._tag, self._renewed_at = taken, asked_at
          if not store.enforces_conditions(NAME, self._content(released=True)):
            self._tag = None  # a lease keeps nobody out
            raise UserError(
              f'{self._address}: the store ignores conditional writes (If-None-Match, If-Match), '
              'so two runs could write here at the same time. Use a store that supports them'
            )
          self._thread.start()
          return last if isinstance(last, str) else None
        # Another process was faster, and the next look shows which one; or it is not so.
        seen = data if seen is None and not is_free else seen or b''
        if refused_at is None:
          refused_at = asked_at
        elif asked_at > refused_at + self._times.expires:
          raise UserError(
            f'the lease {store.address(NAME)} can be read but not replaced: for '
            f'{self._times.expires:.0f} s the store has answered that another process changes it, '
            'but it stays the same. Look for a proxy or cache in between, or a rule that makes '
            'objects immutable'
          )
      time.sleep(self._times.look)

  def release(self) -> None:
    """Releases the lease, unless the store does not answer."""
    self._stop.set()
    if self._thread.is_alive():
      self._thread.join()
    if self._tag is not None:
      with contextlib.suppress(OSError, UserError):
        self._store.replace(NAME, self._content(released=True), self._tag)
      self._tag = None

  def _renew(self) -> None:
    pause = self._times.renew
    while not self._stop.wait(pause):
      asked_at = _now()
      self._renewals += 1
      pause = min(self._times.renew, self._times.look)
      try:
        tag = self._store.replace(NAME, self._content(), self._tag or '')
        if tag is not None:
          self._tag, self._renewed_at, self._problem = tag, asked_at, ''
          pause = self._times.renew
          continue
        _, content, tag = _read(self._store)
        if tag is None or content.get('attempt', self.attempt) != self.attempt:
          self._tag = None
          how = f'was taken over by another run ({_described(content)})'
          self._lost(f'{self._address} {how if tag else "lost its lease: it was removed"}')
          return
        # The answer to an earlier renewal was lost, or the store could not decide (409 of S3).
        self._tag, self._problem = tag, 'the store says that another process changes it'
      except (OSError, UserError) as e:
        log.debug('the lease of %s could not be renewed: %s', self._address, e)
        self._problem = reason_of(e)

  def _content(self, released: bool = False) -> bytes:
    holder = {
      'attempt': self.attempt, 'host': socket.gethostname(), 'process': os.getpid(),
      'user': _user(), 'since': self._since, 'renewals': self._renewals, 'released': released,
    }  # fmt: skip
    return json.dumps(holder, indent=1).encode()


class LeaseView:
  """The lease of a run as another process of the run sees it.

  Args:
    address: The run's job_log_dir.
    attempt: The attempt that must hold the lease.
    times: How often its holder renews it.
  """

  def __init__(self, address: str, attempt: str, times: Times | None = None):
    self._address = address
    self._store = ObjectStore(address, patience=_REQUEST_SECONDS)
    self._attempt = attempt
    self._times = times or Times()
    self._seen = b''
    self._renewed_at = self._looked_at = _now()  # its holder has just taken it
    self._lock = threading.Lock()

  def check(self) -> None:
    """Raises OSError unless the holder has renewed its lease lately, as `Lease.check` does."""
    with self._lock:
      now = _now()  # the lease is read once for each third of the time between two renewals
      if not self._seen or now > self._looked_at + self._times.renew / 3:
        data, content, tag = _read(self._store)
        if content.get('attempt') != self._attempt or content.get('released'):
          held = f'the lease belongs to {_described(content)}' if content else 'it is damaged'
          raise _unsure(self._address, f' ({held if tag else "there is none any more"})')
        if data != self._seen:  # It was renewed after the last look, and maybe long ago.
          self._seen, self._renewed_at = data, self._looked_at
        self._looked_at = now
      if now > self._renewed_at + self._times.sure:
        raise _unsure(self._address, '')


def _unsure(address: str, why: str) -> OSError:
  reason = f'the lease could not be renewed in time{why}'
  return OSError(errno.EAGAIN, reason, address)


def _read(store: ObjectStore) -> tuple[bytes, JsonObject, str | None]:
  """Returns the contents of the lease ({} if damaged) and its tag (None if there is none)."""
  try:
    data, tag = store.read_tagged(NAME)
  except FileNotFoundError:
    return b'', {}, None
  try:
    content = parsed(data)
  except ValueError:
    content = None
  return data, content if isinstance(content, dict) else {}, tag


def _now() -> float:
  """Returns seconds of a clock that also runs while the machine is suspended, if there is one."""
  clock = getattr(time, 'CLOCK_BOOTTIME', None)  # Linux
  return time.monotonic() if clock is None else time.clock_gettime(clock)


def _user() -> str:
  try:
    return getpass.getuser()
  except (KeyError, OSError):  # The user of a container may have no name.
    return str(os.getuid())


def _described(content: JsonObject) -> str:
  if not content:
    return 'its lease is damaged'
  known = {k: str(content.get(k, 'unknown'))[:100] for k in ('process', 'host', 'user', 'since')}
  return 'process {process} on {host} of {user}, since {since}'.format(**known)


def leave(why: str) -> None:
  """Ends the process at once, without writing, because its lease is lost."""
  warn(f'stopped: {why}')
  settle()
  os._exit(1)
