"""Logs that are damaged or cannot be written do not stop a run."""

import json
import os
import subprocess
import sys
import time

import pytest
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import RecordWriter

from paxlite.cli import terminal
from paxlite.tracking import tensorboard
from paxlite.tracking.summaries import Summaries
from paxlite.training import goodput, reporting
from tests.support import runs

GOOD = [{'step': step, 'loss': 1.0} for step in range(1, 5)]

BAD_LINES = {
  'not UTF-8': b'{"step": 2, "loss": "\xff\xfe"}', 'not JSON': b'{"step": 2, "loss": 1.',
  'NUL bytes': b'\0' * 100, 'no object': b'[2]', 'no step': b'{"loss": 1.0}',
  'step is text': b'{"step": "2"}', 'step is null': b'{"step": null}',
  'step is true': b'{"step": true}', 'deep': b'[' * 200_000,
}  # fmt: skip


def lines_of(records) -> bytes:
  return b''.join(json.dumps(r).encode() + b'\n' for r in records)


@pytest.mark.parametrize('name', ['metrics.jsonl', 'eval_metrics.jsonl'])
@pytest.mark.parametrize('kind', BAD_LINES)
def test_a_bad_line_is_set_aside_and_the_good_ones_go_on(tmp_path, caplog, name, kind):
  content = lines_of(GOOD[:2]) + BAD_LINES[kind] + b'\n' + lines_of(GOOD[2:])
  (tmp_path / name).write_bytes(content)
  Summaries(tmp_path, 10).drop_records_after(3, evaluated=3)
  assert runs.records(tmp_path, name) == GOOD[:3]
  assert (tmp_path / f'{name}.damaged').read_bytes() == content
  (told,) = caplog.messages
  assert told == (
    f'{tmp_path / name} is damaged (line 3 is not a record; the run continues with the others): '
    f'moved to {name}.damaged'
  )


def test_what_a_kill_has_cut_off_is_no_damage(tmp_path, caplog):
  (tmp_path / 'metrics.jsonl').write_bytes(lines_of(GOOD) + b'{"step": 5, "lo')
  Summaries(tmp_path, 10).drop_records_after(4, evaluated=4)
  assert runs.records(tmp_path) == GOOD
  assert not caplog.messages
  assert [p.name for p in tmp_path.iterdir()] == ['metrics.jsonl']


def test_a_folder_in_the_place_of_a_log_is_set_aside(tmp_path):
  for _ in range(2):
    (tmp_path / 'metrics.jsonl' / 'inside').mkdir(parents=True)
    Summaries(tmp_path, 10).drop_records_after(4, evaluated=4)
  names = sorted(p.name for p in tmp_path.iterdir())
  assert names == ['metrics.jsonl.damaged', 'metrics.jsonl.damaged.1']


def test_a_log_that_cannot_be_rewritten_is_told(tmp_path, caplog):
  (tmp_path / 'metrics.jsonl').write_bytes(lines_of(GOOD))
  (tmp_path / 'metrics.tmp').mkdir()
  Summaries(tmp_path, 10).drop_records_after(2, evaluated=2)
  assert 'metrics.jsonl cannot be written, training continues' in caplog.text
  assert runs.records(tmp_path) == GOOD


@pytest.mark.parametrize(
  'content',
  [
    b'\xff', b'{', b'[]', b'null', b'\0\0', b'[' * 200_000,
    b'{"started": 0, "ended": 0, "first_step": 0, "last_step": 0, "lost_steps": 0, "seconds": 5}',
    b'{"started": NaN, "ended": 0, "first_step": 0, "last_step": 0, "lost_steps": 0, "seconds":{}}',
    b'{"started": 1' + b'0' * 400 + b'}',
    None,
  ],
)  # fmt: skip
def test_damaged_records_of_time_are_set_aside(tmp_path, caplog, content):
  path = tmp_path / 'goodput' / 'attempt_00001.json'
  path.parent.mkdir()
  path.mkdir() if content is None else path.write_bytes(content)
  assert goodput.report(tmp_path) is None
  goodput.Goodput(tmp_path).write()
  assert sorted(p.name for p in path.parent.iterdir()) == [path.name, f'{path.name}.damaged']
  assert goodput.report(tmp_path).attempts == 1
  assert 'is damaged (it is not a record of an attempt)' in caplog.text


def points(folder) -> list[tuple[int, float]]:
  """Returns what TensorBoard shows: files by name, and no points after a step that was repeated."""
  found: list[tuple[int, float]] = []
  for path in sorted(folder.glob('events.*')):
    data = path.read_bytes()
    while data:
      size = int.from_bytes(data[:8], 'little')
      event = Event.FromString(data[12 : 12 + size])
      data = data[16 + size :]
      if event.session_log.status == 1:  # START
        found = [(step, value) for step, value in found if step < event.step]
      found += [(event.step, v.simple_value) for v in event.summary.value if v.tag == 'loss']
  return found


