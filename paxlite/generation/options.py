"""What several requests ask for, as the arrays and features of one program."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from paxlite.generation.request import Request
from paxlite.generation.sampling import MOST_ENDS, Choice, Features, Sampling


class Extras(NamedTuple):
  """Arrays over the vocabulary that rows have because a request has needed them.

  Attributes:
    bias: Biases of logits.
    penalties: Which tokens a row contains.
  """

  bias: bool = False
  penalties: bool = False

  @classmethod
  def of(cls, requests: Sequence[Request]) -> 'Extras':
    """Returns what some requests need."""
    return cls(any(r.bias for r in requests), any(r.sampling.has_penalties for r in requests))

  def with_(self, other: 'Extras') -> 'Extras':
    """Returns what either needs."""
    return Extras(self.bias or other.bias, self.penalties or other.penalties)


def choices(requests: Sequence[Request | None], extras: Extras, vocab_size: int) -> Choice:
  """Returns the options of rows, of which None is one without a request."""
  known = [Request([0], 1) if r is None else r for r in requests]
  samplings = [r.sampling for r in known]
  of = lambda name: np.array([getattr(s, name) for s in samplings], np.float32)
  ends = np.full((len(known), MOST_ENDS), -1, np.int32)
  for row, r in zip(ends, known, strict=True):
    row[: len(r.ends)] = r.ends
  integers = lambda name: np.array([getattr(r, name) for r in known], np.int32)
  values: dict[str, Any] = dict(
    temperature=of('temperature'),
    top_k=np.array([min(s.top_k, vocab_size) for s in samplings], np.int32),
    top_p=of('top_p'),
    min_p=of('min_p'),
    repetition=of('repetition_penalty'),
    presence=of('presence_penalty'),
    frequency=of('frequency_penalty'),
    seed=np.array([(r.seed >> 32, r.seed & 0xFFFFFFFF) for r in known], np.uint32),
    sample=integers('sample'),
    ends=ends,
    min_tokens=integers('min_tokens'),
    max_tokens=integers('max_tokens'),
    bias=_biases(known, vocab_size) if extras.bias else None,
    seen=_seen(known, vocab_size) if extras.penalties else None,
    count=np.zeros((len(known), vocab_size), np.int32) if extras.penalties else None,
  )
  return Choice(**values)


def features(requests: Sequence[Request]) -> Features:
  """Returns what a program needs for these requests."""
  samplings: list[Sampling] = [r.sampling for r in requests]
  needs = Extras.of(requests)
  top = max((r.top_log_probs for r in requests), default=0)
  return Features(
    draws=any(s.temperature > 0 for s in samplings),
    top_k=any(s.temperature > 0 and s.top_k > 0 for s in samplings),
    top_p=any(s.temperature > 0 and s.top_p < 1 for s in samplings),
    penalties=needs.penalties,
    bias=needs.bias,
    mask=any(r.grammar is not None for r in requests),
    top=0 if top == 0 else 1 << (top - 1).bit_length(),
  )


def _biases(requests: Sequence[Request], vocab_size: int) -> np.ndarray:
  bias = np.zeros((len(requests), vocab_size), np.float32)
  for row, r in zip(bias, requests, strict=True):
    for token, value in r.bias.items():
      row[token] = value
  return bias


def _seen(requests: Sequence[Request], vocab_size: int) -> np.ndarray:
  seen = np.zeros((len(requests), vocab_size), bool)
  for row, r in zip(seen, requests, strict=True):
    row[np.asarray(r.prompt)] = True
  return seen
