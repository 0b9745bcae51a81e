"""Backends: which one is chosen, and XLA's FP8 in training, on disk and lowered for CUDA."""

import collections
import functools
import json
import re

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.linen import meta

from paxlite.config.templates import config_text, template
from paxlite.core.errors import UserError
from paxlite.experiments.demo import TinyGPT
from paxlite.layers.projection import Projection
from paxlite.training.step import train_step
from tests.support import runs
from tests.support.meshes import MODELS, batch_of

LEARNING = dict(LR_SCHEDULE='constant', LEARNING_RATE=1e-2)


def experiment(model='gpt', **values):
  cls, small = MODELS[model]
  return cls(**small | dict(ICI_MESH_SHAPE=[1, 1, 1]) | LEARNING | values)


class Step:
  """A jitted train step of an experiment, its initial state, and a batch."""

  def __init__(self, e):
    e.validate()
    self.task = fdl.build(e.build_task())
    self.batch = {k: jnp.asarray(v) for k, v in batch_of(e).items()}
    self.jitted = jax.jit(lambda state, batch: train_step(self.task, 0, state, batch))

  def _init(self, key):
    return meta.unbox(self.task.init(key))

  @functools.cached_property
  def state(self):
    return jax.jit(self._init)(jax.random.key(0))

  def train(self, steps):
    """Returns the losses of steps on one batch; `state` is that of the last step."""
    losses = []
    for _ in range(steps):
      self.state, metrics = self.jitted(self.state, self.batch)
      losses.append(float(metrics['Metrics/total_loss'].value))
    return losses

  def dots(self):
    """Counts matrix multiplications in the lowered CUDA step by dtypes, the larger name first."""
    state = jax.eval_shape(self._init, jax.random.key(0))
    lowered = self.jitted.trace(state, self.batch).lower(lowering_platforms=('cuda',))
    of_tensor = r'tensor<[\dx]*x([a-z]\w*)>'
    dots = rf'stablehlo\.dot_general .*: \({of_tensor}, {of_tensor}\)'
    pairs = re.findall(dots, lowered.as_text())
    return collections.Counter(tuple(sorted(pair, reverse=True)) for pair in pairs)


PAX = {'ENABLE_TE': '1', 'ENABLE_FP8': '1'}


@pytest.mark.parametrize(
  ('environment', 'values', 'expected'),
  [
    ({}, {}, 'xla (the default)'),
    ({}, dict(USE_FP8=True), 'xla_fp8 (USE_FP8=True)'),
    ({}, dict(USE_INT8='forward'), 'int8 (USE_INT8=forward)'),
    ({}, dict(USE_TE='gemm'), 'te (USE_TE=gemm, TE_RECIPE=bf16)'),
    ({}, dict(USE_TE='gemm', TE_RECIPE='NVFP4'), 'te_fp4 (USE_TE=gemm, TE_RECIPE=NVFP4)'),
    ({'ENABLE_TE': '0', 'ENABLE_FP8': ''}, {}, 'xla (the default)'),
    ({'ENABLE_TE': '1'}, {}, "te (the environment's ENABLE_TE=1, TE_RECIPE=bf16)"),
    ({'ENABLE_TE': '1'}, dict(USE_TE='off'), 'xla (the default)'),
    ({'ENABLE_TE': '1', 'ENABLE_FP8': '1'}, dict(USE_TE='off'), 'xla (the default)'),
    (
      {'ENABLE_TE': '1', 'ENABLE_FP8': '1'},
      dict(USE_TE='off', USE_FP8=True),
      'xla_fp8 (USE_FP8=True)',
    ),
    (
      {'NVTE_FUSED_ATTN': '0'},
      dict(USE_TE='layer', PACKED_INPUT=False),
      'te (USE_TE=layer, TE_RECIPE=bf16, NVTE_FUSED_ATTN=0)',
    ),
    (
      {'ENABLE_TE': 'true', 'ENABLE_FP8': '1'},
      {},
      "te_fp8 (the environment's ENABLE_TE=1, the environment's ENABLE_FP8=1)",
    ),
    (
      {'ENABLE_TE': '1', 'ENABLE_FP8': '1'},
      dict(TE_RECIPE='Float8CurrentScaling'),
      "te_fp8 (the environment's ENABLE_TE=1, TE_RECIPE=Float8CurrentScaling)",
    ),
  ],
)
def test_what_is_chosen(monkeypatch, environment, values, expected):
  for name in ('ENABLE_TE', 'ENABLE_FP8'):
    monkeypatch.delenv(name, raising=False)
  for name, value in environment.items():
    monkeypatch.setenv(name, value)
  assert str(TinyGPT(**values).backend) == expected


