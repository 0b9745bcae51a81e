"""Runs the tokenize tool, and kills it with SIGKILL after it wrote tokens past its second note."""

import os
import signal

from paxlite.cli import command_line
from paxlite.files import text_files
from paxlite.tokenization.commands import tokenize
from paxlite.tokenization.flat_tokens_writer import FlatTokensWriter


class KilledWriter(FlatTokensWriter):
  notes = 0

  def note(self, position) -> None:
    super().note(position)
    self.notes += 1

  def write(self, tokens, ends) -> None:
    super().write(tokens, ends)
    if self.notes == 2:
      self._tokens.flush()
      os.kill(os.getpid(), signal.SIGKILL)


if __name__ == '__main__':
  tokenize._SECONDS_BETWEEN_NOTES = 0.0
  text_files._BLOCK_BYTES = tokenize._BATCH_CHARS = 1 << 17
  tokenize.FlatTokensWriter = KilledWriter
  command_line.run(tokenize.main)
