"""paxlite explain EXPERIMENT [--target=v5e-256] [NAME=VALUE …] [--json=RUN/explanation.json]

Compiles the train step of an experiment, and says where its memory and its time go: what paxlite
compile prints, the parts of the state, and the saved activations by the modules that make them.
NAME=VALUE sets an attribute.

The targets are those of paxlite compile. The default is here: as many devices as the mesh has.
`paxlite report` shows the explanation.json in the folder of a run.

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
PARSER.word('fdl_config', 'EXPERIMENT', 'the experiment', experiment_name)
PARSER.option('--fiddler', 'a function that edits the config', action='append', default=[])
PARSER.option('--target', 'the machine (here)', default='here')
PARSER.option('--json', 'where the explanation goes as JSON', stored)
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
