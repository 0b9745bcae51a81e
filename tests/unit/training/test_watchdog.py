"""The watchdog reports who is behind, once an interval."""

import time

from paxlite.processes.peers import Peers
from paxlite.training import watchdog
from paxlite.training.goodput import Goodput
from paxlite.training.watchdog import Limits, Watchdog


class OneBehind(Peers):
  """Two processes, of which process 1 compiles all the time."""

  def __init__(self):
    super().__init__(count=2)

  def report(self, progress: int, phase: str) -> None:
    pass

  def behind(self, progress: int) -> dict[int, str]:
    return {1: 'compiling'}


def test_who_is_behind_is_said_once_an_interval(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(watchdog, '_SAY_SECONDS', 0.5)
  began, lines = time.monotonic(), []
  limits = Limits(stacks=0.1)  # it looks 40 times a second
  with Watchdog(tmp_path, limits, Goodput(None), OneBehind()) as dog:
    while not lines:
      time.sleep(1.2)
      lines += capsys.readouterr().err.splitlines()
      intervals = (time.monotonic() - began) / 0.5
    dog.beat()
  assert len(lines) <= intervals
  assert all('process 0 waits for process 1 (compiling) (' in line for line in lines)
