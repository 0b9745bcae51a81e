"""SOAP beside the algorithm of its authors in float64, and in runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxlite.more_optimizers.soap import scale_by_soap
from paxlite.parallel.weight_dims import Weight, declared
from tests.support import runs
from tests.unit.optim.test_by_name import optimizer_of

BETA1, BETA2, EPSILON, FREQUENCY = 0.95, 0.9, 1e-8, 5


class Reference:
  """A matrix as https://arxiv.org/abs/2409.11321 and the code of its authors update it.

  The mean gradient is kept in the eigenbases, and brought into the new ones when they change. The
  first update only makes the bases.
  """

  def __init__(self, shape, max_size):
    self.sides = [i for i in (0, 1) if shape[i] <= max_size]
    self.products = {i: np.zeros((shape[i], shape[i])) for i in self.sides}
    self.bases, self.count = {}, 0
    self.m, self.v = np.zeros(shape), np.zeros(shape)

  def rotated(self, x, back=False):
    for i in self.sides:
      q = self.bases[i] if back else self.bases[i].T
      x = q @ x if i == 0 else x @ q.T
    return x

  def update(self, grad):
    if not self.bases:
      self._mean_products(grad)
      self.bases = {i: np.linalg.eigh(self.products[i])[1][:, ::-1] for i in self.sides}
      return np.zeros_like(grad)
    self.count += 1
    rotated = self.rotated(grad)
    self.m = BETA1 * self.m + (1 - BETA1) * rotated
    self.v = BETA2 * self.v + (1 - BETA2) * rotated**2
    scale = np.sqrt(1 - BETA2**self.count) / (1 - BETA1**self.count)
    made = scale * self.rotated(self.m / (np.sqrt(self.v) + EPSILON), back=True)
    self.m = self.rotated(self.m, back=True)
    self._mean_products(grad)
    if self.count % FREQUENCY == 0:
      for i in self.sides:
        q = self.bases[i]
        order = np.argsort(-np.diag(q.T @ self.products[i] @ q))
        self.v = np.take(self.v, order, i)
        self.bases[i] = np.linalg.qr(self.products[i] @ q[:, order])[0]
    self.m = self.rotated(self.m)
    return made

  def _mean_products(self, grad):
    for i in self.sides:
      product = grad @ grad.T if i == 0 else grad.T @ grad
      self.products[i] = BETA2 * self.products[i] + (1 - BETA2) * product


@pytest.mark.parametrize(('heads', 'max_size'), [((3, 2), 100), ((3, 4), 8)])
def test_fifty_updates_are_those_of_its_authors(heads, max_size):
  """Of two layers of weights [6, 3, 2], matrices of six outputs; those of twelve have no basis.

  The eigenvectors of a product without full rank are not determined, and would differ.
  """
  rng, shape = np.random.default_rng(0), (2, 6, *heads)
  box = lambda: {'w': Weight(jnp.zeros(shape), ('layers', 'embed', 'heads', 'head_dim'),
                             equation='BTD,DNH->BTNH')}  # fmt: skip
  optimizer = scale_by_soap(BETA1, BETA2, EPSILON, FREQUENCY, max_size)
  outputs = heads[0] * heads[1]
  references = [Reference((6, outputs), max_size) for _ in range(2)]
  with declared(box), jax.default_matmul_precision('highest'):
    state, update = optimizer.init({'w': jnp.zeros(shape)}), jax.jit(optimizer.update)
    mean = rng.normal(size=shape)
    for number in range(50):
      grad = mean + rng.normal(size=shape)
      made, state = update({'w': jnp.asarray(grad, jnp.float32)}, state)
      wanted = [r.update(g.reshape(6, outputs)) for r, g in zip(references, grad, strict=True)]
      found = np.asarray(made['w']).reshape(2, 6, outputs)
      assert found.any() == (number > 0)
      np.testing.assert_allclose(found, wanted, atol=2e-3)
      assert np.abs(found - wanted).mean() < 1e-4
    assert int(state.count) == 50


def test_a_skipped_update_changes_nothing():
  box = lambda: {'w': Weight(jnp.zeros((6, 4)), ('embed', 'mlp'), equation='BTD,DF->BTF')}
  optimizer = scale_by_soap()
  with declared(box):
    params = {'w': jnp.asarray(np.random.default_rng(0).normal(size=(6, 4)), jnp.float32)}
    _, state = optimizer.update(params, optimizer.init(params), valid=True)
    made, after = optimizer.update({'w': jnp.zeros((6, 4))}, state, valid=False)
  jax.tree.map(np.testing.assert_array_equal, after, state)
  assert not np.asarray(made['w']).any()


def test_moments_in_few_bits_leave_the_bases_as_they_are():
  for dtype in ('bfloat16', 'int8'):
    optimizer_of('soap', ADAM_MOMENTS_DTYPE=dtype)


@pytest.mark.slow
def test_a_run_is_the_same_on_four_devices_and_after_a_stop(tmp_path):
  flags = ['--fdl.OPTIMIZER=soap', '--fdl.SOAP_FREQUENCY=2', '--fdl.USE_REPEATED_LAYER=True']
  of_one = [*flags, '--fdl.PERCORE_BATCH_SIZE=4']
  runs.run(tmp_path / 'one', *of_one, '--fdl.MAX_STEPS=6')
  whole = runs.losses(tmp_path / 'one')
  assert len(set(whole.values())) > 2
  mesh = '--fdl.ICI_MESH_SHAPE=[1,2,2]', '--fdl.PERCORE_BATCH_SIZE=1', '--fdl.NUM_MICROBATCHES=2'
  runs.run(tmp_path / 'four', *flags, *mesh, '--fdl.MAX_STEPS=6', devices=4)
  assert runs.losses(tmp_path / 'four') == pytest.approx(whole, rel=1e-4)
  runs.run(tmp_path / 'parts', *of_one, '--fdl.MAX_STEPS=3')
  runs.run(tmp_path / 'parts', *of_one, '--fdl.MAX_STEPS=6')
  assert runs.losses(tmp_path / 'parts') == whole