@pytest.mark.parametrize(
  ('environment', 'values', 'error'),
  [
    ({'ENABLE_TE': '1'}, dict(USE_FP8=True), r"USE_FP8=True and the environment's ENABLE_TE=1 ex"),
    ({}, dict(USE_FP8=True, USE_TE='gemm'), 'USE_FP8=True and USE_TE=gemm exclude each other'),
    ({}, dict(USE_INT8='forward', USE_FP8=True), 'USE_FP8=True and USE_INT8=forward exclude'),
    ({'ENABLE_FP8': '1'}, {}, "the environment's ENABLE_FP8=1 is for Transformer Engine, which is"),
    ({}, dict(TE_RECIPE='MXFP8'), 'TE_RECIPE=MXFP8 is for Transformer Engine'),
    ({'ENABLE_TE': 'yes'}, {}, 'ENABLE_TE=yes: it must be 1 or 0'),
    ({'NVTE_FUSED_ATTN': 'true'}, dict(USE_TE='layer'), 'NVTE_FUSED_ATTN=true: it must be 1 or 0'),
    ({}, dict(USE_TE='maybe'), "USE_TE must be one of 'off', 'gemm', 'layer'"),
  ],
)
def test_what_cannot_be(monkeypatch, environment, values, error):
  for name in ('ENABLE_TE', 'ENABLE_FP8'):
    monkeypatch.delenv(name, raising=False)
  for name, value in environment.items():
    monkeypatch.setenv(name, value)
  with pytest.raises(UserError, match=error):
    TinyGPT(**values).validate()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_recomputed_products_are_in_fp8_too():
  """All products of a block are, except its last, which the backward pass does not use."""
  dots = Step(experiment('llama', USE_FP8=True, CHECKPOINT_POLICY='SAVE_NOTHING')).dots()
  assert dots['f8E4M3FN', 'f8E4M3FN'] in (7 + 6, 7 + 7)
  assert dots['f8E5M2', 'f8E4M3FN'] == 2 * 7


def test_fp8_needs_experts_of_one_shape():
  with pytest.raises(UserError, match='needs experts with a capacity'):
    experiment('dropless', USE_FP8=True).validate()


# Matrix multiplications of a block: queries, keys and values, output, feed-forward. `split` is how
# many more there are forward: queries, keys and values of one weight are computed one by one.
@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize(
  ('model', 'values', 'products', 'split'),
  [
    ('gpt', dict(USE_REPEATED_LAYER=False, NUM_LAYERS=2), 2 * (1 + 1 + 2), 2 * 2),
    ('gpt', dict(CHECKPOINT_POLICY='SAVE_EVERYTHING'), 1 + 1 + 2, 2),
    ('llama', dict(CHECKPOINT_POLICY='SAVE_EVERYTHING'), 3 + 1 + 3, 0),
    # One block with experts and one without.
    ('glam', dict(CHECKPOINT_POLICY='SAVE_EVERYTHING'), (3 + 1 + 2) + (3 + 1 + 3), 0),
  ],
)
def test_every_product_is_in_fp8_forward_and_backward(model, values, products, split):
  """Counted in JAX's program for CUDA; attention, router and logits are not in FP8."""
  dots = Step(experiment(model, USE_FP8=True, **values)).dots()
  fp8 = {pair: n for pair, n in dots.items() if pair[0].startswith('f8')}
  forward, backward = products + split, 2 * products
  assert fp8 == {('f8E4M3FN', 'f8E4M3FN'): forward, ('f8E5M2', 'f8E4M3FN'): backward}
  plain = Step(experiment(model, **values)).dots()
  assert sum(plain.values()) == sum(dots.values()) - split


