"""The values, versions and devices of each start of a run."""

import dataclasses
import pathlib
from collections.abc import Sequence

from paxlite.config.attribute_kinds import Kind
from paxlite.config.former_names import current_values
from paxlite.core.json_text import JsonObject
from paxlite.experiments.base import Experiment
from paxlite.experiments.identity import run_values
from paxlite.files.json_files import read_object
from paxlite.run_data.data_records import DataRecords
from paxlite.tracking.writers import read_records

# They change the order of sums, and nothing else.
MESH = 'MESH_AXES', 'ICI_MESH_SHAPE', 'DCN_MESH_SHAPE', 'PERCORE_BATCH_SIZE', 'NUM_MICROBATCHES'


@dataclasses.dataclass(frozen=True)
class Start:
  """A start of a run, or a rollback."""

  step: int  # the step that it continued from
  values: JsonObject  # the values of the experiment; {} if they are not known
  versions: JsonObject  # versions and devices; {} if they are not known
  code_changes: Sequence[str] = ()  # texts on what it changed in the code of the run


def starts(folder: pathlib.Path) -> list[Start]:
  """Returns the starts that the folder of a run knows of, in order."""
  found: list[Start] = []
  values: JsonObject = {}
  versions: JsonObject = {}
  for record in read_records(folder / DataRecords.name):
    values = current_values(record.get('values', {}).get('values', values), say=False)
    versions = record.get('versions', versions)
    found.append(Start(record['step'], values, versions, record.get('code_changes', ())))
  return found


def last_start(folder: pathlib.Path) -> Start:
  """Returns what experiment.json and versions.json say of the last start; its step is not known."""
  values = (run_values(folder) or {'values': {}})['values']
  path = folder / 'versions.json'
  return Start(0, values, read_object(path) if path.is_file() else {})


def of_span(folder: pathlib.Path, first: int, last: int) -> list[Start]:
  """Returns the starts that the steps after `first` to `last` belong to."""
  known = starts(folder)
  before = [start for start in known if start.step <= first][-1:]
  return before + [start for start in known if first < start.step < last]


def other_values(e: Experiment, before: JsonObject) -> dict[str, str]:
  """Returns the attributes with another value before that changes what is trained, or how.

  Args:
    e: The experiment as it is now.
    before: Values of a start.

  Returns:
    Texts on the values before and now, by the names of the attributes.
  """
  now = e.values()
  free = e.values_of(Kind.RUN, Kind.GENERATION).keys() - {*MESH, 'LEAVE_OUT'}
  return {
    name: f'{name} was {before[name]} and is {now[name]}'
    for name in now
    if name in before and name not in free and before[name] != now[name]
  }
