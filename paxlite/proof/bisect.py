"""paxlite bisect RUN OTHER [NAME=VALUE …]

Finds where two runs that should agree diverge. Prints what differs before training (values,
versions, devices, data), the first recorded step with other numbers, and the last equal
checkpoints. Replays both from there and names the first step with other bits, and its batch,
gradients or arrays that differ. NAME=VALUE changes both, such as the mesh on other devices. Writes
nothing. Start several processes as for a run. See docs/verifying.md.

Example:
  paxlite bisect runs/yesterday runs/today
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from paxlite.cli import command_line
from paxlite.cli.parser import Parser, stored
from paxlite.core.errors import UserError

if TYPE_CHECKING:
  from paxlite.programs.run import Run

PARSER = Parser(__doc__)
PARSER.word('first', 'RUN', 'run folder', stored)
PARSER.word('second', 'OTHER', 'folder of another run', stored)
PARSER.option(
  '--import', 'your module with the class of a run', action='append', default=[],
  dest='imports', metavar='MODULE',
)  # fmt: skip
PARSER.processes()
PARSER.attributes()


def main(argv: Sequence[str]) -> None:
  args = PARSER.parsed(argv)
  for module in args.imports:
    command_line.import_asked(module)

  from paxlite.compilation import cache
  from paxlite.parallel import devices
  from paxlite.processes import join
  from paxlite.programs.agreement import statement
  from paxlite.proof.bisection import bisect

  runs = [_run(folder, args.attributes) for folder in (args.first, args.second)]
  peers = join.join(
    args.server_addr,
    args.num_hosts,
    args.host_idx,
    required=args.multiprocess_gpu,
    statement=lambda: {
      f'{name} of {run}': stated
      for run, each in zip('AB', runs, strict=True)
      for name, stated in statement(each, 'bisect').items()
    },
  )
  if peers.count == 1:
    cache.enable()
    devices.present()
  with peers, join.leaving_together():
    bisect(*runs)


def _run(folder: str, changes: Mapping[str, str]) -> 'Run':
  from paxlite.programs.launch import build_experiment, run_in
  from paxlite.programs.run import Run
  from paxlite.programs.run_folder import located_run
  from paxlite.proof.replay import copied

  found = run_in(folder)
  if found is None:
    raise UserError(f'{folder} holds no run (experiment.json is missing)')
  experiment = build_experiment(found['experiment'], [], dict(changes), found)
  path, address = located_run(folder, None)
  return copied(Run(experiment, path, address=address, read_only=True, save=False))
