"""The devices that JAX has for this process, or a line that says why it has none."""

import os
from collections.abc import Sequence
from typing import Any

from paxlite.core import shell
from paxlite.core.errors import UserError

_EXTRAS = {'cuda': 'cuda13', 'gpu': 'cuda13', 'tpu': 'tpu'}


def present() -> list[Any]:
  """All devices of the run.

  Raises:
    UserError: JAX_PLATFORMS asks for devices that are not present, or whose package is missing.
  """
  import jax

  try:
    return jax.devices()
  except (RuntimeError, AssertionError) as e:  # JAX asserts where its plugin is missing
    asked = os.environ.get('JAX_PLATFORMS', '')
    if not asked:
      raise
    why = f' ({str(e).splitlines()[0]})' if str(e) else ''
    extra = _EXTRAS.get(asked.partition(',')[0])
    package = f', or install what JAX needs for them: {shell.install(extra)}' if extra else ''
    raise UserError(
      f'JAX has no devices of JAX_PLATFORMS={asked} here{why}. Leave JAX_PLATFORMS unset{package}'
    ) from None


def described() -> str:
  """The devices of the run as text."""
  return text(present())


def text(found: Sequence[Any]) -> str:
  """Devices as text: '8 × NVIDIA H100 80GB HBM3 (gpu)', '1 × cpu'."""
  kind, platform = found[0].device_kind, found[0].platform
  return f'{len(found)} × {kind}' + (f' ({platform})' if platform != kind else '')
