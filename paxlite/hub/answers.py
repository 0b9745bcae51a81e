"""Requests to the Hub with retries, and its errors as one line for the user."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from paxlite.cli.terminal import warn
from paxlite.core import shell
from paxlite.core.errors import NO_SPACE, UserError, line_of
from paxlite.hub.names import HubName

_BUSY = 429, 500, 502, 503, 504
_WAITS = 1.0, 4.0  # seconds before another try, where the Hub does not say how long
_LONGEST_WAIT = 60.0


class UnreachableError(UserError):
  """The Hub is unreachable; local copies may suffice."""


def package() -> Any:
  """Returns the package huggingface_hub; raises UserError if it is not installed."""
  try:
    import huggingface_hub
    import huggingface_hub.constants
    import huggingface_hub.errors
    import huggingface_hub.utils
  except ImportError:
    raise UserError(f'the Hugging Face Hub needs a package: {shell.install("hub")}') from None
  return huggingface_hub


@contextlib.contextmanager
def asking(name: HubName) -> Iterator[None]:
  """A context in which errors of the Hub become UserErrors; see UnreachableError too."""
  hub = package()
  of_hub = hub.errors
  try:
    yield
  except UserError:
    raise
  except (OSError, ValueError, of_hub.HfHubHTTPError.__bases__[0], of_hub.EntryNotFoundError) as e:
    if isinstance(e, of_hub.LocalEntryNotFoundError) and isinstance(e.__cause__, Exception):
      e = e.__cause__  # why the package looked for a copy
    if isinstance(e, OSError) and e.errno in NO_SPACE:
      raise
    kind, message = _explained(e, name, hub)
    raise kind(f'{name}: {message}') from None


def _explained(e: Exception, name: HubName, hub: Any) -> tuple[type[UserError], str]:
  """Returns the class of the UserError that an exception becomes, and what is wrong."""
  of_hub = hub.errors
  token = 'HF_TOKEN' if not hub.get_token() else 'HF_TOKEN to the token of an account that may'
  response = getattr(e, 'response', None)
  status = getattr(response, 'status_code', None)
  if isinstance(e, of_hub.OfflineModeIsEnabled):
    return UnreachableError, 'HF_HUB_OFFLINE is set: unset it to download'
  if isinstance(e, of_hub.GatedRepoError):
    return UserError, f'this {name.kind} is gated: accept its terms at {name.page}, and set {token}'
  if isinstance(e, of_hub.RevisionNotFoundError):
    return UserError, f'revision {name.revision} does not exist: {name.page}/tree/main lists them'
  if isinstance(e, of_hub.RepositoryNotFoundError):
    return UserError, (
      f'neither a path here nor a public {name.kind} at {name.page}: check the spelling, or set '
      f'{token} if it is private'
    )
  if status == 401:
    return UserError, f'{name.page} refuses the token: renew HF_TOKEN, or unset it'
  if status == 403:
    return UserError, f'{name.page} may not be used ({line_of(e)}): set {token}'
  if status == 429:
    wait = response.headers.get('Retry-After') if response is not None else None
    when = f'in {wait} s' if wait else 'in a few minutes'
    more = '' if hub.get_token() else '; HF_TOKEN raises the limit'
    return UnreachableError, f'the Hub answers 429, too many requests: try again {when}{more}'
  if status is not None and status < 500:
    return UserError, (
      f'{name.page} answers {status} ({line_of(e)}): check the spelling and HF_ENDPOINT, and run '
      'the command again'
    )
  if isinstance(e, ValueError):  # the package refuses a name
    return UserError, line_of(e)
  return UnreachableError, (
    f'{name.page} cannot be read ({line_of(e)}): run the command again to continue'
  )


def patiently(name: HubName, ask: Callable[[], Any]) -> Any:
  """Returns what `ask` returns, tried again where the Hub is busy; errors as in `asking`."""
  with asking(name):
    for wait in _WAITS:
      try:
        return ask()
      except package().errors.HfHubHTTPError as e:
        if e.response.status_code not in _BUSY:
          raise
        stated = str(e.response.headers.get('Retry-After') or '')
        seconds = min(float(stated), _LONGEST_WAIT) if stated.isdecimal() else wait
        warn(f'{name}: the Hub answers {e.response.status_code}; retrying in {seconds:.0f} s')
        time.sleep(seconds)
    return ask()
