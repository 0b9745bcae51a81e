"""Checks the arrays that a loss keeps for its backward pass against what its layers must keep."""

import jax
import jax.numpy as jnp
import pytest

from paxlite.aot.saved_activations import loss_of, saved_by
from paxlite.experiments.demo import TinyGPT


def test_of_a_function():
  """exp keeps its result, sin the cosine of its argument; arguments are not counted."""
  x = jax.ShapeDtypeStruct((3, 5), jnp.float32)
  kept, _ = saved_by(lambda x, y: (jnp.sin(jnp.exp(x)) * y).sum(), x, x)
  assert sorted(k.operation for k in kept) == ['cos', 'exp']
  assert {(k.shape, k.dtype) for k in kept} == {((3, 5), 'float32')}


@pytest.mark.cases(fast=2, slow=1)
@pytest.mark.parametrize('repeated', [False, True])
@pytest.mark.parametrize(
  ('policy', 'of_a_layer'),
  [
    ('SAVE_NOTHING', {('act_embed',): 1}),
    ('SAVE_OUT_PROJ', {('act_embed',): 2}),
    ('SAVE_DOT_WITH_NO_BATCH_DIM', {('act_embed',): 2, ('act_mlp',): 1, ('act_heads', None): 3}),
  ],
)
def test_of_the_layers_of_a_model(policy, of_a_layer, repeated):
  """A layer keeps its input, and what its policy names."""
  e = TinyGPT(CHECKPOINT_POLICY=policy, USE_REPEATED_LAYER=repeated, HIDDEN_DIMS=96, MAX_SEQ_LEN=16)
  kept, _ = loss_of(e, e.mesh(jax.devices()[:1]), rows=7).saved()
  found = dict.fromkeys(of_a_layer, 0)
  for k in kept:
    names = tuple(n for n in k.names if n != 'layers')
    if names[2:] in found and k.source != 'final_ln':
      found[names[2:]] += k.shape[0] if 'layers' in k.names else 1
  found['act_embed',] -= 1  # the result of the last layer
  assert found == {names: e.NUM_LAYERS * count for names, count in of_a_layer.items()}, kept


def test_nothing_is_kept_beside_what_a_norm_of_queries_and_keys_reads():
  """Their norms read the combined product, and the statistics of each head are not small."""
  e = TinyGPT(QK_NORM='per_head', CHECKPOINT_POLICY='SAVE_DOT_WITH_NO_BATCH_DIM')
  kept, _ = loss_of(e, e.mesh(jax.devices()[:1]), rows=7).saved()
  of_attention = [k for k in kept if 'attention' in k.source]
  assert {k.label for k in of_attention} == {''}
  assert {k.shape[-3:] for k in of_attention} == {(3, e.NUM_HEADS, e.DIMS_PER_HEAD)}
