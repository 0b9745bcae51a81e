"""A kernel of attention and a bias of its scores, added from outside the package."""

import json

import jax
import numpy as np
import pytest

from paxlite.aot.analysis import abstract_batch, sharded_task
from paxlite.core.errors import UserError
from paxlite.experiments.registry import find
from paxlite.layers.attention import attention_kernels
from paxlite.layers.attention.cudnn_attention import CudnnKernel
from tests.outside.trained import EIGHT, trained, trained_on_one
from tests.support import runs

CAPPED, ALIBI = 'capped_kernel.CappedGPT', 'alibi.AlibiGPT'


def same(found: dict[int, float], expected: dict[int, float]) -> None:
  assert found.keys() == expected.keys()
  assert len(found) == 3
  np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=0, atol=1e-5)


@pytest.mark.exhaustive
def test_a_kernel_computes_what_the_list_has_for_the_case(tmp_path):
  """On eight devices with microbatches, as plain XLA does on one device."""
  own = trained(tmp_path / 'own', CAPPED)
  same(own, trained_on_one(tmp_path / 'other', CAPPED, 8, '--fdl.USE_FLASH_ATTENTION=False'))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_kernel_on_one_device(tmp_path):
  own = trained(tmp_path / 'own', CAPPED)
  same(own, trained_on_one(tmp_path / 'one', CAPPED, 8))
  same(own, trained(tmp_path / 'other', CAPPED, '--fdl.USE_FLASH_ATTENTION=False'))
  without = trained(tmp_path / 'without', CAPPED, '--fdl.ATTEN_LOGIT_CAP=-1')
  assert abs(own[1] - without[1]) > 1e-4, 'the cap changes nothing'


@pytest.mark.slow
def test_a_kernel_is_used_where_it_says_so():
  """Counts in the traced step: in each of two blocks, unless something else is asked for."""
  done = runs.module('tests.outside.test_kernels', devices=8)
  counts = json.loads(done.stdout.splitlines()[-1])
  assert counts.pop('capped') > 0
  assert set(counts.values()) == {0}, counts


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_bias_on_eight_devices(tmp_path):
  own = trained(tmp_path / 'own', ALIBI)
  same(own, trained_on_one(tmp_path / 'one', ALIBI, 8))
  without = trained(tmp_path / 'without', 'alibi.WithoutPositions')
  assert abs(own[1] - without[1]) > 1e-4, 'the bias changes nothing'


def test_a_bias_is_known_to_the_experiment():
  """A ring would leave it out, and fused kernels too."""
  values = dict(MESH_AXES=['replica', 'data', 'mdl', 'context'], ICI_MESH_SHAPE=[1, 1, 1, 2])
  e = find(f'tests.outside.parts.{ALIBI}')().replaced(
    **values, DCN_MESH_SHAPE=[1] * 4, CONTEXT_ATTENTION='ring'
  )
  with pytest.raises(UserError, match=r'nor a relative bias: CONTEXT_ATTENTION=gather'):
    e.validate()
  gpu = e.attention_case(platform='gpu', capability=9.0)
  assert gpu.bias is not None
  assert attention_kernels.refusal(CudnnKernel(), gpu.of_one_device()) is not None


def count(**values: object) -> int:
  """Returns how often the kernel is in a step on eight devices."""
  from tests.outside.parts.capped_kernel import Capped, CappedGPT

  before = Capped.traced
  e = CappedGPT().replaced(ICI_MESH_SHAPE=json.loads(EIGHT.partition('=')[2]), **values)
  task = sharded_task(e, e.mesh(jax.devices()))
  task.lower_step(abstract_batch(e, task.mesh, []))
  return Capped.traced - before


if __name__ == '__main__':
  cases = {
    'capped': dict(), 'without a cap': dict(ATTEN_LOGIT_CAP=-1.0),
    'with sinks': dict(USE_ATTENTION_SINKS=True), 'left out': dict(USE_FLASH_ATTENTION=False),
  }  # fmt: skip
  print(json.dumps({name: count(**values) for name, values in cases.items()}))
