"""Linear attention by chunks against the recurrence that defines it."""

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import meta

from paxlite.core.errors import UserError
from paxlite.experiments.falcon import FalconH1
from paxlite.experiments.hybrid.chunked_scan import _inverse, linear_attention
from paxlite.experiments.kimi import KimiLinear
from paxlite.experiments.llama import LLaMA
from paxlite.experiments.qwen_hybrid import Qwen3_5

B, N, K, V = 2, 2, 6, 4
SMALL = dict(
  NUM_LAYERS=4, NUM_HEADS=2, NUM_KV_HEADS=1, MODEL_DIMS=16, HIDDEN_DIMS=24, DIMS_PER_HEAD=8,
  VOCAB_SIZE=50, MAX_SEQ_LEN=32, FPROP_DTYPE='float32',
)  # fmt: skip
DELTA = dict(
  DELTA_KEY_HEADS=1, DELTA_VALUE_HEADS=2, DELTA_KEY_DIMS=6, DELTA_VALUE_DIMS=4, CONVOLUTION_WIDTH=3,
)  # fmt: skip
MAMBA = dict(
  MAMBA_HEADS=2, MAMBA_HEAD_DIMS=6, MAMBA_STATE_DIMS=4, CONVOLUTION_WIDTH=3,
)  # fmt: skip
# all experts for each token, because the choice of others is not a gradient
KIMI = dict(
  NUM_EXPERTS=2, NUM_EXPERTS_PER_TOKEN=2, NUM_LAYERS=3, KDA_HEADS=2, KDA_HEAD_DIMS=6, LATENT_DIMS=8,
  ROTARY_DIMS_PER_HEAD=4, VALUE_DIMS_PER_HEAD=6, CONVOLUTION_WIDTH=3, NUM_KV_HEADS=2,
  ATTENTION_PATTERN=['kimi_delta', 'full_nope'],
)  # fmt: skip


def inputs(T: int, has_delta: bool, channels: tuple[int, ...] = (), seed: int = 0):
  """Random inputs; `channels` are () for one decay of a head, and (K,) for one of each channel."""
  rng = np.random.default_rng(seed)
  normal = lambda *shape: rng.standard_normal(shape)
  q, k, v = normal(B, T, N, K), normal(B, T, N, K), normal(B, T, N, V)
  k /= np.linalg.norm(k, axis=-1, keepdims=True)
  # some tokens forget all, and some nothing
  decay = -np.exp(3 * normal(B, T, N, *channels))
  beta = rng.uniform(0, 2, (B, T, N)) if has_delta else None
  return q, k, v, decay, beta


def recurrence(q, k, v, decay, beta, segments=None):
  """The definition, in float64."""
  T, read = q.shape[1], []
  state = np.zeros((B, N, K, V))
  for t in range(T):
    if segments is not None and t:
      state = state * (segments[:, t] == segments[:, t - 1])[:, None, None, None]
    factors = np.exp(decay[:, t])
    state = state * (factors[..., None] if factors.ndim == 3 else factors[..., None, None])
    u = v[:, t]
    if beta is not None:
      u = beta[:, t][..., None] * (u - np.einsum('BNKV,BNK->BNV', state, k[:, t]))
    state = state + k[:, t][..., None] * u[..., None, :]
    read.append(np.einsum('BNKV,BNK->BNV', state, q[:, t]))
  return np.stack(read, 1), state


