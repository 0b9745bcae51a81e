"""Reports failures of a store once, not per object or attempt."""

import logging
import time

from paxlite.stores.store_errors import reason_of

_AGAIN_SECONDS = 600.0  # before the same reason is said again
_LASTING_SECONDS = 60.0  # of failures without a success, after which they are said in any case

log = logging.getLogger('paxlite')


class FailureLog:
  """Reports failures of copies to `place`, and counts those not reported."""

  def __init__(self, place: str):
    self._place = place
    self._said_at: dict[str, float] = {}  # by reason
    self._failing_since: float | None = None
    self._is_said = False  # whether the present failures were said
    self._count = 0  # failures that were not said

  def failed(self, error: Exception) -> str:
    """Reports a failure, unless the same was reported lately; returns its reason."""
    reason, now = reason_of(error), time.monotonic()
    if self._failing_since is None:
      self._failing_since = now
    is_new = now > self._said_at.get(reason, -float('inf')) + _AGAIN_SECONDS
    lasts = not self._is_said and now > self._failing_since + _LASTING_SECONDS
    if not is_new and not lasts:
      self._count += 1
      return reason
    more = f' ({self._count} more failures were not shown)' if self._count else ''
    log.warning('%s cannot be written, training continues: %s%s', self._place, reason, more)
    self._said_at[reason], self._is_said, self._count = now, True, 0
    return reason

  def passed(self) -> None:
    """Reports that writing succeeds again, after a reported failure."""
    if self._is_said:
      log.warning('%s can be written again', self._place)
    self._failing_since, self._is_said = None, False
