"""Speculative decoding: drafts are proposed tokens, which a step checks and continues.

This is speculative decoding (https://arxiv.org/abs/2211.17192) without a second model. A step
computes the latest token of a row and its drafts together. The token after the latest one is chosen
as without drafts, by the row's own options and random numbers. If it is the first draft, the step
chooses the token after that one too, and so on. So every row has the tokens that it would have
without drafts, but for rounding, drawn or not; drafts only decide how many steps they take. Where
no row has a draft, a step computes the latest tokens alone.

A state cannot take back a token that was wrong. So layers with states see a token only in the step
after the one that chose it, which computes up to three: two that are sure, and a draft.
"""

import abc
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paxlite.core.trees import PyTree
from paxlite.generation.programs import (
  DecodeLimits,
  DecodeRows,
  DraftState,
  Programs,
  State,
  is_end,
  nothing_chosen,
)
from paxlite.generation.sampling import Choice, SampledTokens, chosen

# the state of all rows, the tokens that they got, how many each one got, and the number of steps
_Carry = tuple[State, SampledTokens, jax.Array, jax.Array]


class Computed(NamedTuple):
  """What a step has computed of B rows: W tokens each, after which up to U = K + 1 were chosen."""

  x_BWD: jax.Array  # what the model makes of the tokens
  ids_BW: jax.Array
  positions_BW: jax.Array
  latest_B: jax.Array  # which of the W tokens is the latest one; drafts follow it
  chosen_BU: jax.Array
  taken_B: jax.Array  # how many of these a row has


