"""The list of kernels: which cases they take, and that a further kernel is known everywhere."""

import re
import types

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from paxlite.aot.costs import Costs
from paxlite.aot.hlo import Program
from paxlite.aot.planning.model import product_flops
from paxlite.experiments.demo import TinyGPT
from paxlite.layers import remat
from paxlite.layers.attention import attention_kernels
from paxlite.layers.attention.attention import DotProductAttention
from paxlite.layers.attention.attention_case import Case, Kernel
from paxlite.layers.attention.attention_kernel import AttentionKernel
from paxlite.layers.attention.partial_attention import RESULTS
from paxlite.layers.attention.softmax_attention import AttentionMask, Softmax
from paxlite.layers.moe import grouped_matmul
from paxlite.parallel import partitioning

AXES = ['replica', 'data', 'mdl', 'context']


def case(T=256, S=256, H=64, width=64, dtype='bfloat16', platform='gpu', softmax=None, **values):
  sizes = dict.fromkeys(AXES, 1) | values.pop('mesh', {})
  rows = values.pop('rows', 2)
  array = lambda tokens, heads, width: jax.ShapeDtypeStruct((rows, tokens, heads, width), dtype)
  return Case(
    array(T, 8, H), array(S, 4, H), array(S, 4, width), Softmax(0.1, **(softmax or {})),
    platform=platform, capability=values.pop('capability', 9.0 if platform == 'gpu' else 0.0),
    sizes=sizes, rules=partitioning.rules_for(AXES), **values,
  )  # fmt: skip


CACHED = AttentionMask(jnp.zeros(1, jnp.int32))
BIAS = jax.ShapeDtypeStruct((1, 8, 256, 256), jnp.float32)
CASES = [
  (dict(), 'cuDNN'), (dict(softmax=dict(window=64, sink_logit=0.0)), 'cuDNN'),
  (dict(width=32), 'cuDNN'), (dict(width=32, over_context=True), 'plain XLA by blocks of keys'),
  (dict(over_context=True), 'cuDNN'), (dict(softmax=dict(logit_cap=3.0)), 'plain XLA'),
  (dict(softmax=dict(dropout=jnp.sin)), 'plain XLA'), (dict(bias=BIAS), 'cuDNN'),
  (dict(bias=BIAS, softmax=dict(window=64)), 'plain XLA'), (dict(dtype='float32'), 'plain XLA'),
  (dict(T=1), 'plain XLA for few queries'), (dict(capability=7.5), 'plain XLA'),
  (dict(T=8, visible=CACHED), 'plain XLA for few queries'), (dict(T=8), 'plain XLA'),
  (dict(T=9, visible=CACHED), 'plain XLA'),
  (dict(T=1, visible=CACHED, rows=31), 'plain XLA for few queries'),
  (dict(T=1, visible=CACHED, rows=32), 'cuDNN for cached keys'),
  (dict(T=1, visible=CACHED, rows=32, mesh=dict(data=2)), 'plain XLA for few queries'),
  (dict(T=1, visible=CACHED, rows=64, mesh=dict(mdl=2)), 'cuDNN for cached keys'),
  (dict(T=1, visible=CACHED, rows=64, mesh=dict(context=2)), 'plain XLA for few queries'),
  (dict(T=1, visible=CACHED, rows=64, fused=False), 'plain XLA for few queries'),
  (dict(T=1, visible=CACHED, rows=64, width=32), 'plain XLA for few queries'),
  (dict(T=1, visible=CACHED, rows=64, softmax=dict(window=64)), 'plain XLA for few queries'),
  (dict(T=4, visible=CACHED, platform='tpu'), 'the kernel for cached keys on TPUs'),
  (dict(T=1, visible=CACHED, platform='tpu', S=192), 'plain XLA for few queries'),
  (dict(T=1, visible=CACHED, platform='tpu', mesh=dict(mdl=8)), 'plain XLA for few queries'),
  (dict(H=256, width=256, capability=8.0), 'plain XLA'), (dict(fused=False), 'plain XLA'),
  (dict(fused=False, over_context=True), 'plain XLA by blocks of keys'),
  (dict(mesh=dict(context=2)), 'plain XLA'), (dict(mesh=dict(mdl=8)), 'plain XLA'),
  (dict(mesh=dict(mdl=4)), 'cuDNN'), (dict(platform='tpu'), 'splash'),
  (dict(platform='tpu', dtype='float32', softmax=dict(logit_cap=3.0)), 'splash'),
  (dict(platform='tpu', width=32), 'splash'), (dict(platform='tpu', T=192, S=192), 'plain XLA'),
  (dict(platform='tpu', bias=BIAS), 'plain XLA'), (dict(platform='cpu'), 'the kernel for CPUs'),
  (dict(platform='cpu', softmax=dict(logit_cap=3.0), bias=BIAS), 'the kernel for CPUs'),
  (dict(platform='cpu', over_context=True), 'plain XLA by blocks of keys'),
]  # fmt: skip


