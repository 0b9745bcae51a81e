"""Where the processes of a run wait for each other while a checkpoint is written.

Orbax's own barrier waits 20 minutes for a process whose disk is full: that process never comes to
it, but to another one, in the clean-up after its error. This one ends as soon as a process says
that it could not write its part, and lets a process with an error pass.
"""

import itertools
import sys
import threading
import time

import jax
import jax.errors

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0  # seconds between two looks at what the others say


_saves = itertools.count(1)  # of this process, as of all others


class SaveBarrier:
  """A barrier for the threads in which checkpoints are written; see Orbax's AsyncOptions.

  Each process makes the same calls of `begin`. Without other processes, nothing is waited for.
  """

  def __init__(self) -> None:
    self._number = 0

  def begin(self) -> None:
    """Begins the next save."""
    self._number = next(_saves)

  def fail(self) -> None:
    """Tells the others that this process could not write its part of the save."""
    if jax.process_count() > 1:
      _client().key_value_set(f'{self._save}/failed', str(jax.process_index()), True)

  def __call__(self, *, key: str, timeout_ms: int) -> None:
    """Waits until all processes have called this with `key`.

    Raises:
      OSError: A process could not write its part.
      TimeoutError: Processes did not come within this time.
    """
    if jax.process_count() == 1:
      return
    if sys.exception() is not None:  # Orbax cleans up after it, and passes it on
      self.fail()
      return
    client, met, errors = _client(), threading.Event(), list[Exception]()

    def meet() -> None:
      try:
        client.wait_at_barrier(f'{self._save}/{key}', timeout_ms)
      except jax.errors.JaxRuntimeError as e:
        errors.append(e)
      met.set()

    threading.Thread(target=meet, daemon=True, name='paxlite-save-barrier').start()
    pause, until = _FIRST_PAUSE, time.monotonic() + timeout_ms / 1000
    while not met.wait(pause):
      pause = min(2 * pause, _LONGEST_PAUSE)
      if (process := self._failed()) is not None:
        raise OSError(f'process {process} could not write it, as it says')
      if time.monotonic() > until:
        break
    if errors or not met.is_set():
      raise TimeoutError('other processes did not write their part in time')

  def _failed(self) -> str | None:
    try:
      found: str = _client().key_value_try_get(f'{self._save}/failed')
    except jax.errors.JaxRuntimeError:  # none of them has
      return None
    return found

  @property
  def _save(self) -> str:
    return f'paxlite/save/{self._number}'


def _client():  # type: ignore[no-untyped-def]  # a class of jaxlib without types
  from jax._src import distributed

  return distributed.global_state.client
