"""Files of records on a disk that cannot be written for a while."""

import json

from paxlite.tracking.summaries import Summaries
from tests.unit.trackers.test_services import SCALARS, SPEED


def steps(path) -> list[int]:
  return [json.loads(line)['step'] for line in path.read_text().splitlines()]


def test_records_that_could_not_be_written_are_written_later(tmp_path, caplog):
  summaries = Summaries(tmp_path, 10)
  summaries.start()
  files = [tmp_path / name for name in ('metrics.jsonl', 'eval_metrics.jsonl', 'samples.jsonl')]
  for step in range(1, 6):
    for path in files:
      if step == 2:
        path.rename(path.with_suffix('.kept'))
        path.mkdir()  # a file of this name cannot be opened
      elif step == 4:
        path.rmdir()
        path.with_suffix('.kept').rename(path)
    summaries.train(step, SCALARS, SPEED)
    if step < 4:
      summaries.result(step, 'held_out', {'avg_xent': 3.5}, 'text')
      summaries.samples(step, {'a': 'b', 'c': 'd'})
  assert [steps(path) for path in files] == [[1, 2, 3, 4, 5], [1, 2, 3], [1, 1, 2, 2, 3, 3]]
  assert caplog.text.count('metrics.jsonl cannot be written, training continues') == 2
  summaries.close()


def test_records_of_steps_that_are_done_again_are_dropped_once_that_is_possible(tmp_path):
  """They would be there twice otherwise."""
  for last in (4, 5):
    summaries = Summaries(tmp_path, 10)
    summaries.start()
    if last == 5:
      (tmp_path / 'metrics.tmp').mkdir()  # the file of the records that remain cannot be written
    summaries.drop_records_after(last - 3, evaluated=0)
    for step in range(last - 2, last + 1):
      summaries.train(step, SCALARS, SPEED)
      if step == 4 and last == 5:
        (tmp_path / 'metrics.tmp').rmdir()
    summaries.close()
  assert steps(tmp_path / 'metrics.jsonl') == [2, 3, 4, 5]
