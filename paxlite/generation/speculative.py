"""Drafts: a prediction module proposes a token, which the model checks while it makes the next one.

This is speculative decoding (https://arxiv.org/abs/2211.17192) without a second model: DeepSeek-V3
(https://arxiv.org/abs/2412.19437, section 5.4.3) does it with its own module. A step computes the
latest token of a row and its draft together. The token after the latest one is chosen as without
drafts, by the row's own options and random numbers. If it is the draft, the step chooses the token
after that one too. So every row has the tokens that it would have without drafts, but for rounding,
drawn or not; a draft only decides how many steps they take.

A state cannot take back a token that was wrong. So layers with states see a token only in the step
after the one that chose it, which computes up to three: two that are sure, and a draft.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paxlite.core.trees import PyTree
from paxlite.generation.programs import (
  Chunk,
  DecodeLimits,
  DecodeRows,
  DraftState,
  Programs,
  State,
  is_end,
  nothing_chosen,
)
from paxlite.generation.sampling import Choice, SampledTokens, chosen, likeliest


class SpeculativePrograms(Programs):
  """The programs of a model with speculative tokens from its first prediction module; see Programs.

  Their cache has the keys of the module too. What it keeps of a token depends on the token after
  it.
  """

  def no_drafts(self, rows: int) -> DraftState | None:
    zeros: Any = lambda: np.zeros(rows, np.int32)
    return DraftState(zeros(), zeros(), zeros() + 1)

  def _read_drafts(
    self, params: PyTree, variables: PyTree, x_RTD: jax.Array, chunk: Chunk, found: SampledTokens
  ) -> tuple[DraftState | None, PyTree]:
    R, T = chunk.ids.shape
    last_R = chunk.count - 1
    known_R = jnp.where(chunk.follow < 0, found.token, chunk.follow)
    next_RT = jnp.pad(chunk.ids[:, 1:], [(0, 0), (0, 1)])
    next_RT = next_RT.at[jnp.arange(R), last_R].set(known_R)
    positions_RT = chunk.start[:, None] + jnp.arange(T)
    draft_R, variables = self._drafted(params, variables, x_RTD, next_RT, positions_RT, last_R)
    return DraftState(draft_R, found.token, jnp.ones(R, jnp.int32)), variables

  def _drafted(
    self,
    params: PyTree,
    variables: PyTree,
    x_BTD: jax.Array,
    next_BT: jax.Array,
    positions_BT: jax.Array,
    at_B: jax.Array,
  ) -> tuple[jax.Array, PyTree]:
    """Returns the draft after one of the next tokens of each row, [B], and the variables after it.

    Args:
      params: The parameters of the model.
      variables: Its variables, in which the tokens are.
      x_BTD: What the model makes of them.
      next_BT: The token after each.
      positions_BT: Their positions.
      at_B: The tokens, of which the next one has a draft after it.
    """
    y_BTD, variables = self._model.apply(
      {'params': params, 'cache': variables['cache']}, x_BTD, next_BT, positions_BT,
      method='predicted_after', mutable=['cache'],
    )  # fmt: skip
    logits_BV = self._logits(params, _taken(y_BTD, at_B[:, None]))[:, 0]
    known_V = self._known(logits_BV.shape[-1])
    if known_V is not None:
      logits_BV = jnp.where(known_V, logits_BV, -jnp.inf)
    return likeliest(logits_BV), variables

  def _decode(
    self,
    params: PyTree,
    state: State,
    is_active_B: jax.Array,
    limits: DecodeLimits,
    most: int,
    full: bool,
  ) -> tuple[State, SampledTokens, jax.Array, jax.Array]:
    """Generates tokens of each active row, of which a step makes one or two; see Programs.

    The result has room for 2 · most tokens.
    """
    steps, until_one_ends, has_grammar, allowed_BV, _ = limits
    B, has_states = len(is_active_B), self.layout.has_states
    was_done_B = state.rows.is_done
    places_W = jnp.arange(3 if has_states else 2)

    def choose(
      logits_BV: jax.Array, options: Choice, number_B: jax.Array, is_on_B: jax.Array
    ) -> SampledTokens:
      known_V = self._known(logits_BV.shape[-1])
      given = full, known_V, allowed_BV, limits.may_draw(full)
      return chosen(logits_BV, options, number_B, is_on_B, *given)

    def goes_on(carry: tuple[State, SampledTokens, jax.Array, jax.Array]) -> jax.Array:
      (_, rows), _, _, i = carry
      ended = ((rows.is_done & ~was_done_B) & is_active_B).any()
      return (i < steps) & (is_active_B & ~rows.is_done).any() & ~(until_one_ends & ended)

    def step(
      carry: tuple[State, SampledTokens, jax.Array, jax.Array],
    ) -> tuple[State, SampledTokens, jax.Array, jax.Array]:
      (cache, rows), out, count_B, i = carry
      assert rows.drafts is not None
      drafts: DraftState = rows.drafts
      is_on_B = is_active_B & ~rows.is_done
      on_B = is_on_B.astype(jnp.int32)
      ids_BW, latest_B = _tokens_of_step(rows, drafts, len(places_W))
      positions_BW = rows.length[:, None] + places_W
      x_BWD, after = self._model.apply(
        {
          'params': params,
          'cache': self.layout.variables(cache, rows.length, on_B * drafts.waiting),
        },
        ids_BW,
        positions_BW,
        None,
        method='hidden',
        mutable=['cache'],
      )
      logits_B2V = self._logits(params, _taken(x_BWD, latest_B[:, None] + jnp.arange(2)))
      after_token = lambda options, *given: options.after(*given) if full else options
      first = choose(logits_B2V[:, 0], rows.options, rows.number, is_on_B)
      options = after_token(rows.options, first.token, is_on_B)
      number_B = rows.number + on_B
      ends_B = is_end(first.token, options) | (number_B >= options.max_tokens)
      takes_B = is_on_B & (first.token == drafts.draft) & ~ends_B
      takes_B &= ~has_grammar  # what it allows after the first token is not known
      second = choose(logits_B2V[:, 1], options, number_B, takes_B)
      options = after_token(options, second.token, takes_B)
      more_B = takes_B.astype(jnp.int32)
      number_B = number_B + more_B
      ends_B |= takes_B & (is_end(second.token, options) | (number_B >= options.max_tokens))

      next_BW = jnp.concatenate([ids_BW[:, 1:], second.token[:, None]], 1)
      behind_BW = places_W - latest_B[:, None]
      next_BW = jnp.where(behind_BW == 0, first.token[:, None], next_BW)
      next_BW = jnp.where(behind_BW == 1, second.token[:, None], next_BW)
      draft_B, after = self._drafted(params, after, x_BWD, next_BW, positions_BW, latest_B + more_B)

      token_B = jnp.where(takes_B, second.token, first.token)
      if_on = lambda new, old: jnp.where(is_on_B, new, old)
      rows = DecodeRows(
        length=rows.length + on_B * (drafts.waiting if has_states else 1 + more_B),
        token=if_on(token_B, rows.token),
        number=number_B,
        is_done=rows.is_done | (is_on_B & ends_B),
        options=options,
        drafts=DraftState(
          if_on(draft_B, drafts.draft),
          if_on(first.token, drafts.before),
          if_on(1 + more_B, drafts.waiting) if has_states else drafts.waiting,
        ),
      )
      out = _put(out, first, jnp.where(is_on_B, count_B, 2 * most))
      out = _put(out, second, jnp.where(takes_B, count_B + 1, 2 * most))
      return State(self.layout.of(after['cache']), rows), out, count_B + on_B + more_B, i + 1

    out = nothing_chosen((B, 2 * most), self._most_top(params, full))
    carry = state, out, jnp.zeros(B, jnp.int32), jnp.int32(0)
    state, out, count_B, i = jax.lax.while_loop(goes_on, step, carry)
    return self._placed(state), *self._everywhere((out, count_B, i))


def _tokens_of_step(
  rows: DecodeRows, drafts: DraftState, width: int
) -> tuple[jax.Array, jax.Array]:
  """Returns the tokens of a step, [B, W], and which of them is the latest one, [B].

  Behind it is the draft; what comes after this has no meaning.
  """
  ids_BW = jnp.stack([rows.token, *[drafts.draft] * (width - 1)], 1)
  if width == 3:
    both_BW = jnp.stack([drafts.before, rows.token, drafts.draft], 1)
    ids_BW = jnp.where(drafts.waiting[:, None] == 2, both_BW, ids_BW)
  return ids_BW, drafts.waiting - 1


def _taken(x_BTD: jax.Array, at_BU: jax.Array) -> jax.Array:
  """Returns some tokens of each row, [B, U, D]."""
  return jnp.take_along_axis(x_BTD, at_BU[..., None], 1)


def _put(out: SampledTokens, found: SampledTokens, at_B: jax.Array) -> SampledTokens:
  """Returns tokens [B, …] with one more of each row; a place that does not exist drops it."""
  rows_B = jnp.arange(len(at_B))
  return jax.tree.map(lambda whole, x: whole.at[rows_B, at_B].set(x, mode='drop'), out, found)
