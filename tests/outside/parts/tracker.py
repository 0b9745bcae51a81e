"""A tracker: a file of CSV that a spreadsheet opens."""

import csv

from paxlite.experiments.demo import TinyGPT
from paxlite.tracking.writers import Writer


class CsvFile(Writer):
  """Writes one line for each recorded step, and one for each evaluation."""

  name = 'numbers.csv'

  def __init__(self, folder):
    self._path = folder / self.name

  def rewind(self, step, evaluated):
    """Drops the lines of steps that a run repeats, after a kill or a rollback."""
    if self._path.exists():
      rows = list(csv.reader(self._path.open()))
      self._path.write_text('')
      self._add(*(r for r in rows if int(r[0]) <= (step if r[1] == 'train' else evaluated)))

  def train(self, step, record, scalars):
    self._add([step, 'train', record['loss'], scalars['learning/lr']])

  def evaluation(self, step, name, metrics):
    self._add([step, name, metrics['avg_xent'], ''])

  def _add(self, *rows):
    with self._path.open('a', newline='') as file:
      csv.writer(file).writerows(rows)


class WithCsv(TinyGPT):
  """paxlite train tests.outside.parts.tracker.WithCsv"""

  NUM_LAYERS = 1
  MAX_STEPS = 4
  EVAL_INTERVAL_STEPS = 2

  def trackers(self, folder):
    return [*super().trackers(folder), CsvFile(folder)]

  def eval_inputs(self):
    config = self.train_input()
    config.max_eval_batches = 1
    return {'same': config}
