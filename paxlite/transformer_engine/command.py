"""paxlite convert-te CHECKPOINT --direction=fw2te --path=OUT

Converts a checkpoint to the fused layers of Transformer Engine or back. The parameters and Adam's
moments are converted bit for bit.

  fw2te  from paxlite's layers (any backend but USE_TE=layer) to USE_TE=layer
  te2fw  from USE_TE=layer to paxlite's layers

A run continues from OUT with CHECKPOINT_RESTORE_PATH=OUT CHECKPOINT_RESTORE_STATE=True.
FP8's scales and histories are not converted, because they belong to the backend that made them:
they start again. The flags of the converter in JAX-Toolbox are understood, such as --input-path.

Example:
  paxlite convert-te runs/llama --direction=fw2te --path=runs/llama-te
"""

from collections.abc import Sequence

from paxlite.cli import command_line
from paxlite.cli.parser import Parser, stored
from paxlite.core import shell
from paxlite.files import output

PARSER = Parser(__doc__)
PARSER.option('--direction', '', required=True, choices=('fw2te', 'te2fw'))
PARSER.word('checkpoint', 'CHECKPOINT', 'a job_log_dir, or imported weights', stored)
PARSER.option('--path', 'the folder to make', stored, required=True)


def main(argv: Sequence[str]) -> None:
  argv = command_line.translate('convert-te', argv)
  args = PARSER.parsed(argv)

  from paxlite.checkpointing.source import find_source
  from paxlite.transformer_engine import conversion

  source = find_source(args.checkpoint)
  with (
    output.output_folder(args.path, last='checksums.json') as path,
    command_line.progress('converting') as report,
  ):
    size, experiment = conversion.convert(source, path, args.direction == 'fw2te', report)
  print(f'{args.path}: {size:,} bytes of {type(experiment).__name__}')
  values = {k: getattr(experiment, k) for k in ('USE_TE', 'PACKED_INPUT')}
  values['CHECKPOINT_RESTORE_PATH'] = args.path
  if 'step' in source.variables:
    values['CHECKPOINT_RESTORE_STATE'] = True
  print(f'Continues with {shell.flags(values)}')
