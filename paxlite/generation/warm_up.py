"""Compiles the programs of an engine before its first request, as for a server."""

import dataclasses

import numpy as np

from paxlite.generation.engine import STEADY_LENGTHS, Engine
from paxlite.generation.request import Request


def warm_up(engine: Engine) -> None:
  """Compiles what requests need until one is longer than the first number of slots.

  Later requests need no further programs, whatever their options.

  Args:
    engine: A steady engine without requests.
  """
  levels, lengths = engine.row_levels, _lengths(engine.max_length)
  done: set[int] = set()
  for rows in (rows for a in levels for b in levels for rows in (a, b)):  # each one after each
    engine.hold_rows(rows)
    engine.generate([_request(16, 0, False)])
    for number, length in enumerate([] if rows in done else lengths):
      for full in (False, True):
        for count in (1, 2):
          asked = [_request(length, 2 * number + i, full) for i in range(count)]
          engine.generate(asked)
          if length == lengths[-1]:
            engine.generate([dataclasses.replace(r, scored_from=1) for r in asked])
    done.add(rows)
  engine.hold_rows(1)


def _lengths(max_length: int) -> list[int]:
  """Returns lengths of prompts that need each length of a part."""
  return sorted({min(length, max_length - 2) for length in STEADY_LENGTHS})


def _request(length: int, number: int, full: bool) -> Request:
  """Returns a request whose prompt shares no beginning with those of other numbers."""
  prompt = np.random.default_rng(number).integers(0, 2, length).tolist()
  return Request(prompt, 2, top_log_probs=int(full))
