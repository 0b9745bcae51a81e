"""What devices send and add up of an embedding table.

`python -m tests.unit.layers.test_embeddings` looks tokens up on 8 devices of a CPU.
"""

import json

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np

from paxlite.layers import embeddings
from paxlite.layers.embeddings import TokenEmbedding
from paxlite.parallel import partitioning
from paxlite.parallel.mesh import make_mesh
from tests.support import runs

AXES = ['replica', 'data', 'mdl', 'context']
V, D, B, T = 96, 32, 8, 16


def test_no_device_along_context_gathers_a_table():
  done = runs.module('tests.unit.layers.test_embeddings', devices=8)
  found = json.loads(done.stdout.splitlines()[-1])
  assert found['difference'] < 1e-5
  for dims in (f'[{V},{D}]', f'[{V},{D // 2}]', f'[{V},{D // 4}]'):
    assert dims not in found['program']


def look_up() -> None:
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
  mesh = make_mesh([1, 2, 1, 4], [1, 1, 1, 1], AXES)
  rules = partitioning.rules_for(AXES)
  split = lambda *names: jax.NamedSharding(mesh, partitioning.spec(names, rules))
  shardings = split('vocab', 'embed'), split('batch', 'length')
  with partitioning.activate(mesh, rules):
    # another function, because JAX would take the trace without a mesh
    step = jax.jit(
      lambda *args: of(*args), in_shardings=shardings, out_shardings=(None, shardings[0])
    )
    program = step.lower(table_VD, ids_BT).compile()
    found = program(*jax.device_put((table_VD, ids_BT), shardings))
  differences = jax.tree.map(
    lambda a, b: np.max(np.abs(a - b)) / np.max(np.abs(b)), found, expected
  )
  print(json.dumps({'difference': float(max(differences)), 'program': program.as_text()}))


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
  shards = {'lookup_batch': G, 'lookup_embed': 4}
  monkeypatch.setattr(embeddings, 'shards_of', lambda name, size: shards[name])
  in_groups = jax.value_and_grad(lambda table_VD: value(table_VD))
  found = jax.jit(in_groups)(table_VD)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), found, expected)
  assert list(scattered(jax.make_jaxpr(in_groups)(table_VD).jaxpr)) == [(G, V, D)]


if __name__ == '__main__':
  look_up()
