"""What XLA is told about the programs of a run, by the platform of its devices."""

import os
from typing import Any

# LLVM's first level makes the same bits of them as its last, and compiles in a third of the time
_INITIAL_VALUES = {'cpu': {'xla_backend_optimization_level': 1}}


def initial_values_options(platform: str) -> dict[str, Any]:
  """Of the program that computes initial values; what XLA_FLAGS says is left to them."""
  flags = os.environ.get('XLA_FLAGS', '')
  options = _INITIAL_VALUES.get(platform, {})
  return {name: value for name, value in options.items() if f'--{name}=' not in flags}
