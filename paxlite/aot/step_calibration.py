"""What a run has measured of its steps, for the plans of the next runs."""

import dataclasses
import importlib.metadata
import json
import math
import os
import pathlib
from collections.abc import Mapping

from paxlite.core.errors import UserError
from paxlite.core.json_text import Json, JsonObject
from paxlite.files import schemes
from paxlite.files.schemes import is_address

FILE = 'calibration.json'  # in a run's folder
RATIO = 'measured_over_foreseen'  # the key that files with measured speeds of a chip do not have


@dataclasses.dataclass(frozen=True)
class StepCalibration:
  """How long the steps of a run took, beside what was foreseen of them.

  Attributes:
    chip: The name of the chip.
    device_kind: What JAX calls the device.
    ratio: The measured seconds of a step over the foreseen ones, which no file had calibrated.
    quartiles: The ratio of a quarter of the steps is below the first, and of a quarter above the
      second.
    steps: The number of steps that were measured.
    experiment: The name of the experiment.
    shape: What its steps are like: layers, dims, tokens of a row, rows and devices, by name.
    versions: Versions of packages by name.
    source: Where it is; '' before it is written.
  """

  chip: str
  device_kind: str
  ratio: float
  quartiles: tuple[float, float]
  steps: int
  experiment: str
  shape: Mapping[str, int]
  versions: Mapping[str, str]
  source: str = ''

  def text(self) -> str:
    """Returns the content of the file."""
    found = {name: getattr(self, name) for name in _NAMES}
    return json.dumps({**found, RATIO: self.ratio}, indent=2) + '\n'

  def sentence(self) -> str:
    """Returns what is multiplied by the ratio, and what this rests on."""
    low, high = self.quartiles
    shape = ', '.join(f'{name} {value:,}' for name, value in self.shape.items())
    return (
      f'Seconds of {self.chip} are multiplied by {self.ratio:.3g}, as measured over {self.steps} '
      f'steps (half of them between {low:.3g} and {high:.3g}) of {self.experiment} ({shape}), in '
      f'{self.source}.{self._other_versions()}'
    )

  def _other_versions(self) -> str:
    """Says which packages had another version when it was measured; '' if none had."""
    others = []
    for name, then in self.versions.items():
      try:
        now = importlib.metadata.version(name)
      except importlib.metadata.PackageNotFoundError:
        continue
      if now != then:
        others.append(f'{name} {then}, and now {now}')
    return f' It was measured with {"; ".join(others)}.' if others else ''


_NAMES = ('chip', 'device_kind', 'quartiles', 'steps', 'experiment', 'shape', 'versions')


def file_of(path: str) -> pathlib.Path:
  """Returns the file that --calibration names: a file, or that of the folder of a run.

  Raises:
    UserError: The folder has none, or there is nothing at an address.
  """
  if is_address(path) and not path.endswith('.json'):
    return pathlib.Path(schemes.local(f'{path.rstrip("/")}/{FILE}'))
  if not os.path.isdir(path):
    return pathlib.Path(schemes.local(path))
  found = pathlib.Path(path) / FILE
  if not found.is_file():
    raise UserError(
      f'--calibration={path} has no {FILE}: a run writes it after 50 steps on a GPU or TPU whose '
      'speeds paxlite knows'
    )
  return found


def of_object(found: JsonObject, path: str) -> StepCalibration:
  """Returns what a file holds.

  Args:
    found: The object in the file.
    path: Where it is, for messages.

  Raises:
    UserError: A value is missing or wrong.
  """
  place = f'--calibration={path}'
  ratio, quartiles, steps = found[RATIO], found.get('quartiles'), found.get('steps')
  if not _is_ratio(ratio):
    raise UserError(f'{place}: {RATIO}={ratio!r} must be a number above 0')
  if not isinstance(quartiles, list) or len(quartiles) != 2 or not all(map(_is_ratio, quartiles)):
    raise UserError(f'{place}: quartiles={quartiles!r} must be two numbers above 0')
  if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
    raise UserError(f'{place}: steps={steps!r} must be a whole number of at least 1')
  shape, versions = found.get('shape'), found.get('versions')
  is_whole = lambda value: isinstance(value, int)
  if not isinstance(shape, dict) or not all(map(is_whole, shape.values())):
    raise UserError(f'{place}: shape={shape!r} must be an object of whole numbers')
  if not isinstance(versions, dict):
    raise UserError(f'{place}: versions={versions!r} must be an object')
  texts = [str(found.get(name)) for name in ('chip', 'device_kind', 'experiment')]
  of_packages = {name: str(version) for name, version in versions.items()}
  return StepCalibration(
    texts[0], texts[1], float(ratio), (float(quartiles[0]), float(quartiles[1])), steps, texts[2],
    shape, of_packages, path,
  )  # fmt: skip


def _is_ratio(value: Json) -> bool:
  is_number = isinstance(value, int | float) and not isinstance(value, bool)
  return is_number and math.isfinite(value) and value > 0
