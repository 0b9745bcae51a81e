"""Samples the next token of each sequence from its logits, with options per sequence."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

MOST_ENDS = 16  # tokens that end a row
MOST_TOP = 20  # likeliest tokens that are told at each one


@struct.dataclass
class Tables:
  """Per-token state of B sequences over the vocabulary."""

  bias: jax.Array  # is added to the logits, [B, V]
  seen: jax.Array  # whether the row contains a token, [B, V] bool
  count: jax.Array  # how often a token was generated, [B, V] int32

  @classmethod
  def empty(cls, rows: int, vocab_size: int) -> 'Tables':
    """Returns tables of rows without a bias and without tokens."""
    of = lambda dtype: jnp.zeros((rows, vocab_size), dtype)
    return cls(of(jnp.float32), of(bool), of(jnp.int32))

  def after(self, token_B: jax.Array, is_active_B: jax.Array) -> 'Tables':
    """Returns the tables after the rows that are active got another token each."""
    rows = jnp.arange(len(token_B))
    return Tables(
      self.bias,
      self.seen.at[rows, token_B].max(is_active_B),
      self.count.at[rows, token_B].add(is_active_B.astype(jnp.int32)),
    )


@struct.dataclass
class Choice:
  """The options of B rows, arrays [B] unless another shape is stated.

  Attributes:
    temperature, top_k, top_p, min_p, repetition, presence, frequency: See Sampling.
    seed: Random keys [B, 2] uint32, those of jax.random.key of a seed.
    sample: Is folded into the key, and after it the number of the token.
    ends: Tokens that end a row, [B, MOST_ENDS]; −1 is none.
    min_tokens: Before so many tokens, none of `ends` is chosen.
    max_tokens: After so many tokens a row ends.
    top: How many of the likeliest tokens are told.
    tables: Biases, and the tokens of the rows; None: no row has needed them.
  """

  temperature: jax.Array
  top_k: jax.Array
  top_p: jax.Array
  min_p: jax.Array
  repetition: jax.Array
  presence: jax.Array
  frequency: jax.Array
  seed: jax.Array
  sample: jax.Array
  ends: jax.Array
  min_tokens: jax.Array
  max_tokens: jax.Array
  top: jax.Array
  tables: Tables | None = None

  def after(self, token_B: jax.Array, is_active_B: jax.Array) -> 'Choice':
    """Returns the options after the rows that are active got another token each."""
    if self.tables is None:
      return self
    return dataclasses.replace(self, tables=self.tables.after(token_B, is_active_B))


class SampledTokens(NamedTuple):
  """The next tokens of B rows."""

  token: jax.Array  # [B] int32
  # the logarithm of the probability that the model gives to the token, [B] float32, in nats, before
  # temperature, filters and penalties
  log_prob: jax.Array
  top_ids: jax.Array  # the likeliest tokens, [B, top] int32
  top_log_probs: jax.Array  # theirs, [B, top] float32
  # a number of the experts of the token before, [B] uint32; None: they are not tracked
  experts: jax.Array | None = None


def most_top(vocab_size: int, full: bool) -> int:
  """Returns how many most likely tokens a program returns besides the chosen one."""
  return min(MOST_TOP, vocab_size) if full else 0


def chosen(
  logits_BV: jax.Array,
  options: Choice,
  number_B: jax.Array,
  is_on_B: jax.Array,
  full: bool,
  known_V: np.ndarray | None = None,
  allowed_BV: jax.Array | None = None,
  draws: bool | None = None,
) -> SampledTokens:
  """Chooses the next token of each row.

  Options are arrays, so that one program serves all requests. What is dear is computed only if a
  row needs it: to draw, to bound what is drawn, and to find the likeliest tokens.

  Args:
    logits_BV: The logits of the model.
    options: The options of the rows.
    number_B: How many tokens each row has generated.
    is_on_B: The rows whose tokens are needed.
    full: Whether rows may have any options; otherwise all that are needed have a temperature, ends
      and lengths alone, which saves some passes over the logits.
    known_V: Whether an id has a token; None: all have one.
    allowed_BV: Whether a grammar allows a token; None: there is none.
    draws: Whether rows draw; None: the device looks for it, which makes the plain variant slower.
  """
  logits_BV = logits_BV.astype(jnp.float32)
  log_sums_B1 = jax.nn.logsumexp(logits_BV, axis=-1, keepdims=True)
  rows, V = jnp.arange(len(logits_BV)), logits_BV.shape[-1]
  x_BV = logits_BV if known_V is None else jnp.where(known_V, logits_BV, -jnp.inf)
  if full and options.tables is not None:
    x_BV = _penalised(x_BV + options.tables.bias, options, options.tables)
  banned_BE = jnp.where(number_B[:, None] < options.min_tokens[:, None], options.ends, -1)
  banned_BE = jnp.where(banned_BE < 0, V, banned_BE)  # indices that a scatter drops
  x_BV = x_BV.at[rows[:, None], banned_BE].set(-jnp.inf, mode='drop')
  if full and allowed_BV is not None:
    x_BV = jnp.where(allowed_BV, x_BV, -jnp.inf)
  likeliest_B = likeliest(x_BV)
  draws_B = options.temperature > 0
  either = lambda: jnp.where(draws_B, _drawn(x_BV, options, number_B, full), likeliest_B)
  if draws is None:
    token_B = jax.lax.cond((draws_B & is_on_B).any(), either, lambda: likeliest_B)
  else:
    token_B = either() if draws else likeliest_B
  log_prob_B = jnp.take_along_axis(logits_BV, token_B[:, None], 1)[:, 0] - log_sums_B1[:, 0]
  shape_BK = len(rows), most_top(V, full)
  top_BK, ids_BK = jnp.zeros(shape_BK, jnp.float32), jnp.zeros(shape_BK, jnp.int32)
  if full:
    top_BK, ids_BK = jax.lax.cond(
      ((options.top > 0) & is_on_B).any(),
      lambda: tuple(jax.lax.top_k(logits_BV, shape_BK[1])),
      lambda: (top_BK, ids_BK),
    )
  return SampledTokens(token_B, log_prob_B, ids_BK, top_BK - log_sums_B1)


def likeliest(x_BV: jax.Array) -> jax.Array:
  """Returns the first index of the largest value of each row, as argmax does, [B] int32.

  XLA for CPUs makes vector instructions of these two reductions, and none of argmax, which takes
  ten times as long. Where a row has NaN, the last index is returned.
  """
  V = x_BV.shape[-1]
  is_largest = x_BV == x_BV.max(-1, keepdims=True)
  return jnp.where(is_largest, jnp.arange(V), V - 1).min(-1).astype(jnp.int32)


def _penalised(x_BV: jax.Array, options: Choice, tables: Tables) -> jax.Array:
  factor_B1 = options.repetition[:, None]
  repeated = jnp.where(x_BV > 0, x_BV / factor_B1, x_BV * factor_B1)
  x_BV = jnp.where(tables.seen, repeated, x_BV)
  x_BV = x_BV - options.frequency[:, None] * tables.count
  return x_BV - options.presence[:, None] * (tables.count > 0)


def _drawn(x_BV: jax.Array, options: Choice, number_B: jax.Array, full: bool) -> jax.Array:
  # rows with temperature 0 are not drawn
  x_BV = x_BV / jnp.where(options.temperature > 0, options.temperature, 1)[:, None]
  if full:
    x_BV = filtered(x_BV, options.top_k, options.top_p, options.min_p)

  def draw(seed: jax.Array, sample: jax.Array, number: jax.Array, x_V: jax.Array) -> jax.Array:
    key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl='threefry2x32'), sample)
    return jax.random.categorical(jax.random.fold_in(key, number), x_V).astype(jnp.int32)

  return jax.vmap(draw)(options.seed, options.sample, number_B, x_BV)


def filtered(
  x_BV: jax.Array, top_k_B: jax.Array, top_p_B: jax.Array, min_p_B: jax.Array
) -> jax.Array:
  """Returns logits with −inf for tokens that top_k, top_p or min_p excludes; see Sampling.

  Nothing is sorted: a bisection finds the least logit that is kept, which takes a tenth of the
  time on a CPU. Of several tokens with this logit, all are kept.
  """
  V = x_BV.shape[-1]
  top_k_B, top_p_B, min_p_B = map(jnp.asarray, (top_k_B, top_p_B, min_p_B))
  largest_B1 = x_BV.max(-1, keepdims=True)
  all_BV = jnp.ones(x_BV.shape, bool)

  def of_count() -> jax.Array:
    count_B = jnp.where(top_k_B == 0, V, jnp.minimum(top_k_B, V))
    return x_BV >= _least(x_BV, all_BV.astype(jnp.int32), count_B)[:, None]

  is_kept_BV = jax.lax.cond((top_k_B > 0).any(), of_count, lambda: all_BV)

  def of_share() -> jax.Array:
    weights_BV = jnp.where(is_kept_BV, jnp.exp(x_BV - largest_B1), 0)
    least_B = _least(x_BV, weights_BV, top_p_B * weights_BV.sum(-1))
    return x_BV >= jnp.where(top_p_B < 1, least_B, -jnp.inf)[:, None]

  is_kept_BV &= jax.lax.cond((top_p_B < 1).any(), of_share, lambda: all_BV)
  share_B = jnp.where(min_p_B > 0, largest_B1[:, 0] + jnp.log(min_p_B), -jnp.inf)
  return jnp.where(is_kept_BV & (x_BV >= share_B[:, None]), x_BV, -jnp.inf)


def _least(x_BV: jax.Array, weights_BV: jax.Array, target_B: jax.Array) -> jax.Array:
  """Returns the largest number t with Σ weights of all x ≥ t ≥ target, of each row."""
  key_BV = _ordered(x_BV)

  def step(i: jax.Array, least_B: jax.Array) -> jax.Array:
    tried_B = least_B | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
    sums_B = jnp.where(key_BV >= tried_B[:, None], weights_BV, 0).sum(-1)
    return jnp.where(sums_B >= target_B, tried_B, least_B)

  # from the first bit of the number to the last one
  least_B = jax.lax.fori_loop(0, 32, step, jnp.zeros(len(x_BV), jnp.uint32))
  return jnp.where(key_BV >= least_B[:, None], x_BV, jnp.inf).min(-1)


def _ordered(x: jax.Array) -> jax.Array:
  """Returns uint32 numbers in the order of these float32 numbers."""
  bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
  is_negative = bits >> 31 == 1
  return jnp.where(is_negative, ~bits, bits | jnp.uint32(1 << 31))
