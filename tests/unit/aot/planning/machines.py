"""Machines for the tests of the planner."""

from paxlite.aot.chips import Chip
from paxlite.aot.planning.machine import Machine


def machine(name='here', platform='cpu', devices=8, near=None, memory=1e9, **chip) -> Machine:
  """Returns a machine; `chip` changes its speeds."""
  speeds = dict(peak_flops=1e12, memory_bandwidth=1e11, ici_bandwidth=1e10, dcn_bandwidth=1e9)
  found = Chip('cpu', memory=0, source='a test', **speeds | chip)
  return Machine(name, platform, devices, near or devices, memory, found)
