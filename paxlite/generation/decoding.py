"""Generates text with a key/value cache, sampling, and rows of different lengths in one batch.

Prompts are padded on the left to the length of a bucket, so that the next token of every row goes
to the same slot. Rows differ only in their padding, which is segment 0 and is not attended to. A
program is compiled once per (rows, bucket of prompts, bucket of cache), and serves all lengths that
fit in these buckets.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jax.tree_util import KeyPath

from paxlite.core.errors import UserError
from paxlite.core.trees import PyTree
from paxlite.core.variable_names import path_name
from paxlite.layers.language_model import TransformerLm
from paxlite.parallel import partitioning

_SMALLEST_BUCKET = 32


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How the next token is chosen; the attributes are applied in this order.

  Attributes:
    repetition_penalty: Divides the positive logits of tokens that the row already contains,
      including the prompt, and multiplies the negative ones (https://arxiv.org/abs/1909.05858);
      1 is off.
    temperature: Divides the logits; 0 always takes the token with the largest logit.
    top_k: Keeps only this many of the largest logits; 0 is off.
    top_p: Keeps only the smallest set of largest logits whose probabilities sum up to at least
      this; 1 is off.
  """

  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0
  repetition_penalty: float = 1.0

  def __post_init__(self) -> None:
    for name, good, what in (
      ('temperature', self.temperature >= 0, 'at least 0 (0 takes the likeliest token)'),
      ('top_k', self.top_k >= 0, 'at least 0 (0 is off)'),
      ('top_p', 0 < self.top_p <= 1, 'above 0 and at most 1 (1 is off)'),
      ('repetition_penalty', self.repetition_penalty > 0, 'positive (1 is off)'),
    ):
      if not good:
        raise UserError(f'{name}={getattr(self, name):g} must be {what}')

  def filtered(self, logits_BV: jax.Array) -> jax.Array:
    """Returns logits / temperature, with −inf for tokens that top_k or top_p excludes."""
    logits_BV = logits_BV / self.temperature
    if 0 < self.top_k < logits_BV.shape[-1]:
      kth = jax.lax.top_k(logits_BV, self.top_k)[0][:, -1:]
      logits_BV = jnp.where(logits_BV < kth, -jnp.inf, logits_BV)
    if self.top_p < 1:
      largest_first = jnp.sort(logits_BV, axis=-1, descending=True)
      probabilities = jax.nn.softmax(largest_first, axis=-1)
      before = jnp.cumsum(probabilities, axis=-1) - probabilities
      least = jnp.where(before < self.top_p, largest_first, jnp.inf).min(-1, keepdims=True)
      logits_BV = jnp.where(logits_BV < least, -jnp.inf, logits_BV)
    return logits_BV


@struct.dataclass
class DecodeState:
  """The state of a batch of B rows while it is decoded.

  Attributes:
    cache: The key/value cache of attention, padded to S slots.
    tokens_BS: The prompts, padded on the left, and the tokens generated after them.
    starts_B: First slot of each prompt.
    ends_B: Last slot of each row, int32. A row gets as many slots as it would get alone.
    slot: Slot of the latest token, int32.
    prompt_slots: Number of slots that the padded prompts fill, int32.
    done_B: Whether each row has ended.
    seen_BV: Whether each row contains each token; None without repetition penalty.
    keys_B: Random key of each row for the sampling.
  """

  cache: PyTree
  tokens_BS: jax.Array
  starts_B: jax.Array
  ends_B: jax.Array
  slot: jax.Array
  prompt_slots: jax.Array
  done_B: jax.Array
  seen_BV: jax.Array | None
  keys_B: jax.Array


