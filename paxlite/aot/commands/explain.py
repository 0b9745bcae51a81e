"""paxlite explain EXPERIMENT [--target=v5e-256] [NAME=VALUE …] [--json=RUN/explanation.json]

Compiles an experiment's train step and shows where memory and time go: the report of `paxlite
compile`, the parts of the state, and saved activations by module.

Targets are as for `paxlite compile`; the default, here, has as many devices as the mesh. `paxlite
report` shows the explanation.json in a run folder.

Examples:
  paxlite explain TinyGPT
  paxlite explain LLaMA3_8B --target=h100x64 'ICI_MESH_SHAPE=[1,8,1]' 'DCN_MESH_SHAPE=[1,8,1]'
"""

import json
import os
from collections.abc import Sequence

from paxlite.cli.parser import Parser, experiment_name, stored
from paxlite.files.output import check_output, write_output

PARSER = Parser(__doc__)
PARSER.word('fdl_config', 'EXPERIMENT', 'experiment', experiment_name)
PARSER.option('--fiddler', 'function that edits the config', action='append', default=[])
PARSER.option('--target', 'machine (here)', default='here')
PARSER.option('--json', 'explanation to write as JSON', stored)
PARSER.attributes()


def main(argv: Sequence[str]) -> None:
  args = PARSER.parsed(argv)
  check_output('--json', args.json)

  from paxlite.aot import targets

  if args.target != 'here':
    targets.prepare_environment()

  import jax

  # a program from JAX's cache may lack its text
  jax.config.update('jax_enable_compilation_cache', False)

  from paxlite.aot import analysis, explanation_tables
  from paxlite.programs.launch import build_experiment

  experiment = build_experiment(args.fdl_config, args.fiddler, args.attributes)
  if args.target == 'here' and 'device_count' not in os.environ.get('XLA_FLAGS', ''):
    jax.config.update('jax_num_cpu_devices', experiment.num_devices)
  found = analysis.explain(experiment, targets.parse(args.target))
  print(explanation_tables.text(found))
  if args.json is not None:
    write_output(args.json, (json.dumps(found, indent=1) + '\n').encode())
