"""Greedy text with drafts: a prediction module proposes a token, and the model checks it.

This is speculative decoding (https://arxiv.org/abs/2211.17192) without a second model: DeepSeek-V3
(https://arxiv.org/abs/2412.19437, section 5.4.3) does it with its own module.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paxlite.core.errors import UserError
from paxlite.core.trees import PyTree
from paxlite.generation import cache as caches
from paxlite.generation.cache import Cache, CacheLayout
from paxlite.layers.language_model import TransformerLm
from paxlite.parallel import partitioning


class Drafted(NamedTuple):
  """A text that was generated with drafts.

  Attributes:
    ids: Its tokens.
    steps: How many times the model was computed for them, without that for the prompt.
  """

  ids: list[int]
  steps: int


class _State(NamedTuple):
  """A text while it is generated.

  Attributes:
    cache: What model and module keep of the tokens before the latest one.
    length: The number of these tokens.
    token: The latest token, int32.
    draft: What may be the token after it.
    ids: All new tokens, [N + 2].
    number: The number of new tokens, with the latest one.
    steps: How many times the model was computed for them.
    is_done: Whether one of the new tokens ends the text.
  """

  cache: Cache
  length: jax.Array
  token: jax.Array
  draft: jax.Array
  ids: jax.Array
  number: jax.Array
  steps: jax.Array
  is_done: jax.Array


def _read(
  model: TransformerLm,
  ids_BT: jax.Array,
  positions_BT: jax.Array,
  last: jax.Array | None,
  is_token: np.ndarray | None,
) -> tuple[jax.Array, jax.Array]:
  """Returns the likeliest token after each token, and the draft of the one after it, [B, T] each.

  Args:
    model: The model, bound to its variables.
    ids_BT, positions_BT: The tokens.
    last: The index of the last token of a prompt, before which the next tokens are known; None: no
      token is known.
    is_token: Whether each id has a token; None: all have one.
  """

  def likeliest(x_BTD: jax.Array) -> jax.Array:
    logits_BTV = model.logits(x_BTD)
    if is_token is not None:
      known_V = np.zeros(logits_BTV.shape[-1], bool)
      known_V[: len(is_token)] = is_token[: len(known_V)]
      logits_BTV = jnp.where(known_V, logits_BTV, -jnp.inf)
    return logits_BTV.argmax(-1).astype(jnp.int32)

  x_BTD = model.hidden(ids_BT, positions_BT, None)
  next_BT = likeliest(x_BTD)
  known_BT = jnp.pad(ids_BT[:, 1:], [(0, 0), (0, 1)])
  input_BT = next_BT if last is None else jnp.where(positions_BT < last, known_BT, next_BT)
  predicted_BTD = model.predicted_after(x_BTD, input_BT, positions_BT)
  return next_BT, likeliest(predicted_BTD)


@dataclasses.dataclass(frozen=True)
class Drafts:
  """Continues texts, one at a time, with the tokens of the largest logits.

  A step computes the latest token and its draft together. If the draft is what the model says after
  the latest token, the step makes two tokens, and otherwise one. So the text does not depend on the
  module, but for rounding; the number of steps does. Only the first module is used.

  Attributes:
    model: The model, with at least one prediction module.
    params: Its parameters.
    max_length: The most tokens of a text, with its prompt.
    ends: Tokens that end a text, of which the first one is its last token.
    is_token: Whether each id has a token, [n]; others, and those from n on, are never chosen. None:
      all have one.
  """

  model: TransformerLm
  params: PyTree
  max_length: int
  ends: Sequence[int] = ()
  is_token: np.ndarray | None = None

  def __post_init__(self) -> None:
    if not self.model.prediction_tpls:
      raise UserError('the model has no modules that predict further tokens, to make drafts with')

  def continuation(self, prompt: Sequence[int], max_new_tokens: int) -> Drafted:
    """Returns the continuation of a prompt.

    Raises:
      UserError: The prompt is empty, or has no room for a new token.
    """
    most = min(max_new_tokens, self.max_length - len(prompt))
    if not prompt or most < 1:
      raise UserError(
        f'a prompt of {len(prompt)} tokens and {max_new_tokens} new ones: a text has at least 1, '
        f'and at most {self.max_length}'
      )
    padded = np.zeros((1, 1 << (len(prompt) - 1).bit_length()), np.int32)
    padded[0, : len(prompt)] = prompt
    ids, count, steps = self._program(self.params, padded, len(prompt), most)
    found = np.asarray(ids)[: min(int(count), most)].tolist()
    stop = next((i + 1 for i, token in enumerate(found) if token in self.ends), None)
    return Drafted(found[:stop], int(steps))

  @functools.cached_property
  def _program(self) -> Any:
    return jax.jit(self._generate, static_argnums=3)

  def _generate(
    self, params: PyTree, ids_1T: jax.Array, length: jax.Array, most: int
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the new tokens [most + 2], how many there are, and the number of steps."""
    apply: Any = functools.partial(
      self.model.apply, is_token=self.is_token, method=_read, mutable=['cache']
    )
    T = ids_1T.shape[1]
    positions_1T = jnp.arange(T)[None]
    (next_1T, draft_1T), after = apply({'params': params}, ids_1T, positions_1T, length - 1)
    layout = CacheLayout(after['cache'], None, partitioning.DEFAULT_RULES)
    if layout.has_states:
      raise UserError(
        'drafts need layers with keys: a state cannot take back a token that was wrong'
      )
    cache = caches.resized(layout.of(after['cache']), jnp.arange(1), T + most + 2)
    ends = jnp.asarray(self.ends, jnp.int32)
    is_end = lambda token: (token == ends).any()

    def step(state: _State) -> _State:
      variables = {
        'params': params,
        'cache': layout.variables(state.cache, state.length[None], jnp.full(1, 2)),
      }
      both_12 = jnp.stack([state.token, state.draft])[None]
      positions_12 = state.length + jnp.arange(2)[None]
      (next_12, draft_12), after = apply(variables, both_12, positions_12, None)
      is_right = (next_12[0, 0] == state.draft).astype(jnp.int32)
      # the second one is overwritten by a later step, unless the draft was right
      ids = jax.lax.dynamic_update_slice(state.ids, next_12[0], [state.number])
      return _State(
        layout.of(after['cache']),
        state.length + 1 + is_right,
        next_12[0, is_right],
        draft_12[0, is_right],
        ids,
        state.number + 1 + is_right,
        state.steps + 1,
        is_end(next_12[0, 0]) | ((is_right == 1) & is_end(next_12[0, 1])),
      )

    first, ids = next_1T[0, length - 1], jnp.zeros(most + 2, jnp.int32)
    state = _State(
      cache, length, first, draft_1T[0, length - 1], ids.at[0].set(first), jnp.int32(1),
      jnp.int32(0), is_end(first),
    )  # fmt: skip
    goes_on = lambda state: (state.number < most) & ~state.is_done
    state = jax.lax.while_loop(goes_on, step, state)
    return state.ids, state.number, state.steps