class Generator:
  """Continues prompts with a model.

  Args:
    model: The model, repeated or unrolled. An unrolled one is faster, because a scan copies the
      weights of every layer.
    params: Parameters of the model, on the mesh.
    max_len: Maximum number of tokens in prompt and continuation: the model's number of positions.
    sampling: How the next token is chosen.
    eos_ids: Token ids that end a row.
    is_token: Whether each id has a token [n]. Others, and those from n on, are never chosen, as
      where a vocabulary was rounded up. None: all ids have one.
    mesh: Mesh over which the batch is sharded; None means one device.
    rules: Mapping of logical axes to mesh axes.
  """

  def __init__(
    self,
    model: TransformerLm,
    params: PyTree,
    max_len: int,
    sampling: Sampling = Sampling(),
    eos_ids: Sequence[int] = (),
    is_token: np.ndarray | None = None,
    mesh: Mesh | None = None,
    rules: partitioning.Rules = partitioning.DEFAULT_RULES,
  ):
    self._model: Any = model  # Flax declares that apply may return a pair
    self.params = params
    self._max_len = max_len
    self._sampling = sampling
    self._eos_ids = tuple(eos_ids)
    self._is_token = is_token
    self._mesh = mesh
    self._rules = rules
    self._prefill = jax.jit(self._traced(self._prefill_program), static_argnums=(4,))
    self._extend = jax.jit(self._traced(self._extend_program), donate_argnums=1)

  def generate(
    self,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    seed: int = 0,
    row_ids: Sequence[int] | None = None,
  ) -> list[list[int]]:
    """Returns the continuation of each prompt without EOS; other rows do not influence it.

    Args:
      prompts: Token ids of each prompt, at least one per prompt.
      max_new_tokens: Maximum number of new tokens per row.
      seed: Seed of the sampling; the same seed and row id give the same tokens in any batch.
      row_ids: Row ids for the sampling; None means 0, 1, 2 ….

    Raises:
      UserError: A prompt is empty, contains invalid ids, or leaves no room for a new token, or
        max_new_tokens is less than 1.
    """
    state, limits = self._start(prompts, max_new_tokens, seed, row_ids)
    state = self._extend(self.params, state, state.prompt_slots + max(limits) - 1)
    tokens_BS = multihost_utils.process_allgather(state.tokens_BS, tiled=True)
    rows = tokens_BS[: len(prompts), int(state.prompt_slots) :]
    return [self._until_eos(row[:limit]) for row, limit in zip(rows, limits, strict=True)]

  def stream(self, prompt: Sequence[int], max_new_tokens: int, seed: int = 0) -> Iterator[int]:
    """Yields the tokens of one continuation as they are generated; see generate."""
    state, (limit,) = self._start([prompt], max_new_tokens, seed, None)
    first = int(state.prompt_slots)
    for slot in range(first, first + limit):
      state = self._extend(self.params, state, slot)
      token = int(jax.device_get(state.tokens_BS[0, slot]))
      if token in self._eos_ids:
        return
      yield token

  def prefill(
    self, prompts: Sequence[Sequence[int]], max_new_tokens: int, seed: int = 0
  ) -> DecodeState:
    """Returns the state after the prompts and the first new token of each, for benchmarks."""
    return self._start(prompts, max_new_tokens, seed, None)[0]

  def extend(self, state: DecodeState, new_tokens: int) -> DecodeState:
    """Fills up to `new_tokens` more slots of `state`, and overwrites the argument."""
    return self._extend(self.params, state, state.slot + new_tokens)

  def _start(
    self,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    seed: int,
    row_ids: Sequence[int] | None,
  ) -> tuple[DecodeState, list[int]]:
    """Returns the state after the prompts, and the maximum number of new tokens of each."""
    if max_new_tokens < 1:
      raise UserError(f'max_new_tokens={max_new_tokens} must be at least 1')
    vocab_size = self.params['embedding']['emb_var'].shape[0]
    for number, prompt in enumerate(prompts):
      check_ids(prompt, vocab_size, f'prompt {number}')
    longest = max(map(len, prompts))
    if min(map(len, prompts)) == 0:
      raise UserError('a prompt is empty: give it a text, or set START_ID, the token to begin with')
    if longest >= self._max_len:
      raise UserError(
        f'a prompt of {longest} tokens leaves no room for a new token: the model takes '
        f'{self._max_len}; shorten it, or raise --fdl.MAX_SEQ_LEN where positions are rotary'
      )
    limits = [min(max_new_tokens, self._max_len - len(prompt)) for prompt in prompts]
    P = min(bucket(longest), self._max_len)
    S = P + bucket(max(limits))
    rows = self._rows(len(prompts))
    tokens = np.zeros((rows, P), np.int32)
    starts = np.full(rows, P, np.int32)
    starts[len(prompts) :] = P - 1  # Rows that only fill up the mesh hold one token.
    ends = np.full(rows, P, np.int32)
    ends[: len(prompts)] = [P + limit - 1 for limit in limits]
    for r, prompt in enumerate(prompts):
      starts[r] = P - len(prompt)
      tokens[r, starts[r] :] = prompt
    ids = np.arange(rows) if row_ids is None else np.pad(row_ids, (0, rows - len(row_ids)))
    keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(seed), i))(ids)
    done = np.arange(rows) >= len(prompts)
    if self._mesh is not None:
      sharding = partitioning.batch_sharding(self._mesh, self._rules, tokens.shape)
      tokens = jax.device_put(tokens, sharding)
    return self._prefill(self.params, tokens, (starts, ends), (keys, done), S), limits

  def _rows(self, count: int) -> int:
    """Returns `count` rounded up to a number of rows that the mesh can divide evenly."""
    shards = (
      1 if self._mesh is None else partitioning.num_shards(self._mesh.shape, self._rules, 'batch')
    )
    return -(-count // shards) * shards

  def _traced(self, program: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `program` so that the mesh and the rules are active while it is traced."""
    mesh = self._mesh
    if mesh is None:
      return program

    @functools.wraps(program)
    def traced(*args: Any) -> Any:
      with partitioning.activate(mesh, self._rules):
        return program(*args)

    return traced

  def _prefill_program(
    self,
    params: PyTree,
    tokens_BT: jax.Array,
    slots: tuple[jax.Array, jax.Array],
    rows: tuple[jax.Array, jax.Array],
    size: int,
  ) -> DecodeState:
    starts_B, ends_B = slots
    keys_B, done_B = rows
    B, T = tokens_BT.shape
    slots_T = jnp.arange(T)
    is_real = slots_T >= starts_B[:, None]
    positions_BT = jnp.maximum(slots_T - starts_B[:, None], 0)
    x_BTD, variables = self._model.apply(
      {'params': params},
      tokens_BT,
      positions_BT,
      is_real.astype(jnp.int32),
      method='hidden',
      mutable=['cache'],
    )
    seen_BV = None
    if self._sampling.repetition_penalty != 1:
      width = self._model.apply({'params': params}, x_BTD[:1, -1:], method='logits').shape[-1]
      rows_B1 = jnp.arange(B)[:, None]
      seen_BV = jnp.zeros((B, width), bool).at[rows_B1, tokens_BT].max(is_real)
    state = DecodeState(
      cache=_padded(variables['cache'], size),
      tokens_BS=jnp.pad(tokens_BT, ((0, 0), (0, size - T))),
      starts_B=starts_B,
      ends_B=ends_B,
      slot=jnp.int32(T - 1),
      prompt_slots=jnp.int32(T),
      done_B=done_B,
      seen_BV=seen_BV,
      keys_B=keys_B,
    )
    return self._append(params, state, x_BTD[:, -1:])

  def _extend_program(
    self, params: PyTree, state: DecodeState, last_slot: jax.Array
  ) -> DecodeState:
    """Fills slots until `last_slot` is filled, or every row has ended."""

    def step(state: DecodeState) -> DecodeState:
      token_B1 = jax.lax.dynamic_slice_in_dim(state.tokens_BS, state.slot, 1, axis=1)
      x_B1D, variables = self._model.apply(
        {'params': params, 'cache': state.cache},
        token_B1,
        jnp.minimum(state.slot, state.ends_B)[:, None] - state.starts_B[:, None],
        jnp.ones_like(token_B1),
        method='hidden',
        mutable=['cache'],
      )
      return self._append(params, dataclasses.replace(state, cache=variables['cache']), x_B1D)

    def goes_on(state: DecodeState) -> jax.Array:
      return (state.slot < last_slot) & ~state.done_B.all()

    return jax.lax.while_loop(goes_on, step, state)

  def _append(self, params: PyTree, state: DecodeState, x_B1D: jax.Array) -> DecodeState:
    """Chooses each row's next token from its last hidden state, and puts it in the next slot."""
    logits_BV = self._model.apply({'params': params}, x_B1D, method='logits')[:, 0]
    if self._is_token is not None:
      known_V = np.zeros(logits_BV.shape[-1], bool)
      found = self._is_token[: len(known_V)]
      known_V[: len(found)] = found
      logits_BV = jnp.where(known_V, logits_BV, -jnp.inf)
    if state.seen_BV is not None:
      penalty = self._sampling.repetition_penalty
      penalised = jnp.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
      logits_BV = jnp.where(state.seen_BV, penalised, logits_BV)
    slot = state.slot + 1
    if self._sampling.temperature == 0:
      token_B = logits_BV.argmax(-1)
    else:
      draw = lambda key, logits: jax.random.categorical(
        jax.random.fold_in(key, slot - state.prompt_slots), logits
      )
      token_B = jax.vmap(draw)(state.keys_B, self._sampling.filtered(logits_BV))
    token_B = jnp.where(state.done_B, 0, token_B).astype(jnp.int32)
    seen_BV = state.seen_BV
    if seen_BV is not None:
      seen_BV = seen_BV.at[jnp.arange(len(token_B)), token_B].set(True)
    ended_B = jnp.isin(token_B, jnp.array(self._eos_ids, jnp.int32)) | (slot >= state.ends_B)
    return dataclasses.replace(
      state,
      tokens_BS=jax.lax.dynamic_update_slice_in_dim(
        state.tokens_BS, token_B[:, None], slot, axis=1
      ),
      slot=slot,
      done_B=state.done_B | ended_B,
      seen_BV=seen_BV,
    )

  def _until_eos(self, row: np.ndarray) -> list[int]:
    tokens = [int(t) for t in row]
    ends = [i for i, t in enumerate(tokens) if t in self._eos_ids]
    return tokens[: ends[0]] if ends else tokens


def check_ids(ids: Sequence[int], vocab_size: int, what: str) -> None:
  """Raises UserError, with the wrong id and its position, unless all ids are in the vocabulary."""
  try:
    array = np.asarray(ids)
  except ValueError:  # a list of lists of different lengths
    array = np.zeros(0, object)
  if not len(ids):
    return
  if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
    raise UserError(f'{what} must be a list of token ids, which are integers')
  (wrong,) = np.nonzero((array < 0) | (array >= vocab_size))
  if wrong.size:
    raise UserError(
      f'{what} has the id {array[wrong[0]]} at position {wrong[0]}: the ids of the vocabulary are '
      f'0 to {vocab_size - 1:,}'
    )


def bucket(length: int) -> int:
  """Returns the smallest power of two, at least 32, that is not below `length`."""
  return max(_SMALLEST_BUCKET, 1 << (length - 1).bit_length())


def _padded(cache: PyTree, size: int) -> PyTree:
  """Pads the cache's arrays to `size` slots, in the dimension before the last one."""

  def one(path: KeyPath, x: jax.Array) -> jax.Array:
    if path_name(path[-1:]) in ('index', 'starts'):
      return x
    return jnp.pad(x, [*[(0, 0)] * (x.ndim - 2), (0, size - x.shape[-2]), (0, 0)])

  return jax.tree_util.tree_map_with_path(one, cache)
