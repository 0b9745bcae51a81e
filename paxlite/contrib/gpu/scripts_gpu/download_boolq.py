"""python -m paxlite.contrib.gpu.scripts_gpu.download_boolq --tfds_data_dir=DIR [--source=FOLDER]

Builds the TFDS dataset `bool_q`. TFDS downloads and verifies it. With --source it is made from a
local folder with train.jsonl and dev.jsonl, whose lines have "question", "passage" and "answer".
"""

import pathlib
from collections.abc import Sequence

from paxlite.cli import command_line
from paxlite.cli.parser import Parser, local
from paxlite.contrib.gpu.scripts_gpu import tfds_datasets
from paxlite.core import shell
from paxlite.core.errors import UserError


def main(argv: Sequence[str]) -> None:
  parser = Parser(__doc__)
  tfds_datasets.add_data_dir(parser)
  parser.option('--source', 'a local folder', local)
  args = parser.parsed(argv)
  if args.source is None:
    print(_fetch(args.tfds_data_dir))
    return
  folder = pathlib.Path(args.source)
  found = {'train': folder / 'train.jsonl', 'validation': folder / 'dev.jsonl'}
  splits = {split: [str(path)] for split, path in found.items() if path.is_file()}
  if 'validation' not in splits:
    raise UserError(f'{folder} holds no dev.jsonl')
  features = {'question': str, 'passage': str, 'answer': bool}
  convert = lambda x: {name: x[name] for name in features}
  print(tfds_datasets.build('bool_q', features, splits, convert, args.tfds_data_dir))


def _fetch(data_dir: str) -> str:
  try:
    import tensorflow_datasets as tfds
  except ImportError as e:
    raise UserError(f'TFDS is missing ({e}): {shell.install("seqio")}') from None
  try:
    builder = tfds.builder('bool_q:1.0.0', data_dir=data_dir)
    builder.download_and_prepare()
  except Exception as e:  # the network and TFDS raise many types
    raise UserError(
      f'bool_q cannot be fetched ({str(e).strip().splitlines()[0]}): name a local folder with '
      '--source'
    ) from None
  return f'{builder.data_dir}: {builder.info.splits}'


if __name__ == '__main__':
  command_line.run(main)