@pytest.mark.parametrize(('values', 'name'), CASES, ids=lambda x: str(x)[:60])
def test_which_kernel_computes_a_case(values, name):
  found = case(**values)
  kernel = attention_kernels.first(found)
  assert kernel.name == name
  why = attention_kernels.why_not_fused(found)
  assert bool(why) == (not kernel.is_fused and found.fused and found.platform != 'cpu')


def test_reasons_are_sentences():
  e = TinyGPT(ATTEN_LOGIT_CAP=-1.0)
  gpu = e.attention_case(platform='gpu', capability=9.0)
  assert attention_kernels.why_not_fused(gpu) == ['cuDNN computes in 16 bits only']
  (choice,) = e.attention_choices(types.SimpleNamespace(platform='cuda', compute_capability='9.0'))
  assert (
    choice == 'Attention to all tokens is computed by plain XLA: cuDNN computes in 16 bits only.'
  )
  assert e.attention_choices(jax.devices()[0]) == []


class Mine(Kernel):
  """Copies the queries, by a kernel of Pallas."""

  name = 'mine'
  primitives = re.compile('my_kernel')
  kept = primitives

  def refusal(self, case):
    return None if case.softmax.window == 7 else 'takes windows of 7 tokens'

  def attend(self, case):
    def kernel(q_ref, y_ref):
      y_ref[...] = q_ref[...]

    shape = jax.ShapeDtypeStruct(case.q.shape, case.q.dtype)
    return pl.pallas_call(kernel, out_shape=shape, interpret=True, name='my_kernel')(case.q)

  def flops(self, call):
    return 1000.0 * call.operands[0][-1]


@pytest.fixture
def mine(monkeypatch):
  monkeypatch.setattr(attention_kernels, '_kernels', list(attention_kernels._kernels))
  attention_kernels.register(Mine())


def attention(window=7, **values):
  module = DotProductAttention(
    query_scale=0.5, window=window, kernel_tpl=lambda: AttentionKernel(fused=True, **values)
  )
  return lambda x: module.apply({}, x, x, x)


def test_a_further_kernel_computes_what_it_says(mine):
  x = jax.random.normal(jax.random.key(0), (2, 16, 4, 8))
  assert (attention()(x) == x).all()
  assert not (attention(window=6)(x) == x).all()
  with pytest.raises(ValueError, match="named 'mine' is registered already"):
    attention_kernels.register(Mine())


def test_policies_keep_what_a_further_kernel_computes(mine):
  name = jax.extend.core.Primitive('my_kernel_fwd')
  assert remat.attention_saveable(name)
  assert not remat.attention_saveable(jax.lax.sin_p)
  assert remat.attention_saveable(jax.extend.core.Primitive('name'), name=RESULTS)


def test_a_further_kernel_has_flops(mine):
  """In a compiled program and in a traced one."""
  text = """HloModule test

ENTRY %main (q: bf16[2,16,4,8]) -> bf16[2,16,4,8] {
  %q = bf16[2,16,4,8] parameter(0)
  ROOT %c = bf16[2,16,4,8] custom-call(%q), custom_call_target="my_kernel"
}
"""
  assert Costs(Program(text), 'gpu').flops() == {'bf16': 8000.0}
  loss = lambda w, x: w * jax.lax.stop_gradient(attention()(x)).sum()
  array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
  traced = jax.make_jaxpr(jax.grad(loss))(array(), array(13, 16, 4, 8)).jaxpr
  assert sum(flops for _, flops in product_flops(traced)) == 8000.0


def test_a_further_product_of_groups(monkeypatch):
  class Mine:
    ROWS = 8
    CALLS = ('my_product',)

    def refusal(self, w_EDF, platform, num_choices):
      return None if w_EDF.shape[0] == 3 else 'takes three groups'

    def product(self, x_PD, w_EDF, sizes_E):
      return x_PD + 1

  monkeypatch.setattr(grouped_matmul, '_kernels', list(grouped_matmul._kernels))
  assert not grouped_matmul.is_call('my_product')
  grouped_matmul.register(Mine())
  x, sizes = jnp.zeros((8, 4)), jnp.array([8, 0, 0])
  assert grouped_matmul.alignment(jnp.zeros((3, 4, 4)), 8) == 8
  assert grouped_matmul.alignment(jnp.zeros((2, 4, 4)), 8) == 1
  assert (grouped_matmul.grouped_matmul(x, jnp.zeros((3, 4, 4)), sizes, 8) == 1).all()
  assert grouped_matmul.is_call('my_product')
