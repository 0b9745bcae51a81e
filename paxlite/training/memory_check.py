"""Compares the memory that a run needs with the available memory, before it is allocated.

The size of the state is known before anything is computed. The size of a step's temporary arrays
(activations, gradients) is known when the step is compiled. Without these checks a run with too
little memory would be killed by the kernel, or would make the machine swap.
"""

import dataclasses

import jax
from jax.sharding import Mesh

from paxlite.cli.terminal import warn
from paxlite.core import host_memory
from paxlite.core.errors import UserError
from paxlite.core.trees import PyTree
from paxlite.parallel import partitioning

_WARN = 0.8  # share of the memory left
_WAY_OUT = 'To try it all the same: --nocheck_memory'


@dataclasses.dataclass(frozen=True)
class MemoryCheck:
  """Warns if a run needs most of the memory left, and refuses it if it needs more than that."""

  mesh: Mesh  # the devices of the run
  enabled: bool = True  # whether anything is checked
  # the attribute for which steps are done twice, from a copy of the state; '': none
  copied_for: str = ''

  def state(self, abstract: PyTree, trainable: PyTree) -> None:
    """Checks the size of the state and its gradients, before they are allocated.

    Raises UserError if they need more memory than is left.

    Args:
      abstract: The state, as a tree of jax.ShapeDtypeStruct with shardings.
      trainable: The parameters in it that get gradients.
    """
    is_apart = lambda x: partitioning.is_on_host(x) and not _on_cpu(self.mesh)
    leaves = jax.tree.leaves(abstract)
    states = 2 if self.copied_for else 1
    state = states * partitioning.bytes_per_device([x for x in leaves if not is_apart(x)])
    gradients = partitioning.bytes_per_device(trainable)
    more = f', and a copy of them ({self.copied_for}),' if self.copied_for else ''
    self._host(partitioning.bytes_per_device([x for x in leaves if is_apart(x)]))
    self._compare(
      state + gradients,
      f'parameters, optimizer and gradients{more} need {_size(state + gradients)}',
      'Choose a smaller model, fewer parameters to train (USE_LORA, a smaller LORA_RANK), less '
      'memory for each (OFFLOAD_OPTIMIZER, ADAM_MOMENTS_DTYPE, GRADIENT_DTYPE, FROZEN_DTYPE), or '
      'more devices with a larger axis data in ICI_MESH_SHAPE',
    )

  def step(self, compiled: jax.stages.Compiled) -> None:
    """Checks a compiled step, after its state is allocated and before the step runs.

    Raises UserError if its temporary arrays need more memory than is left.

    Args:
      compiled: The executable, from jax's lower().compile().
    """
    analysis = compiled.memory_analysis()
    if analysis is None:  # not every platform provides it
      return
    needed = analysis.temp_size_in_bytes
    self._compare(
      needed,
      f'a step needs {_size(needed)} for activations and gradients',
      'Choose a smaller PERCORE_BATCH_SIZE or a larger NUM_MICROBATCHES, a shorter MAX_SEQ_LEN, or '
      'USE_REPEATED_LAYER=True with CHECKPOINT_POLICY=SAVE_NOTHING',
    )

  def _host(self, each: int) -> None:
    """Compares the bytes that each device of this process keeps on the host with those left there.

    Raises UserError if they need more memory than is left.
    """
    available = host_memory.available()
    needed = each * len(self.mesh.local_devices)
    if self.enabled and available is not None and needed > available:
      raise UserError(
        f'OFFLOAD_OPTIMIZER=True needs {_size(needed)} of host memory, but {_size(available)} are '
        'left. Choose ADAM_MOMENTS_DTYPE=bfloat16, or more machines with a larger axis data in '
        f'DCN_MESH_SHAPE. {_WAY_OUT}'
      )

  def _compare(self, needed: int, what: str, way_out: str) -> None:
    """Compares the bytes needed on one device with the bytes left for that device."""
    left = _left(self.mesh) if self.enabled else None
    if left is None or needed <= _WARN * left:
      return
    device = 'this machine' if _on_cpu(self.mesh) else 'a device'
    each = ' on each device' if self.mesh.size > 1 else ''
    text = f'{what}{each}, but {_size(left)} of memory are left on {device}'
    if needed > left:
      raise UserError(f'{text}. {way_out}. {_WAY_OUT}')
    warn(f'Little memory is left: {text}')


def _left(mesh: Mesh) -> int | None:
  """Returns the bytes that one device of this process may still allocate; None if unknown."""
  local = mesh.local_devices
  if _on_cpu(mesh):  # CPU devices share the memory of the machine
    available = host_memory.available()
    return None if available is None else available // max(len(local), 1)
  found = []
  for device in local:
    stats = device.memory_stats() or {}
    if 'bytes_limit' in stats:
      found.append(stats['bytes_limit'] - stats.get('bytes_in_use', 0))
  return min(found, default=None)


def _on_cpu(mesh: Mesh) -> bool:
  return mesh.devices.flat[0].platform == 'cpu'


def _size(count: float) -> str:
  """Returns a readable number of bytes, such as '850 MB' or '18.5 GB'."""
  for unit in ('kB', 'MB', 'GB', 'TB'):
    count /= 1000
    if count < 999.5 or unit == 'TB':
      break
  return f'{count:.3g} {unit}'
