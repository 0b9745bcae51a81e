"""Episodes of rollouts, sorted to show how a model earns its rewards.

A model that games a reward is seen at the ends of these orders: the best rewarded answers, the
longest and shortest, those that are new or that only repeat, and one prompt over the steps.
"""

import collections
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from paxlite.core.json_text import Json, JsonObject, number
from paxlite.report.records import RunRecords
from paxlite.run_data.episodes import said, worth

Table = tuple[list[str], list[list[str]]]  # the header, and rows
_ENDS = 8  # episodes at each end of an order
_PROMPTS, _STEPS = 3, 12  # that are shown over the steps, and the most steps of each
_WORDS = 3  # in a row, which are compared with those of earlier answers
_HEADER = ['run', 'step', 'reward', 'characters', 'new', 'prompt', 'answer']


class Seen(NamedTuple):
  """An episode with its sort keys.

  Attributes:
    run: The name of its run.
    record: What the run has kept of it.
    length: Characters of its answers.
    novelty: The share of its runs of three words that no answer of an earlier step has; 0 of an
      answer without words.
  """

  run: str
  record: JsonObject
  length: int
  novelty: float

  @property
  def reward(self) -> float | None:
    return number(self.record.get('reward'))

  @property
  def cells(self) -> list[str]:
    prompt, answer = ('\n'.join(said(self.record.get(key))) for key in ('prompt', 'answer'))
    step, new = f'{self.record["step"]:,}', f'{self.novelty:.0%}'
    return [self.run, step, worth(self.record), f'{self.length:,}', new, prompt, answer]


def seen(run: RunRecords) -> list[Seen]:
  """Returns the episodes of a run in the order of their steps."""
  found: list[Seen] = []
  known: set[tuple[str, ...]] = set()
  new: set[tuple[str, ...]] = set()  # of the step
  before: Json = None
  for record in sorted(run.episodes, key=lambda r: r['step']):
    if record['step'] != before:
      known |= new
      new, before = set(), record['step']
    texts = answers(record)
    parts = {part for text in texts for part in _parts(text.split())}
    share = len(parts - known) / len(parts) if parts else 0.0
    found.append(Seen(run.name, record, sum(map(len, texts)), share))
    new |= parts
  return found


def answers(record: JsonObject) -> list[str]:
  """Returns the model's answers in an episode."""
  said = record.get('answer')
  messages = [m for m in said if isinstance(m, dict)] if isinstance(said, list) else []
  return [str(m.get('content', '')) for m in messages if m.get('role') == 'assistant']


def tables(runs: Sequence[RunRecords]) -> Iterator[tuple[str, Table]]:
  """Yields titles with tables: both ends of each order, and prompts over the steps."""
  every = [each for run in runs for each in seen(run)]
  orders: dict[str, Callable[[Seen], float | None]] = {
    'reward': lambda each: each.reward,
    'length': lambda each: float(each.length),
    'novelty': lambda each: each.novelty,
  }
  for name, value in orders.items():
    pairs = [(x, each) for each in every if (x := value(each)) is not None]
    ranked = [each for _, each in sorted(pairs, key=lambda pair: -pair[0])]
    shown = ranked if len(ranked) <= 2 * _ENDS else [*ranked[:_ENDS], *ranked[-_ENDS:]]
    yield f'Episodes by {name}: highest and lowest', (_HEADER, [each.cells for each in shown])
  yield 'Prompts over the steps', (_HEADER, [each.cells for each in _over_steps(every)])


def _over_steps(every: Sequence[Seen]) -> Iterator[Seen]:
  """Yields the best rewarded episode of each step, for the prompts of most steps."""
  best: dict[tuple[str, str], dict[int, Seen]] = collections.defaultdict(dict)
  for each in every:
    of_prompt = best[each.run, str(each.record.get('prompt'))]
    other = of_prompt.get(each.record['step'])
    if other is None or (each.reward or 0.0) > (other.reward or 0.0):
      of_prompt[each.record['step']] = each
  repeated = [steps for steps in best.values() if len(steps) > 1]
  for steps in sorted(repeated, key=len, reverse=True)[:_PROMPTS]:
    found = list(steps.values())
    stride = -(-len(found) // _STEPS)
    yield from found[::stride]


def _parts(words: Sequence[str]) -> Iterator[tuple[str, ...]]:
  """Yields the runs of words of a text; a shorter text is one."""
  for i in range(max(1, len(words) - _WORDS + 1)) if words else ():
    yield tuple(words[i : i + _WORDS])
