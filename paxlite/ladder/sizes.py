"""Model sizes (width and depth), and the attributes that follow from them."""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import NamedTuple, Self

from paxlite.config.attribute_kinds import Kind, names_of
from paxlite.config.attributes import attribute_types
from paxlite.core.errors import UserError
from paxlite.experiments.language_model import LanguageModel

# attributes that grow with the width, heads of one size among them
_GROWING = (
  'MODEL_DIMS', 'NUM_HEADS', 'NUM_KV_HEADS', 'HIDDEN_DIMS', 'EXPERT_HIDDEN_DIMS',
  'SHARED_EXPERT_HIDDEN_DIMS',
)  # fmt: skip
_CONSTANT = {
  'VOCAB_SIZE', 'DIMS_PER_HEAD', 'NUM_LAYERS', 'NUM_EXPERTS', 'NUM_SHARED_EXPERTS',
  'BLOCKS_PER_LAYER', 'NUM_DENSE_BLOCKS', 'RELATIVE_BIAS_BUCKETS',
}  # fmt: skip


class Parameters(NamedTuple):
  """The numbers of parameters of a model."""

  all: int  # all of them
  # those but for the embedding and the output head, by which losses follow a law better
  # (https://arxiv.org/abs/2001.08361, section 3.2)
  blocks: int


MOST_RUNGS = 5  # that default_rungs returns
FEWEST_RUNGS = 4  # which determine the three numbers of a scaling law, and its uncertainty


@dataclasses.dataclass(frozen=True, order=True)
class Size:
  """The size of a model."""

  width: int  # MODEL_DIMS
  layers: int  # NUM_LAYERS

  @classmethod
  def parsed(cls, text: str) -> Self:
    """Parses a size such as 64x2; raises UserError."""
    found = re.fullmatch(r'([1-9]\d*)[x×]([1-9]\d*)', text.strip())
    if found is None:
      raise UserError(f'{text!r} must be WIDTHxLAYERS, such as 64x2')
    return cls(int(found[1]), int(found[2]))

  @classmethod
  def of(cls, experiment: LanguageModel) -> Self:
    """Returns the size of an experiment."""
    return cls(experiment.MODEL_DIMS, experiment.NUM_LAYERS)

  def __str__(self) -> str:
    return f'{self.width}x{self.layers}'


def check(experiment: LanguageModel) -> None:
  """Raises UserError if an experiment has widths that the rules do not scale."""
  values, types = experiment.values(), attribute_types(type(experiment))
  others = [
    f'{name}={value}'
    for name in names_of(types, Kind.SHAPE)
    if type(value := values[name]) is int and value and name not in {*_GROWING, *_CONSTANT}
  ]
  if others:
    raise UserError(
      f'{type(experiment).__name__} has {", ".join(others)}, which the ladder cannot scale with '
      'the width: it supports models of attention and feed-forward layers or experts'
    )


def step_of_widths(experiment: LanguageModel) -> int:
  """Returns the smallest width with whole groups of heads; all widths are its multiples."""
  groups = math.gcd(experiment.NUM_HEADS, experiment.NUM_KV_HEADS)
  return experiment.MODEL_DIMS // math.gcd(experiment.MODEL_DIMS, groups)


def values_of(experiment: LanguageModel, size: Size) -> dict[str, int]:
  """Returns the attribute values that give an experiment another size.

  Heads keep their width, so that there are fewer or more of them. All other widths keep their ratio
  to MODEL_DIMS. Raises UserError if the width is no multiple of `step_of_widths`.
  """
  step = step_of_widths(experiment)
  if size.width % step:
    raise UserError(
      f'{size}: {type(experiment).__name__} has {experiment.NUM_HEADS} heads '
      f'(NUM_KV_HEADS={experiment.NUM_KV_HEADS}) in {experiment.MODEL_DIMS} dimensions, so widths '
      f'must be multiples of {step}'
    )
  values = experiment.values()
  scaled = lambda name: round(int(str(values[name])) * size.width / experiment.MODEL_DIMS)
  growing = {name: scaled(name) for name in _GROWING if name in values}
  return {**growing, 'DIMS_PER_HEAD': experiment.DIMS_PER_HEAD, 'NUM_LAYERS': size.layers}


def check_count(rungs: Sequence[Size]) -> None:
  """Raises UserError if there are fewer than FEWEST_RUNGS sizes."""
  if len(rungs) < FEWEST_RUNGS:
    raise UserError(
      f'{len(rungs)} sizes cannot determine a law of three numbers and its uncertainty: a ladder '
      f'needs {FEWEST_RUNGS}'
    )


def fewest_layers(experiment: LanguageModel) -> int:
  """Returns the layers of the least deep model of a kind."""
  return experiment.num_first_blocks + experiment.blocks_per_layer


def default_rungs(experiment: LanguageModel) -> list[Size]:
  """Returns up to MOST_RUNGS sizes below an experiment's, as deep for their width as it is.

  If its heads allow few widths, there are sizes of half that depth as well. Raises UserError if
  there are fewer than FEWEST_RUNGS.
  """
  whole, step = Size.of(experiment), step_of_widths(experiment)
  first, period = experiment.num_first_blocks, experiment.blocks_per_layer
  deep = lambda width, divisor: (
    first + period * max(1, round((whole.layers - first) * width / whole.width / period / divisor))
  )
  widths = range(step, whole.width * 3 // 4 + 1, step)
  found = [Size(width, deep(width, 1)) for width in widths]
  if len(found) < FEWEST_RUNGS:
    found = sorted({*found, *(Size(width, deep(width, 2)) for width in widths)})
  if len(found) < FEWEST_RUNGS:
    raise UserError(
      f'the heads of {type(experiment).__name__} (NUM_HEADS={experiment.NUM_HEADS}, '
      f'NUM_KV_HEADS={experiment.NUM_KV_HEADS}) allow only widths that are multiples of {step}, '
      "too few below the model's: state sizes of several depths, as --rungs="
      + ','.join(f'{step}x{layers}' for layers in (1, 2, 3, 4))
    )
  if len(found) <= MOST_RUNGS:
    return found
  ends = math.log(found[0].width), math.log(found[-1].width)
  share = lambda i: i / (MOST_RUNGS - 1)
  wanted = [math.exp(ends[0] + share(i) * (ends[1] - ends[0])) for i in range(MOST_RUNGS)]
  return sorted({min(found, key=lambda s: abs(math.log(s.width / w))) for w in wanted})
