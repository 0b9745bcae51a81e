"""Attention by cuDNN: its requests, computed by XLA, and the cases without a request."""

import contextlib
import functools
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxlite.doctor import kernel_check
from paxlite.experiments.glam.layers import RelativeBias
from paxlite.layers import remat
from paxlite.layers.attention import attention_case, attention_kernels, cudnn_attention, cudnn_call
from paxlite.layers.attention.attention import AttentionSinks, DotProductAttention
from paxlite.layers.attention.attention_case import Case
from paxlite.layers.attention.attention_kernel import AttentionKernel
from paxlite.layers.attention.blockwise_attention import Blockwise
from paxlite.layers.attention.cudnn_attention import CudnnKernel
from paxlite.layers.attention.partial_attention import Partial
from paxlite.layers.attention.softmax_attention import AttentionMask, Softmax
from paxlite.parallel import partitioning
from paxlite.parallel.mesh import make_mesh

CUDNN = functools.partial(AttentionKernel, fused=True)
PLAIN = Softmax(0.5)
reasons = CudnnKernel.reasons
XLA_ATTENTION = jax.nn.dot_product_attention
SEGMENTS = jnp.array([[1] * 11 + [2] * 16 + [0] * 5, [1] * 3 + [2] * 9 + [3] * 20])


def qkv(kv_heads: int = 4, length: int = 32, value_width: int = 8):
  keys = jax.random.split(jax.random.key(0), 3)
  shapes = (2, length, 4, 8), (2, length, kv_heads, 8), (2, length, kv_heads, value_width)
  return [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]


@pytest.fixture
def asked(monkeypatch):
  """Records each request to cuDNN, and lets XLA compute it."""
  found = []

  def attend(*args, implementation, **kwargs):
    assert implementation == 'cudnn'
    found.append(kwargs)
    return XLA_ATTENTION(*args, implementation='xla', **kwargs)

  def call(target, results, *, output_layouts, legacy_backend_config, **_):
    config = json.loads(legacy_backend_config)['cudnn_fmha_backend_config']
    found.append(config | {'target': target})
    assert len(output_layouts) == len(results)

    def answer(*operands):
      computed = answered(target, config, *operands)
      computed.append(jnp.zeros(0, jnp.uint8))
      assert [(x.shape, x.dtype) for x in computed] == [(x.shape, x.dtype) for x in results]
      return computed

    return answer

  monkeypatch.setattr(jax.nn, 'dot_product_attention', attend)
  monkeypatch.setattr(jax.ffi, 'ffi_call', call)
  monkeypatch.setattr(partitioning, 'active_kind', lambda: 'gpu')
  monkeypatch.setattr(attention_case, 'active_capability', lambda: 9.0)
  on_float32 = lambda kernel, case: reasons(kernel, case) | {'computes in 16 bits only': False}
  monkeypatch.setattr(CudnnKernel, 'reasons', on_float32)
  monkeypatch.setitem(cudnn_call._TYPES, 'float32', ('F32', -1e30))
  return found


