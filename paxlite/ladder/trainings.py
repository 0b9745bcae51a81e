"""Trains the rungs of a ladder in turn, each in its own process."""

import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from paxlite.core.child_processes import terminated_with_parent
from paxlite.core.errors import EXIT_AGAIN, UserError
from paxlite.ladder.rungs import Rung


def trained(rungs: Sequence[Rung], say: Callable[[str], None]) -> Iterator[tuple[Rung, float]]:
  """Trains the runs that are not complete, and yields all with their losses.

  A run that was stopped continues from its last checkpoint. Raises UserError if a run failed or was
  stopped, or its folder holds another run.

  Args:
    rungs: The runs.
    say: Prints a line about each.
  """
  known = [rung.loss for rung in rungs]  # which checks all folders before the first run begins
  for i, rung in enumerate(rungs):
    began, loss = time.monotonic(), known[i]
    if loss is None:
      say(f'{i + 1} of {len(rungs)}: training {rung.folder.name}; its output goes to {_log(rung)}')
      problem = _train(rung)
      loss = rung.loss
      if loss is None:  # a run that has diverged may fail after its last evaluation
        raise UserError(problem or f'{rung.folder} ended without an evaluation of its last step')
    taken = time.monotonic() - began
    say(f'{i + 1} of {len(rungs)}: {rung.folder.name} reached {loss:.4f} ({taken:.0f} s)')
    yield rung, loss


def _train(rung: Rung) -> str:
  """Trains a run; returns an error, or ''."""
  rung.folder.parent.mkdir(parents=True, exist_ok=True)
  log = _log(rung)
  begin = log.stat().st_size if log.is_file() else 0
  with log.open('ab') as written:
    process = subprocess.Popen(
      [sys.executable, '-P', '-m', 'paxlite.main', *rung.flags], stdin=subprocess.DEVNULL,
      stdout=written, stderr=subprocess.STDOUT, env=os.environ | terminated_with_parent(),
    )  # fmt: skip
    try:
      code = process.wait()
    except KeyboardInterrupt:  # which the run has got from the terminal, too
      process.wait()
      raise
    except SystemExit:
      process.terminate()
      process.wait()
      raise
  if code == EXIT_AGAIN:
    return f'{rung.folder} was stopped, and has saved: the same command continues'
  said = log.read_bytes()[begin:].decode(errors='replace').splitlines()
  last = said[-1] if said else 'it printed nothing'
  problem = next((x for x in said if x.startswith(('error: ', 'stopped: '))), last)
  return f'{rung.folder} failed ({log}): {problem}' if code else ''


def _log(rung: Rung) -> pathlib.Path:
  return rung.folder.with_name(f'{rung.folder.name}.log')
