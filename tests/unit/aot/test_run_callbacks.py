"""What a run says of its step: predicted seconds, and what each block of the model took."""

import json
import re

import pytest
from jax.profiler import ProfileData

import paxlite
from paxlite.aot import chips, explanation_tables, report_sections, run_callbacks, schedule, traces
from paxlite.aot.explanation_tables import milliseconds
from paxlite.report import tables
from paxlite.report.records import read_runs
from tests.support import runs

SHORT = dict(SUMMARY_INTERVAL_STEPS=25, EVAL_INTERVAL_STEPS=100, CHECKPOINT_EVERY_N_STEPS=100)


def test_a_run_says_what_was_predicted_and_measured(tmp_path, monkeypatch, capsys):
  """This CPU is taken to be an H200."""
  monkeypatch.setattr(run_callbacks, 'chip_of_kind', lambda kind: chips.CHIPS['h200'])
  paxlite.train(paxlite.get('TinyGPT')(MAX_STEPS=60, **SHORT), tmp_path / 'run')
  said = capsys.readouterr()
  line = re.search(
    r'A step takes ([\d.]+) ms; ([\d.]+) ms were predicted \((.*)\)', said.out + said.err
  )
  assert line
  assert f'of {schedule.MEMORY}' in line[3]
  found = json.loads((tmp_path / 'run' / run_callbacks.PREDICTED).read_text())
  assert found['chip'] == 'h200'
  assert 50 <= found['step'] <= 60
  assert min(found['measured_seconds'], found['predicted_seconds']) > 0

  assert found['measured_steps'] == 39
  assert found['memory']['predicted_bytes'] > 0
  assert 'measured_bytes' not in found['memory'], 'a CPU does not say it'
  assert found['predicted_parts'].keys() == set(schedule.PARTS)
  assert sum(found['predicted_parts'].values()) == pytest.approx(found['predicted_seconds'])

  table = report_sections.sections(read_runs([str(tmp_path / 'run')]))[0]
  assert all(row[0] == 'run' for row in table.rows)
  by_part = {row[1]: row[2:] for row in table.rows}
  assert schedule.MEMORY in by_part
  _, measured, ratio = by_part['the whole step, the median of 39 (h200)']
  assert measured == milliseconds(found['measured_seconds'])
  assert ratio == f'{found["measured_seconds"] / found["predicted_seconds"]:.2f}'
  assert by_part['memory of a device'][1:] == ('–', '–')
  assert 'whole' in table.notes[0]


def test_nothing_is_said_of_devices_without_a_chip(tmp_path, capsys):
  paxlite.train(paxlite.get('TinyGPT')(MAX_STEPS=52, **SHORT), tmp_path / 'run')
  said = capsys.readouterr()
  assert 'predicted' not in said.out + said.err
  assert not (tmp_path / 'run' / run_callbacks.PREDICTED).exists()
  table = report_sections.sections(read_runs([str(tmp_path / 'run')]))[0]
  assert table.rows == []
  (note,) = table.notes
  assert note.endswith('such as CPUs: run.')


def test_a_run_goes_on_where_the_file_cannot_be_written(tmp_path, monkeypatch, capsys):
  def full(*_):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr(run_callbacks, 'chip_of_kind', lambda kind: chips.CHIPS['h200'])
  monkeypatch.setattr(run_callbacks, 'write_file', full)
  run = paxlite.train(paxlite.get('TinyGPT')(MAX_STEPS=52, **SHORT), tmp_path / 'run')
  said = capsys.readouterr()
  assert 'ms were predicted' in said.out + said.err
  assert list(run.metrics['step'])[-1] == 52


TRACED = dict(
  MAX_STEPS=8, PROFILER_CAPTURE_STEP=3, PROFILER_NUM_STEPS=3, SUMMARY_INTERVAL_STEPS=4,
  EVAL_INTERVAL_STEPS=100, CHECKPOINT_EVERY_N_STEPS=100,
)  # fmt: skip


def traced(folder) -> tuple[float, dict[str, float]]:
  """Returns the seconds of all instructions of the step in a trace, and those of loops."""
  (path,) = folder.rglob('*.xplane.pb')
  total, loops = 0.0, {}
  for plane in ProfileData.from_file(str(path)).planes:
    for line in plane.lines:
      for event in line.events:
        stats = dict(event.stats)
        if stats.get('hlo_module') != 'jit_step':
          continue
        name, seconds = stats['hlo_op'], event.duration_ns / 1e9
        total += seconds
        if name.startswith(('while', 'call', 'conditional')):
          loops[name] = loops.get(name, 0.0) + seconds
  return total, loops


