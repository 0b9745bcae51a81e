"""Where the gradient of a weight is scattered along the lines of a TPU's torus."""

import dataclasses
import itertools
import subprocess
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from paxlite.layers.precision import scattered_gradient
from paxlite.layers.precision.weight_matmul import weight_matmul
from paxlite.parallel import partitioning, torus
from tests.support import runs


@dataclasses.dataclass(eq=False)  # hashable, as a Mesh is
class FakeMesh:
  devices: np.ndarray
  axis_names: tuple[str, ...]

  @property
  def size(self) -> int:
    return self.devices.size

  @property
  def shape(self) -> dict[str, int]:
    return dict(zip(self.axis_names, self.devices.shape, strict=True))


def mesh_of(places: np.ndarray, *axes: str, platform: str = 'tpu') -> Any:
  """A mesh of devices with these coordinates [sizes of the axes…, coordinates]."""
  devices = np.empty(places.shape[:-1], object)
  for index in np.ndindex(devices.shape):
    devices[index] = types.SimpleNamespace(platform=platform, coords=places[index].tolist())
  return FakeMesh(devices, axes)


def grid(*sizes: int) -> np.ndarray:
  """All places of a grid in the order of their coordinates, [places, 3]."""
  places = list(itertools.product(*map(range, sizes)))
  return np.array([[*place, 0, 0][:3] for place in places])


SNAKE = grid(4, 4)[[0, 4, 8, 12, 13, 9, 5, 6, 10, 14, 15, 11, 7, 3, 2, 1]]
TURNED = np.concatenate([grid(2, 3), grid(2, 3)[[1, 0, 2, 4, 3, 5]] + [2, 0, 0]])


@pytest.mark.parametrize(
  ('places', 'expected'),
  [
    (grid(8), (8,)),
    (grid(16, 16), (16, 16)),
    (grid(4, 8), (4, 8)),
    (grid(2, 3, 4), (2, 3, 4)),
    (grid(1, 8), (8,)),
    (SNAKE, (16,)),  # JAX lays a ring through a slice of 16 chips
    (TURNED, (12,)),  # the second half is in another order
    (np.concatenate([grid(4, 4)] * 2), (32,)),  # two slices have the same coordinates
    (grid(4, 4)[:14], (14,)),
    (grid(4, 4)[::5], (4,)),  # a diagonal
    (grid(1), (1,)),
  ],
)
def test_the_lines_of_a_mesh_axis(places, expected):
  assert torus.lines(mesh_of(places, 'data'), 'data') == expected


def test_lines_are_the_same_for_all_other_places_of_a_mesh():
  places = grid(4, 4, 2).reshape(4, 4, 2, 3)
  data_first = places.transpose(2, 0, 1, 3).reshape(2, 16, 3)
  assert torus.lines(mesh_of(data_first, 'replica', 'data'), 'data') == (4, 4)
  assert torus.lines(mesh_of(data_first, 'replica', 'data'), 'replica') == (2,)
  bent = data_first.copy()
  bent[1, [0, 1]] = bent[1, [1, 0]]
  assert torus.lines(mesh_of(bent, 'replica', 'data'), 'data') == (16,)


def test_devices_that_are_not_tpus_are_one_line():
  assert torus.lines(Mesh(np.array(jax.devices()[:1]), ('data',)), 'data') == (1,)
  # those of `paxlite compile --target=h100x64` have the numbers of their hosts as coordinates
  assert torus.lines(mesh_of(grid(8, 8), 'data', platform='gpu'), 'data') == (64,)


def scatter_on(sizes: dict[str, int], rows: int, shape: tuple[int, ...], *names: str | None) -> Any:
  """Returns the scatter of a weight's gradient on a mesh whose devices are in lines of 4."""
  count = int(np.prod(list(sizes.values())))
  places = grid(count // 4, 4).reshape(*sizes.values(), 3)
  mesh: Any = mesh_of(places, *sizes)
  with partitioning.activate(mesh, partitioning.rules_for(tuple(sizes), partitioning.ALL_RULES)):
    return scattered_gradient.scatter_of(rows, shape, names)


def test_a_gradient_is_scattered_where_only_the_batch_is_split():
  one = {'replica': 1, 'data': 16, 'mdl': 1}
  made = scatter_on(one, 32, (64, 8, 4), 'embed', 'heads', 'head_dim')
  assert made.lines == (4, 4)
  assert made.dim == 0
  assert scatter_on(one, 32, (3, 64, 8, 4), 'qkv', 'embed', 'heads', None).dim == 1
  assert scatter_on({'replica': 2, 'data': 16, 'mdl': 1}, 32, (64, 8), 'embed', 'mlp') is not None


@pytest.mark.parametrize(
  ('sizes', 'rows', 'shape', 'names'),
  [
    ({'replica': 1, 'data': 16, 'mdl': 2}, 32, (64, 8), ('embed', 'mlp')),
    ({'replica': 1, 'data': 8, 'mdl': 1, 'context': 2}, 32, (64, 8), ('embed', 'mlp')),
    ({'stage': 2, 'replica': 1, 'data': 8, 'mdl': 1}, 32, (64, 8), ('embed', 'mlp')),
    ({'replica': 4, 'data': 4, 'mdl': 1}, 32, (64, 8), ('embed', 'mlp')),  # one line
    ({'replica': 16, 'data': 1, 'mdl': 1}, 32, (64, 8), ('embed', 'mlp')),
    ({'replica': 1, 'data': 16, 'mdl': 1}, 8, (64, 8), ('embed', 'mlp')),  # half a row a device
    ({'replica': 1, 'data': 16, 'mdl': 1}, 32, (65, 8), ('embed', 'mlp')),  # not split
    ({'replica': 1, 'data': 16, 'mdl': 1}, 32, (64, 8), (None, 'mlp')),
  ],
)
def test_xla_sums_all_other_gradients(sizes, rows, shape, names):
  assert scatter_on(sizes, rows, shape, *names) is None


VALUES = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh
from paxlite.layers.precision.scattered_gradient import Scatter, scattered_sum

mesh = Mesh(np.array(jax.devices()).reshape(1, 8), ('replica', 'data'))
x, y = (jax.random.normal(jax.random.key(i), (16, 4, n)) for i, n in enumerate((24, 6)))
for made, dim in ('DF', 0), ('FD', 1):
  equation = f'BTD,BTF->{made}'
  scatter = Scatter(mesh, ('replica', 'data'), dim, (2, 4))
  found = jax.jit(lambda x, y: scattered_sum(equation, 'B', scatter, x, y))(x, y)
  assert found.sharding.shard_shape(found.shape)[dim] == 24 // 8
  np.testing.assert_allclose(found, jnp.einsum(equation, x, y), rtol=1e-5, atol=1e-5)
print('equal')
"""


@pytest.mark.slow
def test_a_scattered_sum_has_the_values_of_einsum():
  """On lines of two sizes, so that each device gets its own part in one order of them alone."""
  done = subprocess.run(
    [sys.executable, '-c', VALUES], capture_output=True, text=True, env=runs.environment(8),
    cwd=runs.ROOT, check=False,
  )  # fmt: skip
  assert done.stdout == 'equal\n', done.stderr


def test_without_a_mesh_a_product_is_that_of_einsum():
  x, w = jnp.ones((2, 3, 4)), jnp.ones((4, 5))
  assert scattered_gradient.scatter_of(2, w.shape, ('embed', 'mlp')) is None
  y = weight_matmul('BTD,DF->BTF', x, w, ('embed', 'mlp'))
  np.testing.assert_array_equal(y, jnp.einsum('BTD,DF->BTF', x, w))
