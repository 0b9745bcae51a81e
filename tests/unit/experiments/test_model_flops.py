"""Model FLOPs where weights are frozen equal a count of the products of the gradient's program."""

import math
import random

import fiddle as fdl
import jax
import jax.numpy as jnp
import pytest
from flax.linen import meta
from jax.interpreters.partial_eval import dce_jaxpr

from paxlite.experiments.demo import TinyGPT
from paxlite.experiments.description import requirements
from paxlite.experiments.llama import LLaMA
from paxlite.experiments.mixtral import Mixtral
from paxlite.optim.state_axes import named

LAYERS = 4
SIZES = dict(
  NUM_LAYERS=LAYERS, MODEL_DIMS=16, HIDDEN_DIMS=40, NUM_HEADS=2, DIMS_PER_HEAD=8, VOCAB_SIZE=96,
  MAX_SEQ_LEN=8, PERCORE_BATCH_SIZE=2, ICI_MESH_SHAPE=[1, 1, 1], DCN_MESH_SHAPE=[1, 1, 1],
  CHECKPOINT_POLICY='SAVE_EVERYTHING', PACKED_INPUT=False,
)  # fmt: skip


def built(cls, **values):
  """Returns an experiment, its task, and the shapes of its parameters in boxes."""
  e = cls(**dict(USE_REPEATED_LAYER=False) | SIZES | values)
  task = fdl.build(e.build_task())
  return e, task, jax.eval_shape(task.init, jax.random.key(0)).params


def products(program) -> float:
  """Returns the FLOPs of the products in a program."""
  found = 0.0
  for eqn in program.eqns:
    if eqn.primitive.name == 'dot_general':
      ((contracted, _), _), left = eqn.params['dimension_numbers'], eqn.invars[0].aval
      found += 2 * eqn.outvars[0].aval.size * math.prod(left.shape[i] for i in contracted)
    inner = (getattr(x, 'jaxpr', x) for x in jax.tree.leaves(list(eqn.params.values())))
    times = eqn.params['length'] if eqn.primitive.name == 'scan' else 1
    found += times * sum(products(x) for x in inner if hasattr(x, 'eqns'))
  return found


def counted(e, task, boxed) -> float:
  """Returns the FLOPs of the gradients of a token, as if half of attention were masked."""
  shape = e.batch_size, e.MAX_SEQ_LEN
  batch = {k: jnp.zeros(shape, jnp.int32) for k in ('ids', 'labels')}
  batch['weights'] = jnp.ones(shape)
  gradients = lambda params: task.grads(params, batch, None)[0]
  program = jax.make_jaxpr(gradients)(meta.unbox(boxed)).jaxpr
  used, _ = dce_jaxpr(program, [True] * len(program.outvars))
  return products(used) / math.prod(shape)


@pytest.mark.cases(fast=4)
@pytest.mark.parametrize('draw', range(5))
@pytest.mark.parametrize('cls', [TinyGPT, LLaMA])
def test_frozen_layers_have_no_gradients_of_their_own(cls, draw):
  rng = random.Random(draw)
  chosen = sorted(rng.sample(range(LAYERS), rng.randrange(LAYERS)))
  patterns = [f'transformer/x_layers_{i}/.*' for i in chosen]
  patterns += [p for p in ('final_ln/.*', 'softmax/.*') if rng.random() < 0.5]
  patterns += ['embedding/.*'] if rng.random() < 0.3 else []
  patterns = patterns or ['final_ln/.*']
  e, task, boxed = built(cls, TRAINABLE_VARIABLES=patterns)
  attention = sum(e.attention_flops_of(kind.attention) for kind in e.block_kinds)
  first = 0 if 'embedding/.*' in patterns else chosen[0] if chosen else LAYERS
  unmasked = attention - attention * first / LAYERS * 2 / 3  # the half that causality masks
  found = e.trained_flops(task.optimizer, boxed)
  assert found + unmasked == pytest.approx(counted(e, task, boxed), rel=1e-9)


def test_a_repeated_stack_is_one_layer():
  e, task, boxed = built(LLaMA, USE_REPEATED_LAYER=True, TRAINABLE_VARIABLES=['softmax/.*'])
  forward = 2 * e.matmul_params + 4 * e.VOCAB_SIZE * e.MODEL_DIMS
  attention = sum(e.attention_flops_of(kind.attention) for kind in e.block_kinds)
  assert e.trained_flops(task.optimizer, boxed) == pytest.approx(forward + attention / 3)
  e, task, boxed = built(LLaMA, USE_REPEATED_LAYER=True, TRAINABLE_VARIABLES=['transformer/.*'])
  found = e.trained_flops(task.optimizer, boxed)
  assert found == pytest.approx(e.flops_per_token - 2 * e.VOCAB_SIZE * e.MODEL_DIMS)


@pytest.mark.parametrize('values', [{}, {'USE_REPEATED_LAYER': True}, {'FROZEN_DTYPE': 'nf4'}])
def test_lora_has_two_thirds_and_its_factors(values):
  e, task, boxed = built(LLaMA, USE_LORA=True, LORA_RANK=2, **values)
  attention = sum(e.attention_flops_of(kind.attention) for kind in e.block_kinds)
  factors = sum(x.unbox().size for name, x in named(boxed).items() if '/lora_' in name)
  two_thirds = 4 * (e.matmul_params + e.VOCAB_SIZE * e.MODEL_DIMS) + attention
  found = e.trained_flops(task.optimizer, boxed)
  assert found == pytest.approx(two_thirds + 6 * factors)
  if not values:  # the first layer needs no gradient of its first input
    of_layer = 2 * e.matmul_params / LAYERS
    assert 0 <= found + attention - counted(e, task, boxed) < of_layer


def test_all_that_is_trained_is_six_for_each_number():
  for cls, values in ((TinyGPT, {}), (LLaMA, {}), (Mixtral, {'NUM_EXPERTS': 4})):
    e, task, boxed = built(cls, **values)
    assert e.trained_flops(task.optimizer, boxed) == e.flops_per_token


def test_of_experts_those_count_that_a_token_meets():
  e, task, boxed = built(
    Mixtral, NUM_EXPERTS=8, NUM_EXPERTS_PER_TOKEN=2, TRAINABLE_VARIABLES=['.*/self_attention/.*']
  )
  frozen = e.matmul_params - LAYERS * e.attention_params + e.VOCAB_SIZE * e.MODEL_DIMS
  assert e.trained_flops(task.optimizer, boxed) == pytest.approx(e.flops_per_token - 2 * frozen)


def test_a_dry_run_says_what_is_left():
  e, _, _ = built(LLaMA, TRAINABLE_VARIABLES=['softmax/.*'])
  (line,) = [x for x in requirements(e).splitlines() if x.startswith('model FLOPs')]
  assert float(line.split()[4]) < 0.5 * e.flops_per_token * e.batch_size * e.MAX_SEQ_LEN
