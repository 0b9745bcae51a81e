"""python -m paxlite.contrib.gpu.scripts_gpu.download_the_pile --source=FOLDER --tfds_data_dir=DIR

Builds the TFDS dataset `the_pile` that the Pile experiments read. The Pile is no longer public. Its
files come from your own mirror, in JSON lines with a field "text", also as .zst, .gz or .xz:

  FOLDER/train/*.jsonl.zst  FOLDER/val.jsonl.zst  FOLDER/test.jsonl.zst

If the folder has a SHA256SUMS.txt, the files are verified first.
"""

import pathlib
from collections.abc import Sequence

from paxlite.cli import command_line
from paxlite.cli.parser import Parser, local
from paxlite.contrib.gpu.scripts_gpu import tfds_datasets
from paxlite.core.errors import UserError

_NAMES = {'train': ('train',), 'validation': ('val', 'validation'), 'test': ('test',)}


def main(argv: Sequence[str]) -> None:
  parser = Parser(__doc__)
  parser.option('--source', 'folder of a mirror', local, required=True)
  tfds_datasets.add_data_dir(parser)
  parser.option('--num_shards', 'files of a split (by its size)', int)
  args = parser.parsed(argv)
  folder = pathlib.Path(args.source)
  if not folder.is_dir():
    raise UserError(
      f'--source={folder} is not a folder. The Pile is no longer public: name your own mirror'
    )
  splits = {split: _files(folder, names) for split, names in _NAMES.items()}
  splits = {split: files for split, files in splits.items() if files}
  if 'train' not in splits:
    raise UserError(f'{folder} holds neither train.jsonl* nor train/*.jsonl*')
  verified = tfds_datasets.check_sums(folder)
  built = tfds_datasets.build(
    'the_pile', {'text': str}, splits, lambda x: {'text': x['text']}, args.tfds_data_dir,
    args.num_shards,
  )  # fmt: skip
  print(f'{built}; {verified:,} checksums verified')


def _files(folder: pathlib.Path, names: Sequence[str]) -> list[str]:
  found = [p for name in names for p in folder.glob(f'{name}.jsonl*')]
  found += [p for name in names for p in sorted((folder / name).glob('*.jsonl*'))]
  return [str(p) for p in found]


if __name__ == '__main__':
  command_line.run(main)