@pytest.mark.parametrize('foreign', [None, '1700000000', '1999999999999999999999'])
def test_tensorboard_after_a_clock_that_went_back(tmp_path, monkeypatch, foreign):
  """The run continues from step 2 and repeats steps 3 and 4, a year earlier."""
  folder = tmp_path / 'summaries' / 'train'
  scalars = dict.fromkeys(
    ('Metrics/total_loss', 'learning/lr', 'learning/raw_grad_norm', 'learning/skipped_steps'), 0.0
  )  # fmt: skip
  speed = dict.fromkeys(('tokens_per_second', 'step_seconds', 'model_tflops', 'mfu'))
  if foreign:
    folder.mkdir(parents=True)
    RecordWriter(str(folder / f'events.out.tfevents.{foreign}.host')).close()
  for attempt, steps in enumerate([range(1, 5), range(3, 6)]):
    board = Summaries(tmp_path, 10)
    board.drop_records_after(steps[0] - 1, evaluated=0)
    for step in steps:
      board.train(step, {**scalars, 'Metrics/total_loss': float(10 * attempt + step)}, speed)
    board.close()
    now = time.time_ns
    monkeypatch.setattr(tensorboard.time, 'time_ns', lambda now=now: now() - 365 * 86400 * 10**9)
  assert points(folder) == [(1, 1), (2, 2), (3, 13), (4, 14), (5, 15)]
  if foreign:
    assert min(folder.iterdir()).name.split('.')[3] == foreign


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize('redirection', ['>/dev/full', '>&-', '>&- 2>&-', '>/dev/full 2>/dev/full'])
def test_a_run_whose_lines_cannot_be_printed(tmp_path, redirection):
  command = runs.command(tmp_path, '--fdl.MAX_STEPS=3', '--fdl.NUM_LAYERS=1')
  ended = subprocess.run(
    ['sh', '-c', f'exec "$@" {redirection}', 'sh', *command], cwd=runs.ROOT,
    env=runs.environment(), capture_output=True, text=True, timeout=120, check=False,
  )  # fmt: skip
  assert ended.returncode == 0, ended.stderr
  assert ended.stderr == ''
  assert [r['step'] for r in runs.records(tmp_path)] == [1, 2, 3]
  assert (tmp_path / 'checkpoints' / 'checkpoint_00000003').is_dir()


def test_a_line_that_could_not_be_printed_does_not_come_later():
  """The disk was full for a moment; the exit code is that of the program."""
  code = (
    'import os; from paxlite.cli.terminal import say, settle\n'
    'say("dropped"); log = os.open("/dev/null", os.O_WRONLY); import sys\n'
    'out = os.dup(2); os.dup2(out, 1); say("printed é"); print("more"); settle()'
  )
  ended = subprocess.run(
    ['sh', '-c', 'exec "$@" >/dev/full', 'sh', sys.executable, '-c', code],
    cwd=runs.ROOT, env=os.environ | {'PYTHONIOENCODING': 'ascii'}, capture_output=True, text=True,
    check=False,
  )  # fmt: skip
  assert ended.returncode == 0
  assert ended.stderr == 'printed ?\nmore\n'


def test_files_do_not_get_the_numbers_of_closed_streams():
  code = (
    'import os; from paxlite.cli.terminal import occupy_standard_files, say\n'
    'occupy_standard_files(); f = open("/dev/null"); assert f.fileno() > 2; say("nobody")'
  )
  ended = subprocess.run(
    ['sh', '-c', 'exec "$@" <&- >&- 2>&-', 'sh', sys.executable, '-c', code],
    cwd=runs.ROOT, check=False,
  )  # fmt: skip
  assert ended.returncode == 0


@pytest.mark.parametrize('stream', [None, open(os.devnull)])  # noqa: SIM115 - accepts no lines
def test_any_stream_will_do(monkeypatch, stream):
  monkeypatch.setattr(sys, 'stdout', stream)
  terminal.say('x')
  terminal.settle()


@pytest.mark.parametrize(
  ('step_seconds', 'expected'),
  [
    (6.0, [2, 4, 6, 8, 10, 12]),
    (2.0, [5, 10]),
    (25.0, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]),
    (0.9, []),  # the next record comes before the next round number, 20
  ],
)
def test_lines_between_records_are_at_round_numbers(step_seconds, expected):
  shown, last = [], 0
  for step in range(1, 13):
    if reporting.line_is_due(step, last, (step - last) * step_seconds):
      shown.append(step)
      last = step
  assert shown == expected
