"""What devices add up of the gradient of an embedding table."""

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np

from paxlite.layers import embeddings
from paxlite.layers.embeddings import TokenEmbedding


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
