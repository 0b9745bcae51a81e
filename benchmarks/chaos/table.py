"""What happened in all runs, by kinds of faults, as a table and as JSON."""

import collections
import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

LOST = 'steps', 'records', 'bits', 'checkpoints', 'hangs', 'unclear errors'

_WIDTH = 80  # of what a run said, in the table


@dataclasses.dataclass
class _Row:
  count: int = 0
  with_others: int = 0
  restarts: int = 0
  again: list[int] = dataclasses.field(default_factory=list)
  said: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
  lost: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)


class Table:
  """Counts.

  Attributes:
    phases: What runs did when they were killed.
    during_a_copy: Kills while a checkpoint was copied to the bucket.
  """

  def __init__(self) -> None:
    self._rows: dict[str, _Row] = collections.defaultdict(_Row)
    self._lost: collections.Counter[str] = collections.Counter()
    self._again: list[int] = []
    self._starts: collections.Counter[str] = collections.Counter()
    self._ends: collections.Counter[str] = collections.Counter()
    self._several = 0
    self.phases: collections.Counter[str] = collections.Counter()
    self.during_a_copy = 0

  @property
  def lost(self) -> int:
    """How much was lost."""
    return self._lost.total()

  def count(self, kind: str) -> int:
    """How often a kind of fault has happened."""
    return self._rows[kind].count if kind in self._rows else 0

  def add(
    self, place: str, kinds: Sequence[str], said: Iterable[str], before: Iterable[str],
    again: int | None, lost: Mapping[str, int],
  ) -> None:  # fmt: skip
    """Counts a start.

    Args:
      place: Where it was.
      kinds: The faults that happened.
      said: What the run said at its end.
      before: The faults since the run has last continued, for which `again` counts.
      again: Steps that are computed again since this start; None: it did not continue.
      lost: What was lost.
    """
    self._starts[place] += 1
    self._several += len(kinds) > 1
    for kind in kinds:
      row = self._rows[kind]
      row.count += 1
      row.with_others += len(kinds) > 1
      row.said.update(said)
    if again is not None and (charged := set(before)):
      self._again.append(again)
      for kind in charged:
        self._rows[kind].restarts += 1
        self._rows[kind].again.append(again)
    self.lose(lost, kinds)

  def lose(self, lost: Mapping[str, int], kinds: Iterable[str]) -> None:
    """Counts what was lost by a run that had these faults."""
    self._lost.update(lost)
    for kind in kinds:
      self._rows[kind].lost.update(lost)

  def end(self, place: str) -> None:
    """Counts a run that was brought to its end and compared."""
    self._ends[place] += 1

  def result(self) -> dict[str, Any]:
    """Returns all counts."""
    numbers = lambda found: {name: found[name] for name in LOST}
    steps = lambda again: {
      'median': statistics.median(again) if again else 0,
      'largest': max(again, default=0),
    }
    return {
      'faults': sum(row.count for row in self._rows.values()),
      'starts': dict(self._starts),
      'starts_with_several_faults': self._several,
      'runs_to_the_end': dict(self._ends),
      'lost': numbers(self._lost),
      'steps_again': steps(self._again) | {'all': sum(self._again)},
      'killed_while': dict(self.phases.most_common()),
      'killed_during_a_copy_to_the_bucket': self.during_a_copy,
      'kinds': {
        kind: {
          'count': row.count,
          'with_others': row.with_others,
          'restarts': row.restarts,
          'steps_again': steps(row.again),
          'said': dict(row.said.most_common()),
          'lost': numbers(row.lost),
        }
        for kind, row in self._rows.items()
        if row.count
      },
    }


def markdown(result: Mapping[str, Any]) -> str:
  """Returns the table of a result."""
  lines = [
    '| fault | times | with others | restarts | steps again: median, most | what the run said '
    f'most often | lost: {", ".join(LOST)} |',
    '|---|---|---|---|---|---|---|',
  ]
  for kind, row in result['kinds'].items():
    again, said = row['steps_again'], list(row['said'].items())[:2]
    texts = '; '.join(f'{_short(text)} ({count})' for text, count in said).replace('|', '\\|')
    lost = ', '.join(str(row['lost'][name]) for name in LOST)
    lines.append(
      f'| {kind} | {row["count"]} | {row["with_others"]} | {row["restarts"]} | '
      f'{again["median"]:g}, {again["largest"]} | {texts} | {lost} |'
    )
  again, ends = result['steps_again'], sum(result['runs_to_the_end'].values())
  lost = ', '.join(str(result['lost'][name]) for name in LOST)
  lines.append(
    f'| all | {result["faults"]} | | | {again["median"]:g}, {again["largest"]} | '
    f'{ends} runs reached their end, in {sum(result["starts"].values())} starts | {lost} |'
  )
  return '\n'.join(lines)


def _short(text: str) -> str:
  return text if len(text) <= _WIDTH else f'{text[: _WIDTH - 1]}…'
