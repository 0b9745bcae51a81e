"""The compiled programs of generation: reading parts of prompts, and choosing tokens in a loop."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh

from paxlite.core.errors import UserError
from paxlite.core.trees import PyTree
from paxlite.generation import cache as caches
from paxlite.generation.cache import Cache, CacheLayout, Pages
from paxlite.generation.sampling import Choice, SampledTokens, Tables, chosen, most_top
from paxlite.layers.attention import cache_encoding
from paxlite.layers.language_model import TransformerLm
from paxlite.layers.moe import chosen_experts
from paxlite.layers.sown import CHOSEN
from paxlite.parallel import partitioning

_BLOCK = 16  # tokens of a row whose logits are computed at a time, where a prompt is scored


@struct.dataclass
class DraftState:
  """The extra state of B sequences with speculative tokens; see speculative."""

  draft: jax.Array  # what may be the tokens after the latest one, [B, K]; −1: there is no draft
  before: jax.Array  # the token before the latest one, [B]
  # how many of the latest tokens are not in the cache, [B]: 1, or 2 with `before`
  waiting: jax.Array
  seen: jax.Array | None = None  # all tokens of each row [B, L], where drafts come from them


@struct.dataclass
class DecodeRows:
  """The state of B sequences besides their cache, arrays [B]."""

  length: jax.Array  # number of tokens in the cache
  token: jax.Array  # the latest token, which is not in the cache yet
  number: jax.Array  # number of generated tokens, with the latest one
  is_done: jax.Array  # whether the row has ended
  options: Choice  # how its tokens are chosen
  drafts: DraftState | None = None  # its drafts; None: none are made


class State(NamedTuple):
  """The state on the devices: the cache of B sequences with S slots each, and their other state."""

  cache: Cache
  rows: DecodeRows


class Chunk(NamedTuple):
  """Parts of the prompts of R rows, T tokens each."""

  ids: Any  # token ids, [R, T], padded on the right
  count: Any  # number of tokens of each part, [R]
  # the rows whose first `start` tokens precede the parts, [R]; mostly those of `target`
  source: Any
  target: Any  # the rows that get the tokens, [R]; one that does not exist: the part is padding
  start: Any  # number of tokens before the parts, [R]
  places: Any  # the tokens of each part, [R, T], after which log-probabilities are computed
  next: Any  # the token after each of them, [R, T]
  # how many columns of `places` are computed, []; None: none, and the program has no code for it,
  # which makes it faster
  num_places: Any
  follow: Any  # the token of the prompt after each part, [R]; −1: the part is the last one
  options: Choice  # how the first token after the part is chosen
  allowed: Any  # which token may be that, [R, V] bool; None: any


class DecodeLimits(NamedTuple):
  """The limits of a call that generates B rows."""

  steps: Any  # the most steps, []
  until_one_ends: Any  # whether it ends when a row has ended, [] bool
  has_grammar: Any  # whether a row has a grammar, which allows tokens for one step, [] bool
  allowed: Any  # which tokens may come, [B, V] bool; None: any
  draws: Any = None  # None: no row draws, and the program has no code for it

  def may_draw(self, full: bool) -> bool | None:
    """Returns the argument `draws` of sampling.chosen."""
    return None if full else self.draws is not None


class Read(NamedTuple):
  """The results for parts of prompts."""

  chosen: SampledTokens  # the tokens after the parts
  scores: SampledTokens  # what is known of the tokens after `places`, arrays [R, T, …]


class Programs:
  """The programs of a model, each compiled for the sizes that it is called with.

  The options of requests are arrays. There are two variants of each program: `full` computes all
  options, and the other one only temperatures, ends and lengths, as most requests need.

  Args:
    layout: What its cache looks like.
    known_V: Whether each id has a token, [n]; None: all have one.
    mesh: The mesh; None: one device.
    rules: The mapping from logical axes to mesh axes.
    tracks_experts: Whether chosen tokens have a number of the experts before them.
  """

  def __init__(
    self,
    model: TransformerLm,
    layout: CacheLayout,
    known_V: np.ndarray | None,
    mesh: Mesh | None,
    rules: partitioning.Rules,
    tracks_experts: bool = False,
  ):
    self._model: Any = model  # Flax declares that apply may return a pair
    self.layout = layout
    self._known_V = known_V
    self._tracks_experts = tracks_experts
    self._mutable = ['cache', *([CHOSEN] if tracks_experts else [])]
    # the mesh and the rules are active while a program is traced
    traced: Callable[..., Any] = (
      (lambda program: program) if mesh is None else partitioning.activate(mesh, rules)
    )
    kept = cache_encoding.activate(layout.dtype)
    self.read = jax.jit(traced(kept(self._read)), static_argnums=(3, 4), donate_argnums=1)
    self.decode = jax.jit(traced(kept(self._decode)), static_argnums=(4, 5), donate_argnums=1)
    self.resize = jax.jit(traced(self._resize), static_argnums=2)
    self.save = jax.jit(traced(self._save))
    self.restore = jax.jit(traced(self._restore), donate_argnums=0)

  def _read(
    self, params: PyTree, state: State, chunk: Chunk, is_first: bool, full: bool
  ) -> tuple[State, Read]:
    """Reads parts of prompts, and chooses a token after each, which only the last part needs.

    Args:
      params: The parameters of the model.
      state: Is overwritten.
      chunk: The parts.
      is_first: Whether all parts are the first ones of their rows, which need no cache.
      full: See sampling.chosen.
    """
    R, T = chunk.ids.shape
    if is_first:
      cache = self.layout.first_variables(chunk.count)
    else:
      rows = caches.taken(state.cache, chunk.source, chunk.start)
      cache = self.layout.variables(rows, chunk.start, chunk.count)
    x_RTD, after = self._model.apply(
      {'params': params, 'cache': cache}, chunk.ids, chunk.start[:, None] + jnp.arange(T), None,
      method='hidden', mutable=self._mutable,
    )  # fmt: skip
    last_R1D = jnp.take_along_axis(x_RTD, (chunk.count - 1)[:, None, None], 1)
    number_R = jnp.zeros(R, jnp.int32)
    is_on_R, limits = jnp.ones(R, bool), (full, chunk.allowed)
    found = self._choose(params, last_R1D, chunk.options, number_R, is_on_R, *limits)
    found = self._with_experts(found, after, chunk.count - 1, T)
    drafts, after = self._read_drafts(params, after, x_RTD, chunk, found, state.rows.drafts)
    cache = caches.put(state.cache, self.layout.of(after['cache']), chunk.target)
    options, tables = chunk.options, state.rows.options.tables
    if options.tables is None and tables is not None:
      options = dataclasses.replace(options, tables=Tables.empty(R, tables.bias.shape[-1]))
    number_R += 1
    new = DecodeRows(
      length=chunk.start + chunk.count, token=found.token, number=number_R,
      is_done=is_end(found.token, options) | (number_R >= options.max_tokens),
      options=options.after(found.token, is_on_R), drafts=drafts,
    )  # fmt: skip
    set_rows = lambda x, y: x.at[chunk.target].set(y, mode='drop')
    rows = jax.tree.map(set_rows, state.rows, new)
    read = Read(found, self._scores(params, x_RTD, chunk, full))
    return self._placed(State(cache, rows)), self._everywhere(read)

  most_drafts: int = 0  # of a step

  def no_drafts(self, rows: int) -> DraftState | None:
    """Returns the draft state of empty rows."""
    return None

  def _read_drafts(
    self,
    params: PyTree,
    variables: PyTree,
    x_RTD: jax.Array,
    chunk: Chunk,
    found: SampledTokens,
    drafts: DraftState | None,
  ) -> tuple[DraftState | None, PyTree]:
    """Returns what rows have beyond parts of prompts, and the variables of the model after it.

    Args:
      params: The parameters of the model.
      variables: Its variables after the parts.
      x_RTD: What the model makes of the parts.
      chunk: The parts.
      found: The tokens that were chosen after them.
      drafts: What all rows had beyond their latest tokens.
    """
    return None, variables

  def _decode(
    self,
    params: PyTree,
    state: State,
    is_active_B: jax.Array,
    limits: DecodeLimits,
    most: int,
    full: bool,
  ) -> tuple[State, SampledTokens, jax.Array, jax.Array]:
    """Generates tokens of each active row, in up to `most` steps.

    Args:
      params: The parameters of the model.
      state: Is overwritten.
      is_active_B: The rows that are generated.
      limits: How far this call goes.
      most: The size of the result.
      full: See sampling.chosen.

    Returns:
      The state; the tokens, arrays [B, most, …]; how many of them each row has, [B]; and how many
      times the model was computed.
    """
    steps, until_one_ends, allowed_BV = limits.steps, limits.until_one_ends, limits.allowed
    B = len(is_active_B)
    was_done_B = state.rows.is_done

    def goes_on(carry: tuple[State, SampledTokens, jax.Array]) -> jax.Array:
      (_, rows), _, i = carry
      ended = ((rows.is_done & ~was_done_B) & is_active_B).any()
      return (i < steps) & (is_active_B & ~rows.is_done).any() & ~(until_one_ends & ended)

    def step(
      carry: tuple[State, SampledTokens, jax.Array],
    ) -> tuple[State, SampledTokens, jax.Array]:
      (cache, rows), out, i = carry
      is_on_B = is_active_B & ~rows.is_done
      x_B1D, after = self._model.apply(
        {
          'params': params,
          'cache': self.layout.variables(cache, rows.length, is_on_B.astype(jnp.int32)),
        },
        rows.token[:, None],
        rows.length[:, None],
        None,
        method='hidden',
        mutable=self._mutable,
      )
      given = rows.options, rows.number, is_on_B, full, allowed_BV, limits.may_draw(full)
      found = self._choose(params, x_B1D, *given)
      found = self._with_experts(found, after, jnp.zeros(B, jnp.int32), 1)
      on = is_on_B.astype(jnp.int32)
      number_B = rows.number + on
      is_end_B = is_end(found.token, rows.options) | (number_B >= rows.options.max_tokens)
      rows = DecodeRows(
        length=rows.length + on, token=jnp.where(is_on_B, found.token, rows.token), number=number_B,
        is_done=rows.is_done | (is_on_B & is_end_B),
        options=rows.options.after(found.token, is_on_B) if full else rows.options,
      )  # fmt: skip
      out = jax.tree.map(
        lambda whole, x: jax.lax.dynamic_update_slice_in_dim(whole, x[:, None], i, 1), out, found
      )
      return State(self.layout.of(after['cache']), rows), out, i + 1

    out = nothing_chosen((B, most), self._most_top(params, full), self._tracks_experts)
    state, out, count = jax.lax.while_loop(goes_on, step, (state, out, jnp.int32(0)))
    return self._placed(state), *self._everywhere((out, jnp.full(B, count), count))

  def _with_experts(
    self, found: SampledTokens, variables: PyTree, at_B: jax.Array, T: int
  ) -> SampledTokens:
    """Returns chosen tokens with the experts of the tokens `at_B` of the T that were computed."""
    if not self._tracks_experts:
      return found
    number_BT = chosen_experts.numbers(variables, (len(at_B), T))
    return found._replace(experts=jnp.take_along_axis(number_BT, at_B[:, None], 1)[:, 0])

  def _resize(self, state: State, row_R: jax.Array, slots: int) -> State:
    """Returns these rows of a state with `slots` slots each."""
    rows = jax.tree.map(lambda x: jnp.take(x, row_R, 0, mode='clip'), state.rows)
    return self._placed(State(caches.resized(state.cache, row_R, slots), rows))

  def _save(self, state: State, row_1: jax.Array, page_W: jax.Array) -> State:
    """Returns a copy of one row; see cache.row_of."""
    rows = jax.tree.map(lambda x: x[row_1], state.rows)
    return State(caches.row_of(state.cache, row_1, page_W), rows)

  def _restore(self, state: State, row: State, row_1: jax.Array, page_W: jax.Array) -> State:
    """Returns the state with such a copy in a row and in pages; `state` is overwritten."""
    rows = jax.tree.map(lambda x, new: x.at[row_1].set(new), state.rows, row.rows)
    return self._placed(State(caches.with_row(state.cache, row.cache, row_1, page_W), rows))

  def _choose(
    self,
    params: PyTree,
    x_B1D: jax.Array,
    options: Choice,
    number_B: jax.Array,
    is_on_B: jax.Array,
    full: bool,
    allowed_BV: jax.Array | None,
    draws: bool | None = None,
  ) -> SampledTokens:
    logits_BV = self._logits(params, x_B1D)[:, 0]
    known_V = self._known(logits_BV.shape[-1])
    return chosen(logits_BV, options, number_B, is_on_B, full, known_V, allowed_BV, draws)

  def _most_top(self, params: PyTree, full: bool) -> int:
    return most_top(vocab_size(params), full)

  def _logits(self, params: PyTree, x_BTD: jax.Array) -> jax.Array:
    logits_BTV: jax.Array = self._model.apply({'params': params}, x_BTD, method='logits')
    return logits_BTV

  def _known(self, vocab_size: int) -> np.ndarray | None:
    """Returns whether each id has a token; None: all have one."""
    if self._known_V is None:
      return None
    known_V = np.zeros(vocab_size, bool)
    known_V[: len(self._known_V)] = self._known_V[:vocab_size]
    return known_V

  def _scores(self, params: PyTree, x_RTD: jax.Array, chunk: Chunk, full: bool) -> SampledTokens:
    """Returns the facts about the tokens after `places`; always includes the most likely one.

    The columns are computed in blocks, as many as there are, so that one program scores few tokens
    and many.
    """
    top = max(1, self._most_top(params, full))
    if chunk.num_places is None:
      return nothing_chosen((len(x_RTD), 0), top)
    width = min(_BLOCK, chunk.places.shape[1])

    def block(i: jax.Array, out: SampledTokens) -> SampledTokens:
      cut = lambda x: jax.lax.dynamic_slice_in_dim(x, i * width, width, 1)
      next_RU = cut(chunk.next)
      x_RUD = jnp.take_along_axis(x_RTD, cut(chunk.places)[..., None], 1)
      logits_RUV = self._logits(params, x_RUD).astype(jnp.float32)
      log_sums = jax.nn.logsumexp(logits_RUV, axis=-1, keepdims=True)
      of_next = jnp.take_along_axis(logits_RUV, next_RU[..., None], -1) - log_sums
      largest, ids = jax.lax.top_k(logits_RUV, out.top_ids.shape[-1])
      found = SampledTokens(next_RU, of_next[..., 0], ids, largest - log_sums)
      put = lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, i * width, 1)
      return jax.tree.map(put, out, found)

    nothing = nothing_chosen(chunk.places.shape, top)
    return jax.lax.fori_loop(0, -(-chunk.num_places // width), block, nothing)

  def _placed(self, state: State) -> State:
    """Returns the state with its shardings, which are the same after every program."""
    shardings = self.layout.shardings(len(state.rows.length))
    if shardings is None:
      return state
    place = jax.lax.with_sharding_constraint
    cache = {path: place(x, shardings[path]) for path, x in state.cache.items()}
    return State(cache, self._everywhere(state.rows))

  def _everywhere(self, tree: Any) -> Any:
    """Returns arrays of which every device has a copy, so that every process can read them."""
    whole = self.layout.everywhere
    if whole is None:
      return tree
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, whole), tree)


def layout_of(
  model: TransformerLm,
  params: PyTree,
  mesh: Mesh | None,
  rules: partitioning.Rules,
  drafts: bool = False,
  dtype: str | None = None,
  pages: Pages | None = None,
) -> CacheLayout:
  """Returns the layout of a model's cache, including its first prediction module's.

  Raises UserError if it has arrays that a dtype of 8 bits does not encode, or nothing for pages.
  """

  def read(model: TransformerLm, ids_BT: jax.Array) -> None:
    x_BTD = model.hidden(ids_BT, ids_BT, None)
    if drafts:
      model.predicted_after(x_BTD, ids_BT, ids_BT)

  def trace(params: PyTree) -> PyTree:
    apply: Any = model.apply
    return apply({'params': params}, jnp.zeros((1, 1), jnp.int32), method=read, mutable=['cache'])[
      1
    ]

  with cache_encoding.activate(dtype):
    variables = jax.eval_shape(trace, params)['cache']
  layout = CacheLayout(variables, mesh, rules, dtype, pages)
  if pages is not None and not layout.has_tokens:
    raise UserError(
      'KV_CACHE_TOKENS is for models that cache the keys of tokens, and this one keeps states '
      'alone: leave it out'
    )
  if dtype is not None and (found := layout.not_encoded):
    raise UserError(
      f'KV_CACHE_DTYPE={dtype} stores the keys and values of heads in 8 bits, but this model '
      f'caches {found}: leave KV_CACHE_DTYPE out'
    )
  return layout


def vocab_size(params: PyTree) -> int:
  """Returns the number of ids of a model, V."""
  size: int = params['embedding']['emb_var'].shape[0]
  return size


def nothing_chosen(shape: tuple[int, ...], top: int, tracks_experts: bool = False) -> SampledTokens:
  """Returns arrays of this shape for chosen tokens and the `top` most likely ones."""
  return SampledTokens(
    jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32), jnp.zeros((*shape, top), jnp.int32),
    jnp.zeros((*shape, top), jnp.float32),
    jnp.zeros(shape, jnp.uint32) if tracks_experts else None,
  )  # fmt: skip


def is_end(token_B: jax.Array, options: Choice) -> jax.Array:
  """Returns whether tokens [B] end their rows."""
  return (token_B[:, None] == options.ends).any(-1)