def answered(target, config, q_BTNH, k_BSKH, v_BSKH, *others):
  """The results of one of cuDNN's calls, from its operands in their order."""
  assert k_BSKH.shape == v_BSKH.shape
  (B, T, N), S, others = q_BTNH.shape[:3], k_BSKH.shape[1], list(others)
  assert q_BTNH.dtype == k_BSKH.dtype == v_BSKH.dtype
  assert config['intermediate_tensor_shape']['dimensions'] == [str(n) for n in (B, N, T, S)]
  d_context = sums = context = None
  if 'Backward' in target:
    sums, d_context = others.pop(0), others.pop(0)
    assert sums.shape == (B * config['max_seg_per_batch'], N, T)
  bias = others.pop(0) if 'Bias' in target else 0
  learned = 'Bias' in target and bias.shape[:2] == (1, N)
  if d_context is not None:
    context = others.pop(0)
    assert context.shape == d_context.shape
    assert (context.dtype, d_context.dtype) == (q_BTNH.dtype, q_BTNH.dtype)
    assert sums.dtype == jnp.float32
  distance = jnp.arange(T)[:, None] - jnp.arange(S)
  mask = (distance >= 0) | (config['mask_type'] == 'NO_MASK')
  if config['sliding_window_length']:
    mask &= distance < config['sliding_window_length']
  mask = jnp.broadcast_to(mask, (B, 1, T, S))
  if config['max_seg_per_batch'] > 1:
    assert config['mask_type'] == 'PADDING_CAUSAL'
    q_lengths, k_lengths, q_offsets, k_offsets = others
    queries = segments_of(q_offsets, q_lengths, q_BTNH.shape)
    keys = segments_of(k_offsets, k_lengths, k_BSKH.shape)
    mask &= (queries[:, :, None] == keys[:, None, :])[:, None]
  else:
    assert config['mask_type'] in ('CAUSAL', 'NO_MASK')
    assert not others

  groups = N // k_BSKH.shape[2]
  as_float = lambda x: x.astype(jnp.float32)
  q, k, v = as_float(q_BTNH), *(as_float(x).repeat(groups, 2) for x in (k_BSKH, v_BSKH))
  scores = jnp.einsum('BTNH,BSNH->BNTS', q, k) * config['fmha_scale'] + bias
  scores = jnp.where(mask, scores, -1e30)
  if d_context is None:
    sums = jax.nn.logsumexp(scores, -1)
    context = jnp.einsum('BNTS,BSNH->BNTH', jnp.exp(scores - sums[..., None]), v)
    context = context.astype(q_BTNH.dtype)
    # with bounds, each segment has its own sums
    return [context, jnp.tile(sums, (config['max_seg_per_batch'], 1, 1))]
  weights = jnp.exp(scores - sums[:B, ..., None])
  context, d_context = as_float(context), as_float(d_context)
  means = (context * d_context).sum(-1).swapaxes(1, 2)[..., None]
  d_scores = weights * (jnp.einsum('BTNH,BSNH->BNTS', d_context, v) - means) * config['fmha_scale']
  d_bias = [(d_scores / config['fmha_scale']).sum(0, keepdims=True)] if learned else []
  dq = jnp.einsum('BNTS,BSNH->BNTH', d_scores, k)
  dk = jnp.einsum('BNTS,BTNH->BNSH', d_scores, q)
  dv = jnp.einsum('BNTS,BTNH->BNSH', weights, d_context)
  of_group = lambda x: x.reshape(B, -1, groups, *x.shape[2:]).sum(2)
  return [x.astype(q_BTNH.dtype) for x in (dq, of_group(dk), of_group(dv), *d_bias)]


def segments_of(offsets, lengths, shape):
  """The number of each token's segment, or −1."""
  B, T, N, H = shape
  starts = offsets.ravel()[: lengths.size] // (N * H)
  tokens = jnp.arange(B * T)[:, None]
  inside = (tokens >= starts) & (tokens < starts + lengths.ravel())
  return jnp.where(inside.any(1), inside.argmax(1), -1).reshape(B, T)


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize('mesh', [False, True])
@pytest.mark.parametrize('packed', ['', 'bias', 'bounds', 'counted', 'too many'])
@pytest.mark.parametrize('case', ['plain', 'grouped', 'window', 'narrow values'])
def test_cudnn_is_asked_for_the_same(asked, monkeypatch, case, packed, mesh):
  """Compares output and gradients, with and without the shard_map of a mesh.

  The rows have six segments. Where the device counts them, there is room for 2 · 4 or for 2 · 2.
  """
  values = dict(query_scale=0.5, window=6 if case == 'window' else 0)
  arrays = qkv(2 if case == 'grouped' else 4, value_width=5 if case == 'narrow values' else 8)
  segments = SEGMENTS if packed else None

  def grad(module):
    def value(arrays):
      y = module.apply({}, *arrays, segments)
      return jnp.sin(y).sum(), y

    return jax.jit(jax.value_and_grad(value, has_aux=True))(arrays)

  (_, expected), grads = grad(DotProductAttention(**values))
  assert not asked
  rules = partitioning.rules_for(['replica', 'data', 'mdl'])
  one = make_mesh([1, 1, 1], [1, 1, 1], ['replica', 'data', 'mdl'], jax.devices()[:1])
  most = {'bounds': 4, 'counted': None, 'too many': None}
  kernel = functools.partial(CUDNN, max_segments=most.get(packed, 0))
  usual = 2 if packed == 'too many' else 4
  monkeypatch.setattr(cudnn_attention, '_usual_segments', lambda length: usual)
  with partitioning.activate(one, rules) if mesh else contextlib.nullcontext():
    (_, y), grads2 = grad(DotProductAttention(**values, kernel_tpl=kernel))
  if packed:
    forms = {'bounds': ['']}.get(packed, ['', 'ScaleBias'] if packed in most else ['ScaleBias'])
    forms = ['ScaleBias'] if case == 'window' else forms
    names = [f'__cudnn$fmha{form}Softmax{way}' for way in ('', 'Backward') for form in forms]
    assert [a['target'] for a in asked] == names
  else:
    assert asked
    assert all(a['is_causal'] for a in asked)
  np.testing.assert_allclose(y, expected, atol=1e-6)
  jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-6), grads, grads2)


