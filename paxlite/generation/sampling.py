"""How the next token of a row is chosen from its logits, with options of its own for each row."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from paxlite.core.errors import UserError

MOST_ENDS = 16  # tokens that end a row


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How the next token is chosen; the attributes are applied in this order.

  Attributes:
    temperature: Divides the logits; 0 always takes the token with the largest logit.
    top_k: Keeps only this many of the largest logits; 0 is off.
    top_p: Keeps only the smallest set of largest logits whose probabilities sum up to at least
      this; 1 is off.
    repetition_penalty: Divides the positive logits of tokens that the row already contains,
      including the prompt, and multiplies the negative ones (https://arxiv.org/abs/1909.05858),
      before all others; 1 is off.
    min_p: Keeps only tokens with at least this share of the probability of the likeliest one; 0 is
      off.
    presence_penalty: Is subtracted once from the logits of tokens that were generated; 0 is off.
    frequency_penalty: Is subtracted as often as a token was generated; 0 is off.
  """

  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0
  repetition_penalty: float = 1.0
  min_p: float = 0.0
  presence_penalty: float = 0.0
  frequency_penalty: float = 0.0

  def __post_init__(self) -> None:
    for name, good, what in (
      ('temperature', self.temperature >= 0, 'at least 0 (0 takes the likeliest token)'),
      ('top_k', self.top_k >= 0, 'at least 0 (0 is off)'),
      ('top_p', 0 < self.top_p <= 1, 'above 0 and at most 1 (1 is off)'),
      ('repetition_penalty', self.repetition_penalty > 0, 'positive (1 is off)'),
      ('min_p', 0 <= self.min_p < 1, 'at least 0 and below 1 (0 is off)'),
      ('presence_penalty', -2 <= self.presence_penalty <= 2, 'from -2 to 2 (0 is off)'),
      ('frequency_penalty', -2 <= self.frequency_penalty <= 2, 'from -2 to 2 (0 is off)'),
    ):
      if not good:
        raise UserError(f'{name}={getattr(self, name):g} must be {what}')

  @property
  def has_penalties(self) -> bool:
    """Whether the choice depends on the tokens before."""
    return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


GREEDY = Sampling()


class Features(NamedTuple):
  """What a program is compiled for, because no row that is generated needs the rest.

  Attributes:
    draws: Rows with a temperature above 0.
    top_k: Rows that draw from so many of the likeliest tokens.
    top_p: Rows that draw from tokens of a share of the probability.
    penalties: Rows whose choice depends on the tokens before.
    bias: Rows with biases of logits.
    mask: Rows with a grammar, so that a call chooses one token.
    top: How many of the likeliest tokens are returned beside the chosen one.
  """

  draws: bool = False
  top_k: bool = False
  top_p: bool = False
  penalties: bool = False
  bias: bool = False
  mask: bool = False
  top: int = 0

  def with_(self, other: 'Features') -> 'Features':
    """Returns what either is for."""
    return Features(
      self.draws or other.draws,
      self.top_k or other.top_k,
      self.top_p or other.top_p,
      self.penalties or other.penalties,
      self.bias or other.bias,
      self.mask or other.mask,
      max(self.top, other.top),
    )


NO_FEATURES = Features()


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
    bias: Is added to the logits, [B, V]; None: nothing is.
    seen: Whether the row contains a token, [B, V] bool; None: no row has penalties.
    count: How often a token was generated, [B, V] int32; None like `seen`.
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
  bias: jax.Array | None = None
  seen: jax.Array | None = None
  count: jax.Array | None = None

  def after(self, token_B: jax.Array, is_active_B: jax.Array) -> 'Choice':
    """Returns the options after the rows that are active got another token each."""
    if self.seen is None or self.count is None:
      return self
    rows = jnp.arange(len(token_B))
    return dataclasses.replace(
      self,
      seen=self.seen.at[rows, token_B].max(is_active_B),
      count=self.count.at[rows, token_B].add(is_active_B.astype(jnp.int32)),
    )


class Chosen(NamedTuple):
  """The next tokens of B rows.

  Attributes:
    token: [B] int32.
    log_prob: The logarithm of the probability that the model gives to the token, [B] float32, in
      nats, before temperature, filters and penalties.
    top_ids: The likeliest tokens, [B, top] int32.
    top_log_probs: Theirs, [B, top] float32.
  """

  token: jax.Array
  log_prob: jax.Array
  top_ids: jax.Array
  top_log_probs: jax.Array