@pytest.mark.exhaustive
def test_lora_needs_no_gradient_of_what_is_frozen():
  step = Step(experiment('llama', USE_FP8=True, USE_LORA=True, CHECKPOINT_POLICY='SAVE_EVERYTHING'))
  dots = step.dots()
  assert dots['f8E4M3FN', 'f8E4M3FN'] == 7
  assert dots['f8E5M2', 'f8E4M3FN'] == 7  # only for the gradients of activations
  frozen = jax.tree.leaves(step.task.optimizer.split(step.state.params)[1])
  before = step.state.fp8_state
  losses = step.train(20)
  assert losses[-1] < losses[0]
  after = jax.tree.leaves(step.task.optimizer.split(step.state.params)[1])
  jax.tree.map(np.testing.assert_array_equal, frozen, after)
  assert not np.array_equal(jax.tree.leaves(before)[0], jax.tree.leaves(step.state.fp8_state)[0])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
  ('model', 'values', 'tolerance'),
  [
    pytest.param(
      'gpt', dict(USE_REPEATED_LAYER=False, FPROP_DTYPE='bfloat16'), 0.005, marks=pytest.mark.slow
    ),
    pytest.param('llama', dict(CHECKPOINT_POLICY='SAVE_NOTHING'), 0.1, marks=pytest.mark.slow),
    pytest.param('glam', dict(NUM_MICROBATCHES=2), 0.06, marks=pytest.mark.slow),
  ],
)
def test_fp8_learns_as_xla_does(model, values, tolerance):
  """Takes 30 steps on one batch, which the models memorize.

  FP8 keeps 3 bits of mantissa, and a width of 32 averages over few values.
  benchmarks/convergence.py trains a wider model on text.
  """
  values = values | dict(LEARNING_RATE=1e-3)
  fp8 = Step(experiment(model, USE_FP8=True, **values)).train(30)
  xla = Step(experiment(model, **values)).train(30)
  assert xla[-1] < 0.8 * xla[0]
  assert fp8[-1] == pytest.approx(xla[-1], rel=tolerance)
  assert fp8[-1] != xla[-1]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_histories_are_replaced_and_not_optimized():
  """A step puts the largest weight at the front, without decay, clipping or learning rate."""
  step = Step(experiment(USE_FP8=True, WEIGHT_DECAY=0.5, CLIP_GRADIENT_NORM_TO_VALUE=0.1))
  before = step.state
  step.train(1)
  block = ('transformer', 'repeat', 'ff_layer', 'ffn_layer1')
  fp8, w = step.state.fp8_state['_overwrite_with_gradient'], before.params
  for name in block:
    fp8, w = fp8[name], w[name]
  history = fp8['einsum']['dot_general']['kernel_amax_history']
  assert history.shape == (4, 1024)
  np.testing.assert_array_equal(history[:, 0], np.abs(w['w']).max((1, 2)))
  assert not history[:, 1:].any()

  # Neither the optimizer's state nor the reported norm includes the histories.
  moments = jax.tree.leaves(step.state.opt_state)
  assert len(moments) == 2 * len(jax.tree.leaves(before.params)) + 2
  loss = lambda params: step.task.loss_and_metrics(params, step.batch, None, before.fp8_state)[0]
  norm = optax.tree.norm(jax.jit(jax.grad(loss))(before.params))
  _, metrics = step.jitted(before, step.batch)
  assert float(metrics['learning/raw_grad_norm'].value) == pytest.approx(float(norm), rel=1e-5)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_skipped_step_leaves_histories_alone():
  step = Step(experiment(USE_FP8=True))
  step.train(1)
  before = step.state
  params = jax.tree.map(lambda x: x, before.params)
  params['final_ln']['scale'] = params['final_ln']['scale'].at[0].set(jnp.nan)
  after, metrics = step.jitted(step.state.replace(params=params), step.batch)
  assert not metrics['learning/is_valid_step'].value
  jax.tree.map(np.testing.assert_array_equal, before.fp8_state, after.fp8_state)


FLAGS = (
  '--fdl.USE_REPEATED_LAYER=True', '--fdl.NUM_MICROBATCHES=2', '--fdl.PERCORE_BATCH_SIZE=2',
  '--fdl.DROPOUT_PROB=0.1', '--fdl.CHECKPOINT_EVERY_N_STEPS=3',
)  # fmt: skip


def arrays(folder, step):
  import zarr

  state = folder / 'checkpoints' / f'checkpoint_{step:08d}' / 'state'
  return {
    p.name: zarr.open(str(p), mode='r')[...] for p in state.iterdir() if (p / '.zarray').exists()
  }


@pytest.mark.slow
def test_a_smaller_model_loses_no_layer_in_silence(tmp_path):
  """Only FP8's variables may be omitted."""
  fp8 = '--fdl.USE_FP8=True'
  runs.run(tmp_path, fp8, '--fdl.MAX_STEPS=1')
  for backend in (fp8, '--fdl.USE_FP8=False'):
    smaller = [backend, '--fdl.NUM_LAYERS=1', '--fdl.MAX_STEPS=2', '--accept_changes']
    refused = runs.run(tmp_path, *smaller, code=2)
    assert re.search(r'/x_layers_1/\S+ is not in the model', refused.stderr)