def test_more_segments_than_there_is_room_for(asked):
  """The six segments of both rows fit into 2 · 3 places, and not into 2 · 2."""

  def attend(max_segments):
    kernel = functools.partial(CUDNN, max_segments=max_segments)
    module = DotProductAttention(query_scale=0.5, kernel_tpl=kernel)
    return jax.jit(module.apply)({}, *qkv(), SEGMENTS)

  assert jnp.isfinite(attend(3)).all()
  assert jnp.isnan(attend(2)).all()


def compared(monkeypatch, *names: str) -> list[kernel_check.KernelComparison]:
  """Returns some of the comparisons of `paxlite doctor --kernels`."""
  chosen = {}
  for function in ('_cases', '_cached', '_parts'):
    found = list(getattr(kernel_check, function)())
    chosen[function] = [case for case in found if case[0] in names]
  with monkeypatch.context() as patched:
    for function, cases in chosen.items():
      patched.setattr(kernel_check, function, lambda cases=cases: iter(cases))
    return list(kernel_check.comparisons())


BOUNDS = 'packed rows, bounds', 'packed rows, counted'


@pytest.mark.slow
def test_bounds_that_differ_from_a_mask_are_found(asked, monkeypatch):
  assert not any(c.is_wrong for c in compared(monkeypatch, *BOUNDS))
  assert {a['max_seg_per_batch'] for a in asked} == {1, 2, 4}
  right = cudnn_call.bounds
  wrong = lambda ids, n: (right(ids, n)[0] + (right(ids, n)[0] == 100), right(ids, n)[1])
  monkeypatch.setattr(cudnn_call, 'bounds', wrong)
  (found, _) = compared(monkeypatch, *BOUNDS)
  assert found.is_wrong
  assert (found.what, found.way_out) == (f'cuDNN, {BOUNDS[0]}', 'MAX_SEGMENTS_PER_SEQ=0')


def in_base_2(kind, is_backward, operands, call):
  if kind.endswith('Backward') and is_backward:
    operands = [*operands[:3], operands[3] / jnp.log(2), *operands[4:]]
  context, *others = call(*operands)
  if not kind.endswith('Backward') and not is_backward:
    others[0] = others[0] / jnp.log(2)
  return context, *others


