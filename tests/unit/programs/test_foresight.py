"""After 50 steps a run says what was foreseen of a step, and what a step takes."""

import json
import re

import pytest

import paxlite
from paxlite.aot import chips, step_parts, targets
from paxlite.programs import foresight
from paxlite.tools.report_page import forecasts
from paxlite.tools.report_page.records import read_runs

SHORT = dict(SUMMARY_INTERVAL_STEPS=25, EVAL_INTERVAL_STEPS=100, CHECKPOINT_EVERY_N_STEPS=100)


def test_a_run_says_what_was_foreseen_and_measured(tmp_path, monkeypatch, capsys):
  """This CPU is taken to be an H200."""
  monkeypatch.setattr(foresight, 'chip_of_kind', lambda kind: chips.CHIPS['h200'])
  paxlite.train(paxlite.get('TinyGPT')(MAX_STEPS=60, **SHORT), tmp_path / 'run')
  said = capsys.readouterr()
  line = re.search(
    r'A step takes ([\d.]+) ms; ([\d.]+) ms were foreseen \((.*)\)', said.out + said.err
  )
  assert line
  assert 'of other kernels' in line[3]
  found = json.loads((tmp_path / 'run' / foresight.FILE).read_text())
  assert found['chip'] == 'h200'
  assert 50 <= found['step'] <= 60
  assert min(found['measured_seconds'], found['foreseen_seconds']) > 0

  assert found['measured_steps'] == 39
  assert found['memory']['foreseen_bytes'] > 0
  assert 'measured_bytes' not in found['memory'], 'a CPU does not say it'
  kernels = found['parts']['compute_bound'] + found['parts']['memory_bound']
  assert sum(found['kernels'].values()) == pytest.approx(kernels)
  assert set(found['kernels']) == {step_parts.PRODUCTS, step_parts.TRAFFIC, step_parts.OPTIMIZER}

  recorded = read_runs([str(tmp_path / 'run')])
  _, rows = forecasts.table(recorded)
  assert all(row[0] == 'run' for row in rows)
  by_part = {row[1]: row[2:] for row in rows}
  assert {'matrix products', 'optimizer and metrics'} <= set(by_part)
  _, measured, ratio = by_part['the whole step, the median of 39 (h200)']
  assert measured == forecasts.milliseconds(found['measured_seconds'])
  assert ratio == f'{found["measured_seconds"] / found["foreseen_seconds"]:.2f}'
  assert by_part['memory of a device'][1:] == ['–', '–']
  assert 'whole' in forecasts.notes(recorded)[0]

  # the next plan is calibrated by the run
  chip = targets.parse('h200x1', str(tmp_path / 'run')).chip
  assert chip.step.ratio == pytest.approx(found['measured_seconds'] / found['foreseen_seconds'])
  assert chip.step.shape['NUM_LAYERS'] == 2
  low, high = chip.step.quartiles
  assert low <= chip.step.ratio <= high
  assert 'over 39 steps' in chip.step.sentence()


def test_nothing_is_said_of_devices_without_a_chip(tmp_path, capsys):
  paxlite.train(paxlite.get('TinyGPT')(MAX_STEPS=52, **SHORT), tmp_path / 'run')
  said = capsys.readouterr()
  assert 'foreseen' not in said.out + said.err
  assert not (tmp_path / 'run' / foresight.FILE).exists()
  assert not (tmp_path / 'run' / 'calibration.json').exists()
  recorded = read_runs([str(tmp_path / 'run')])
  assert forecasts.table(recorded)[1] == []
  assert forecasts.notes(recorded) == [
    'Seconds on a CPU cannot be foreseen, as its speeds are unknown: run.'
  ]


def test_a_run_goes_on_where_the_file_cannot_be_written(tmp_path, monkeypatch, capsys):
  def full(*_):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr(foresight, 'chip_of_kind', lambda kind: chips.CHIPS['h200'])
  monkeypatch.setattr(foresight, 'write_file', full)
  run = paxlite.train(paxlite.get('TinyGPT')(MAX_STEPS=52, **SHORT), tmp_path / 'run')
  said = capsys.readouterr()
  assert 'ms were foreseen' in said.out + said.err
  assert list(run.metrics['step'])[-1] == 52
