"""The line of a terminal that changes, and what is printed while it is there."""

import pty
import subprocess
import sys

import pytest

from paxlite.cli import live_line
from tests.support import runs

PROGRAM = """
import logging, sys, time
from paxlite.cli import live_line, terminal
terminal.print_logs()
with live_line.working('Reading the training data', terminal.say):
  logging.getLogger('paxlite').warning('3 records are odd')
  terminal.warn('plain')
"""


@pytest.mark.parametrize('stderr_is_a_file', [False, True])
def test_a_warning_has_a_line_of_its_own(tmp_path, stderr_is_a_file):
  leader, follower = pty.openpty()
  with open(tmp_path / 'err', 'wb') as file:
    process = subprocess.Popen(
      [sys.executable, '-c', PROGRAM], stdout=follower,
      stderr=file if stderr_is_a_file else follower,
      env=runs.environment() | {'TERM': 'xterm', 'COLUMNS': '80'}, cwd=runs.ROOT,
    )  # fmt: skip
  shown = runs.shown_on(leader, follower, process)
  told = ['WARNING:paxlite:3 records are odd', 'plain']
  if stderr_is_a_file:
    assert (tmp_path / 'err').read_text().splitlines() == told
    assert b'odd' not in shown
    return
  assert 'Reading the training data …' in shown.decode()
  lines = shown.decode().replace('\x1b[2K', '\n').replace('\r', '\n').split('\n')
  assert [line for line in lines if 'odd' in line or 'plain' in line] == told


@pytest.mark.parametrize('width', [1, 20, 79, 80, 200])
def test_a_line_of_a_step_does_not_wrap(monkeypatch, width):
  text = 'step 10/100  loss 2.3456  0:12 left  12,345 tokens/s  0.123 s/step  lr 1.00e-03  grad 0.5'
  assert live_line.cut(text) == text  # in a file
  monkeypatch.setattr(live_line, 'is_possible', lambda: True)
  monkeypatch.setenv('COLUMNS', str(width))
  shown = live_line.cut(text)
  assert len(shown) == min(width, len(text))
  assert shown == text or text.startswith(shown.removesuffix('…'))
