"""Writes a report as one HTML page that needs no network."""

import html
import itertools
import json
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence

from paxlite.core.json_text import Json, JsonObject
from paxlite.core.wording import shortened
from paxlite.report import episodes, spike_texts, tables
from paxlite.report.curves import stroke
from paxlite.report.records import Points, RunRecords, thinned

_POINTS = 40_000  # of all curves of the page together
_FEWEST = 100  # points of a curve
_CURVES = {
  'loss': 'Training loss',
  'lr': 'Learning rate',
  'grad_norm': 'Gradient norm',
  'tokens_per_second': 'Tokens per second',
  'mfu': 'MFU',
}
_EVALUATED = {
  'avg_xent': 'loss',
  'bits_per_byte': 'bits per byte',
  'fraction_of_correct_next_step_preds': 'accuracy',
  'acc': 'accuracy',
}
_OVER = {'step': 'steps', 'tokens': 'tokens', 'hours': 'hours of steps'}
_CHARTS = 60  # the first ones; a run may be evaluated on any number of inputs
_SAMPLES = 12  # of a run: the last ones
_SAMPLE_CHARS = 5_000
_VALUE_CHARS = 2_000
_ROWS = 1_000  # of a table
_HERE = pathlib.Path(__file__).parent


def page(runs: Sequence[RunRecords], title: str, reads_data: bool = False) -> str:
  """Returns the page.

  Args:
    runs: The runs.
    title: Its title.
    reads_data: Whether the texts of spikes of the loss are read from the data of the runs.
  """
  curves, shown, of = _curves(runs)
  spikes = spike_texts.spike_texts(runs, reads_data)
  data = {
    'runs': [run.name for run in runs],
    'strokes': [stroke(i) for i in range(len(runs))],
    'over': _OVER,
    'curves': curves,
    'spikes': spike_texts.marks(spikes),
    'loss': _CURVES['loss'],
  }
  sections = [
    _table('Runs', tables.summary(runs)),
    _warnings(runs),
    '<section id="curves"></section>',
    f'<p class="note">The curves show {shown:,} of {of:,} points; left-out intervals keep their '
    'smallest and largest points. Hours count time spent in steps.</p>'
    if of > shown
    else '',
    spike_texts.section(spikes, runs),
    _table('Evaluations', tables.evaluations(runs)),
    _table('What the time was spent on', tables.goodputs(runs)),
    *_added(runs),
    _table('What differs', tables.differences(runs)) if len(runs) > 1 else '',
    _samples(runs),
    _table('Episodes', tables.episodes(runs)),
    *_episodes(runs),
    _values(runs),
    _table('Versions and devices', tables.versions(runs)),
  ]
  parts = {
    'title': html.escape(title),
    'body': '\n'.join(filter(None, sections)),
    'data': _script_value(data),
  }
  return _filled(_HERE / 'page.html', parts)


def _added(runs: Sequence[RunRecords]) -> Iterator[str]:
  for title, header, rows, notes in tables.sections(runs):
    yield _table(title, (header, rows))
    yield from (f'<p class="note">{html.escape(text)}</p>' for text in notes)


def _episodes(runs: Sequence[RunRecords]) -> Iterator[str]:
  shown = [(title, table) for title, table in episodes.tables(runs) if table[1]]
  yield from (_table(title, table) for title, table in shown)
  if shown:
    yield (
      '<p class="note">new: the share of three words in a row that no answer of an earlier step '
      'has. Prompts over the steps have the best answer of each step.</p>'
    )


def charts(runs: Sequence[RunRecords]) -> list[tuple[str, dict[str, list[Points]]]]:
  """Returns titles, each with the points of all runs over steps, tokens and hours."""
  drawn = ((t, series) for t, series in _series(runs) if any(map(len, series['step'])))
  return list(itertools.islice(drawn, _CHARTS))


def _series(runs: Sequence[RunRecords]) -> Iterator[tuple[str, dict[str, list[Points]]]]:
  for metric, title in _CURVES.items():
    yield title, {o: [run.series(metric, o) for run in runs] for o in _OVER}
  for name, metric in dict.fromkeys(pair for run in runs for pair in run.evaluated_metrics):
    if metric in _EVALUATED:
      title = f'{name}: {_EVALUATED[metric]}'
      yield title, {o: [run.evaluated(name, metric, o) for run in runs] for o in _OVER}


