"""paxlite report RUN [RUN …] [--output=report.html] [--curves=FILE.svg] [--markdown=FILE.md]

Writes one HTML page about runs: curves over steps, tokens or hours, evaluations, what the time was
spent on, samples, and what differs. The page needs no network and can be sent by mail. --curves
writes the curves as a picture, and --markdown the tables; - is standard output.

Example:
  paxlite report runs/narrow runs/wide --output=widths.html
"""

from collections.abc import Sequence

from paxlite.cli import command_line
from paxlite.core.errors import UserError
from paxlite.files.stored_output import write_output

_POINTS = 2_000  # of a curve of the picture, which is not wider


def main(argv: Sequence[str]) -> None:
  parser = command_line.Parser(__doc__, stored=['output'])
  parser.add_argument('runs', nargs='+', metavar='RUN', help='folders of runs')
  parser.add_argument('--output', default='report.html', help='the page to write (report.html)')
  parser.add_argument('--curves', help='a picture of the curves to write, as SVG')
  parser.add_argument('--markdown', help='the tables to write as Markdown')
  parser.add_argument('--title', help='the title of the page')
  args = command_line.parse_args(parser, argv)
  if args.curves is not None and not args.curves.endswith('.svg'):
    raise UserError(f'--curves={args.curves} must end with .svg, which browsers and papers take')

  from paxlite.tools.report_page import curves, page, tables
  from paxlite.tools.report_page.records import read_runs, thinned

  runs = read_runs(args.runs)
  title = args.title or f'paxlite: {", ".join(run.name for run in runs)}'
  _write(args.output, page.page(runs, title))
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


if __name__ == '__main__':
  command_line.run(main)
