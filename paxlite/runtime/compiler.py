"""The options with which XLA compiles a run's programs, by kind of device."""

import os
from typing import Any

# Options for the program that computes initial values, which runs once. LLVM's first optimization
# level gives bit-identical values to its last one, in a third of the time.
_INITIAL_VALUES: dict[str, dict[str, Any]] = {'cpu': {'xla_backend_optimization_level': 1}}

_PREFIXES = {
  'cpu': ('xla_cpu_',),
  'gpu': ('xla_gpu_',),
  'tpu': ('xla_tpu_', 'xla_enable_async_'),
}


def kind(platform: str) -> str:
  """Returns cpu, gpu or tpu for the name of a platform in JAX."""
  return {'cuda': 'gpu', 'rocm': 'gpu'}.get(platform, platform)


def of_kind(platform: str, options: dict[str, Any]) -> dict[str, Any]:
  """Returns `options` without those for other kinds of device."""
  others = tuple(p for k, ps in _PREFIXES.items() if k != kind(platform) for p in ps)
  return {name: value for name, value in options.items() if not name.startswith(others)}


def initial_values_options(platform: str) -> dict[str, Any]:
  """Returns the options for the program of the initial values, without those in XLA_FLAGS."""
  flags = os.environ.get('XLA_FLAGS', '')
  options = _INITIAL_VALUES.get(kind(platform), {})
  return {name: value for name, value in options.items() if f'--{name}=' not in flags}