def chosen(
  logits_BV: jax.Array,
  options: Choice,
  number_B: jax.Array,
  features: Features,
  known_V: np.ndarray | None = None,
  allowed_BV: jax.Array | None = None,
) -> Chosen:
  """Chooses the next token of each row.

  Args:
    logits_BV: The logits of the model.
    options: The options of the rows.
    number_B: How many tokens each row has generated.
    features: What the rows need.
    known_V: Whether an id has a token; None: all have one.
    allowed_BV: Whether a grammar allows a token; None: there is none.
  """
  logits_BV = logits_BV.astype(jnp.float32)
  log_sums_B1 = jax.nn.logsumexp(logits_BV, axis=-1, keepdims=True)
  rows = jnp.arange(len(logits_BV))
  x_BV = logits_BV if known_V is None else jnp.where(known_V, logits_BV, -jnp.inf)
  if features.bias and options.bias is not None:
    x_BV = x_BV + options.bias
  if features.penalties:
    x_BV = _penalised(x_BV, options)
  banned_BE = jnp.where(number_B[:, None] < options.min_tokens[:, None], options.ends, -1)
  outside = x_BV.shape[-1]  # indices that a scatter drops
  banned_BE = jnp.where(banned_BE < 0, outside, banned_BE)
  x_BV = x_BV.at[rows[:, None], banned_BE].set(-jnp.inf, mode='drop')
  if features.mask and allowed_BV is not None:
    x_BV = jnp.where(allowed_BV, x_BV, -jnp.inf)
  token_B = likeliest(x_BV)
  if features.draws:
    token_B = jnp.where(options.temperature > 0, _drawn(x_BV, options, number_B, features), token_B)
  token_B = token_B.astype(jnp.int32)
  log_prob_B = jnp.take_along_axis(logits_BV, token_B[:, None], 1)[:, 0] - log_sums_B1[:, 0]
  top, top_ids = jax.lax.top_k(logits_BV, features.top)
  return Chosen(token_B, log_prob_B, top_ids, top - log_sums_B1)


def likeliest(x_BV: jax.Array) -> jax.Array:
  """Returns the first index of the largest value of each row, as argmax does, [B] int32.

  XLA for CPUs makes vector instructions of these two reductions, and none of argmax, which takes
  ten times as long. Where a row has NaN, the last index is returned.
  """
  V = x_BV.shape[-1]
  is_largest = x_BV == x_BV.max(-1, keepdims=True)
  return jnp.where(is_largest, jnp.arange(V), V - 1).min(-1).astype(jnp.int32)


def _penalised(x_BV: jax.Array, options: Choice) -> jax.Array:
  assert options.seen is not None
  assert options.count is not None
  factor_B1 = options.repetition[:, None]
  repeated = jnp.where(x_BV > 0, x_BV / factor_B1, x_BV * factor_B1)
  x_BV = jnp.where(options.seen, repeated, x_BV)
  x_BV = x_BV - options.frequency[:, None] * options.count
  return x_BV - options.presence[:, None] * (options.count > 0)


def _drawn(x_BV: jax.Array, options: Choice, number_B: jax.Array, features: Features) -> jax.Array:
  # rows with temperature 0 are not drawn
  x_BV = x_BV / jnp.where(options.temperature > 0, options.temperature, 1)[:, None]
  x_BV = filtered(x_BV, options.top_k, options.top_p, options.min_p, features)

  def draw(seed: jax.Array, sample: jax.Array, number: jax.Array, x_V: jax.Array) -> jax.Array:
    key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl='threefry2x32'), sample)
    return jax.random.categorical(jax.random.fold_in(key, number), x_V)

  return jax.vmap(draw)(options.seed, options.sample, number_B, x_BV)


def filtered(
  x_BV: jax.Array,
  top_k_B: jax.Array,
  top_p_B: jax.Array,
  min_p_B: jax.Array,
  features: Features,
) -> jax.Array:
  """Returns logits with −inf for tokens that top_k, top_p or min_p excludes; see Sampling.

  Nothing is sorted: a bisection finds the least logit that is kept, which takes a tenth of the
  time on a CPU. Of several tokens with this logit, all are kept.
  """
  largest_B1 = x_BV.max(-1, keepdims=True)
  weights_BV = jnp.exp(x_BV - largest_B1)
  is_kept_BV = jnp.ones(x_BV.shape, bool)
  if features.top_k:
    V = x_BV.shape[-1]
    count_B = jnp.where(top_k_B == 0, V, jnp.minimum(top_k_B, V))
    ones_BV = jnp.ones(x_BV.shape, jnp.int32)
    is_kept_BV = x_BV >= _least(x_BV, ones_BV, count_B)[:, None]
  if features.top_p:
    weights_BV = jnp.where(is_kept_BV, weights_BV, 0)
    share_B = top_p_B * weights_BV.sum(-1)
    least_B = jnp.where(top_p_B < 1, _least(x_BV, weights_BV, share_B), -jnp.inf)
    is_kept_BV &= x_BV >= least_B[:, None]
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
