"""paxlite convert-te CHECKPOINT --direction=fw2te --path=OUT

Converts a checkpoint's parameters and Adam moments, bit for bit, to Transformer Engine's fused
layers or back.

  fw2te  from paxlite's layers (any backend but USE_TE=layer) to USE_TE=layer
  te2fw  from USE_TE=layer to paxlite's layers

Continue a run from OUT with CHECKPOINT_RESTORE_PATH=OUT CHECKPOINT_RESTORE_STATE=True. FP8 scales
and histories are not converted: they start again. Flags of JAX-Toolbox's converter, such as
--input-path, also work.

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
PARSER.word('checkpoint', 'CHECKPOINT', 'run folder, or imported weights', stored)
PARSER.option('--path', 'folder to make', stored, required=True)


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