@pytest.mark.slow
def test_a_run_from_before_backends_does_not_change_its_own(tmp_path):
  """Its experiment.json has no USE_TE, and it continues with ENABLE_TE=1 in the environment."""
  runs.run(tmp_path, '--fdl.MAX_STEPS=1')
  path = tmp_path / 'experiment.json'
  written = json.loads(path.read_text())
  for name in ('USE_TE', 'TE_RECIPE', 'USE_FP8', 'USE_INT8'):
    del written['values'][name]
  path.write_text(json.dumps(written))
  refused = runs.run(tmp_path, '--fdl.MAX_STEPS=2', env={'ENABLE_TE': '1'}, code=2)
  assert "USE_TE 'off' → 'gemm'" in refused.stderr


@pytest.mark.slow
def test_a_run_in_fp8_continues_bit_for_bit(tmp_path):
  fp8 = (*FLAGS, '--fdl.USE_FP8=True')
  whole = runs.run(tmp_path / 'whole', *fp8, '--fdl.MAX_STEPS=6')
  assert 'Backend: xla_fp8 (USE_FP8=True)' in whole.stdout
  written = json.loads((tmp_path / 'whole' / 'experiment.json').read_text())
  assert written['backend'] == 'xla_fp8 (USE_FP8=True)'
  runs.run(tmp_path / 'parts', *fp8, '--fdl.MAX_STEPS=3')
  runs.run(tmp_path / 'parts', *fp8, '--fdl.MAX_STEPS=6')
  one, two = arrays(tmp_path / 'whole', 6), arrays(tmp_path / 'parts', 6)
  assert sum('amax_history' in name for name in one) == 3 * 4
  assert one.keys() == two.keys()
  for name in one:
    np.testing.assert_array_equal(one[name], two[name], err_msg=name)


@pytest.mark.exhaustive
def test_a_checkpoint_goes_on_under_another_backend(tmp_path):
  """It continues in FP8 and back with the same weights, but only with --accept_changes."""
  folder = tmp_path / 'run'
  runs.run(folder, *FLAGS, '--fdl.MAX_STEPS=3')
  fp8 = (*FLAGS, '--fdl.USE_FP8=True')
  refused = runs.run(folder, *fp8, '--fdl.MAX_STEPS=6', code=2)
  assert 'USE_FP8 False → True' in refused.stderr
  done = runs.run(folder, *fp8, '--fdl.MAX_STEPS=6', '--accept_changes')
  assert 'Continuing from the checkpoint of step 3.' in done.stdout
  assert any('amax_history' in name for name in arrays(folder, 6))
  runs.run(folder, *FLAGS, '--fdl.MAX_STEPS=9', '--accept_changes')
  assert not any('amax_history' in name for name in arrays(folder, 9))
  losses = runs.losses(folder)
  assert losses.keys() == set(range(1, 10))
  smaller = runs.run(
    folder, *fp8, '--fdl.NUM_LAYERS=1', '--fdl.MAX_STEPS=10', '--accept_changes', code=2
  )
  assert 'repeat' in smaller.stderr
  # As the start of a new run, with weights alone and with the optimizer's state.
  start = f'--fdl.CHECKPOINT_RESTORE_PATH={folder}'
  runs.run(tmp_path / 'new', *fp8, start, '--fdl.MAX_STEPS=1')
  state = '--fdl.CHECKPOINT_RESTORE_STATE=True'
  runs.run(tmp_path / 'on', *fp8, start, state, '--fdl.MAX_STEPS=10')


