"""The options with which XLA compiles a run's programs, by kind of device."""

import functools
import math
import os
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from paxlite.parallel.devices import has_sparse_cores, kind

if TYPE_CHECKING:
  import jax

Option = str | bool | int | float
Options = Mapping[str, Option]

# Options for the program that computes initial values, which runs once. LLVM's first optimization
# level gives bit-identical values to its last one, in a third of the time.
_INITIAL_VALUES: dict[str, dict[str, Option]] = {'cpu': {'xla_backend_optimization_level': 1}}

_FLAGS_OF_XLA = 'XLA_FLAGS', 'LIBTPU_INIT_ARGS'
# prefixes of further environment variables that choose kernels or the precision of products
_CHANGES_PROGRAMS = 'NVIDIA_TF32_OVERRIDE', 'NVTE_', 'TF_CUDNN_', 'TF_XLA_FLAGS', 'CUBLAS_'

# Options for programs that run on several GPUs: the next layer's weights are gathered and the last
# one's gradients are reduced while a layer is computed, and a loop over layers does not copy what
# it carries. Each option has a (name, value) for each generation of XLA, the newest first.
_SEVERAL_GPUS: tuple[tuple[tuple[str, Option], ...], ...] = (
  *(
    (
      (f'xla_gpu_pipeline_{kind}', 'COLLECTIVE_PIPELINING_MODE_ON'),
      (f'xla_gpu_enable_pipelined_{kind}', True),
    )
    for kind in ('all_gather', 'reduce_scatter', 'all_reduce')
  ),
  (('xla_gpu_enable_while_loop_double_buffering', True),),
)
# Options for GPUs that exchange activations along these mesh axes. Several collectives run at a
# time, so that none waits for another one. By the compiler's schedule, steps take 4 to 12 % less
# time with mdl, 6 to 8 % with context, and 0.1 to 5 % with stage. With data alone, steps of large
# models take 1 to 16 % more. With expert nothing was gained, and a ragged all-to-all, which writes
# to the memory of other devices, would run beside other collectives.
_EXCHANGING: tuple[tuple[tuple[str, Option], ...], ...] = (
  (('xla_gpu_experimental_parallel_collective_overlap_limit', 4),),
)
_EXCHANGING_AXES = ('mdl', 'stage', 'context')
# An option for several GPUs without a loop over layers. By itself, XLA scatters the gradients of
# many layers in one collective, which nothing hides, and which holds the gradients until then. With
# it, gradients are scattered alone, but for those whose part on a device has fewer bytes.
_EACH_GRADIENT: tuple[tuple[tuple[str, Option], ...], ...] = (
  (('xla_gpu_reduce_scatter_combine_threshold_bytes', 1 << 16),),
)
# Options for several TPUs. By itself, XLA gathers weights in parts, and multiplies each part with
# the activations, which are read again each time. Without that, and with the first gathers of the
# next layer in the loop of this one, most steps take 1 to 18 % less time (docs/measurements.md).
_SEVERAL_TPUS: tuple[tuple[tuple[str, Option], ...], ...] = (
  (('xla_tpu_enable_windowed_einsum_for_all_gather', False),),
  (('xla_tpu_enable_ici_ag_pipelining', True),),
  (('xla_should_allow_loop_variant_parameter_in_chain', 'ENABLED'),),
  (('xla_should_add_loop_invariant_op_in_chain', 'ENABLED'),),
  (('xla_tpu_max_ag_pipelining_per_loop', 2),),
)
# Options for several TPUs that gather the weights of dropless experts. XLA hides no collective
# behind the kernels of their products, unless the SparseCores run it. They take gathers and
# scatters along one line of the torus: see layers/precision/scattered_gradient.py.
_SPARSE_CORES: tuple[tuple[tuple[str, Option], ...], ...] = tuple(
  ((f'xla_tpu_enable_sparse_core_collective_offload_{kind}', True),)
  for kind in ('all_gather', 'reduce_scatter', 'all_reduce')
)
# With these mesh axes, activations are gathered in the loops over layers, or weights in the loop
# over the ticks of a pipeline. XLA pipelines such gathers by computing what is before them twice.
# Of 11 steps that were compiled without that, 10 take 2 to 17 % less time, one takes 5 % more, and
# all take less memory (docs/measurements.md).
_GATHERING_AXES = ('mdl', 'stage', 'expert')
_GATHERS = _SEVERAL_GPUS[0]
_OFF: dict[Option, Option] = {
  True: False,
  'COLLECTIVE_PIPELINING_MODE_ON': 'COLLECTIVE_PIPELINING_MODE_OFF',
}

_PREFIXES = {
  'cpu': ('xla_cpu_',),
  'gpu': ('xla_gpu_',),
  'tpu': ('xla_tpu_', 'xla_enable_async_', 'xla_should_'),
}