def with_a_nan(kind, is_backward, operands, call):
  results = list(call(*operands))
  if kind.endswith('Backward') == is_backward:
    at = 2 if is_backward else 0
    results[at] = results[at].at[0, 1, 2, 3].set(jnp.nan)
  return tuple(results)


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize('is_backward', [False, True])
@pytest.mark.parametrize('change', [in_base_2, with_a_nan])
@pytest.mark.parametrize(
  ('case', 'way_out'),
  [
    ('a sink', 'USE_FLASH_ATTENTION=False'),
    ('a bias with a sink', 'USE_FLASH_ATTENTION=False'),
    ('512 keys, packed rows', 'CONTEXT_ATTENTION=heads'),
  ],
)
def test_wrong_kernels_end_a_run(asked, monkeypatch, case, way_out, change, is_backward):
  assert not any(c.is_wrong for c in compared(monkeypatch, case))
  assert {a['target'].endswith('Backward') for a in asked} == {False, True}
  of_call = cudnn_call._call
  changed = lambda kind, *args, **kwargs: (
    lambda *operands: change(kind, is_backward, operands, of_call(kind, *args, **kwargs))
  )
  monkeypatch.setattr(cudnn_call, '_call', changed)
  (found,) = compared(monkeypatch, case)
  assert found.is_wrong
  assert found.way_out == way_out


@pytest.mark.exhaustive
@pytest.mark.slow
def test_what_the_check_computes(asked, monkeypatch):
  sinks = 'a sink', 'a sink in packed rows', 'a sink in a window'
  assert len(compared(monkeypatch, *sinks)) == 3
  calls = {(a['target'].split('fmha')[1], a['sliding_window_length']) for a in asked}
  softmax = 'Softmax', 'SoftmaxBackward', 'ScaleBiasSoftmax', 'ScaleBiasSoftmaxBackward'
  assert calls == {(name, 0) for name in softmax} | {(name, 64) for name in softmax[2:]}
  asked.clear()
  assert len(compared(monkeypatch, '256 keys', '512 keys', '128 keys, packed rows')) == 3
  shapes = {tuple(a['intermediate_tensor_shape']['dimensions'][2:]) for a in asked}
  assert shapes == {('256', '256'), ('256', '512'), ('256', '128')}
  assert {a['mask_type'] for a in asked} == {'CAUSAL', 'NO_MASK'}


def test_gpus_without_the_kernels_are_not_asked(asked, monkeypatch):
  monkeypatch.setattr(attention_case, 'active_capability', lambda: 7.5)
  (found,) = compared(monkeypatch, 'a sink')
  assert not asked
  assert not found.is_wrong


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize('mesh', [False, True])
@pytest.mark.parametrize('packed', [False, True])
@pytest.mark.parametrize('window', [0, 6])
def test_a_sink_logit_of_each_head(asked, window, packed, mesh):
  """The calls take none: their results are corrected, and so is what the backward call reads."""
  sinks = functools.partial(AttentionSinks, num_heads=4)
  logits = jnp.asarray([0.5, -1.0, 2.0, 0.0])
  values = dict(query_scale=0.5, window=window, sinks_tpl=sinks)

  def grad(module):
    def value(logits, arrays):
      variables = {'params': {'sinks': {'logits': logits}}}
      y = module.apply(variables, *arrays, SEGMENTS if packed else None)
      return jnp.sin(y).sum(), y

    return jax.jit(jax.value_and_grad(value, argnums=(0, 1), has_aux=True))(logits, qkv(2))

  (_, expected), grads = grad(DotProductAttention(**values))
  assert not asked
  rules = partitioning.rules_for(['replica', 'data', 'mdl'])
  one = make_mesh([1, 1, 1], [1, 1, 1], ['replica', 'data', 'mdl'], jax.devices()[:1])
  kernel = functools.partial(CUDNN, max_segments=4)  # the sums of bounds have another order
  with partitioning.activate(one, rules) if mesh else contextlib.nullcontext():
    (_, y), found = grad(DotProductAttention(**values, kernel_tpl=kernel))
  bias = 'ScaleBias' if packed else ''
  names = [f'__cudnn$fmha{bias}Softmax', f'__cudnn$fmha{bias}SoftmaxBackward']
  assert [a['target'] for a in asked] == names
  np.testing.assert_allclose(y, expected, atol=1e-6)
  jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), found, grads)


