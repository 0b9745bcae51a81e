"""paxlite ladder EXPERIMENT [--rungs=WIDTHxLAYERS,…] [--rates=…] [NAME=VALUE …]

Predicts the loss that a model will reach, with its uncertainty, from small models of its kind.
Trains them in turn, with learning rates and initial values scaled to width and depth (muP,
CompleteP), and fits a law to their held-out losses. --rates finds the learning rate too. Complete
runs are not repeated. See docs/ladder.md.

NAME=VALUE sets an attribute of the experiment and its small models.

Examples:
  paxlite ladder DemoGPT MAX_STEPS=100
  paxlite ladder DemoGPT --rungs=32x1,64x2,96x2,128x3 --rates=0.5,1,2 NUM_HEADS=16
  paxlite ladder my_module.MyGPT --print
"""

import json
import math
import pathlib
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from paxlite.cli.parser import Parser, experiment_name, local
from paxlite.cli.terminal import say
from paxlite.core.errors import UserError

if TYPE_CHECKING:
  from paxlite.ladder.answer import LadderFit

PARSER = Parser(__doc__)
PARSER.word('fdl_config', 'EXPERIMENT', 'experiment', experiment_name)
PARSER.option('--folder', 'folder of the runs (ladders/EXPERIMENT)', local, metavar='FOLDER')
PARSER.option('--rungs', 'sizes of small models, as 64x1,128x2')
PARSER.option('--asked', "size to predict (the experiment's)", metavar='SIZE')
PARSER.option('--base', 'size that the learning rate and other values suit', metavar='SIZE')
PARSER.option('--rates', 'learning-rate factors to try, as 0.5,1,2 (1)')
PARSER.option('--seeds', 'runs per model (1)', int, default=1)
PARSER.option('--print', 'print the training commands only', bool)
PARSER.attributes()
_POINTS = 40  # of a curve


def main(argv: Sequence[str]) -> None:
  args = PARSER.parsed(argv)
  if args.seeds < 1:
    raise UserError(f'--seeds={args.seeds} must be at least 1')
  from paxlite.experiments.language_model import LanguageModel
  from paxlite.ladder import rungs, sizes, trainings, transfer
  from paxlite.ladder.answer import LadderFit
  from paxlite.ladder.sizes import Size
  from paxlite.programs.launch import build_experiment

  experiment = build_experiment(args.fdl_config, [], args.attributes)
  if not isinstance(experiment, LanguageModel):
    raise UserError(f'{args.fdl_config} is not a language model, which a ladder needs')
  rungs.check(experiment)
  own = Size.of(experiment)
  asked = own if args.asked is None else Size.parsed(args.asked)
  stated = {Size.parsed(text) for text in args.rungs.split(',')} if args.rungs else None
  of_rungs = sorted(stated or sizes.default_rungs(experiment))
  sizes.check_count(of_rungs)
  every = {*of_rungs, asked}
  base = transfer.base_of(experiment, every) if args.base is None else Size.parsed(args.base)
  transfer.check_depths(experiment, {*every, base})
  values = transfer.values_of(experiment, asked, base)
  experiment.replaced(**values).validate()
  folder = pathlib.Path(args.folder or f'ladders/{args.fdl_config}')
  runs = rungs.rungs(
    args.fdl_config, args.attributes, experiment, of_rungs, base, _rates(args.rates), args.seeds,
    folder,
  )  # fmt: skip
  if args.print:
    for run in runs:
      say(run.command)
    return
  parameters = transfer.counted(experiment.replaced(**sizes.values_of(experiment, asked)))
  answer = LadderFit(list(trainings.trained(runs, say)), asked, parameters)
  (folder / 'ladder.json').write_text(json.dumps(answer.json, indent=1) + '\n')
  (folder / 'ladder.svg').write_text(picture(answer))
  values |= {'LEARNING_RATE': float(f'{experiment.LEARNING_RATE * answer.rate:.6g}')}
  words = rungs.words(args.attributes, rungs.needed(experiment, values))
  command = shlex.join(['paxlite', 'train', args.fdl_config, *words])
  say(f'\n{answer.text}\n\nTrain it with:\n{command}')


def picture(answer: 'LadderFit') -> str:
  """The losses by size, the law, and its interval up to the requested size, as SVG."""
  from paxlite.ladder.answer import CONFIDENCE
  from paxlite.report import curves

  law = answer.law()
  sizes = [*(n.blocks for _, n in answer.sizes), answer.parameters.blocks]
  first, last = min(sizes), max(sizes)
  shares = [i / _POINTS for i in range(_POINTS + 1)]
  at = [first * (last / first) ** share for share in shares]
  said = [law.predict(size, CONFIDENCE) for size in at]
  x = [math.log10(size) for size in at]
  series = {
    'measured': [
      (math.log10(n.blocks), answer.mean(size, answer.rate)) for size, n in answer.sizes
    ],
    'law': list(zip(x, (p.loss for p in said), strict=True)),
    f'{CONFIDENCE:.0%}, low': list(zip(x, (p.low for p in said), strict=True)),
    f'{CONFIDENCE:.0%}, high': list(zip(x, (p.high for p in said), strict=True)),
  }
  return curves.svg('held-out loss', 'log10 of the number of parameters in blocks', series)


def _rates(text: str | None) -> list[float]:
  """The factors of --rates; raises UserError if one is no number above 0."""
  if text is None:
    return [1.0]
  try:
    found = sorted({float(word) for word in text.split(',')})
  except ValueError:
    found = [0.0]
  if not all(0 < rate < math.inf for rate in found):
    raise UserError(f'--rates={text} must be numbers above 0, such as 0.5,1,2')
  return found
