"""python -m paxlite.contrib.gpu.scripts_gpu.download_lambada --tfds_data_dir=DIR [--source=FILE]

Builds the TFDS dataset `lambada` that the Lambada experiments read: OpenAI's version of LAMBADA's
test set. It is downloaded, or read from a local copy in JSON lines with a field "text".
"""

import pathlib
from collections.abc import Mapping, Sequence

from paxlite.cli import command_line
from paxlite.cli.parser import Parser, local
from paxlite.contrib.gpu.scripts_gpu import tfds_datasets

_URL = 'https://openaipublic.blob.core.windows.net/gpt-2/data/lambada_test.jsonl'
_SHA256 = '4aa8d02cd17c719165fc8a7887fddd641f43fcafa4b1c806ca8abc31fabdb226'


def main(argv: Sequence[str]) -> None:
  parser = Parser(__doc__)
  tfds_datasets.add_data_dir(parser)
  parser.option('--source', 'a local copy', local)
  args = parser.parsed(argv)
  downloads = pathlib.Path(args.tfds_data_dir) / 'downloads'
  file = args.source or tfds_datasets.fetched(_URL, _SHA256, downloads)
  print(tfds_datasets.build('lambada', {'text': str}, {'test': [file]}, _text, args.tfds_data_dir))


def _text(record: Mapping[str, str]) -> dict[str, str]:
  if 'text' in record:
    return {'text': record['text']}
  return {'text': f'{record["context"]} {record["continuation"]}'}


if __name__ == '__main__':
  command_line.run(main)
