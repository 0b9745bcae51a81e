"""How often a run has seen each document of its data."""

import collections
import dataclasses
import statistics
from collections.abc import Iterator

from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject
from paxlite.core.wording import amount
from paxlite.run_data.origins import Key, length_of, names_records, num_documents, pieces, place_of
from paxlite.run_data.run_data import RunData

_MOST = 5  # documents that are named


@dataclasses.dataclass(frozen=True)
class Counts:
  """How often each document was seen: its tokens in the batches, divided by its tokens."""

  steps: int  # the steps that are counted
  times: dict[str, float]  # how often each document was seen that was, by its place
  unseen: int | None  # how many were never seen; None: the number of documents is not known


def counted(run: RunData) -> Counts:
  """Counts the documents in all completed steps of a run.

  Raises UserError if the data do not name their documents, or cannot be read.
  """
  steps = run.steps_done
  run.check_step(max(1, steps))
  tokens: collections.Counter[Key] = collections.Counter()
  longest: collections.Counter[Key] = collections.Counter()
  data = run.data_of(steps)
  others = [step for step in run.first_steps if not run.same_documents(step, steps)]
  if others:
    raise UserError(
      f'{run.place} changed its data after step {others[-1]:,}, so its documents cannot be '
      'counted as one set'
    )
  for _, batch in run.batches(1, steps):
    for row in range(len(batch['ids'])):
      for piece in pieces(batch, row):
        if not names_records(data, piece.key):
          raise UserError(f'documents cannot be counted: {place_of(data, piece.key)}')
        tokens[piece.key] += piece.end - piece.start
        after = (piece.token or 0) + piece.end - piece.start
        longest[piece.key] = max(longest[piece.key], after)
  times = {
    str(place_of(data, key)): count / (length_of(data, key) or longest[key])
    for key, count in tokens.items()
  }
  total = num_documents(data)
  return Counts(steps, times, None if total is None else total - len(tokens))


def lines(found: Counts) -> Iterator[str]:
  """Yields the lines of the counts."""
  times = sorted(found.times.values())
  every = times if not found.unseen else [*[0.0] * found.unseen, *times]
  yield f'Counted   {amount(len(times), "document")} in {amount(found.steps, "step")}'
  if found.unseen is not None:
    yield f'Never     {found.unseen:,} of {len(every):,}'
  else:
    yield 'Never     unknown: the data do not say how many documents they have'
  yield (
    f'Times     at least {_short(every[0])}, half of them up to '
    f'{_short(statistics.median_high(every))}, at most {_short(every[-1])}'
  )
  for i, (name, count) in enumerate(most_frequent(found)):
    yield f'{"Most" if not i else "":10}{_short(count)} times {name}'


def most_frequent(found: Counts) -> list[tuple[str, float]]:
  return sorted(found.times.items(), key=lambda pair: (-pair[1], pair[0]))[:_MOST]


def as_json(found: Counts) -> JsonObject:
  """Returns counts as JSON."""
  return {'steps': found.steps, 'never': found.unseen, 'times': found.times}


def _short(number: float) -> str:
  return f'{number:,.2f}'.rstrip('0').rstrip('.')
