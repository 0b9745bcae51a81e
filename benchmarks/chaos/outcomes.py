"""What a run has at its end, and how it differs from that of an undisturbed run."""

import collections
import dataclasses
import hashlib
import json
import pathlib

from paxlite.checkpointing.checksums import folder_name

_Records = list[tuple[int, str]]


@dataclasses.dataclass(frozen=True)
class Outcome:
  """The results of a run, of which every bit counts.

  Attributes:
    losses: Loss and norm of the gradients of each record of a step.
    evaluations: The losses of each record of an evaluation.
    state: A digest of each file of the last checkpoint's state, by its path.
  """

  losses: _Records
  evaluations: _Records
  state: dict[str, str]

  @classmethod
  def of(cls, folder: pathlib.Path, step: int) -> 'Outcome':
    """Reads that of a folder whose last step is `step`."""
    state = folder / 'checkpoints' / folder_name(step) / 'state'
    chunks = sorted(p for p in state.glob('*/*') if not p.name.startswith('.'))
    return cls(
      _records(folder / 'metrics.jsonl', ('loss', 'grad_norm')),
      _records(folder / 'eval_metrics.jsonl', ('input', 'avg_xent')),
      {c.relative_to(state).as_posix(): hashlib.sha256(c.read_bytes()).hexdigest() for c in chunks},
    )

  def lost(self, found: 'Outcome') -> collections.Counter[str]:
    """Returns how many records and bits another outcome lacks, has twice, or has otherwise."""
    counts: collections.Counter[str] = collections.Counter()
    for mine, theirs in (
      (self.losses, found.losses),
      (self.evaluations, found.evaluations),
      (list(self.state.items()), list(found.state.items())),
    ):
      steps, other = (
        collections.Counter(k for k, _ in mine),
        collections.Counter(k for k, _ in theirs),
      )
      counts['records'] += ((steps - other) + (other - steps)).total()
      values = dict(mine)
      counts['bits'] += sum(k in values and values[k] != value for k, value in theirs)
    return +counts


def _records(path: pathlib.Path, keys: tuple[str, ...]) -> _Records:
  records = map(json.loads, path.read_text().splitlines())
  return [(r['step'], repr([r[key] for key in keys])) for r in records]
