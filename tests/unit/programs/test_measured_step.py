"""A traced run says what each block of the model takes, as the program and the trace have it."""

import json

import pytest
from jax.profiler import ProfileData

import paxlite
from paxlite.aot import chips, step_blocks
from paxlite.programs import measured_step
from paxlite.tools.report_page import step_blocks as report
from paxlite.tools.report_page import tables
from paxlite.tools.report_page.records import read_runs
from tests.support import runs

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
  monkeypatch.setattr(measured_step, 'chip_of_kind', lambda kind: chips.CHIPS['h200'])
  folder = tmp_path / 'run'
  paxlite.train(paxlite.get('TinyGPT')(**TRACED), folder)
  found = json.loads((folder / measured_step.FILE).read_text())
  assert (found['steps'], found['chip']) == (3, 'h200')
  blocks = found['blocks']
  known = {'embedding', 'layer/self_attention', 'layer/ff_layer', 'logits', 'loss', 'update'}
  assert known <= blocks.keys()
  total, _ = traced(folder / 'profile')
  assert sum(b['measured'] for b in blocks.values()) == pytest.approx(total / 3)
  assert step_blocks.UNKNOWN not in blocks
  assert blocks.get(step_blocks.ELSEWHERE, {'measured': 0})['measured'] < 0.05 * total / 3
  assert all(blocks[name]['measured'] > 0 for name in known)
  assert all(blocks[name]['foreseen'] > 0 for name in known)
  # FLOPs by hand: forward, and two products for each in the backward pass; tokens of a batch
  e = paxlite.get('TinyGPT')(**TRACED)
  tokens = e.batch_size * e.MAX_SEQ_LEN
  layer = 6 * tokens * e.NUM_LAYERS * e.MODEL_DIMS
  assert blocks['layer/ff_layer']['flops'] == layer * 2 * e.HIDDEN_DIMS
  assert blocks['logits']['flops'] == 6 * tokens * e.MODEL_DIMS * e.VOCAB_SIZE

  recorded = read_runs([str(folder)])
  header, rows = report.table(recorded)
  assert header[1] == 'block'
  names = [row[1] for row in rows]
  assert names.index('embedding') < names.index('layer/ff_layer') < names.index('logits')
  assert rows[-1][1] == report.ALL
  by_name = {row[1]: row for row in rows}
  assert by_name['logits'][5] == report.milliseconds(blocks['logits']['measured'])
  assert (
    '0.0% of the time is of instructions that the program does not' in report.notes(recorded)[0]
  )
  assert '| run | block | FLOPs |' in tables.markdown(recorded)


@pytest.mark.slow
def test_loops_count_once_and_collectives_are_a_block(tmp_path):
  flags = [f'--fdl.{name}={value}' for name, value in TRACED.items()]
  flags += ['--fdl.ICI_MESH_SHAPE=[1,2,2]', '--fdl.USE_REPEATED_LAYER=True']
  folder = tmp_path / 'run'
  runs.run(folder, *flags, devices=4)
  blocks = json.loads((folder / measured_step.FILE).read_text())['blocks']
  total, loops = traced(folder / 'profile')
  assert loops
  measured = sum(b['measured'] for b in blocks.values())
  assert measured == pytest.approx((total - sum(loops.values())) / 3 / 4)
  assert step_blocks.UNKNOWN not in blocks
  assert blocks[step_blocks.COLLECTIVES]['measured'] > 0
  # paxlite explain divides the program in the same way
  file = tmp_path / 'step.json'
  values = [flag.removeprefix('--fdl.') for flag in flags]
  said = runs.module('paxlite', 'explain', 'TinyGPT', *values, f'--json={file}', devices=4).stdout
  explained = json.loads(file.read_text())['blocks']
  assert explained.keys() == blocks.keys()
  for name, block in blocks.items():
    assert explained[name]['flops'] == block['flops']
    assert explained[name]['measured'] is None
  assert 'Kernels of a step, by block' in said


def test_a_trace_that_cannot_be_read_disturbs_no_run(tmp_path, monkeypatch):
  def broken(*_):
    raise ValueError('no trace')

  monkeypatch.setattr(measured_step, 'traced_seconds', broken)
  paxlite.train(paxlite.get('TinyGPT')(**TRACED), tmp_path / 'run')
  assert not (tmp_path / 'run' / measured_step.FILE).exists()
  recorded = read_runs([str(tmp_path / 'run')])
  assert (report.table(recorded)[1], report.notes(recorded)) == ([], [])
