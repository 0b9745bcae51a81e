"""What a report shows of the step of a run."""

import json

from paxlite.aot import report_sections
from paxlite.report import page, tables
from paxlite.report.records import read_runs
from tests.unit.aot.test_explanation import EXPLAINED
from tests.unit.report.test_page import write_run


def test_a_step_is_shown_as_predicted_and_as_measured(tmp_path):
  """Of runs on a CPU and of those with a damaged file there is a sentence."""
  parts = {'matrix multiplications': 0.4, 'memory traffic': 0.1, 'collectives': 0.02, 'host': 0.0}
  found = dict(step=60, measured_seconds=0.624, predicted_seconds=0.52, chip='h200')
  memory = dict(predicted_bytes=50 * 2**30, measured_bytes=55 * 2**30)
  found |= dict(measured_steps=39, predicted_parts=parts, memory=memory)
  cpu = json.dumps({'devices': '8 × cpu', 'processes': 1, 'packages': {}})
  runs = read_runs([
    str(write_run(tmp_path / 'new', 5, predicted_json=json.dumps(found))),
    str(write_run(tmp_path / 'cpu', 5, versions_json=cpu)),
    str(write_run(tmp_path / 'damaged', 5, predicted_json='{"predicted_parts": 3}')),
  ])  # fmt: skip
  title, header, rows, notes = report_sections.sections(runs)[0]
  assert title == 'A step, predicted and measured'
  assert header == ('run', 'part of a step', 'predicted', 'measured', 'measured / predicted')
  assert rows == [
    ('new', 'matrix multiplications', '400.0 ms', '–', '–'),
    ('new', 'memory traffic', '100.0 ms', '–', '–'),
    ('new', 'collectives', '20.0 ms', '–', '–'),
    ('new', 'the whole step, the median of 39 (h200)', '520.0 ms', '624.0 ms', '1.20'),
    ('new', 'memory of a device', '50.0 GiB', '55.0 GiB', '1.10'),
  ]
  about, others = notes
  assert 'A step is measured as a whole' in about
  assert others.endswith('such as CPUs: cpu, damaged.')
  text = page.page(runs, 'steps')
  assert others in text
  assert '624.0 ms' in text
  assert '624.0 ms' in tables.markdown(runs)


def test_an_explanation_in_the_folder_of_a_run_is_shown(tmp_path):
  explained = json.dumps(EXPLAINED)
  runs = read_runs([
    str(write_run(tmp_path / 'one', 5, explanation_json=explained)),
    str(write_run(tmp_path / 'damaged', 5, explanation_json=explained.replace('bytes', 'x'))),
  ])  # fmt: skip
  titles = [table.title for table in report_sections.sections(runs)[2:]]
  assert titles[:2] == ['one: What was compiled', 'one: Memory of a device']
  assert titles[-1].startswith('one: Saved activations')
  text = page.page(runs, 'x')
  assert 'layer/ff_layer' in text
  assert 'one: Collectives of a step, by block' in tables.markdown(runs)
