"""python -m paxlite.tools.compile --fdl_config=EXPERIMENT --target=v5e-256 [--save=step.bin] …

Compiles the train step of an experiment for a machine that need not be there, and says whether it
fits, what it communicates and how fast it can be. --fdl.NAME=VALUE overrides an attribute; the mesh
must be that of the target, and COMPILER_OPTIONS go to XLA. --compiled_step=step.bin makes training
load what --save has written.

Targets: v5e-N, v5p-N, v6e-N (one slice of TPUs), Kxv5e-N (K slices), h100xN, and here. Compilers
come with the extras tpu and cuda.
"""

import argparse
import json
import pathlib
from collections.abc import Sequence

from paxlite.errors import UserError
from paxlite.tools import cli


def main(argv: Sequence[str]) -> None:
  parser = argparse.ArgumentParser(
    prog='python -m paxlite.tools.compile',
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument('--fdl_config', required=True, help='the experiment')
  parser.add_argument('--fiddler', action='append', default=[], help='as of paxlite.main')
  parser.add_argument('--target', required=True, help='the machine: see above')
  parser.add_argument('--save', type=pathlib.Path, help='where the compiled step goes')
  parser.add_argument('--json', type=pathlib.Path, help='where the report goes as JSON')
  args, overrides = cli.parse(parser, argv)

  from paxlite import targets

  if args.target != 'here':
    targets.prepare_environment()
  target = targets.parse(args.target)

  from paxlite import aot
  from paxlite.main import build_experiment

  experiment = build_experiment(args.fdl_config, args.fiddler, overrides)
  report = aot.compile_step(experiment, target, args.save)
  print(aot.page(report, target.chip))
  if args.json is not None:
    try:
      args.json.parent.mkdir(parents=True, exist_ok=True)
      args.json.write_text(json.dumps(report.as_json(), indent=1) + '\n')
    except OSError as e:
      raise UserError(f'--json={args.json} cannot be written: {e.strerror or e}') from None


if __name__ == '__main__':
  cli.run(main)
