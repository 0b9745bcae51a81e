"""The options that XLA compiles a run's programs with, by the kind of its devices."""

import os
from typing import Any

# Of the program that computes initial values, which runs once: LLVM's first level makes the same
# bits of it as its last, in a third of the time
_INITIAL_VALUES: dict[str, dict[str, Any]] = {'cpu': {'xla_backend_optimization_level': 1}}

_PREFIXES = {
  'cpu': ('xla_cpu_',),
  'gpu': ('xla_gpu_',),
  'tpu': ('xla_tpu_', 'xla_enable_async_'),
}


def kind(platform: str) -> str:
  """cpu, gpu or tpu of a platform's name in JAX."""
  return {'cuda': 'gpu', 'rocm': 'gpu'}.get(platform, platform)


def of_kind(platform: str, options: dict[str, Any]) -> dict[str, Any]:
  """Those of `options` that are not for another kind of device."""
  others = tuple(p for k, ps in _PREFIXES.items() if k != kind(platform) for p in ps)
  return {name: value for name, value in options.items() if not name.startswith(others)}


def initial_values_options(platform: str) -> dict[str, Any]:
  """Options for the program that computes initial values; those of XLA_FLAGS are left out."""
  flags = os.environ.get('XLA_FLAGS', '')
  options = _INITIAL_VALUES.get(kind(platform), {})
  return {name: value for name, value in options.items() if f'--{name}=' not in flags}
