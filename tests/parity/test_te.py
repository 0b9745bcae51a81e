"""Transformer Engine's Python code on CPU: products, whole layers, and converted parameters."""

import functools
import json
import re
import subprocess
import sys
import types

import pytest

pytest.importorskip('torch._dynamo')  # before TensorFlow's LLVM, which other tests load

import tests.support.te_cpu  # noqa: F401, I001

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
from fiddle import selectors
from flax.core import meta
from flax.traverse_util import flatten_dict, unflatten_dict

from paxlite import main
from paxlite.core.errors import UserError
from paxlite.experiments.glam import GLaM126M64E
from paxlite.experiments.gpt import GPT126M, GPT2
from paxlite.experiments.llama import LLaMA, Mistral7B
from paxlite.layers.transformer import TransformerBlock
from paxlite.checkpointing.source import find_source
from paxlite.transformer_engine import command as convert_te, products
from paxlite.transformer_engine.conversion import block_rules, from_te, to_te
from paxlite.transformer_engine.templates import te_block
from tests.support import runs

flat = functools.partial(flatten_dict, sep='/')
unflat = functools.partial(unflatten_dict, sep='/')

SMALL = dict(
  NUM_LAYERS=2, MODEL_DIMS=64, HIDDEN_DIMS=160, NUM_HEADS=4, VOCAB_SIZE=128, MAX_SEQ_LEN=32,
  PACKED_INPUT=False, FPROP_DTYPE='float32', ICI_MESH_SHAPE=[1, 1, 1], DCN_MESH_SHAPE=[1, 1, 1],
)  # fmt: skip
GQA = SMALL | dict(NUM_KV_HEADS=2, ROPE_THETA=500_000.0, ROPE_LAYOUT='half')
MODELS = {
  'gpt': GPT126M(**SMALL), 'gpt2': GPT2(**SMALL), 'no bias': GPT126M(**SMALL, USE_BIAS=False),
  'relu': GPT126M(**SMALL, ACTIVATION_CLS='relu'),
  'gated gelu': GPT126M(**SMALL, USE_GATED_ACTIVATION=True), 'llama': LLaMA(**SMALL),
  'gqa': LLaMA(**GQA), 'gqa with bias': LLaMA(**GQA, USE_BIAS=True),
}  # fmt: skip


def blocks(e):
  """Returns both kinds of block of an experiment, and the arguments that both take."""
  (ours,) = selectors.select(e.model(), TransformerBlock)
  x = jax.random.normal(jax.random.key(1), (2, 32, 64), e.FPROP_DTYPE)
  return fdl.build(ours)(), fdl.build(te_block(e, e.model()))(), (x, jnp.arange(32)[None], None)