@pytest.mark.slow
def test_blocks_have_all_of_the_time_and_of_the_flops(tmp_path, monkeypatch, capsys):
  """This CPU is taken to be an H200."""
  monkeypatch.setattr(run_callbacks, 'chip_of_kind', lambda kind: chips.CHIPS['h200'])
  folder = tmp_path / 'run'
  paxlite.train(paxlite.get('TinyGPT')(**TRACED), folder)
  found = json.loads((folder / run_callbacks.BLOCKS).read_text())
  assert (found['steps'], found['chip']) == (3, 'h200')
  blocks = found['blocks']
  known = {'embedding', 'layer/self_attention', 'layer/ff_layer', 'logits', 'loss', 'update'}
  assert known <= blocks.keys()
  total, _ = traced(folder / 'profile')
  assert sum(b['measured'] for b in blocks.values()) == pytest.approx(total / 3)
  assert explanation_tables.UNKNOWN not in blocks
  assert blocks.get(explanation_tables.ELSEWHERE, {'measured': 0})['measured'] < 0.05 * total / 3
  assert all(blocks[name]['measured'] > 0 for name in known)
  assert all(blocks[name]['predicted'] > 0 for name in known)
  # FLOPs by hand: forward, and two products for each in the backward pass; tokens of a batch
  e = paxlite.get('TinyGPT')(**TRACED)
  tokens = e.batch_size * e.MAX_SEQ_LEN
  layer = 6 * tokens * e.NUM_LAYERS * e.MODEL_DIMS
  assert blocks['layer/ff_layer']['flops'] == layer * 2 * e.HIDDEN_DIMS
  assert blocks['logits']['flops'] == 6 * tokens * e.MODEL_DIMS * e.VOCAB_SIZE

  recorded = read_runs([str(folder)])
  _, header, rows, notes = report_sections.sections(recorded)[1]
  assert header[1] == 'block'
  names = [row[1] for row in rows]
  took = [blocks[name]['measured'] for name in names[:-1]]
  assert took == sorted(took, reverse=True)
  assert rows[-1][1] == explanation_tables.ALL
  by_name = {row[1]: row for row in rows}
  assert by_name['logits'][6] == milliseconds(blocks['logits']['measured'])
  assert 'Measured collectives include waiting' in notes[0]
  assert '| run | block | FLOPs |' in tables.markdown(recorded)


@pytest.mark.slow
def test_loops_count_once_and_collectives_are_a_block(tmp_path):
  flags = [f'--fdl.{name}={value}' for name, value in TRACED.items()]
  flags += ['--fdl.ICI_MESH_SHAPE=[1,2,2]', '--fdl.USE_REPEATED_LAYER=True']
  folder = tmp_path / 'run'
  runs.run(folder, *flags, devices=4)
  blocks = json.loads((folder / run_callbacks.BLOCKS).read_text())['blocks']
  total, loops = traced(folder / 'profile')
  assert loops
  measured = sum(b['measured'] for b in blocks.values())
  assert measured == pytest.approx((total - sum(loops.values())) / 3 / 4)
  assert explanation_tables.UNKNOWN not in blocks
  assert blocks[explanation_tables.COLLECTIVES]['measured'] > 0
  # paxlite explain divides the program in the same way
  file = tmp_path / 'step.json'
  values = [flag.removeprefix('--fdl.') for flag in flags]
  said = runs.module('paxlite', 'explain', 'TinyGPT', *values, f'--json={file}', devices=4).stdout
  explained = json.loads(file.read_text())['report']['costs']['blocks']
  assert explained.keys() == blocks.keys()
  for name, block in blocks.items():
    assert explained[name]['flops'] == block['flops']
    assert explained[name]['measured'] is None
  assert 'Kernels of a step, by block' in said


def test_a_trace_that_cannot_be_read_disturbs_no_run(tmp_path, monkeypatch):
  def broken(*_):
    raise ValueError('no trace')

  monkeypatch.setattr(traces, 'seconds', broken)
  paxlite.train(paxlite.get('TinyGPT')(**TRACED), tmp_path / 'run')
  assert not (tmp_path / 'run' / run_callbacks.BLOCKS).exists()
  _, _, rows, notes = report_sections.sections(read_runs([str(tmp_path / 'run')]))[1]
  assert (rows, notes) == ([], [])
