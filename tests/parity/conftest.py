"""Both ways of computing a model: those of CPUs, and those that accelerators take."""

import pytest

from paxlite.layers import attention_kernel, weight_product


@pytest.fixture(params=['cpu', 'accelerator'])
def platform(request, monkeypatch):
  """On 'accelerator' a model takes the kernels in plain XLA that TPUs and GPUs take."""
  if request.param == 'accelerator':
    for module in (attention_kernel, weight_product):
      monkeypatch.setattr(module, 'active_platform', lambda: 'tpu')
