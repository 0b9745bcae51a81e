"""Tables of a report, as rows of texts, and as Markdown."""

from collections.abc import Sequence

from paxlite import extensions
from paxlite.core.extension import imported
from paxlite.core.json_text import JsonObject, number
from paxlite.losses.metric_names import larger_is_better
from paxlite.report.curves import short
from paxlite.report.records import RunRecords, differing
from paxlite.run_data.episodes import said, worth

Table = tuple[list[str], list[list[str]]]  # the header, and rows
# metrics that repeat others, or count
_LEFT_OUT = ('aux_loss', 'log_pplx', 'num_predictions', 'total_loss')
_MOST_CHARS = 80  # of a value
_EPISODES = 32  # of a run: the last ones


def summary(runs: Sequence[RunRecords]) -> Table:
  """Returns a row for each run: its progress, its cost, and its last metrics."""
  header = ['run', 'experiment', 'step', 'loss', 'tokens', 'hours', 'goodput', 'starts', 'devices']
  rows = []
  for run in runs:
    last: JsonObject = next(
      (r for r in reversed(run.steps) if number(r.get('loss')) is not None), {}
    )
    spent = run.goodput
    rows.append([
      run.name,
      str(run.values.get('experiment') or '–').rpartition('.')[2],
      f'{run.steps[-1]["step"]:,}' if run.steps else '–',
      f'{last["loss"]:.4f}' if last else '–',
      short(last['tokens']) if last.get('tokens') else '–',
      f'{last["hours"]:.3g}' if last.get('hours') else '–',
      f'{spent.goodput:.1%}' if spent else '–',
      str(spent.attempts) if spent else '–',
      run.versions.get('devices', '–'),
    ])  # fmt: skip
  return header, rows


def evaluations(runs: Sequence[RunRecords]) -> Table:
  """Returns a row for each metric: its last and its best value in each run."""
  names = dict.fromkeys(pair for run in runs for pair in run.evaluated_metrics)
  errors = {name for name in names if name[1].endswith('_stderr')}
  header = ['input', 'metric', *(run.name for run in runs)]
  rows = []
  for name, metric in names:
    if (name, metric) in errors or metric in _LEFT_OUT:
      continue
    cells = [_evaluation(run, name, metric, (name, f'{metric}_stderr') in errors) for run in runs]
    rows.append([name, metric, *cells])
  return header, rows


def _evaluation(run: RunRecords, name: str, metric: str, has_error: bool) -> str:
  found = [r for r in run.evaluations_of.get(name, ()) if number(r.get(metric)) is not None]
  if not found:
    return '–'
  sign = -1 if larger_is_better(metric, run.losses) else 1
  last, best = found[-1], min(found, key=lambda r: sign * r[metric])
  error = number(last.get(f'{metric}_stderr')) if has_error else None
  text = f'{last[metric]:.4g}' + (f' ± {error:.2g}' if error is not None else '')
  return (
    text
    if best[metric] == last[metric]
    else f'{text} (best {best[metric]:.4g} at step {best["step"]:,})'
  )


def differences(runs: Sequence[RunRecords]) -> Table:
  """Returns a row for each attribute in which the runs differ."""
  header = ['attribute', *(run.name for run in runs)]
  return header, [[name, *map(_value, values)] for name, values in differing(runs)]


def episodes(runs: Sequence[RunRecords]) -> Table:
  """Returns a row for each of the last recorded episodes of the runs."""
  rows = [
    [
      run.name,
      f'{episode["step"]:,}',
      '\n'.join(said(episode.get('prompt'))),
      '\n'.join(said(episode.get('answer'))),
      worth(episode),
    ]
    for run in runs
    for episode in run.episodes[-_EPISODES:]
  ]
  return ['run', 'step', 'prompt', 'answer', 'reward'], rows


def goodputs(runs: Sequence[RunRecords]) -> Table:
  """Returns a row for each kind of time, with its share of each run's wall time."""
  from paxlite.training.goodput import KINDS

  known = [(run, run.goodput) for run in runs if run.goodput is not None]
  totals = {run.name: sum(spent.seconds.values()) for run, spent in known}
  rows = [
    [
      text,
      *(f'{spent.seconds[kind] / (totals[run.name] or 1):.1%}' for run, spent in known),
    ]
    for kind, text in KINDS.items()
    if any(spent.seconds[kind] for _, spent in known)
  ]
  return ['time spent on', *(run.name for run, _ in known)], rows


def versions(runs: Sequence[RunRecords]) -> Table:
  """Returns a row for each package, and for the devices."""
  names = dict.fromkeys(name for run in runs for name in run.versions)
  rows = [[name, *(run.versions.get(name, '–') for run in runs)] for name in names]
  return ['', *(run.name for run in runs)], rows


def sections(runs: Sequence[RunRecords]) -> list[tuple[str, list[str], list[list[str]], list[str]]]:
  """Returns what extensions add: (title, header, rows, sentences below the table) of each table."""
  makers = [imported(name) for e in extensions.found() for name in e.sections]
  return [section for make in makers for section in make(runs)]


def markdown(runs: Sequence[RunRecords]) -> str:
  """Returns the summary, the evaluations, the steps and the differences as Markdown."""
  parts = [_markdown(summary(runs)), _markdown(evaluations(runs))]
  for title, header, rows, notes in sections(runs):
    parts += [f'**{title}**' if rows else '', _markdown((header, rows)), '\n\n'.join(notes)]
  if len(runs) > 1:
    parts.append(_markdown(differences(runs)))
  return '\n\n'.join(filter(None, parts)) + '\n'


def _markdown(table: Table) -> str:
  header, rows = table
  if not rows:
    return ''
  line = lambda cells: f'| {" | ".join(map(_cell, cells))} |'
  return '\n'.join([line(header), line(['---'] * len(header)), *map(line, rows)])


def _cell(text: str) -> str:
  """Escapes a text for a table cell."""
  return ' '.join(text.split()).replace('|', '\\|')


def _value(value: object) -> str:
  text = '–' if value is None else str(value)
  return text if len(text) <= _MOST_CHARS else f'{text[:_MOST_CHARS]}…'