def noisy(params):
  """Returns parameters whose norms and biases differ from their initial values."""
  leaves, tree = jax.tree.flatten(params)
  keys = jax.random.split(jax.random.key(3), len(leaves))
  return tree.unflatten(
    [x + 0.1 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
  )


# the smallest sizes that NVFP4 supports
BLACKWELL = dict(MODEL_DIMS=128, HIDDEN_DIMS=256, MAX_SEQ_LEN=64, FPROP_DTYPE='bfloat16')
QUICK = {'gpt', 'gqa with bias'}


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.parametrize(
  'name', [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in MODELS]
)
def test_the_layer_computes_what_a_block_does(name):
  """Compares the output and all gradients; parameters are converted."""
  e = MODELS[name]
  ours, theirs, (x, *rest) = blocks(e)
  params = noisy(meta.unbox(jax.jit(ours.init)(jax.random.key(0), x, *rest))['params'])
  there = lambda p: {'te': unflat(dict(to_te(jax.tree.map(np.asarray, flat(p)), block_rules(e))))}
  made = jax.eval_shape(lambda: meta.unbox(theirs.init(jax.random.key(0), x, *rest)))
  shapes = lambda tree: {k: (x.shape, x.dtype) for k, x in flat(tree).items()}
  assert made.keys() == {'params'}
  assert shapes(made['params']) == shapes(there(params))

  def run(module, params):
    def loss(params, x):
      y = module.apply({'params': params}, x, *rest)
      return (y * jax.random.normal(jax.random.key(2), y.shape)).sum(), y

    return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(params, x)

  (grads, grad_x), y = run(ours, params)
  (te_grads, te_grad_x), te_y = run(theirs, jax.tree.map(jnp.asarray, there(params)))
  near = functools.partial(np.testing.assert_allclose, rtol=2e-5)
  near(te_y, y, atol=2e-5)
  near(te_grad_x, grad_x, atol=5e-5 * np.abs(grad_x).max())
  expected = flat(there(grads))
  for path, g in flat(te_grads).items():
    near(g, expected[path], atol=2e-5 * np.abs(expected[path]).max(), err_msg=path)


@pytest.mark.cases(fast=4, slow=1)
@pytest.mark.parametrize('leading', [(), (3,)])
@pytest.mark.parametrize('name', MODELS)
def test_parameters_there_and_back_are_the_same_bits(name, leading):
  e = MODELS[name]
  ours, _, inputs = blocks(e)
  shapes = jax.eval_shape(lambda: meta.unbox(ours.init(jax.random.key(0), *inputs)['params']))
  rng = np.random.default_rng(0)
  params = {
    k: rng.standard_normal((*leading, *x.shape), np.float32) for k, x in flat(shapes).items()
  }
  rules = block_rules(e)
  there = dict(to_te(params, rules))
  back = dict(from_te(there, rules))
  assert back.keys() == params.keys()
  for k, x in params.items():
    np.testing.assert_array_equal(back[k], x)
  if leading:
    for k, x in to_te({k: x[1] for k, x in params.items()}, rules):
      np.testing.assert_array_equal(there[k][1], x)
  with pytest.raises(UserError, match='is missing'):
    to_te({}, rules)


@pytest.mark.parametrize(
  ('model', 'values', 'error'),
  [
    (GPT126M, dict(PACKED_INPUT=True), r'PACKED_INPUT=True \(only False\)'),
    (GPT126M, dict(USE_LORA=True), 'USE_LORA=True'),
    (LLaMA, dict(ATTEN_LOGIT_CAP=30.0), 'ATTEN_LOGIT_CAP=30'),
    (LLaMA, dict(DIMS_PER_HEAD=8, HEADS_SPAN_MODEL=False), 'NUM_HEADS × DIMS_PER_HEAD'),
    (Mistral7B, dict(NUM_KV_HEADS=2), 'SLIDING_WINDOW=4096'),
    (GLaM126M64E, {}, 'the blocks of GLaM126M64E'),
  ],
)
def test_what_the_layer_does_not_know_is_refused(model, values, error):
  with pytest.raises(UserError, match=error):
    model(**SMALL | values, USE_TE='layer').validate()


FLAGS = [
  '--fdl.LR_SCHEDULE=constant',
  '--fdl.LEARNING_RATE=3e-3',  # at 1e-2 the loss jumps, and rounding decides how far
  '--fdl.PACKED_INPUT=False',
  '--fdl.FPROP_DTYPE=bfloat16',
  '--fdl.MODEL_DIMS=64',
  '--fdl.SAMPLE_PROMPT=None',
  '--fdl.EVAL_INTERVAL_STEPS=1000',
]
TEXT = '--fdl_config=tests.support.experiments.TinyText'

STACKS = {
  'unrolled': ['--fdl.USE_REPEATED_LAYER=False', '--fdl.CHECKPOINT_POLICY=SAVE_EVERYTHING'],
  'scan': ['--fdl.USE_REPEATED_LAYER=True', '--fdl.CHECKPOINT_POLICY=SAVE_EVERYTHING'],
  'remat': ['--fdl.USE_REPEATED_LAYER=True', '--fdl.CHECKPOINT_POLICY=SAVE_NOTHING'],
}


def train(folder, *flags, steps=30):
  """Runs paxlite.main in this process, in which Transformer Engine is loaded."""
  steps = f'--fdl.MAX_STEPS={steps}'
  assert main.main(['main', TEXT, f'--job_log_dir={folder}', *FLAGS, steps, *flags]) == 0
  return runs.losses(folder)


@pytest.fixture(scope='module')
def begun(tmp_path_factory):
  """By kind of stack: XLA's losses, and the flags that continue its run after the first step."""

  @functools.cache
  def begin(stack):
    folder = tmp_path_factory.mktemp(stack)
    train(folder / 'first', *STACKS[stack], steps=1)
    command = ['--direction=fw2te', f'--checkpoint={folder / "first"}', f'--path={folder / "te"}']
    convert_te.main(command)
    state = '--fdl.CHECKPOINT_RESTORE_STATE=True'
    start = {
      'gemm': [f'--fdl.CHECKPOINT_RESTORE_PATH={folder / "first"}', state],
      'layer': [f'--fdl.CHECKPOINT_RESTORE_PATH={folder / "te"}', state],
    }
    return train(folder / 'xla', *STACKS[stack], *start['gemm']), start

  return begin


@pytest.mark.parametrize(
  ('te', 'recipe', 'stack'),
  [
    # every recipe and every kind of stack once, in every kind of layer
    ('gemm', 'bf16', 'unrolled'),
    ('gemm', 'DelayedScaling', 'remat'),
    ('gemm', 'Float8CurrentScaling', 'scan'),
    ('layer', 'bf16', 'remat'),
    ('layer', 'DelayedScaling', 'unrolled'),
    ('layer', 'Float8CurrentScaling', 'scan'),
  ],
)
@pytest.mark.exhaustive
@pytest.mark.slow
def test_training_through_main(tmp_path, capsys, begun, te, recipe, stack):
  """From the same initial values, 24 bfloat16 losses are each within 0.1 % of XLA's.

  In the last steps of 30, FP8 may have a spike that XLA has not: the learning rate is high.
  """
  xla, start = begun(stack)
  flags = [f'--fdl.USE_TE={te}', f'--fdl.TE_RECIPE={recipe}', *STACKS[stack], *start[te]]
  losses = train(tmp_path, *flags)
  name = 'te' if recipe == 'bf16' else 'te_fp8'
  assert f'Backend: {name} (USE_TE={te}, TE_RECIPE={recipe}' in capsys.readouterr().out
  assert xla[30] < 0.85 * xla[2]
  assert losses[30] < 0.85 * losses[2]
  for step in range(2, 26):
    assert losses[step] == pytest.approx(xla[step], rel=0.001), step


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_environment_of_pax_users(tmp_path, monkeypatch, capsys):
  """They set ENABLE_TE=1 ENABLE_FP8=1. XLA continues the checkpoint with the same parameters."""
  monkeypatch.setenv('ENABLE_TE', '1')
  monkeypatch.setenv('ENABLE_FP8', '1')
  base = ['main', '--fdl_config=TinyGPT', f'--job_log_dir={tmp_path}']
  assert main.main([*base, '--fdl.MAX_STEPS=3']) == 0
  reason = "te_fp8 (the environment's ENABLE_TE=1, the environment's ENABLE_FP8=1)"
  assert f'Backend: {reason}' in capsys.readouterr().out
  assert json.loads((tmp_path / 'experiment.json').read_text())['backend'] == reason
  monkeypatch.delenv('ENABLE_TE')
  monkeypatch.delenv('ENABLE_FP8')
  assert main.main([*base, '--fdl.MAX_STEPS=6']) == 2
  assert "USE_TE 'gemm' → 'off'" in capsys.readouterr().err
  assert main.main([*base, '--fdl.MAX_STEPS=6', '--accept_changes']) == 0
  assert 'Continuing from the checkpoint of step 3.' in capsys.readouterr().out


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_run_goes_on_in_the_other_kind_of_layer(tmp_path, capsys):
  """Parameters and both moments are converted, and back to the same bits; the loss continues."""
  flags = ['--fdl.USE_REPEATED_LAYER=True', '--fdl.DROPOUT_PROB=0']
  first = [*FLAGS, *flags]
  run = lambda folder, *more: main.main(['main', TEXT, f'--job_log_dir={folder}', *first, *more])
  assert run(tmp_path / 'whole', '--fdl.MAX_STEPS=12') == 0
  assert run(tmp_path / 'fw', '--fdl.MAX_STEPS=6') == 0
  there, back = tmp_path / 'te', tmp_path / 'back'
  printed = runs.module(
    'paxlite', 'convert-te', runs.IMPORT, '--direction=fw2te', f'--checkpoint={tmp_path / "fw"}',
    f'--path={there}',
  ).stdout  # fmt: skip
  goes_on = printed.splitlines()[-1].removeprefix('Continues with ').split()
  assert goes_on[0] == 'USE_TE=layer'
  assert run(tmp_path / 'on', '--fdl.MAX_STEPS=12', *goes_on) == 0
  losses, whole = runs.losses(tmp_path / 'on'), runs.losses(tmp_path / 'whole')
  assert min(losses) == 7
  for step in range(7, 13):  # in bfloat16, with different rounding
    assert losses[step] == pytest.approx(whole[step], rel=0.005)

  runs.module(
    'paxlite', 'convert-te', runs.IMPORT, '--direction=te2fw', f'--checkpoint={there}',
    f'--path={back}',
  )  # fmt: skip
  before, after = find_source(tmp_path / 'fw').variables, find_source(back).variables
  assert before.keys() == after.keys()
  assert sum('/repeat/' in name for name in before) == 3 * 12
  for name, variable in before.items():
    np.testing.assert_array_equal(variable.whole(), after[name].whole(), err_msg=name)

  wrong = runs.module(
    'paxlite', 'convert-te', runs.IMPORT, '--direction=te2fw', f'--checkpoint={tmp_path / "fw"}',
    f'--path={tmp_path / "no"}', code=2,
  )  # fmt: skip
  assert 'has USE_TE=off: choose the other --direction' in wrong.stderr
  assert not (tmp_path / 'no').exists()
  unconverted = [f'--fdl.CHECKPOINT_RESTORE_PATH={tmp_path / "fw"}', '--fdl.USE_TE=layer']
  capsys.readouterr()
  assert run(tmp_path / 'forgot', '--fdl.MAX_STEPS=12', *unconverted) == 2
  assert 'paxlite convert-te' in capsys.readouterr().err
  text = runs.module(
    'paxlite', 'export', runs.IMPORT, '--to=hf', f'--checkpoint={there}', '--path=hf', code=2
  )
  assert '--direction=te2fw' in text.stderr


@pytest.fixture
def blackwell(monkeypatch):
  """Transformer Engine's Python code believes that it has a B200.

  Its quantizer in JAX, which a B200 does not run, has two faults that are mended here: XLA on CPUs
  makes 448 in e4m3fn infinite, and scales of 16 × 16 are spread over the wrong rows.
  """
  from transformer_engine.jax.quantize import device_utils, helper, quantizer

  def forget():
    device_utils.get_device_compute_capability.cache_clear()
    device_utils.is_fp8_gemm_with_all_layouts_supported.cache_clear()

  def reduced(x, exponent_bits, mantissa_bits):
    assert (x.dtype, exponent_bits, mantissa_bits) == (jnp.float8_e4m3fn, 4, 3)
    return jax.lax.optimization_barrier(x)

  def repeated(x, counts):
    for axis, count in enumerate(counts):
      x = jnp.repeat(x, count, axis)
    return x

  extension = sys.modules['transformer_engine_jax']
  monkeypatch.setattr(extension, 'get_device_compute_capability', lambda *_: 100)
  monkeypatch.setattr(jax.lax, 'reduce_precision', reduced)
  monkeypatch.setattr(quantizer, 'jnp', types.SimpleNamespace(**vars(jnp) | {'tile': repeated}))
  monkeypatch.setattr(helper, '_is_scaling_mode_supported', None)
  monkeypatch.setattr(helper, '_reason_for_no_scaling_mode', '')
  forget()
  yield
  forget()


# the numbers of e2m1 without sign; those with an even code come first, as ties go to them
E2M1 = np.array([0, 1, 2, 4, 0.5, 1.5, 3, 6])


def nvfp4(x, block):
  """Returns the numbers of NVFP4 nearest to a matrix, in float64.

  A block has a scale in e4m3, and the matrix one in float32 that makes the largest scale 448.
  """
  rows, columns = block
  blocks = x.reshape(len(x) // rows, rows, -1, columns)
  whole = np.abs(x).max() / (6 * 448)
  scales = np.abs(blocks).max((1, 3), keepdims=True) / 6 / whole
  scales = whole * scales.astype(jnp.float8_e4m3fn).astype(np.float64)
  nearest = np.abs(np.abs(blocks / scales)[..., None] - E2M1).argmin(-1)
  return (np.sign(blocks) * E2M1[nearest] * scales).reshape(x.shape)


def mxfp8(x):
  """Returns the numbers of MXFP8 nearest to a matrix: 32 of a row share a power of two."""
  blocks = x.reshape(len(x), -1, 32)
  scales = 2.0 ** np.ceil(np.log2(np.abs(blocks).max(-1, keepdims=True) / 448))
  return ((blocks / scales).astype(jnp.float8_e4m3fn).astype(np.float64) * scales).reshape(x.shape)


def product(x, w, key=None, recipe='NVFP4'):
  """Returns x · w by Transformer Engine's product, with keys of dropout or without."""
  module = products.te_dot_general(recipe)
  rngs = None if key is None else {'dropout': key}
  with products.te_context(recipe):
    return module.apply({}, x, w, (((1,), (0,)), ((), ())), rngs=rngs)


def matrices():
  """Returns inputs, a kernel and a gradient in bfloat16, and their numbers in float64.

  Their blocks differ in size by up to a factor of 100.
  """
  rng = np.random.default_rng(0)
  drawn = []
  for shape in (64, 128), (128, 256), (64, 256):
    sizes = np.kron(10.0 ** rng.uniform(-1, 1, (shape[0] // 16, shape[1] // 16)), np.ones((16, 16)))
    drawn.append(jnp.asarray(rng.standard_normal(shape) * sizes, jnp.bfloat16))
  return drawn, [np.asarray(x, np.float64) for x in drawn]


def off(found, expected):
  """Returns the norm of the difference relative to that of what was expected."""
  return np.linalg.norm(np.asarray(found, np.float64) - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize(('recipe', 'error'), [('NVFP4', 0.15), ('MXFP8', 0.04)])
def test_blocks_are_rounded_to_the_nearest_numbers(blackwell, recipe, error):
  """In NVFP4, kernels have a scale for 16 × 16 numbers. Halves may go either way."""
  (x, w, _), (x64, w64, _) = matrices()
  if recipe == 'NVFP4':
    expected = nvfp4(x64, (1, 16)) @ nvfp4(w64, (16, 16))
  else:
    expected = mxfp8(x64) @ mxfp8(w64.T).T
  assert off(product(x, w, recipe=recipe), expected) < error / 10
  assert error / 2 < off(expected, x64 @ w64) < error


def test_nvfp4_rounds_gradients_without_bias(blackwell):
  """They are random by the key of dropout; their mean is that of the rounded kernel."""
  (x, w, g), (x64, w64, g64) = matrices()

  @jax.jit
  def gradients(key):
    return jax.vjp(lambda x, w: product(x, w, key), x, w)[1](g)

  keys = jax.random.split(jax.random.key(0), 64)
  found = [gradients(key) for key in keys]
  for again, first, other in zip(gradients(keys[0]), *found[:2], strict=True):
    np.testing.assert_array_equal(again, first)
    assert off(other, np.asarray(first, np.float64)) > 0.01
  mean_x, mean_w = (np.mean([np.asarray(f[i], np.float64) for f in found], 0) for i in (0, 1))
  expected = g64 @ nvfp4(w64, (16, 16)).T
  assert off(found[0][0], expected) > 4 * off(mean_x, expected)
  assert off(mean_x, expected) < 0.03
  assert off(mean_w, x64.T @ g64) < 0.15  # inputs are rounded to the nearest


@pytest.mark.cases(fast=0, slow=2)
@pytest.mark.slow
@pytest.mark.parametrize(
  ('te', 'recipe'), [('layer', 'NVFP4'), ('gemm', 'MXFP8'), ('gemm', 'NVFP4'), ('layer', 'MXFP8')]
)
def test_blocks_in_a_model(blackwell, te, recipe):
  """The loss is near bfloat16's, also without keys; NVFP4's gradients depend on them everywhere."""
  values = dict(USE_TE=te, TE_RECIPE=recipe, USE_REPEATED_LAYER=True, USE_BIAS=False)
  e = GPT126M(**SMALL | BLACKWELL | values)
  task, plain = (fdl.build(x.build_task()) for x in (e, e.replaced(TE_RECIPE='bf16')))
  params = meta.unbox(task.init_params(jax.random.key(0)))
  ids = np.random.default_rng(0).integers(128, size=(2, 65))
  batch = dict(ids=ids[:, :-1], labels=ids[:, 1:], weights=np.ones((2, 64), np.float32))

  def loss(params, key, task=task):
    return task.loss_and_metrics(params, batch, key)[0]

  value_and_grad = jax.jit(jax.value_and_grad(loss))
  (one, first), (two, other) = (value_and_grad(params, jax.random.key(i)) for i in range(2))
  assert one == two
  assert float(jax.jit(loss)(params, None)) == pytest.approx(float(one), rel=1e-6)
  assert float(one) == pytest.approx(float(loss(params, None, plain)), rel=2e-3)
  blocks = {k: (x, flat(other)[k]) for k, x in flat(first).items() if '/repeat/' in f'/{k}'}
  assert blocks
  for name, (a, b) in blocks.items():
    for layer in range(2):
      difference = off(b[layer], np.asarray(a[layer], np.float64))
      assert (difference > 1e-3) == (recipe == 'NVFP4'), (name, layer)


@pytest.mark.parametrize(
  ('values', 'error'),
  [
    (dict(FPROP_DTYPE='float32'), r'FPROP_DTYPE=float32 \(only bfloat16\)'),
    (dict(MODEL_DIMS=64), r'MODEL_DIMS of 64 on a device \(only multiples of 128\)'),
    (dict(MAX_SEQ_LEN=32), r'MAX_SEQ_LEN of 32 on a device \(only multiples of 64\)'),
    (
      dict(ICI_MESH_SHAPE=[1, 1, 4]),
      r'HIDDEN_DIMS of 64 .*; NUM_HEADS × DIMS_PER_HEAD of 32 .*; NUM_KV_HEADS × DIMS_PER_HEAD',
    ),
  ],
)
def test_sizes_that_nvfp4_refuses(values, error):
  e = GPT126M(**SMALL | BLACKWELL | values, USE_TE='gemm', TE_RECIPE='NVFP4')
  with pytest.raises(UserError, match=f'TE_RECIPE=NVFP4 does not support: .*{error}'):
    e.build_task()


@pytest.mark.parametrize(('te', 'recipe'), [('gemm', 'MXFP8'), ('layer', 'NVFP4')])
def test_what_is_not_installed_or_not_there(monkeypatch, te, recipe):
  e = GPT126M(**SMALL | BLACKWELL, USE_TE=te, TE_RECIPE=recipe)
  with pytest.raises(UserError, match=rf'TE_RECIPE={recipe}: .*compute capability'):
    jax.eval_shape(fdl.build(e.build_task()).init, jax.random.key(0))
  monkeypatch.setitem(sys.modules, 'transformer_engine.jax', None)
  with pytest.raises(UserError, match=r'Transformer Engine is not installed.*docs/backends\.md'):
    jax.eval_shape(fdl.build(e.build_task()).init, jax.random.key(0))


def test_nvte_fused_attn_is_honored(monkeypatch):
  """If cuDNN has a kernel, 1 uses it, which fails without the real extension; 0 does not use it."""
  extension = sys.modules['transformer_engine_jax']
  kernel = extension.NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen
  monkeypatch.setattr(extension, 'get_fused_attn_backend', lambda *_, **__: (kernel, ''))
  init = lambda: jax.eval_shape(
    fdl.build(GPT126M(**SMALL, USE_TE='layer').build_task()).init, jax.random.key(0)
  )
  monkeypatch.setenv('NVTE_FUSED_ATTN', '0')
  init()
  monkeypatch.setenv('NVTE_FUSED_ATTN', '1')
  with pytest.raises(RuntimeError, match='was called without CUDA'):
    init()


@pytest.mark.exhaustive
@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize(
  ('te', 'recipe'), [('gemm', 'DelayedScaling'), ('layer', 'Float8CurrentScaling')]
)
def test_on_a_mesh(tmp_path, te, recipe):
  """The loss on 2 × 2 devices equals that of one, up to rounding; the process has four."""
  flags = [*FLAGS, f'--fdl.USE_TE={te}', f'--fdl.TE_RECIPE={recipe}', '--fdl.MAX_STEPS=3']
  mesh = ['--fdl.ICI_MESH_SHAPE=[2,2,1]', '--fdl.PERCORE_BATCH_SIZE=1']
  runs.run(tmp_path / 'four', *flags, *mesh, devices=4, module='tests.support.te_main')
  runs.run(tmp_path / 'one', *flags, '--fdl.PERCORE_BATCH_SIZE=4', module='tests.support.te_main')
  four, one = runs.losses(tmp_path / 'four'), runs.losses(tmp_path / 'one')
  assert four.keys() == one.keys()
  for step, loss in one.items():
    assert four[step] == pytest.approx(loss, rel=2e-3)


def test_mesh_axes_reach_transformer_engine():
  sizes = {'replica': 2, 'data': 4, 'mdl': 1, 'context': 2, 'expert': 2}
  axes = dict(dp_resource='replica', fsdp_resource='data', cp_resource='context')
  assert products.mesh_resources(sizes) == axes
  products.transformer_engine().MeshResource(**axes)
  assert products.mesh_resources({'replica': 1, 'data': 1, 'mdl': 2}) == {'tp_resource': 'mdl'}


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_commands_of_the_page(tmp_path):
  (text,) = re.findall(
    r'^```sh te\n(.*?)^```', (runs.ROOT / 'docs/backends.md').read_text(), re.M | re.S
  )
  for line in text.splitlines():
    words = line.replace('paxlite.main', 'tests.support.te_main').split()
    result = subprocess.run(
      [sys.executable, *(words[1:] if words[0] == 'python' else ['-m', *words])], cwd=tmp_path,
      env=runs.environment() | {'PYTHONPATH': str(runs.ROOT)}, capture_output=True, text=True,
      timeout=300, check=False,
    )  # fmt: skip
    assert result.returncode == 0, f'{line}\n{result.stderr}'