class SpeculativePrograms(Programs, abc.ABC):
  """The programs of a model whose steps check drafts; see Programs.

  Attributes:
    most_drafts: The number of drafts in a step, K; 1 where layers have states.
    may_lack_drafts: Whether a row may have no drafts, −1 each.
  """

  may_lack_drafts: bool = False

  @abc.abstractmethod
  def _next_drafts(
    self, params: PyTree, variables: PyTree, rows: DecodeRows, computed: Computed
  ) -> tuple[jax.Array, jax.Array | None, PyTree]:
    """Returns the drafts after a step, [B, K]; all tokens of the rows; and the variables.

    Args:
      params: The parameters of the model.
      variables: Its variables after the step.
      rows: The rows before the step.
      computed: What the step has computed.
    """

  def no_drafts(self, rows: int) -> DraftState:
    zeros: Any = lambda *shape: np.zeros((rows, *shape), np.int32)
    return DraftState(zeros(self.most_drafts), zeros(), zeros() + 1)

  def _decode(
    self,
    params: PyTree,
    state: State,
    is_active_B: jax.Array,
    limits: DecodeLimits,
    most: int,
    full: bool,
  ) -> tuple[State, SampledTokens, jax.Array, jax.Array]:
    """Generates tokens of each active row, of which a step makes up to U; see Programs.

    The result has room for U · most tokens.
    """
    steps, until_one_ends, has_grammar, allowed_BV, _ = limits
    B, room, has_states = len(is_active_B), (self.most_drafts + 1) * most, self.layout.has_states
    was_done_B = state.rows.is_done

    def choose(
      logits_BV: jax.Array, options: Choice, number_B: jax.Array, is_on_B: jax.Array
    ) -> SampledTokens:
      known_V = self._known(logits_BV.shape[-1])
      given = full, known_V, allowed_BV, limits.may_draw(full)
      return chosen(logits_BV, options, number_B, is_on_B, *given)

    def goes_on(carry: _Carry) -> jax.Array:
      (_, rows), _, _, i = carry
      ended = ((rows.is_done & ~was_done_B) & is_active_B).any()
      return (i < steps) & (is_active_B & ~rows.is_done).any() & ~(until_one_ends & ended)

    def is_wide(carry: _Carry) -> jax.Array:
      """Whether a row has drafts that may be taken, or two tokens that its states have not seen."""
      rows = carry[0].rows
      assert rows.drafts is not None
      needs_B = ((rows.drafts.draft[:, 0] >= 0) & ~has_grammar) | (rows.drafts.waiting > 1)
      return (needs_B & is_active_B & ~rows.is_done).any()

    def step(K: int, carry: _Carry) -> _Carry:
      (cache, rows), out, count_B, i = carry
      assert rows.drafts is not None
      drafts: DraftState = rows.drafts
      is_on_B = is_active_B & ~rows.is_done
      on_B = is_on_B.astype(jnp.int32)
      ids_BW, latest_B = rows.token[:, None], jnp.zeros(B, jnp.int32)
      if K:
        ids_BW, latest_B = _tokens_of_step(rows, drafts, has_states)
      positions_BW = rows.length[:, None] + jnp.arange(ids_BW.shape[1])
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
      logits_BUV = self._logits(params, _taken(x_BWD, latest_B[:, None] + jnp.arange(K + 1)))
      options, number_B, token_B, takes_B = rows.options, rows.number, rows.token, is_on_B
      ends_B, taken_B, tokens = jnp.zeros(B, bool), jnp.zeros(B, jnp.int32), []
      for u in range(K + 1):
        found = choose(logits_BUV[:, u], options, number_B, takes_B)
        options = options.after(found.token, takes_B) if full else options
        out = _put(out, found, jnp.where(takes_B, count_B + u, room))
        number_B += takes_B
        ends_B |= takes_B & (is_end(found.token, options) | (number_B >= options.max_tokens))
        token_B = jnp.where(takes_B, found.token, token_B)
        taken_B += takes_B
        tokens.append(found.token)
        if u < K:  # what a grammar allows after the first token is not known
          takes_B &= (found.token == drafts.draft[:, u]) & ~ends_B & ~has_grammar

      chosen_BU = jnp.stack(tokens, 1)
      computed = Computed(x_BWD, ids_BW, positions_BW, latest_B, chosen_BU, taken_B)
      draft_BK, seen_BL, after = self._next_drafts(params, after, rows, computed)
      if_on = lambda new, old: jnp.where(is_on_B, new, old)
      rows = DecodeRows(
        length=rows.length + (on_B * drafts.waiting if has_states else taken_B),
        token=token_B,
        number=number_B,
        is_done=rows.is_done | ends_B,
        options=options,
        drafts=DraftState(
          jnp.where(is_on_B[:, None], draft_BK, drafts.draft),
          if_on(tokens[0], drafts.before),
          if_on(taken_B, drafts.waiting) if has_states else drafts.waiting,
          seen_BL,
        ),
      )
      return State(self.layout.of(after['cache']), rows), out, count_B + taken_B, i + 1

    wide, narrow = (functools.partial(step, K) for K in (self.most_drafts, 0))

    def wide_and_narrow(carry: _Carry) -> _Carry:
      # loops update the cache in place; a condition would copy it
      carry = jax.lax.while_loop(lambda c: goes_on(c) & is_wide(c), wide, carry)
      return jax.lax.while_loop(lambda c: goes_on(c) & ~is_wide(c), narrow, carry)

    out = nothing_chosen((B, room), self._most_top(params, full))
    carry = state, out, jnp.zeros(B, jnp.int32), jnp.int32(0)
    body: Callable[[_Carry], _Carry] = wide_and_narrow if self.may_lack_drafts else wide
    state, out, count_B, i = jax.lax.while_loop(goes_on, body, carry)
    return self._placed(state), *self._everywhere((out, count_B, i))


def _tokens_of_step(
  rows: DecodeRows, drafts: DraftState, has_states: bool
) -> tuple[jax.Array, jax.Array]:
  """Returns the tokens of a step, [B, W], and which of them is the latest one, [B].

  Behind it are the drafts; what comes after these has no meaning.
  """
  draft_BK = jnp.maximum(drafts.draft, 0)
  ids_BW = jnp.concatenate([rows.token[:, None], draft_BK], 1)
  if has_states:
    both_BW = jnp.concatenate([drafts.before[:, None], ids_BW], 1)
    ids_BW = jnp.concatenate([ids_BW, draft_BK], 1)
    ids_BW = jnp.where(drafts.waiting[:, None] == 2, both_BW, ids_BW)
  return ids_BW, drafts.waiting - 1


def _taken(x_BTD: jax.Array, at_BU: jax.Array) -> jax.Array:
  """Returns some tokens of each row, [B, U, D]."""
  return jnp.take_along_axis(x_BTD, at_BU[..., None], 1)


def _put(out: SampledTokens, found: SampledTokens, at_B: jax.Array) -> SampledTokens:
  """Returns tokens [B, …] with one more of each row; a place that does not exist drops it."""
  rows_B = jnp.arange(len(at_B))
  return jax.tree.map(lambda whole, x: whole.at[rows_B, at_B].set(x, mode='drop'), out, found)