def _curves(runs: Sequence[RunRecords]) -> tuple[list[JsonObject], int, int]:
  """Returns the curves with a list of points for each run, and how many points there are."""
  found = charts(runs)
  number = max(1, len(found) * len(runs) * len(_OVER))
  most = max(_FEWEST, _POINTS // number)
  curves = [
    {'title': t, 'series': {o: [_short(thinned(p, most)) for p in ps] for o, ps in series.items()}}
    for t, series in found
  ]
  of = sum(len(p) for _, series in found for p in series['step'])
  shown = sum(min(len(p), len(thinned(p, most))) for _, s in found for p in s['step'])
  return curves, shown, of


def _short(points: Points) -> list[list[float]]:
  return [[float(f'{x:.6g}'), float(f'{y:.5g}')] for x, y in points]


def _table(title: str, table: tables.Table) -> str:
  header, rows = table
  if not rows:
    return ''
  head = ''.join(f'<th>{html.escape(name)}</th>' for name in header)
  row = lambda cells: ''.join(
    f'<td data-label="{html.escape(name)}">{html.escape(shortened(cell, _VALUE_CHARS))}</td>'
    for name, cell in zip(header, cells, strict=False)
  )
  shown = rows[:_ROWS]
  if len(rows) > _ROWS:
    shown = [*shown, [f'… and {len(rows) - _ROWS:,} more rows']]
  body = ''.join(f'<tr>{row(cells)}</tr>' for cells in shown)
  return (
    f'<section><h2>{html.escape(title)}</h2><div class="wide"><table><thead><tr>{head}</tr>'
    f'</thead><tbody>{body}</tbody></table></div></section>'
  )


def _warnings(runs: Sequence[RunRecords]) -> str:
  items = [
    f'<li>{html.escape(f"{run.name}: {text}")}</li>' for run in runs for text in run.warnings
  ]
  return f'<ul class="note">{"".join(items)}</ul>' if items else ''


def _samples(runs: Sequence[RunRecords]) -> str:
  blocks = []
  for run in runs:
    for sample in run.samples[-_SAMPLES:]:
      step, prompt = sample['step'], str(sample.get('prompt', ''))
      text = str(sample.get('text', '')).removeprefix(prompt)
      blocks.append(
        f'<figure><figcaption>{html.escape(run.name)}, step {step:,}</figcaption>'
        f'<pre><b>{html.escape(shortened(prompt, _SAMPLE_CHARS))}</b>'
        f'{html.escape(shortened(text, _SAMPLE_CHARS))}</pre></figure>'
      )
  return f'<section><h2>Samples</h2>{"".join(blocks)}</section>' if blocks else ''


def _values(runs: Sequence[RunRecords]) -> str:
  blocks = []
  for run in runs:
    values = list(run.values.items())
    lines = '\n'.join(shortened(f'{name} = {v!r}', _VALUE_CHARS) for name, v in values[:_ROWS])
    if lines:
      blocks.append(
        f'<details><summary>{html.escape(run.name)}</summary><pre>{html.escape(lines)}</pre>'
        '</details>'
      )
  return f'<section><h2>Values</h2>{"".join(blocks)}</section>' if blocks else ''


def _filled(template: pathlib.Path, parts: Mapping[str, str]) -> str:
  """Returns a template with each marker, <!--name--> or /*name*/, replaced by its part.

  What looks like a marker in a part stays as it is.

  Args:
    template: A file of the package.
    parts: HTML or JavaScript by the names of the markers.
  """
  names = '|'.join(map(re.escape, parts))
  marker = re.compile(rf'<!--({names})-->|/\*({names})\*/')
  text = template.read_text(encoding='utf-8')
  assert {a or b for a, b in marker.findall(text)} == set(parts), f'{template} lacks markers'
  return marker.sub(lambda found: parts[found[1] or found[2]], text)


def _script_value(value: Json) -> str:
  """Returns a value as JavaScript that cannot end the script it is in."""
  return json.dumps(value, separators=(',', ':')).replace('<', '\\u003c')