def computed(*args, **kwargs):
  single = lambda x: None if x is None else jnp.asarray(x, jnp.float32)
  with jax.default_matmul_precision('highest'):
    return jax.jit(lambda args: linear_attention(*args, **kwargs))([*map(single, args)])


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize(
  ('T', 'has_delta', 'is_packed', 'channels'),
  [
    (150, True, True, ()),
    pytest.param(1, True, False, (), marks=pytest.mark.slow),
    pytest.param(7, True, True, (), marks=pytest.mark.slow),
    pytest.param(64, False, False, (), marks=pytest.mark.slow),
    pytest.param(150, False, True, (), marks=pytest.mark.slow),
    pytest.param(200, True, False, (), marks=pytest.mark.slow),
    (150, True, True, (K,)),
    pytest.param(1, True, False, (K,), marks=pytest.mark.slow),
    pytest.param(7, True, True, (K,), marks=pytest.mark.slow),
    pytest.param(64, False, False, (K,), marks=pytest.mark.slow),
    pytest.param(200, True, False, (K,), marks=pytest.mark.slow),
  ],
)
def test_chunks_equal_the_recurrence(T, has_delta, is_packed, channels):
  args = inputs(T, has_delta, channels)
  segments = None
  if is_packed:  # some of one token, and none that ends where a chunk does
    segments = np.cumsum(np.random.default_rng(1).random((B, T)) < 0.05, 1) + 1
  wanted, wanted_state = recurrence(*args, segments)
  ids = None if segments is None else jnp.asarray(segments, jnp.int32)
  read, state = computed(*args, segment_ids_BT=ids)
  np.testing.assert_allclose(read, wanted, rtol=0, atol=2e-6 * np.abs(wanted).max())
  np.testing.assert_allclose(state, wanted_state, rtol=0, atol=2e-6 * np.abs(wanted_state).max())


@pytest.mark.slow
@pytest.mark.parametrize('channels', [(), (K,)])
def test_a_row_goes_on_from_its_state(channels):
  args = inputs(100, True, channels)
  wanted, wanted_state = computed(*args)
  reads, state = [], None
  for part in (slice(0, 70), slice(70, 99), slice(99, 100)):
    read, state = computed(*(x[:, part] for x in args), None, state)
    reads.append(read)
  np.testing.assert_allclose(np.concatenate(reads, 1), wanted, rtol=0, atol=1e-5)
  np.testing.assert_allclose(state, wanted_state, rtol=0, atol=1e-5)


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize(('has_delta', 'channels'), [(True, ()), (False, ()), (True, (K,))])
def test_gradients_equal_those_of_steps(has_delta, channels):
  """The gradients are those of one step after another, which the case T = 1 above tests."""
  args = [jnp.asarray(x, jnp.float32) for x in inputs(40, has_delta, channels) if x is not None]

  def by_steps(*args):
    def step(state, token):
      read, state = linear_attention(*(x[:, None] for x in token), state_BNKV=state)
      return state, read[:, 0]

    by_token = [jnp.moveaxis(x, 1, 0) for x in args]
    state, reads = jax.lax.scan(step, jnp.zeros((B, N, K, V)), by_token)
    return jnp.moveaxis(reads, 0, 1), state

  loss = lambda function: lambda *args: sum(jnp.sin(x).sum() for x in function(*args))
  numbers = tuple(range(len(args)))
  with jax.default_matmul_precision('highest'):
    found = jax.jit(jax.grad(loss(linear_attention), numbers))(*args)
    wanted = jax.jit(jax.grad(loss(by_steps), numbers))(*args)
  for one, other in zip(found, wanted, strict=True):
    np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * np.abs(other).max())


@pytest.mark.slow
@pytest.mark.parametrize('lengths', [(8, 12), (12, 8)])
def test_gradients_of_packed_texts_are_those_of_each_alone(lengths):
  """XLA of jax 0.11.0 and before ended the process here, by its default flags for CPUs."""
  rng = np.random.default_rng(0)
  T, draw = sum(lengths), lambda *shape: rng.standard_normal((2, sum(lengths), 2, *shape))
  k = draw(12)
  k /= np.linalg.norm(k, axis=-1, keepdims=True)
  args = draw(12), k, draw(12), -np.exp(draw(12)), rng.uniform(0, 1, (2, T, 2))
  args = [jnp.asarray(x, jnp.float32) for x in args]
  loss = lambda *args: jnp.square(linear_attention(*args)[0]).sum()
  gradients = jax.jit(jax.grad(loss, range(5)))
  texts = jnp.broadcast_to(jnp.repeat(jnp.arange(2), np.array(lengths)), (2, T))
  with jax.default_matmul_precision('highest'):
    packed = gradients(*args, texts)
    parts = slice(0, lengths[0]), slice(lengths[0], T)
    alone = [gradients(*(x[:, part] for x in args)) for part in parts]
  for found, *wanted in zip(packed, *alone, strict=True):
    wanted = np.concatenate(wanted, 1)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.cases(fast=0, slow=2)
