"""What the seconds of a foreseen step are spent on, by kinds of kernels."""

import collections
from collections.abc import Mapping

from paxlite.aot.collectives import collective
from paxlite.aot.costs import Costs
from paxlite.aot.origins import UPDATE, Paths, origins
from paxlite.aot.schedule import Speed

PRODUCTS, ATTENTION, TRAFFIC, OPTIMIZER = 'products', 'attention', 'traffic', 'optimizer'
PARTS = PRODUCTS, ATTENTION, TRAFFIC, OPTIMIZER


def kernel_seconds(costs: Costs, speed: Speed, mesh_sizes: Mapping[str, int]) -> dict[str, float]:
  """Returns the seconds of the kernels of a step by their part, one of PARTS.

  Together they are the kernels of `StepSchedule`'s timeline. Attention that is no kernel of its own
  is in the products and in the traffic. A kernel of the optimizer comes from the update of the
  weights alone, and has no product: a compiler may fuse the update with that of a gradient.

  Args:
    costs: The costs of the program of a step.
    speed: The speeds of the device.
    mesh_sizes: Devices by axis of its mesh.
  """
  paths = Paths(costs.program)
  # another program, such as one that writes text, has no update of weights
  is_training = any('jvp(' in kernel.instruction.source for kernel, _ in costs.kernels())
  found: dict[str, float] = collections.defaultdict(float)
  for kernel, count in costs.kernels():
    if collective(kernel.computation, kernel.instruction, mesh_sizes) is not None:
      continue  # what it reads and writes takes no time of its own
    path = paths.path(kernel.computation, kernel.instruction)
    if kernel.peak_share is not None:
      part = ATTENTION
    elif kernel.flops:
      part = PRODUCTS
    elif is_training and path and all(origin.of == UPDATE for origin in origins(path)):
      part = OPTIMIZER
    else:
      part = TRAFFIC
    found[part] += count * speed.kernel(kernel)
  return {name: found[name] for name in PARTS if name in found}
