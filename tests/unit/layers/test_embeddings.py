"""What devices send and add up of an embedding table.

`python -m tests.unit.layers.test_embeddings` looks tokens up on 8 devices of a CPU.
"""

import json

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

from paxlite.layers import embeddings
from paxlite.layers.embeddings import TokenEmbedding
from paxlite.parallel import partitioning
from paxlite.parallel.mesh import make_mesh
from tests.support import runs

AXES = ['replica', 'data', 'mdl', 'context']
V, B, T = 96, 8, 16
# replica, data, context, the width of the table; and shapes that no device should have
CASES = [
  ((1, 2, 4), 32, [(V, 32), (V, 16), (V, 8)]),
  ((1, 1, 8), 32, [(V, 32)]),
  ((2, 1, 4), 32, [(V, 32)]),
  ((1, 2, 4), 34, [(B, T, 17), (B, T, 34)]),  # context does not divide 17
  ((1, 2, 4), 33, [(B, T, 33)]),
]


@pytest.mark.slow
def test_no_device_along_context_gathers_a_table():
  """Where context divides its width; else, no device looks up the tokens of others."""
  done = runs.module('tests.unit.layers.test_embeddings', devices=8)
  results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{')]
  assert len(results) == len(CASES)
  for (_, _, shapes), found in zip(CASES, results, strict=True):
    assert found['difference'] < 1e-5
    for dims in shapes:
      assert f'f32[{",".join(map(str, dims))}]' not in found['program'], found['case']


def look_up(sizes: tuple[int, int, int], D: int) -> None:
  """Prints how far values and gradients are from those of one device, and the program."""
  ids_BT = jax.random.randint(jax.random.key(0), (B, T), 0, V)
  table_VD = jax.random.normal(jax.random.key(1), (V, D))
  square_DD = jax.random.normal(jax.random.key(2), (D, D))

  def value(table_VD, ids_BT):
    x_BTD = TokenEmbedding(V, D).apply({'params': {'emb_var': table_VD}}, ids_BT)
    x_BTD = partitioning.shard(x_BTD, 'batch', 'length', None)
    x_BTD = partitioning.shard(jnp.sin(x_BTD @ square_DD), 'batch', 'length', None)
    return (x_BTD**3).sum()

  of = jax.value_and_grad(value)
  expected = jax.jit(of)(table_VD, ids_BT)
  replica, data, context = sizes
  mesh = make_mesh([replica, data, 1, context], [1, 1, 1, 1], AXES)
  rules = partitioning.rules_for(AXES)

  def split(x, *names):
    spec = partitioning.fitting(partitioning.spec(names, rules), x.shape, dict(mesh.shape))
    return jax.NamedSharding(mesh, spec)

  shardings = split(table_VD, 'vocab', 'embed'), split(ids_BT, 'batch', 'length')
  with partitioning.activate(mesh, rules):
    # another function, because JAX would take the trace without a mesh
    step = jax.jit(lambda *args: of(*args), in_shardings=shardings)
    program = step.lower(table_VD, ids_BT).compile()
    found = program(*jax.device_put((table_VD, ids_BT), shardings))
  differences = jax.tree.map(
    lambda a, b: np.max(np.abs(a - b)) / np.max(np.abs(b)), found, expected
  )
  result = {'case': [*sizes, D], 'difference': float(max(differences))}
  print(json.dumps(result | {'program': program.as_text()}), flush=True)


def test_groups_of_devices_add_up_what_they_have_added_up_alone(monkeypatch):
  """XLA may otherwise add up whole tables over all devices: 524 MB for LLaMA 7B, not 66 MB."""
  V, D, B, T, G = 24, 8, 6, 16, 2
  ids_BT = jax.random.randint(jax.random.key(0), (B, T), 0, V)
  table_VD = jax.random.normal(jax.random.key(1), (V, D))

  def value(table_VD):
    embedding = TokenEmbedding(V, D)
    return jnp.sin(embedding.apply({'params': {'emb_var': table_VD}}, ids_BT)).sum()

  def scattered(jaxpr):
    for e in jaxpr.eqns:
      if e.primitive.name == 'scatter-add':
        yield e.outvars[0].aval.shape
      for inner in jax.extend.core.jaxprs_in_params(e.params):
        yield from scattered(inner)

  alone = jax.value_and_grad(value)
  expected = jax.jit(alone)(table_VD)
  assert list(scattered(jax.make_jaxpr(alone)(table_VD).jaxpr)) == [(V, D)]
  shards = {'lookup_batch': G, 'lookup_embed': 4, 'exchanged_embed': 4}
  monkeypatch.setattr(embeddings, 'shards_of', lambda name, size: shards[name])
  in_groups = jax.value_and_grad(lambda table_VD: value(table_VD))
  found = jax.jit(in_groups)(table_VD)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), found, expected)
  assert list(scattered(jax.make_jaxpr(in_groups)(table_VD).jaxpr)) == [(G, V, D)]


if __name__ == '__main__':
  for sizes, width, _ in CASES:
    look_up(sizes, width)
