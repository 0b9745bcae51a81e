"""Drafts from what a row has said: what came after its last tokens when they came before.

An answer that repeats parts of its prompt, as an edit or a summary does, then needs fewer steps
(https://arxiv.org/abs/2304.04487), and the model needs no module.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paxlite.core.trees import PyTree
from paxlite.generation.programs import Chunk, DecodeRows, DraftState
from paxlite.generation.sampling import SampledTokens
from paxlite.generation.speculative import Computed, SpeculativePrograms

_SHORTEST, _LONGEST = 2, 3  # tokens that are looked for; what follows one token is mostly another
_DRAFTS = 3


class NgramDrafts(SpeculativePrograms):
  """Programs with drafts from the tokens of a row; see Programs.

  Args:
    *given: See Programs.
    max_length: The most tokens of a row, L.
  """

  may_lack_drafts = True

  def __init__(self, *given: Any, max_length: int):
    super().__init__(*given)
    self._max_length = max_length
    self.most_drafts = 1 if self.layout.has_states else _DRAFTS

  def no_drafts(self, rows: int) -> DraftState:
    seen: Any = np.zeros((rows, self._max_length), np.int32)
    return dataclasses.replace(super().no_drafts(rows), seen=seen)

  def _read_drafts(
    self,
    params: PyTree,
    variables: PyTree,
    x_RTD: jax.Array,
    chunk: Chunk,
    found: SampledTokens,
    drafts: DraftState | None,
  ) -> tuple[DraftState | None, PyTree]:
    assert drafts is not None
    assert drafts.seen is not None
    seen_RL = jnp.take(drafts.seen, chunk.source, 0, mode='clip')
    seen_RL = _with(seen_RL, chunk.ids, chunk.start, chunk.count)
    known_R = chunk.start + chunk.count
    one_R = jnp.ones_like(known_R)
    seen_RL = _with(seen_RL, found.token[:, None], known_R, one_R)
    draft_RK = ngram_drafts(seen_RL, known_R + 1, self.most_drafts)
    return DraftState(draft_RK, found.token, one_R, seen_RL), variables

  def _next_drafts(
    self, params: PyTree, variables: PyTree, rows: DecodeRows, computed: Computed
  ) -> tuple[jax.Array, jax.Array | None, PyTree]:
    assert rows.drafts is not None
    assert rows.drafts.seen is not None
    known_B = rows.length + rows.drafts.waiting
    seen_BL = _with(rows.drafts.seen, computed.chosen_BU, known_B, computed.taken_B)
    return ngram_drafts(seen_BL, known_B + computed.taken_B, self.most_drafts), seen_BL, variables


def ngram_drafts(seen_BL: jax.Array, known_B: jax.Array, count: int) -> jax.Array:
  """Returns what may come after rows of tokens, [B, K].

  It is what came after the last three or two tokens of a row when they came before, at the last
  such place, and again from there where the row ends; −1 if they did not.

  Args:
    seen_BL: Tokens.
    known_B: How many of them each row has.
    count: The number of drafts, K.
  """
  places_L = jnp.arange(seen_BL.shape[1])
  is_alike_BL = places_L < known_B[:, None] - 1
  length_BL = jnp.zeros(seen_BL.shape, jnp.int32)
  for back in range(_LONGEST):
    last_B1 = jnp.take_along_axis(seen_BL, jnp.maximum(known_B - 1 - back, 0)[:, None], 1)
    is_alike_BL &= (jnp.roll(seen_BL, back, 1) == last_B1) & (places_L >= back)
    length_BL += is_alike_BL
  rank_BL = jnp.where(length_BL >= _SHORTEST, length_BL * len(places_L) + places_L, -1)
  begin_B1 = rank_BL.argmax(1)[:, None] + 1
  period_B1 = jnp.maximum(known_B[:, None] - begin_B1, 1)
  draft_BK = jnp.take_along_axis(seen_BL, begin_B1 + jnp.arange(count) % period_B1, 1)
  return jnp.where(rank_BL.max(1)[:, None] < 0, -1, draft_BK)


def _with(seen_BL: jax.Array, ids_BT: jax.Array, at_B: jax.Array, count_B: jax.Array) -> jax.Array:
  """Returns rows with the first `count_B` of some tokens at their places."""
  B, T = ids_BT.shape
  places_BT = at_B[:, None] + jnp.arange(T)
  is_put_BT = jnp.arange(T) < count_B[:, None]
  places_BT = jnp.where(is_put_BT, places_BT, seen_BL.shape[1])
  return seen_BL.at[jnp.arange(B)[:, None], places_BT].set(ids_BT, mode='drop')
