"""After 50 steps a run says what was foreseen of a step, and what a step takes."""

import json
import re

import paxlite
from paxlite.aot import chips
from paxlite.programs import foresight
from paxlite.tools.report_page import tables
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

  header, rows = tables.foreseen(read_runs([str(tmp_path / 'run')]))
  assert header == ['milliseconds of a step', 'run (h200)']
  assert [row[0] for row in rows][-2:] == ['foreseen in all', 'measured']
  assert rows[-1][1] == f'{1e3 * found["measured_seconds"]:,.1f}'


def test_nothing_is_said_of_devices_without_a_chip(tmp_path, capsys):
  paxlite.train(paxlite.get('TinyGPT')(MAX_STEPS=52, **SHORT), tmp_path / 'run')
  said = capsys.readouterr()
  assert 'foreseen' not in said.out + said.err
  assert not (tmp_path / 'run' / foresight.FILE).exists()
  assert tables.foreseen(read_runs([str(tmp_path / 'run')]))[1] == []


def test_a_run_goes_on_where_the_file_cannot_be_written(tmp_path, monkeypatch, capsys):
  def full(*_):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr(foresight, 'chip_of_kind', lambda kind: chips.CHIPS['h200'])
  monkeypatch.setattr(foresight, 'write_file', full)
  run = paxlite.train(paxlite.get('TinyGPT')(MAX_STEPS=52, **SHORT), tmp_path / 'run')
  said = capsys.readouterr()
  assert 'ms were foreseen' in said.out + said.err
  assert list(run.metrics['step'])[-1] == 52
