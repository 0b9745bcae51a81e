"""paxlite read-hlo FILE --target=v5e-16 [--mesh=data=16,mdl=1] [--json=FILE]

Reads the text of a compiled program and prints its FLOPs, its memory traffic, its collectives and
what bounds it on the target's chip. The program may be anybody's: `compiled.as_text()` of JAX, a
file `*after_optimizations.txt` of XLA_FLAGS=--xla_dump_to=FOLDER, or a file that
`paxlite compile --write_hlo=FILE` has written.

--mesh names the mesh axes of the program with their sizes, the slowest first; all devices of the
target are one axis by default. --near names the devices of each axis within a slice or host, where
these are fewer.

Example:
  paxlite read-hlo step.hlo --target=h100x8 --mesh=replica=1,data=8,mdl=1
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Sequence

from paxlite.cli.parser import Parser, stored
from paxlite.core.errors import UserError
from paxlite.files import schemes
from paxlite.files.output import write_output

PARSER = Parser(__doc__)
PARSER.option('file', 'the text of a compiled program', stored, metavar='FILE')
PARSER.option('--target', 'the machine, as of paxlite compile', required=True)
PARSER.option('--mesh', 'NAME=SIZE,… of the mesh; default: all devices as one axis')
PARSER.option('--near', 'NAME=SIZE,… within a slice or host; default: as --mesh')
PARSER.option('--network', 'GB/s that a host of GPUs sends to others')
PARSER.option('--json', 'where the figures go as JSON', stored)


def main(argv: Sequence[str]) -> None:
  args = PARSER.parsed(argv)

  from paxlite.aot import roofline, targets

  target = targets.parse(args.target)
  if args.network is not None:
    target = targets.with_network(target, args.network)
  if target.chip is None:
    raise UserError('--target=here has no data sheet: name a chip, such as --target=v5e-4')
  devices = target.devices // target.slices
  sizes = _sizes('--mesh', args.mesh) if args.mesh else {'devices': devices}
  near = sizes | (_sizes('--near', args.near) if args.near else {})
  if math.prod(sizes.values()) != devices:
    raise UserError(f'--mesh={args.mesh} has {math.prod(sizes.values())} devices, not {devices}')
  if near.keys() != sizes.keys() or any(sizes[name] % near[name] for name in sizes):
    raise UserError(f'--near={args.near} does not divide the axes of --mesh={args.mesh}')
  path = pathlib.Path(schemes.local(args.file))
  try:
    text = path.read_text()
    links = roofline.Links(sizes, near)
    step = roofline.StepProgram(text, target.chip.platform, links, target.chip)
    costs = roofline.costs_of(step)
  except (OSError, ValueError) as error:
    raise UserError(f'{path} is not the text of a compiled program: {error}') from None
  print('\n'.join(roofline.lines(costs, target.chip)))
  if args.json:
    write_output(args.json, (json.dumps(dataclasses.asdict(costs), indent=1) + '\n').encode())


def _sizes(flag: str, text: str) -> dict[str, int]:
  """'data=16,mdl=1' as a dictionary.

  Raises:
    UserError: The text has another form.
  """
  sizes = {}
  for part in text.split(','):
    name, _, number = part.partition('=')
    if not name.strip() or not number.strip().isdigit() or int(number) < 1:
      raise UserError(f'{flag}={text}: write NAME=SIZE,NAME=SIZE, such as data=16,mdl=1')
    sizes[name.strip()] = int(number)
  return sizes
