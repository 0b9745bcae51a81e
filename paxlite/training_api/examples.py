"""The examples of a request, checked, and the padded batches that programs are compiled for."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from paxlite.core.errors import UserError
from paxlite.data.base import Batch
from paxlite.finetuning.reinforcement.policy_loss import OLD
from paxlite.generation.request import check_ids
from paxlite.training_api import wire

_LEAST_LENGTH = 32
_TOKENS = 4096  # of a batch, unless one example is longer
CLIPS = {'clip_low_threshold': 0.8, 'clip_high_threshold': 1.2}  # of the ratio
# The arrays that a loss reads besides the target tokens, and its settings.
_POLICY = ('logprobs', 'advantages')
LOSSES: Mapping[str, tuple[tuple[str, ...], Mapping[str, float]]] = {
  'cross_entropy': (('weights',), {}),
  'importance_sampling': (_POLICY, {}),
  'ppo': (_POLICY, CLIPS),
  'cispo': (_POLICY, CLIPS),
}


@dataclasses.dataclass(frozen=True)
class LossExample:
  """One sequence of T tokens.

  Attributes:
    ids, labels: The tokens, and those to be predicted after them, int32 [T].
    arrays: What the loss reads besides, float32 [T], by the client's names.
  """

  ids: np.ndarray
  labels: np.ndarray
  arrays: Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class LossExamples:
  """The examples of a request, and the loss that is computed of them."""

  loss: str
  settings: Mapping[str, float]
  examples: Sequence[LossExample]


def examples_of(message: Any, vocab_size: int, max_length: int) -> LossExamples:
  """Returns the examples of a ForwardBackwardRequest.

  Raises:
    UserError: The loss is not known, or an example is not one of this model and loss.
  """
  if message.loss_fn not in LOSSES:
    raise UserError(f'loss_fn={message.loss_fn!r} is not supported: use {", ".join(LOSSES)}')
  names, defaults = LOSSES[message.loss_fn]
  given = {s.key: s.value.text or s.value.number for s in message.loss_fn_config_v2}
  for key, value in given.items():
    if key not in defaults or not isinstance(value, float) or not np.isfinite(value):
      known = f'{", ".join(defaults)} as numbers' if defaults else 'no settings'
      raise UserError(f'loss_fn_config[{key!r}]={value!r}: {message.loss_fn} has {known}')
  if not message.data:
    raise UserError('data is empty: send at least one example')
  found = [
    _example(datum, f'data[{i}]', message.loss_fn, names, vocab_size, max_length)
    for i, datum in enumerate(message.data)
  ]
  return LossExamples(message.loss_fn, {**defaults, **given}, found)


def _example(
  datum: Any, what: str, loss: str, names: Sequence[str], vocab_size: int, max_length: int
) -> LossExample:
  ids = wire.tokens_of(datum.model_input, f'{what}.model_input')
  if not 1 <= len(ids) <= max_length:
    raise UserError(f'{what}.model_input has {len(ids):,} tokens: from 1 to {max_length:,} fit')
  check_ids(ids, vocab_size, f'{what}.model_input')
  inputs = {one.key: one.value for one in datum.loss_fn_inputs}
  wanted = ['target_tokens', *names]
  optional = {'weights'}  # 1 for each token
  if wrong := ({*wanted} - optional - {*inputs}) or ({*inputs} - {*wanted}):
    raise UserError(
      f'{what}.loss_fn_inputs has {", ".join(sorted(inputs)) or "nothing"}, but {loss} reads '
      f'{" and ".join(wanted)}: {"add" if min(wrong) in wanted else "leave out"} {min(wrong)}'
    )
  arrays = {
    name: wire.array_of(inputs[name], f'{what}.{name}') if name in inputs else np.ones(len(ids))
    for name in wanted
  }
  for name, array in arrays.items():
    if len(array) != len(ids):
      raise UserError(
        f'{what}.{name} has {len(array):,} values, but model_input has {len(ids):,} tokens: the '
        'target of each token is the next one'
      )
    if not np.isfinite(array).all():
      (at,) = np.nonzero(~np.isfinite(array))
      raise UserError(f'{what}.{name} is {array[at[0]]} at position {at[0]}')
  labels = arrays.pop('target_tokens')
  check_ids(labels, vocab_size, f'{what}.target_tokens')
  return LossExample(
    ids, labels.astype(np.int32), {name: x.astype(np.float32) for name, x in arrays.items()}
  )


def batches(examples: Sequence[LossExample], max_length: int) -> Iterator[tuple[list[int], Batch]]:
  """Yields the numbers of some examples and their padded batch, until all have been in one.

  Lengths and numbers of rows are powers of two, so that a few programs serve all requests. They
  depend on the request alone, so that other clients change no bit of a result.
  """
  by_length: dict[int, list[int]] = {}
  for i, example in enumerate(examples):
    by_length.setdefault(min(_above(len(example.ids), _LEAST_LENGTH), max_length), []).append(i)
  for length, indices in sorted(by_length.items()):
    most = max(1, _TOKENS // length)
    for start in range(0, len(indices), most):
      part = indices[start : start + most]
      yield part, _padded([examples[i] for i in part], _above(len(part)), length)


def _padded(examples: Sequence[LossExample], rows: int, length: int) -> Batch:
  def filled(arrays: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    found: np.ndarray = np.zeros((rows, length), dtype)
    for row, array in zip(found, arrays, strict=False):
      row[: len(array)] = array
    return found

  batch = {
    'ids': filled([e.ids for e in examples], np.int32),
    'labels': filled([e.labels for e in examples], np.int32),
    'segment_ids': filled([np.ones(len(e.ids)) for e in examples], np.int32),
    'segment_pos': np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length)).copy(),
  }
  of = lambda name: filled([e.arrays[name] for e in examples], np.float32)
  if 'weights' in examples[0].arrays:
    return {**batch, 'weights': of('weights')}
  # a token without an advantage adds nothing to the loss, whatever its ratio is
  advantages = of('advantages')
  is_own = (advantages != 0).astype(np.float32)
  return {**batch, 'weights': is_own, 'advantages': advantages, OLD: of('logprobs')}


def _above(number: int, least: int = 1) -> int:
  """Returns the smallest power of two that is at least `number`, and at least `least`."""
  return max(least, 1 << (number - 1).bit_length())