@pytest.mark.cases(fast=0, slow=2)
@pytest.mark.slow
@pytest.mark.parametrize(
  ('queries', 'keys', 'causal'), [(32, 32, False), (32, 32, True), (16, 32, False), (32, 16, False)]
)
@pytest.mark.parametrize('segmented', [False, True])
def test_parts_of_a_ring(asked, queries, keys, causal, segmented):
  softmax = Softmax(0.4)
  rng = jax.random.split(jax.random.key(0), 4)
  shapes = (2, queries, 4, 8), (2, keys, 2, 8), (2, keys, 2, 8), (2, queries, 4, 8)
  *qkv, gradient = (jax.random.normal(key, s) for key, s in zip(rng, shapes, strict=True))
  of = lambda n: jnp.where(jnp.arange(n) < n // 3, 1, 2)[None].repeat(2, 0)
  segments = (of(queries), of(keys)) if segmented else None
  cudnn, plain = cudnn_attention.CudnnParts(softmax), Blockwise(softmax)
  found, expected = (k.forward(qkv, segments, causal) for k in (cudnn, plain))
  whole = Partial(expected.context * 0.7, expected.lse + 0.4)
  both = [(*found, *cudnn.backward(qkv, segments, causal, whole, gradient))]
  both += [(*expected, *plain.backward(qkv, segments, causal, whole, gradient))]
  assert {a['mask_type'] for a in asked} == {'CAUSAL' if causal else 'NO_MASK'}
  for a, b in zip(*both, strict=True):
    np.testing.assert_allclose(a, b, atol=2e-5)


def test_stages_with_sink_logits_are_rows_of_one_call(asked, monkeypatch):
  stages = [jnp.stack([x, x[:, ::-1]]) for x in qkv()]
  logits_ZN = jnp.asarray([[0.5, -1.0, 2.0, 0.0], [1.0, 0.0, -3.0, 0.5]])

  def of_stage(logit_N, q, k, v):
    softmax = Softmax(0.5, sink_logit=logit_N)
    visible = AttentionMask(segments=(SEGMENTS, SEGMENTS))
    case = Case(q, k, v, softmax, visible, platform='gpu', capability=9.0, sizes={}, rules={})
    return CudnnKernel().attend_locally(case)

  def grad(of_stages):
    value = lambda *args: jnp.sin(of_stages(*args)).sum()
    return jax.jit(jax.grad(value, argnums=(0, 1, 2, 3)))(logits_ZN, *stages)

  one_by_one = lambda *args: jnp.stack([of_stage(*(x[i] for x in args)) for i in (0, 1)])
  expected = grad(one_by_one)
  asked.clear()
  mesh = types.SimpleNamespace(shape={'stage': 2})
  monkeypatch.setattr(partitioning, 'active_mesh', lambda: (mesh, {}))
  found = grad(jax.vmap(of_stage))
  assert '4' in {a['intermediate_tensor_shape']['dimensions'][0] for a in asked}
  jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), found, expected)


@pytest.mark.parametrize(
  'values',
  [
    dict(logit_cap=30.0),
    dict(relative_bias_tpl=lambda name: RelativeBias(4, name=name), window=8),
    dict(dropout=0.1),
  ],
  ids=lambda v: next(iter(v)),
)
def test_cudnn_is_not_asked_for_what_it_has_not(asked, values):
  arrays = qkv()
  both = [
    DotProductAttention(query_scale=0.5, kernel_tpl=kernel, **values)
    for kernel in (AttentionKernel, CUDNN)
  ]
  rngs = {'dropout': jax.random.key(2)}
  variables = both[0].init({'params': jax.random.key(1), **rngs}, *arrays)
  expected, found = (m.apply(variables, *arrays, rngs=rngs) for m in both)
  assert not asked
  np.testing.assert_array_equal(found, expected)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize('mesh', [False, True])
