"""Runs a test with both kinds of kernels: those for CPUs, and those for accelerators."""

import pytest

from paxlite.layers import attention_kernel, weight_product


@pytest.fixture(params=['cpu', 'accelerator'])
def platform(request, monkeypatch):
  """On 'accelerator', a model uses the plain-XLA kernels of TPUs and GPUs."""
  if request.param == 'accelerator':
    for module in (attention_kernel, weight_product):
      monkeypatch.setattr(module, 'active_platform', lambda: 'tpu')
