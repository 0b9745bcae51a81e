"""int8: qwix in training, and int8 weights of a model that continues text."""

import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxlite.core.errors import UserError
from paxlite.generation import inference
from paxlite.generation.engine import Engine
from paxlite.quantization import products
from paxlite.quantization.schemes import Int8
from tests.support import experiments, runs  # noqa: F401 - named in checkpoints
from tests.support.decode_program import decode_program
from tests.unit.experiments.test_backends import Step, experiment

KEEP = dict(CHECKPOINT_POLICY='SAVE_EVERYTHING')


def int8_dots(step):
  dots = step.dots()
  assert all(pair in (('i8', 'i8'), ('f32', 'f32')) for pair in dots)
  return dots['i8', 'i8']


@pytest.mark.cases(fast=0, slow=2)
@pytest.mark.slow
@pytest.mark.parametrize(
  ('model', 'values', 'products'),
  [
    ('gpt', dict(USE_REPEATED_LAYER=False, NUM_LAYERS=2), 2 * 4),
    ('llama', KEEP, 7),
    ('glam', KEEP, (3 + 1 + 2) + (3 + 1 + 3)),
  ],
)
def test_every_product_is_in_int8(model, values, products):
  """This holds forward, or forward and for both backward products; all else is unchanged."""
  forward = Step(experiment(model, USE_INT8='forward', **values))
  assert int8_dots(forward) == products
  both = Step(experiment(model, USE_INT8='forward_backward', **values))
  assert int8_dots(both) == 3 * products


@pytest.mark.exhaustive
@pytest.mark.slow
def test_lora_beside_int8():
  step = Step(experiment('llama', USE_INT8='forward_backward', USE_LORA=True, **KEEP))
  assert int8_dots(step) == 2 * 7  # frozen weights need no gradient
  losses = step.train(10)
  assert losses[-1] < losses[0]


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize('how', ['forward', 'forward_backward'])
def test_int8_learns_as_xla_does(how):
  """Losses differ by at most 2 % after 30 steps on a batch, with scan and microbatches."""
  values = dict(CHECKPOINT_POLICY='SAVE_NOTHING', NUM_MICROBATCHES=2, LEARNING_RATE=1e-3)
  int8 = Step(experiment('llama', USE_INT8=how, **values)).train(30)
  xla = Step(experiment('llama', **values)).train(30)
  assert xla[-1] < 0.75 * xla[0]
  assert int8[-1] == pytest.approx(xla[-1], rel=0.02)
  assert int8[-1] != xla[-1]


def test_the_last_bit_of_a_weight_decides_nothing():
  """The largest absolute value of a row is 127, and not 127.5, which is rounded by its last bit."""
  qwix = pytest.importorskip('qwix')
  rng = np.random.default_rng(0)
  w = rng.uniform(-3, 3, (2000, 16)).astype(np.float32)
  w[np.arange(2000), rng.integers(0, 16, 2000)] = -3.5 - rng.random(2000, np.float32)
  for moved in (w, np.nextafter(w, np.float32(0)), np.nextafter(w, np.float32(-9))):
    how = dict(channelwise_axes=[0], calibration_method=products._TO_127)
    values = np.asarray(qwix.quantize(moved, jnp.int8, **how).qvalue)
    assert (values.min(1) == -127).all()


def test_what_int8_cannot(monkeypatch):
  with pytest.raises(UserError, match='needs experts with a capacity'):
    experiment('dropless', USE_INT8='forward').validate()
  monkeypatch.setitem(sys.modules, 'qwix', None)
  with pytest.raises(UserError, match=r"pip install -e '.*\[int8\]'"):
    Step(experiment(USE_INT8='forward'))


def test_a_weight_that_is_not_finite_stays_so():
  w = np.ones((2, 3), np.float32)
  w[0, 1], w[1, 2] = np.nan, np.inf
  arrays = jax.device_get(Int8().encode(w, (0,)))
  values, scale = arrays['values'], arrays['scale']
  np.testing.assert_array_equal(np.isfinite(values * scale).all(0), [True, False, False])


def test_rounding_is_to_the_nearest_of_255_by_channel():
  w = np.random.default_rng(0).standard_normal((3, 16, 4, 8)).astype(np.float32)
  w[0, :, 1, 2] = 0
  arrays = jax.device_get(Int8().encode(w, (1,)))
  values, scale = arrays['values'], arrays['scale']
  assert values.dtype == np.int8
  assert scale.shape == (3, 1, 4, 8)
  np.testing.assert_allclose(values * scale, w, atol=float(scale.max()) / 2 * 1.0001)
  largest = np.abs(values).max(1)
  assert largest[0, 1, 2] == 0
  assert (np.delete(largest.ravel(), 1 * 8 + 2) == 127).all()


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  """A LoRA run that is based on a run of a small GPT, and that base."""
  folder = tmp_path_factory.mktemp('trained')
  flags = ['--fdl.MODEL_DIMS=64', '--fdl.MAX_STEPS=60', '--fdl.LR_COS_DECAY_END=60']
  flags += ['--fdl.LEARNING_RATE=1e-2', '--fdl.MAX_EVAL_BATCHES=1']
  runs.run(folder / 'base', *flags, config='tests.support.experiments.TinyText')
  lora = [*flags, '--fdl.USE_LORA=True', f'--fdl.CHECKPOINT_RESTORE_PATH={folder / "base"}']
  runs.run(folder / 'lora', *lora, config='tests.support.experiments.TinyText')
  return folder


@pytest.mark.exhaustive
@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.parametrize('run', ['base', 'lora'])
@pytest.mark.slow
def test_a_model_with_int8_weights_is_near_and_small(trained, run):
  path = str(trained / run)
  plain = inference.load_checkpoint(path)
  small = inference.load_checkpoint(path, overrides={'INT8_WEIGHTS': 'True'})
  ids = np.array([plain.encode('In the beginning God created the heaven and the earth.')])
  logits = [jax.jit(m.model.apply)({'params': m.params}, ids) for m in (plain, small)]
  error = np.linalg.norm(logits[1] - logits[0]) / np.linalg.norm(logits[0])
  assert 0 < error < 0.02
  agree = (logits[1].argmax(-1) == logits[0].argmax(-1)).mean()
  assert agree > 0.9

  def bytes_of(m):
    blocks = m.params['transformer']
    return sum(x.nbytes for x in jax.tree.leaves(blocks) if x.ndim > 1)

  if run == 'base':  # float32 becomes int8, with a float32 scale for 64 values or more
    assert bytes_of(small) < 0.3 * bytes_of(plain)
  assert len(small.engine().continuations([ids[0].tolist()], 8)[0]) <= 8


@pytest.mark.exhaustive
@pytest.mark.slow
def test_int8_weights_stay_int8_in_the_loop_over_tokens(trained):
  """XLA would convert all of them before the loop, but the loop carries each projection as s8."""
  m = inference.load_checkpoint(str(trained / 'base'), overrides={'INT8_WEIGHTS': 'True'})
  text = decode_program(Engine(m.model, m.params, 32))
  (loop,) = re.findall(r'= \((.*)\) while\(', text)
  assert loop.count('s8[') == 2 * 4


@pytest.mark.slow
def test_decoding_by_the_command_line(trained):
  done = runs.module(
    'paxlite', 'generate', runs.IMPORT, f'--checkpoint={trained / "base"}',
    '--prompt=In the beginning', '--fdl.INT8_WEIGHTS=True',
  )  # fmt: skip
  assert done.stdout.strip()
