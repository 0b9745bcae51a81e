"""Weights of one family in a model of another are refused, or the function is the same."""

import functools
import zlib

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import meta

from paxlite.config.attribute_kinds import Kind
from paxlite.config.attributes import attribute_types
from paxlite.core.errors import UserError
from paxlite.core.variable_names import path_name
from paxlite.experiments.compatibility import differences, function_lines
from paxlite.experiments.datasets import Synthetic
from paxlite.experiments.gemma import Gemma
from paxlite.experiments.glam import GLaM
from paxlite.experiments.gpt import GPT2, GPT126M
from paxlite.experiments.llama import LLaMA, LLaMA3_2_1B, Mistral7B
from paxlite.experiments.seqax import Seqax
from paxlite.programs.run import Run
from paxlite.programs.training import train

FAMILIES = [GPT126M, GPT2, LLaMA, LLaMA3_2_1B, Mistral7B, Gemma, Seqax, GLaM]
SMALL = dict(
  NUM_LAYERS=2, NUM_HEADS=2, MODEL_DIMS=16, HIDDEN_DIMS=32, DIMS_PER_HEAD=8, NUM_KV_HEADS=2,
  VOCAB_SIZE=64, MAX_SEQ_LEN=16, FPROP_DTYPE='float32', PACKED_INPUT=False,
  ICI_MESH_SHAPE=[1, 1, 1], DCN_MESH_SHAPE=[1, 1, 1],
)  # fmt: skip
IDS = jax.random.randint(jax.random.key(1), (2, 16), 0, 64)


def small(family, **changes):
  known = attribute_types(family)
  if 'NUM_EXPERTS' in known:
    changes = {'NUM_EXPERTS': 2} | changes
  return family(**{k: v for k, v in (SMALL | changes).items() if k in known})


def params_of(e):
  """Returns random parameters by name, including biases and norms."""
  task = fdl.build(e.build_task())
  abstract = meta.unbox(jax.eval_shape(task.init_params, jax.random.key(0)))
  seed = lambda path: zlib.crc32(path_name(path).encode())
  return jax.tree_util.tree_map_with_path(
    lambda path, x: 0.3 * np.random.default_rng(seed(path)).normal(size=x.shape).astype(x.dtype),
    abstract,
  )


def logits(e, params):
  return jax.jit(fdl.build(e.build_task()).model.apply)({'params': params}, IDS)


def shapes_of(e):
  task = fdl.build(e.build_task())
  return shapes(meta.unbox(jax.eval_shape(task.init_params, jax.random.key(0))))


def shapes(params):
  return jax.tree.map(jnp.shape, params)


@pytest.mark.cases(fast=0, slow=2)
@pytest.mark.slow
@pytest.mark.parametrize('theirs', [f for f in FAMILIES if f not in (Seqax, GLaM)])
def test_models_of_equal_attributes_compute_the_same_or_are_refused(theirs):
  """Each other family gets all attributes of this one; some then have variables of its shapes."""
  their = small(theirs)
  values = their.values_of(Kind.SHAPE, Kind.FUNCTION)
  params = params_of(their)
  lines, expected = function_lines(their.build_task().model), logits(their, params)
  compared = 0
  for family in FAMILIES:
    our = small(family, **values)
    if family is theirs or shapes_of(our) != shapes(params):
      continue
    compared += 1
    if not differences(lines, function_lines(our.build_task().model)):
      np.testing.assert_allclose(logits(our, params), expected, rtol=1e-5, atol=1e-5)
  assert compared >= 1


def test_the_scale_of_queries_is_seen():
  """Seqax scales queries by 1, in code that no attribute describes."""
  their = small(Seqax)
  our = small(LLaMA, **their.values_of(Kind.SHAPE, Kind.FUNCTION))
  found = differences(
    function_lines(their.build_task().model), function_lines(our.build_task().model)
  )
  scales = [line.split('query_scale = ')[1] for line in found if 'query_scale' in line]
  assert sorted(scales) == sorted(['1.0 there', f'{our.attention_scale} here'])


@pytest.mark.parametrize(
  'changes',
  [
    dict(USE_REPEATED_LAYER=True),
    dict(CHECKPOINT_POLICY='SAVE_DOT_ONLY'),
    dict(DROPOUT_PROB=0.1),
    dict(FPROP_DTYPE='bfloat16'),
    dict(USE_FLASH_ATTENTION=False),
    dict(NUM_LOSS_CHUNKS=2),
    dict(ATTENTION_BLOCK_SIZE=8),
    dict(INIT_STD=0.1),
    dict(USE_LORA=True, LORA_RANK=3),
  ],
)
def test_what_does_not_change_the_function_is_not_compared(changes):
  lines = [function_lines(small(LLaMA, **c).build_task().model) for c in ({}, changes)]
  assert differences(*lines) == []


@functools.cache
def mine():
  class Scaled(Synthetic, LLaMA):
    def attention(self):
      attention = super().attention()
      attention.attention_tpl.query_scale = 1.0
      return attention

  class Plain(Synthetic, LLaMA):
    pass

  globals().update(Scaled=Scaled, Plain=Plain)  # a checkpoint finds them by these names
  Scaled.__qualname__, Plain.__qualname__ = 'Scaled', 'Plain'
  return Scaled, Plain


@pytest.mark.slow
def test_a_run_refuses_weights_of_another_function(tmp_path):
  scaled, plain = mine()
  values = SMALL | dict(PERCORE_BATCH_SIZE=2, MAX_STEPS=1, SUMMARY_INTERVAL_STEPS=1)
  train(Run(scaled(**values), tmp_path / 'scaled'))
  restored = plain(**values, CHECKPOINT_RESTORE_PATH=str(tmp_path / 'scaled'))
  with pytest.raises(UserError, match=r'Scaled, which computes something else .*query_scale'):
    Run(restored, tmp_path / 'plain').trainer()
  same = scaled(**values, CHECKPOINT_RESTORE_PATH=str(tmp_path / 'scaled'))
  Run(same, tmp_path / 'same').trainer()
