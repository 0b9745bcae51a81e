"""Trains text8k.model again: `python -m paxlite.tokenization.packaged OUT.model`."""

import pathlib
import sys

from paxlite.data.packaged import TEXTS
from paxlite.data.text import split_blocks
from paxlite.tokenization.training import pieces_of, train


def build(out: str, vocab_size: int = 8192) -> None:
  blocks = (block for path in TEXTS for block, held_out in split_blocks(path) if not held_out)
  pieces = (piece for block in blocks for piece in pieces_of(block))
  pathlib.Path(out).write_bytes(train(pieces, vocab_size))


if __name__ == '__main__':
  build(sys.argv[1])
