"""Runs a test with both kinds of kernels: those for CPUs, and those for accelerators."""

import pytest

from paxlite.layers.attention.cpu_attention import CpuKernel
from paxlite.layers.precision import weight_matmul


@pytest.fixture(params=['cpu', 'accelerator'])
def platform(request, monkeypatch):
  """On 'accelerator', a model uses the plain-XLA kernels of TPUs and GPUs."""
  if request.param == 'accelerator':
    monkeypatch.setattr(CpuKernel, 'refusal', lambda *_: 'is left out')
    monkeypatch.setattr(weight_matmul, 'active_platform', lambda: 'tpu')
