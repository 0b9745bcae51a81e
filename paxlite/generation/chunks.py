"""Prompt parts of several jobs, as the arrays of one call."""

from collections.abc import Sequence

import jax
import numpy as np

from paxlite.generation import options
from paxlite.generation.job import Job, PromptPart
from paxlite.generation.programs import Chunk


def chunk_of(
  jobs: Sequence[Job],
  parts: Sequence[PromptPart],
  shape: tuple[int, int],
  rows: int,
  vocab_size: int,
  allowed: jax.Array | None,
) -> Chunk:
  """Returns the next parts of the prompts of some jobs.

  Args:
    shape: R, of which those beyond the jobs are padding, and T.
    rows: The number of rows of the cache.
    vocab_size: V.
    allowed: Which tokens may follow the parts, [R, V]; None: the rows get no tables.
  """
  ids, places, following = np.zeros((3, *shape), np.int32)
  for i, part in enumerate(parts):
    ids[i, : len(part.ids)] = part.ids
    places[i, : len(part.places)] = part.places
    following[i, : len(part.places)] = part.next
  most = max(len(part.places) for part in parts)
  beyond = shape[0] - len(jobs)
  padded = lambda values, value: np.array([*values, *[value] * beyond], np.int32)
  requests = [*(job.request for job in jobs), *[None] * beyond]
  return Chunk(
    ids=ids, count=padded([len(part.ids) for part in parts], 1),
    source=padded([job.source for job in jobs], rows),
    target=padded([job.row for job in jobs], rows),
    start=padded([job.num_read for job in jobs], 0), places=places, next=following,
    num_places=np.int32(most) if most else None,
    follow=padded([part.follow for part in parts], -1),
    options=options.choices(requests, allowed is not None, vocab_size), allowed=allowed,
  )  # fmt: skip
