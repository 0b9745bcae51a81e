"""python benchmarks/inputs.py: tokens per second of the shuffled inputs with a warm page cache."""

import argparse
import pathlib
import tempfile
import time

import numpy as np

from paxlite.data.base import RowInput
from paxlite.data.flat_tokens import FlatTokenRows
from paxlite.data.synthetic import SyntheticRows
from paxlite.tokenization.flat_tokens_writer import FlatTokensWriter


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--tokens', type=int, default=50_000_000)
  parser.add_argument('--length', type=int, default=2048)
  parser.add_argument('--seconds', type=float, default=3.0, help='of each measurement')
  args = parser.parse_args()
  rng = np.random.default_rng(0)
  with tempfile.TemporaryDirectory() as folder:
    sources = {}
    for format in ('memmap', 'seqax'):
      path = str(pathlib.Path(folder) / format)
      writer = FlatTokensWriter(path, 'train', 50_000, format)
      while writer.token_count < args.tokens:
        document = rng.integers(50_000, size=int(rng.integers(100, 2000)))
        writer.write(document, [len(document)])
      writer.close()
      for rows in ('stream', 'packed'):
        sources[f'{format}, {rows}'] = FlatTokenRows(path, 'train', args.length, rows)
    sources['synthetic'] = SyntheticRows(50_000, args.length)
    for name, source in sources.items():
      batches = RowInput(source, batch_size=64).train_batches(0, slice(None))
      for _ in range(2 * len(source) // 64 if len(source) < 1 << 18 else 10):
        next(batches)  # warms the page cache, and seqax's decoded chunks
      count, started = 0, time.perf_counter()
      while time.perf_counter() - started < args.seconds:
        count += next(batches)['ids'].size
      print(
        f'{name:16} {count / (time.perf_counter() - started) / 1e6:7.1f} M tokens/s', flush=True
      )


if __name__ == '__main__':
  main()