@pytest.mark.slow
@pytest.mark.parametrize('rate', [1e-4, 0.1, 3.0, 90.0, 1e4])
def test_channels_decay_at_any_rate(rate):
  """Neither a state that lasts nor one that is forgotten at once loses digits, or its gradient."""
  q, k, v, decay, beta = inputs(150, True, (K,), seed=3)
  decay = -rate * np.random.default_rng(4).random(decay.shape)
  decay[..., 0] = -1e-5  # beside channels that forget, one that does not
  args = q, k, v, decay, beta
  wanted, wanted_state = recurrence(*args)
  read, state = computed(*args)
  np.testing.assert_allclose(read, wanted, rtol=0, atol=2e-6 * np.abs(wanted).max())
  np.testing.assert_allclose(state, wanted_state, rtol=0, atol=2e-6 * np.abs(wanted_state).max())
  loss = lambda *args: jnp.square(linear_attention(*args)[0]).sum()
  single = [jnp.asarray(x, jnp.float32) for x in args]
  for gradient in jax.jit(jax.grad(loss, range(5)))(*single):
    assert np.isfinite(gradient).all()


def test_keys_that_are_alike_keep_all_digits():
  """The powers of this triangle have 18 digits."""
  lower = jnp.tril(jnp.ones((64, 64)), -1)
  np.testing.assert_array_equal(_inverse(lower) @ (lower + jnp.eye(64)), np.eye(64))


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize(
  ('family', 'changes'),
  [
    (Qwen3_5, DELTA),
    (Qwen3_5, DELTA | dict(USE_LORA=True)),
    (Qwen3_5, DELTA | dict(CHECKPOINT_POLICY='SAVE_CONTEXT')),
    (FalconH1, MAMBA),
    (KimiLinear, KIMI),
    (KimiLinear, KIMI | dict(USE_LORA=True)),
  ],
)
def test_texts_of_a_packed_row_do_not_leak(family, changes):
  """No gradient of the loss of one text reaches the tokens of another."""
  model = fdl.build(family(**SMALL | changes).build_task()).model
  ids = np.random.default_rng(0).integers(0, 50, (1, 24))
  params = meta.unbox(jax.jit(model.init)(jax.random.key(0), ids))['params']
  segments = np.repeat([[1, 2, 3]], [5, 9, 10], axis=1)
  positions = np.concatenate([np.arange(n) for n in (5, 9, 10)])[None]

  def second(table):
    changed = params | {'embedding': {'emb_var': table}}
    x = model.apply({'params': changed}, np.arange(24)[None], positions, segments)
    return jnp.square(x[:, 5:14]).sum()

  table = params['embedding']['emb_var']
  gradient = jax.jit(jax.grad(second))(table)
  touched = np.abs(gradient).max(-1) > 0
  assert np.flatnonzero(touched[:24]).tolist() == list(range(5, 14))


def test_which_kinds_there_are():
  with pytest.raises(UserError, match="has 'gated_delta', and LLaMA has only"):
    LLaMA(ATTENTION_PATTERN=['gated_delta']).validate()
  with pytest.raises(UserError, match='DELTA_VALUE_HEADS=3 is not divisible'):
    Qwen3_5(**SMALL | DELTA | dict(DELTA_VALUE_HEADS=3, DELTA_KEY_HEADS=2)).validate()
  with pytest.raises(UserError, match=r'must be \[\]: all blocks of FalconH1'):
    FalconH1(**SMALL | MAMBA | dict(ATTENTION_PATTERN=['full'])).validate()
  with pytest.raises(UserError, match='MAMBA_FACTORS has 2 numbers, and must have one for each'):
    FalconH1(**SMALL | MAMBA | dict(MAMBA_FACTORS=[1.0, 2.0])).validate()
