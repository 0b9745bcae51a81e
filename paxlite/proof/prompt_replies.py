"""A model's replies to a few prompts: log-probabilities and continuations.

They are computed in float32 on rows of one length, so that the same weights give the same bits on
the same machine.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject
from paxlite.eval.scoring import bucket
from paxlite.generation.inference import Inference
from paxlite.generation.spelling import spelled
from paxlite.parallel import partitioning

PROMPTS = (
  'The capital of France is', 'Once upon a time, there was a little',
  'In 1969, the first man walked on the', 'def factorial(n):\n    if n == 0:',
  'Wasser kocht bei 100 Grad, weil', 'Q: What is 17 + 4?\nA:',
)  # fmt: skip
STEPS, TOP = 16, 5


class Replies:
  """Computes what a model makes of prompts.

  Args:
    inference: The model, which has to be in float32.
    length: Tokens of the longest row.
  """

  def __init__(self, inference: Inference, length: int):
    self._inference = inference
    self._length = min(bucket(length), max(length, inference.max_length))
    self._program = jax.jit(self._log_probabilities)

  def _log_probabilities(self, params: Any, ids_BT: jax.Array) -> jax.Array:
    e, model = self._inference.experiment, self._inference.model
    with partitioning.activate(self._inference.mesh, e.rules):
      logits_BTV = model.apply({'params': params}, ids_BT)
    assert isinstance(logits_BTV, jax.Array)
    return jax.nn.log_softmax(logits_BTV.astype(jnp.float32))

  def log_probabilities(self, ids: Sequence[int]) -> np.ndarray:
    """Returns the log-probabilities of what follows each token, float32 [T, V]."""
    row = np.zeros((1, self._length), np.int32)
    row[0, : len(ids)] = ids
    with jax.default_matmul_precision('highest'):
      found = self._program(self._inference.params, row)
    return np.asarray(found)[0, : len(ids)]

  def reply(self, text: str, ids: Sequence[int]) -> JsonObject:
    """Returns the reply to a prompt, with the most likely tokens of each step.

    Raises UserError if the model gives no finite numbers.
    """
    continuation: list[int] = []
    for _ in range(STEPS):
      log_p_TV = self.log_probabilities([*ids, *continuation])
      if not np.isfinite(log_p_TV[-1].max()):
        place = self._inference.source.folder
        raise UserError(f'{place} returns no numbers for {text!r}: nothing to prove')
      continuation.append(int(log_p_TV[-1].argmax()))
    return self.judged({'text': text, 'ids': list(ids), 'continuation': continuation})

  def judged(self, given: JsonObject) -> JsonObject:
    """Returns the log-probabilities of a prompt and of its continuation, given by a proof.

    The tokens of each step are those that the proof names; without these, the likeliest.
    """
    prompt, continuation = given['ids'], given['continuation']
    row = [*prompt, *continuation]
    log_p_TV = self.log_probabilities(row)
    steps_SV = log_p_TV[len(prompt) - 1 : -1]
    stated = given.get('top')
    likeliest = np.argsort(-steps_SV, axis=-1, kind='stable')[:, :TOP].tolist()
    tops = likeliest if stated is None else [[token for token, _ in top] for top in stated]
    told = [piece for piece, _ in spelled(self._inference.tokenizer, continuation, prompt)]
    return {
      'text': given['text'],
      'ids': prompt,
      'log_probabilities': [_short(log_p_TV[i, t]) for i, t in enumerate(prompt[1:])],
      'continuation': continuation,
      'continued': ''.join(piece.text for piece in told if piece.data is not None),
      'tokens': [piece.text for piece in told],
      'top': [
        [[token, _short(step_V[token])] for token in top]
        for step_V, top in zip(steps_SV, tops, strict=True)
      ],
      'likeliest': [top[0] for top in likeliest],
    }


def replies(inference: Inference) -> list[JsonObject]:
  """Returns the replies of a model to PROMPTS.

  Raises UserError if it has too few positions for all of them.
  """
  encoded = {text: inference.encode(text) for text in PROMPTS}
  fit = {text: ids for text, ids in encoded.items() if 1 < len(ids) <= inference.max_length - STEPS}
  if not fit:
    raise UserError(
      f'{inference.source.folder} has {inference.max_length} positions, too few for the prompts '
      'of a proof: leave --proof out'
    )
  model = Replies(inference, STEPS + max(map(len, fit.values())))
  return [model.reply(text, ids) for text, ids in fit.items()]


def judged(inference: Inference, given: Sequence[JsonObject]) -> list[JsonObject]:
  """Returns what a model makes of the prompts and continuations of a proof.

  Raises UserError if the model has too few ids or positions for them.
  """
  ids = [i for reply in given for i in (*reply['ids'], *reply['continuation'])]
  ids += [i for reply in given for top in reply['top'] for i, _ in top]
  if max(ids) >= inference.experiment.VOCAB_SIZE:
    raise UserError(
      f'the proof has the token {max(ids)}, but the model does not: it is another model'
    )
  longest = max(len(r['ids']) + len(r['continuation']) for r in given)
  if longest > inference.max_length:
    raise UserError(
      f"the model has {inference.max_length} positions, but the proof's prompts need {longest}: "
      'it is another model'
    )
  model = Replies(inference, longest)
  return [model.judged(reply) for reply in given]


def _short(value: np.float32) -> float:
  """Returns a number with the digits that tell it from other float32."""
  return float(f'{value:.9g}')