@pytest.mark.exhaustive
@pytest.mark.slow
def test_evaluation_and_text_after_training_in_fp8(tmp_path):
  """Evaluation is in FP8, as in training; text comes from the same weights in plain XLA."""
  config = 'tests.support.experiments.TinyText'
  flags = ['--fdl.USE_FP8=True', '--fdl.MAX_STEPS=4']
  done = runs.run(tmp_path / 'fp8', *flags, config=config)
  assert "A sample at temperature 0.8, continuing 'In the beginning'" in done.stdout
  again = runs.run(tmp_path / 'fp8', *flags, '--mode=eval', config=config)
  assert 'Backend: xla_fp8 (USE_FP8=True)' in again.stdout
  once, twice = (r['avg_xent'] for r in runs.records(tmp_path / 'fp8', 'eval_metrics.jsonl'))
  assert once == twice
  start = f'--fdl.CHECKPOINT_RESTORE_PATH={tmp_path / "fp8"}'
  runs.run(tmp_path / 'xla', start, '--mode=eval', config=config)
  (plain,) = (r['avg_xent'] for r in runs.records(tmp_path / 'xla', 'eval_metrics.jsonl'))
  assert plain != once
  assert plain == pytest.approx(once, rel=1e-3)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_lora_in_fp8_continues_evaluates_and_writes(tmp_path):
  """Its checkpoints hold low-rank factors and FP8's scales, but no weights of the base."""
  config = 'tests.support.experiments.TinyText'
  runs.run(tmp_path / 'base', '--fdl.MAX_STEPS=1', config=config)
  flags = ['--fdl.USE_FP8=True', '--fdl.USE_LORA=True', '--fdl.CHECKPOINT_EVERY_N_STEPS=2']
  flags += [f'--fdl.CHECKPOINT_RESTORE_PATH={tmp_path / "base"}']
  runs.run(tmp_path / 'whole', *flags, '--fdl.MAX_STEPS=4', config=config)
  runs.run(tmp_path / 'parts', *flags, '--fdl.MAX_STEPS=2', config=config)
  runs.run(tmp_path / 'parts', *flags, '--fdl.MAX_STEPS=4', config=config)
  one, two = arrays(tmp_path / 'whole', 4), arrays(tmp_path / 'parts', 4)
  assert {n.split('.')[-1] for n in one if n.startswith('params.')} == {'lora_a', 'lora_b'}
  assert any('amax_history' in name for name in one)
  assert one.keys() == two.keys()
  for name in one:
    np.testing.assert_array_equal(one[name], two[name], err_msg=name)
  text = runs.module(
    'paxlite', 'generate', runs.IMPORT, f'--checkpoint={tmp_path / "whole"}', '--prompt=And it'
  )
  assert text.stdout.strip()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_step_in_fp8_is_compiled_ahead_and_loaded(tmp_path):
  fp8 = ('--fdl.USE_FP8=True', f'--save={tmp_path / "step.bin"}')
  page = runs.module('paxlite', 'compile', '--fdl_config=TinyGPT', '--target=here', *fp8).stdout
  assert 'Backend: xla_fp8 (USE_FP8=True)' in page
  step = f'--compiled_step={tmp_path / "step.bin"}'
  done = runs.run(tmp_path / 'run', fp8[0], step, '--fdl.MAX_STEPS=10')
  assert 'Loaded the train step' in done.stdout
  assert 'USE_FP8 True → False' in runs.run(tmp_path / 'other', step, code=2).stderr


class Halved(TinyGPT):
  """Edits its task at the end, as in docs/experiments.md."""

  def task(self):
    task = super().task()
    task.model.transformer_tpl.layer_tpl.ffn_tpl.projection_tpl = template(
      Projection, use_bias=True, dtype='float32'
    )
    return task


@pytest.mark.exhaustive
@pytest.mark.slow
def test_an_edited_task_is_on_the_backend_too():
  step = Step(Halved(USE_FP8=True, **LEARNING))
  assert step.dots()['f8E4M3FN', 'f8E4M3FN'] == 2 * (3 + 1 + 2)
  step = Step(Halved(USE_INT8='forward', **LEARNING))
  assert step.dots()['i8', 'i8'] == 2 * 4
  with pytest.raises(UserError, match='Halved changes its blocks'):
    Halved(USE_TE='layer', PACKED_INPUT=False).validate()


class Edit:
  """A mixin that is no experiment and edits the task."""

  def task(self):
    task = super().task()
    task.model.logit_cap = 7.0
    return task


def test_the_task_is_on_the_backend_whoever_overrides_it():
  class Below(Halved):
    def task(self):
      task = super().task()
      task.model.logit_cap = 7.0
      return task

  class Mixed(Edit, TinyGPT):
    pass

  class BelowMixed(Mixed):
    pass

  for cls in (TinyGPT, Below, Mixed, BelowMixed):
    e = cls(USE_FP8=True)
    assert 'Fp8Einsum' in config_text(e.build_task()), cls
    assert 'Fp8Einsum' not in config_text(e.plain.build_task()), cls
    assert (e.build_task().model.logit_cap == 7.0) == (cls is not TinyGPT), cls
