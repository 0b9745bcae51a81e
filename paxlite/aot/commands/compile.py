"""paxlite compile EXPERIMENT --target=v5e-256 [NAME=VALUE …] [--save=step.bin]

Compiles an experiment's train step for a machine you need not have, and reports whether it fits,
what it communicates and how fast it can be. The mesh must match the target. COMPILER_OPTIONS go to
XLA. --compiled_step=step.bin makes training load the step that --save wrote, and
XLA_FLAGS=--xla_dump_to=FOLDER writes the program text.

--network=50 assumes 50 GB/s between GPU hosts instead of their usual speed (H100: 400 GB/s).

Exits with 1 if the step does not fit, and 2 for wrong input.

Targets: v5e-N, v5p-N, v6e-N, tpu7x-N (one TPU slice), Kxv5e-N (K slices), a100xN, l40sxN, h100xN,
h200xN, b200xN, gb200xN, and here. The extras tpu and cuda install the compilers.

Examples:
  paxlite compile TinyGPT --target=here
  paxlite compile LLaMA3_8B --target=h100x64 'ICI_MESH_SHAPE=[1,8,1]' 'DCN_MESH_SHAPE=[1,8,1]'
"""

import json
import pathlib
import sys
from collections.abc import Sequence

from paxlite.cli.parser import Parser, experiment_name, local, stored
from paxlite.files.output import check_output, write_output

PARSER = Parser(__doc__)
PARSER.word('fdl_config', 'EXPERIMENT', 'experiment', experiment_name)
PARSER.option('--fiddler', 'function that edits the config', action='append', default=[])
PARSER.option('--target', 'machine: see above', required=True)
PARSER.option('--network', 'GB/s between GPU hosts')
PARSER.option('--calibration', 'measured chip speeds; see docs/planning.md', stored)
PARSER.option('--save', 'file for the compiled step', local)
PARSER.option('--json', 'report to write as JSON', stored)
PARSER.attributes()


def main(argv: Sequence[str]) -> None:
  args = PARSER.parsed(argv)
  for flag in ('save', 'json'):
    check_output(f'--{flag}', getattr(args, flag))

  from paxlite.aot import targets

  if args.target != 'here':
    targets.prepare_environment()
  target = targets.parse(args.target, args.calibration)
  if args.network is not None:
    target = targets.with_network(target, args.network)

  import jax

  # a program from JAX's cache cannot be saved again, and its time would not be the compiler's
  jax.config.update('jax_enable_compilation_cache', False)

  from paxlite.aot import analysis, explanation_tables
  from paxlite.programs.launch import build_experiment

  experiment = build_experiment(args.fdl_config, args.fiddler, args.attributes)
  report = analysis.compile_step(experiment, target, args.save and pathlib.Path(args.save))
  found = report.as_json()
  print(explanation_tables.text({'report': found}))
  if args.json is not None:
    write_output(args.json, (json.dumps(found, indent=1) + '\n').encode())
  if report.fits is False:
    sys.exit(1)
