"""The texts that the steps of the highest spikes of the loss were trained on, for the page."""

import dataclasses
import html
import itertools
from collections.abc import Sequence

from paxlite.core.errors import UserError, line_of
from paxlite.core.json_text import JsonObject, number
from paxlite.core.wording import shortened
from paxlite.report.records import RunRecords
from paxlite.run_data.spikes import Spike, spikes

_SPIKES = 3  # of a run: the highest ones
_TOKENS = 120  # of a text
_LINES = 200  # of a step
_CHARS = 12_000  # of a step


@dataclasses.dataclass(frozen=True)
class SpikeTexts:
  """The contents shown for a spike.

  Attributes:
    run: The number of its run.
    spike: The spike.
    at: Where it is over steps, tokens and hours.
    text: The texts of its step, or why there are none.
  """

  run: int
  spike: Spike
  at: JsonObject
  text: str

  @property
  def name(self) -> str:
    return f'spike-{self.run}-{self.spike.step}'


def spike_texts(runs: Sequence[RunRecords], reads_data: bool = True) -> list[SpikeTexts]:
  """Returns the texts of the highest spikes of each run.

  Args:
    runs: The runs.
    reads_data: Whether the data of the runs are read, as far as they are here.
  """
  return [found for i, run in enumerate(runs) for found in _of_run(i, run, reads_data)]


def _of_run(index: int, run: RunRecords, reads_data: bool) -> list[SpikeTexts]:
  records = {r['step']: r for r in run.steps}
  losses = {step: number(r.get('loss')) for step, r in records.items()}
  highest = spikes({step: x for step, x in losses.items() if x is not None})[:_SPIKES]
  if not highest or not reads_data:
    return []
  texts = _texts(run, [spike.step for spike in highest])
  over = ('step', 'tokens', 'hours')
  return [
    SpikeTexts(index, spike, {name: records[spike.step].get(name) for name in over}, text)
    for spike, text in zip(highest, texts, strict=True)
  ]


def _texts(run: RunRecords, steps: Sequence[int]) -> list[str]:
  """Returns the texts of steps; that of a step that cannot be read says why."""
  try:
    from paxlite.run_data.run_data import RunData
    from paxlite.run_data.texts import lines

    data = RunData(str(run.folder))
    shown = (lines(data, s, data.batch(s), None, color=False, most=_TOKENS) for s in steps)
    return [shortened('\n'.join(itertools.islice(text, _LINES)), _CHARS) for text in shown]
  except (UserError, OSError, ImportError) as e:
    return [f'The texts of this step cannot be read here: {line_of(e)}'] * len(steps)


def section(found: Sequence[SpikeTexts], runs: Sequence[RunRecords]) -> str:
  """Returns the section of the page with the texts, each folded; '' if there are none."""
  blocks = [
    f'<details id="{html.escape(each.name)}"><summary>{html.escape(runs[each.run].name)}, step '
    f'{each.spike.step:,}: loss {each.spike.loss:.4f}, and {each.spike.before:.4f} before it'
    f'</summary><pre>{html.escape(each.text)}</pre></details>'
    for each in found
  ]
  if not blocks:
    return ''
  note = '<p class="note">A click on a spike of the training loss opens the texts of its step.</p>'
  return f'<section><h2>Texts of spikes</h2>{note}{"".join(blocks)}</section>'


def marks(found: Sequence[SpikeTexts]) -> list[JsonObject]:
  """Returns where spikes are in the curves of the loss, for the script of the page."""
  return [
    {'run': each.run, 'at': each.at, 'loss': each.spike.loss, 'id': each.name} for each in found
  ]