def of_kind(platform: str, options: dict[str, Option]) -> dict[str, Option]:
  """Returns `options` without those for other kinds of device."""
  others = tuple(p for k, ps in _PREFIXES.items() if k != kind(platform) for p in ps)
  return {name: value for name, value in options.items() if not name.startswith(others)}


def is_known_here(name: str, value: Option) -> bool:
  """Returns whether the XLA of JAX's default devices takes an option."""
  return _is_known(name, value, None)


def step_options(
  platform: str,
  mesh_sizes: Mapping[str, int],
  given: dict[str, Option],
  is_known: Callable[[str, Option], bool] = is_known_here,
  scatters_each_gradient: bool = False,
  gathers_experts: bool = False,
) -> dict[str, Option]:
  """Returns the options of a train step: paxlite's own for this platform, and those given.

  An option is left out if it is given under one of its names, here or in XLA_FLAGS or
  LIBTPU_INIT_ARGS, or if this XLA does not know it.

  Args:
    platform: JAX's name of the platform.
    mesh_sizes: The sizes of the mesh axes.
    given: The options that a user gives.
    is_known: Whether the XLA of the devices takes an option.
    scatters_each_gradient: Whether XLA scatters the gradient of each weight by itself, as is better
      without a loop over layers.
    gathers_experts: Whether each device gathers the weights of dropless experts.
  """
  if math.prod(mesh_sizes.values()) == 1:
    return given
  groups = {'gpu': _SEVERAL_GPUS, 'tpu': _SEVERAL_TPUS}.get(kind(platform), ())
  has = lambda axes: any(mesh_sizes.get(axis, 1) > 1 for axis in axes)
  if kind(platform) == 'gpu' and has(_EXCHANGING_AXES) and not has(('expert',)):
    groups += _EXCHANGING
  if kind(platform) == 'gpu' and scatters_each_gradient:
    groups += _EACH_GRADIENT
  if kind(platform) == 'tpu' and gathers_experts:
    groups += _SPARSE_CORES
  own: dict[str, Option] = {}
  flags = ' '.join(os.environ.get(name, '') for name in ('XLA_FLAGS', 'LIBTPU_INIT_ARGS'))
  for names in groups:
    if any(name in given or re.search(rf'--(no)?{name}\b', flags) for name, _ in names):
      continue
    if has(_GATHERING_AXES) and names == _GATHERS:
      names = tuple((name, _OFF[value]) for name, value in names)
    own |= dict([option for option in names if is_known(*option)][:1])
  return own | given


def without_pipelining(options: Options) -> dict[str, Option]:
  """Returns options without those that pipeline collectives, which need more memory."""
  pipelining = {name for names in _SEVERAL_GPUS for name, _ in names if 'pipeline' in name}
  pipelining |= {name for names in _SEVERAL_TPUS[1:] for name, _ in names}
  return {name: value for name, value in options.items() if name not in pipelining}


def is_known_to(device: 'jax.Device') -> Callable[[str, Option], bool]:
  """Returns a function that says whether the XLA of a device, here or not, takes an option."""
  return lambda name, value: _is_known(name, value, device)


@functools.cache
def _is_known(name: str, value: Option, device: 'jax.Device | None') -> bool:
  """Returns whether XLA takes an option; a trivial program is compiled to find out.

  XLA takes options for SparseCores on TPUs that have none.
  """
  import jax

  of = jax.devices()[0] if device is None else device
  if 'sparse_core' in name and not has_sparse_cores(of):
    return False
  sharding = None if device is None else jax.sharding.SingleDeviceSharding(device)
  x = jax.ShapeDtypeStruct((), 'float32', sharding=sharding)
  try:
    options: dict[str, Any] = {name: value}  # some versions of JAX declare texts and bools alone
    jax.jit(lambda x: x).lower(x).compile(compiler_options=options)
  except jax.errors.JaxRuntimeError:
    return False
  return True


def initial_values_options(platform: str) -> dict[str, Option]:
  """Returns the options for the program of the initial values, without those in XLA_FLAGS."""
  flags = os.environ.get('XLA_FLAGS', '')
  options = _INITIAL_VALUES.get(kind(platform), {})
  return {name: value for name, value in options.items() if f'--{name}=' not in flags}


def flags_of(variable: str) -> list[str]:
  """Returns the XLA flags of an environment variable, except those that change no program.

  Those set dumps, or the number of fake devices, which is compared where it matters.
  """
  idle = ('--xla_force_host_platform_device_count', '--xla_dump_')
  return [f for f in os.environ.get(variable, '').split() if not f.startswith(idle)]


def environment_of_programs() -> dict[str, str]:
  """Returns the environment variables that change what a program computes, or how."""
  found = {name: ' '.join(flags_of(name)) for name in _FLAGS_OF_XLA}
  found |= {k: v for k, v in os.environ.items() if k.startswith(_CHANGES_PROGRAMS)}
  return {k: v for k, v in sorted(found.items()) if v}
