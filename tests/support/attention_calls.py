"""What the tests of kernels of attention call."""

import types

import jax
import jax.numpy as jnp
import numpy as np

from paxlite.layers.attention import attention_kernels
from paxlite.layers.attention.attention import DotProductAttention
from paxlite.layers.attention.attention_case import Case
from paxlite.layers.attention.attention_kernel import AttentionKernel
from paxlite.layers.attention.softmax_attention import Softmax
from paxlite.parallel import partitioning


def gradients(module, arrays, segments):
  """Returns ((a value, the output), the gradients of the value)."""

  def value(arrays):
    y = module.apply({}, *arrays, segments)
    return jnp.sin(y).sum(), y

  return jax.jit(jax.value_and_grad(value, has_aux=True))(arrays)


def check_plain(kernel, arrays, values, asked) -> None:
  """Checks that attention with these values is computed without the kernel, with both templates."""
  both = [
    DotProductAttention(query_scale=0.5, kernel_tpl=tpl, **values)
    for tpl in (AttentionKernel, kernel)
  ]
  rngs = {'dropout': jax.random.key(2)}
  variables = both[0].init({'params': jax.random.key(1), **rngs}, *arrays)
  expected, found = (m.apply(variables, *arrays, rngs=rngs) for m in both)
  assert not asked
  np.testing.assert_array_equal(found, expected)


def fits(monkeypatch, kernel, query, keys, dtype, sizes, **device) -> bool:
  """Returns whether a kernel computes attention of these shapes on a mesh of such a device."""
  rules = partitioning.rules_for(['replica', 'data', 'mdl', 'context'])
  shape = dict(replica=1, data=1, mdl=1, context=1) | sizes
  mesh = types.SimpleNamespace(devices=np.array([types.SimpleNamespace(**device)]), shape=shape)
  monkeypatch.setattr(partitioning, 'active_mesh', lambda: (mesh, rules))
  q, kv = (jax.ShapeDtypeStruct(s, dtype) for s in (query, keys))
  return attention_kernels.refusal(kernel, Case(q, kv, kv, Softmax(0.5))) is None