@pytest.mark.parametrize('sink', [None, 0.0])
def test_a_bias_that_is_learned(asked, mesh, sink):
  arrays = qkv()
  bias = dict(
    query_scale=0.5, sink_logit=sink, relative_bias_tpl=lambda name: RelativeBias(4, name=name)
  )
  plain, fused = (
    DotProductAttention(**bias, kernel_tpl=kernel) for kernel in (AttentionKernel, CUDNN)
  )
  variables = plain.init(jax.random.key(1), *arrays)
  value = lambda module: lambda *given: jnp.sin(module.apply(*given)).sum()
  expected = jax.value_and_grad(value(plain), (0, 1, 2, 3))(variables, *arrays)
  assert not asked
  rules = partitioning.rules_for(['replica', 'data', 'mdl'])
  one = make_mesh([1, 1, 1], [1, 1, 1], ['replica', 'data', 'mdl'], jax.devices()[:1])
  with partitioning.activate(one, rules) if mesh else contextlib.nullcontext():
    found = jax.jit(jax.value_and_grad(value(fused), (0, 1, 2, 3)))(variables, *arrays)
  names = '__cudnn$fmhaScaleBiasSoftmax', '__cudnn$fmhaScaleBiasSoftmaxBackward'
  assert [a['target'] for a in asked] == list(names)
  close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
  jax.tree.map(close, found, expected)


def test_where_there_is_a_kernel(monkeypatch):
  """There is one on GPUs, for 16 bits, whole sequences, and heads that stay with their keys."""
  rules = partitioning.rules_for(['replica', 'data', 'mdl', 'context'])

  def fits(
    T=64, S=64, N=8, G=8, H=64, dtype=jnp.bfloat16, platform='cuda', capability='8.0', **sizes
  ):
    device = types.SimpleNamespace(platform=platform, compute_capability=capability)
    shape = dict(replica=1, data=1, mdl=1, context=1) | sizes
    mesh = types.SimpleNamespace(devices=np.array([device]), shape=shape)
    monkeypatch.setattr(partitioning, 'active_mesh', lambda: (mesh, rules))
    abstract = lambda *shape: jax.ShapeDtypeStruct(shape, dtype)
    kv = abstract(2, S, G, H)
    return (
      attention_kernels.refusal(CudnnKernel(), Case(abstract(2, T, N, H), kv, kv, PLAIN)) is None
    )

  assert fits()
  assert fits(dtype=jnp.float16, data=4, mdl=4)
  assert fits(G=2, mdl=2, platform='gpu')
  assert not fits(platform='cpu')
  assert not fits(platform='tpu')
  assert not fits(dtype=jnp.float32)
  assert not fits(T=1)
  assert not fits(T=33, S=33)
  assert not fits(H=60)
  assert not fits(H=256)
  assert fits(H=256, capability='9.0')
  assert fits(H=256, capability='10.3')
  assert not fits(H=264, capability='9.0')
  assert not fits(G=2, mdl=4)
  assert not fits(context=2)
  assert fits(stage=2)


@pytest.mark.parametrize(
  ('policy', 'runs'),
  [('SAVE_NOTHING', 2), ('SAVE_ATTENTION', 1), ('SAVE_QKV_ATTENTION_OUT_PROJ', 1)],
)
@pytest.mark.parametrize(('max_segments', 'bias_for_more'), [(0, False), (4, False), (4, True)])
def test_a_policy_keeps_what_the_forward_kernel_computes(policy, runs, max_segments, bias_for_more):
  q_BTNH = jnp.zeros((2, 32, 4, 64), jnp.bfloat16)
  options = cudnn_call.Options(1.0, max_segments=max_segments, bias_for_more=bias_for_more)

  def value(q_BTNH):
    context = cudnn_call.attend((jnp.sin(q_BTNH), q_BTNH, q_BTNH), SEGMENTS, None, None, options)
    return jnp.sin(context).astype(jnp.float32).sum()

  body = jax.checkpoint(value, policy=remat.jax_policy(policy))
  program = str(jax.make_jaxpr(jax.grad(body))(q_BTNH))
  forms = 1 + bias_for_more
  assert program.count('target_name=__cudnn') == forms * (runs + 1)  # one is the backward kernel
