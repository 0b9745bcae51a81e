"""The options of several requests, as arrays for one program."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from paxlite.generation.request import Request
from paxlite.generation.sampling import MOST_ENDS, Choice, Tables


def needs_tables(requests: Sequence[Request]) -> bool:
  """Returns whether rows need arrays over the vocabulary; see sampling.Tables."""
  return any(r.bias or r.sampling.has_penalties or r.grammar is not None for r in requests)


def needs_full(requests: Sequence[Request]) -> bool:
  """Returns whether a request has other options than a temperature, ends and lengths."""
  is_full = lambda r: r.top_log_probs or (r.sampling.temperature > 0 and r.sampling.has_filters)
  return needs_tables(requests) or any(map(is_full, requests))


def choices(requests: Sequence[Request | None], tables: bool, vocab_size: int) -> Choice:
  """Returns the options of rows, of which None is one without a request.

  Args:
    requests: The requests of the rows.
    tables: Whether the rows have tables.
    vocab_size: V.
  """
  known = [Request([0], 1) if r is None else r for r in requests]
  samplings = [r.sampling for r in known]
  of = lambda name: np.array([getattr(s, name) for s in samplings], np.float32)
  ends = np.full((len(known), MOST_ENDS), -1, np.int32)
  for row, r in zip(ends, known, strict=True):
    row[: len(r.ends)] = r.ends
  integers = lambda name: np.array([getattr(r, name) for r in known], np.int32)
  values: dict[str, Any] = dict(
    temperature=of('temperature'),
    top_k=np.array([min(s.top_k, vocab_size) for s in samplings], np.int32), top_p=of('top_p'),
    min_p=of('min_p'), repetition=of('repetition_penalty'), presence=of('presence_penalty'),
    frequency=of('frequency_penalty'),
    seed=np.array([(r.seed >> 32, r.seed & 0xFFFFFFFF) for r in known], np.uint32),
    sample=integers('sample'), ends=ends, min_tokens=integers('min_tokens'),
    max_tokens=integers('max_tokens'), top=integers('top_log_probs'),
    tables=_tables(known, vocab_size) if tables else None,
  )  # fmt: skip
  return Choice(**values)


def _tables(requests: Sequence[Request], vocab_size: int) -> Tables:
  count: Any = np.zeros((len(requests), vocab_size), np.int32)
  bias: Any = np.zeros((len(requests), vocab_size), np.float32)
  seen: Any = np.zeros((len(requests), vocab_size), bool)
  for i, r in enumerate(requests):
    seen[i, np.asarray(r.prompt)] = True
    bias[i, [*r.bias]] = [*r.bias.values()]
  return Tables(bias, seen, count)
