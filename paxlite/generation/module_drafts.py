"""A draft from the model's own prediction module.

DeepSeek-V3 (https://arxiv.org/abs/2412.19437, section 5.4.3) makes them so.
"""

import jax
import jax.numpy as jnp

from paxlite.core.trees import PyTree
from paxlite.generation.programs import Chunk, DecodeRows, DraftState
from paxlite.generation.sampling import SampledTokens, likeliest
from paxlite.generation.speculative import Computed, SpeculativePrograms


class ModuleDrafts(SpeculativePrograms):
  """Programs with one draft, from the model's first prediction module; see Programs.

  Their cache has the keys of the module too. What it keeps of a token depends on the token after
  it.
  """

  most_drafts = 1

  def _read_drafts(
    self,
    params: PyTree,
    variables: PyTree,
    x_RTD: jax.Array,
    chunk: Chunk,
    found: SampledTokens,
    drafts: DraftState | None,
  ) -> tuple[DraftState | None, PyTree]:
    R, T = chunk.ids.shape
    last_R = chunk.count - 1
    known_R = jnp.where(chunk.follow < 0, found.token, chunk.follow)
    next_RT = jnp.pad(chunk.ids[:, 1:], [(0, 0), (0, 1)])
    next_RT = next_RT.at[jnp.arange(R), last_R].set(known_R)
    positions_RT = chunk.start[:, None] + jnp.arange(T)
    draft_R1, variables = self._drafted(params, variables, x_RTD, next_RT, positions_RT, last_R)
    return DraftState(draft_R1, found.token, jnp.ones(R, jnp.int32)), variables

  def _next_drafts(
    self, params: PyTree, variables: PyTree, rows: DecodeRows, computed: Computed
  ) -> tuple[jax.Array, jax.Array | None, PyTree]:
    x_BWD, ids_BW, positions_BW, latest_B, chosen_BU, taken_B = computed
    next_BW = jnp.concatenate([ids_BW[:, 1:], chosen_BU[:, -1:]], 1)
    behind_BW = jnp.arange(ids_BW.shape[1]) - latest_B[:, None]
    for u in range(chosen_BU.shape[1]):
      next_BW = jnp.where(behind_BW == u, chosen_BU[:, u, None], next_BW)
    at_B = latest_B + jnp.maximum(taken_B - 1, 0)
    draft_B1, variables = self._drafted(params, variables, x_BWD, next_BW, positions_BW, at_B)
    return draft_B1, None, variables

  def _drafted(
    self,
    params: PyTree,
    variables: PyTree,
    x_BTD: jax.Array,
    next_BT: jax.Array,
    positions_BT: jax.Array,
    at_B: jax.Array,
  ) -> tuple[jax.Array, PyTree]:
    """Returns the draft after one of the next tokens of each row, [B, 1], and the variables.

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
    y_B1D = jnp.take_along_axis(y_BTD, at_B[:, None, None], 1)
    logits_BV = self._logits(params, y_B1D)[:, 0]
    known_V = self._known(logits_BV.shape[-1])
    if known_V is not None:
      logits_BV = jnp.where(known_V, logits_BV, -jnp.inf)
    return likeliest(logits_BV)[:, None], variables
