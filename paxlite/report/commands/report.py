"""paxlite report RUN [RUN …] [--output=report.html] [--curves=FILE.svg] [--markdown=FILE.md]

Writes one HTML page about runs: curves over steps, tokens or hours, evaluations, time spent,
samples and differences. The page works offline. --curves writes the curves as SVG and --markdown
the tables; - is standard output. A click on a spike of the training loss shows the texts of its
step, read from the data; --texts=false leaves them out.

Example:
  paxlite report runs/narrow runs/wide --output=widths.html
"""

from collections.abc import Sequence

from paxlite.cli.parser import Parser, stored
from paxlite.core.errors import UserError
from paxlite.files.output import write_output

_POINTS = 2_000  # of a curve of the picture, which is not wider

PARSER = Parser(__doc__)
PARSER.option('runs', 'run folders', stored, nargs='+', metavar='RUN')
PARSER.option('--output', 'page to write (report.html)', stored, default='report.html')
PARSER.option('--curves', 'curves to write as SVG', stored)
PARSER.option('--markdown', 'tables to write as Markdown', stored)
PARSER.option('--texts', 'include the texts of loss spikes', bool, default=True)
PARSER.option('--title', 'page title')


def main(argv: Sequence[str]) -> None:
  args = PARSER.parsed(argv)
  if args.curves is not None and not args.curves.endswith('.svg'):
    raise UserError(f'--curves={args.curves} must end with .svg')

  from paxlite.report import curves, page, tables
  from paxlite.report.records import read_runs, thinned

  runs = read_runs(args.runs)
  title = args.title or f'paxlite: {", ".join(run.name for run in runs)}'
  _write(args.output, page.page(runs, title, args.texts))
  if args.curves is not None:
    names = [run.name for run in runs]
    drawn = [
      curves.svg(metric, 'steps', dict(zip(names, (thinned(p, _POINTS) for p in of), strict=True)))
      for metric, of in ((metric, points['step']) for metric, points in page.charts(runs))
    ]
    _write(args.curves, curves.sheet(drawn or [curves.svg('Training loss', 'steps', {})]))
  if args.markdown is not None:
    _write(args.markdown, tables.markdown(runs))


def _write(name: str, text: str) -> None:
  if name == '-':
    print(text, end='')
    return
  write_output(name, text.encode())
  print(f'{name}: {len(text.encode()) / 1000:,.0f} kB')
