"""Makes TFDS datasets from JSON lines; shared by the download_*.py scripts."""

import hashlib
import os
import pathlib
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence

from paxlite.cli.parser import Parser, local
from paxlite.core import shell
from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject
from paxlite.files.json_files import read_json_lines

_KINDS = {str: 'text', bool: 'true or false'}

Convert = Callable[[JsonObject], JsonObject]


def add_data_dir(parser: Parser) -> None:
  """Adds --tfds_data_dir, whose default is the environment variable TFDS_DATA_DIR."""
  given = os.environ.get('TFDS_DATA_DIR') or None
  meaning = 'folder for the dataset, like TFDS_DATA_DIR'
  parser.option('--tfds_data_dir', meaning, local, default=given, required=given is None)


def build(
  name: str,
  features: Mapping[str, type],
  splits: Mapping[str, Sequence[str]],
  convert: Convert,
  data_dir: str,
  num_shards: int | None = None,
) -> str:
  """Writes `data_dir`/name/1.0.0 from JSON lines; returns a line that describes the dataset.

  Raises UserError if TFDS is missing, a line is invalid, or the dataset exists already.

  Args:
    name: Name of the dataset.
    features: The types of its fields: str, bool.
    splits: The files of each split, .jsonl, also .gz .xz .zst.
    convert: Makes a record of the dataset from a line. If a field is missing or has another type,
      the error names the line.
    data_dir: TFDS_DATA_DIR.
    num_shards: Number of files per split; None: by size. Up to 8 processes share a multiple of 8.
  """
  try:
    import tensorflow as tf
    import tensorflow_datasets as tfds
  except ImportError as e:
    raise UserError(f'TFDS is missing ({e}): {shell.install("seqio")}') from None
  folder = pathlib.Path(data_dir) / name / '1.0.0'
  if folder.exists():
    raise UserError(f'{folder} exists already: remove it to build it again')
  kinds = {str: tf.string, bool: tf.bool}
  signature = {k: tf.TensorSpec((), kinds[t]) for k, t in features.items()}
  types = {str: tfds.features.Text(), bool: tfds.features.Scalar(tf.bool)}
  errors: list[BaseException] = []  # TensorFlow replaces errors of a generator by its own

  def dataset(files: Sequence[str]) -> object:
    def records() -> Iterator[JsonObject]:
      try:
        for file in files:
          yield from _converted(file, convert, features)
      except (UserError, KeyboardInterrupt, SystemExit) as e:
        errors.append(e)
        raise

    return tf.data.Dataset.from_generator(records, output_signature=signature)

  try:
    built = tfds.dataset_builders.store_as_tfds_dataset(
      name=name, version='1.0.0',
      features=tfds.features.FeaturesDict({k: types[t] for k, t in features.items()}),
      split_datasets={split: dataset(files) for split, files in splits.items()}, data_dir=data_dir,
      download_config=tfds.download.DownloadConfig(num_shards=num_shards),
    )  # fmt: skip
  except Exception:
    if errors:
      raise errors[0] from None
    raise
  counts = ', '.join(f'{s}: {i.num_examples:,}' for s, i in built.info.splits.items())
  return f'{folder}: {counts}'


def _converted(file: str, convert: Convert, features: Mapping[str, type]) -> Iterator[JsonObject]:
  for place, record in read_json_lines(file):
    try:
      converted = convert(record)
    except (KeyError, IndexError, TypeError, AttributeError) as e:
      raise UserError(f'{place} is not a record of this dataset: {e!r}') from None
    for name, kind in features.items():
      if not isinstance(converted[name], kind):
        raise UserError(
          f'{place} is not a record of this dataset: {name!r} must be {_KINDS[kind]}, not '
          f'{shell.shortened(repr(converted[name]))}'
        )
    yield converted


def fetched(url: str, sha256: str, folder: pathlib.Path) -> str:
  """Returns the file at a URL, downloaded into a folder unless present; verifies its checksum.

  Raises UserError if there is no network, or the file is not the expected one.
  """
  path = folder / url.rsplit('/', 1)[-1]
  if not path.exists():
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f'{path.name}.unfinished')
    try:
      urllib.request.urlretrieve(url, unfinished)
      check(unfinished, sha256)
      unfinished.rename(path)
    except OSError as e:
      raise UserError(f'{url} cannot be fetched ({e}): name a local copy with --source') from None
    finally:
      unfinished.unlink(missing_ok=True)
  check(path, sha256)
  return str(path)


def check(path: pathlib.Path, sha256: str) -> None:
  """Raises UserError if a file does not have this SHA-256."""
  found = hashlib.sha256()
  with path.open('rb') as f:
    while block := f.read(1 << 22):
      found.update(block)
  if found.hexdigest() != sha256.lower():
    raise UserError(f'{path} is damaged or another file: its SHA-256 is {found.hexdigest()}')


def check_sums(folder: pathlib.Path) -> int:
  """Verifies the files that the folder's SHA256SUMS* files list; returns their number."""
  count = 0
  for sums in sorted(folder.glob('SHA256SUMS*')):
    for number, line in enumerate(sums.read_text().splitlines(), 1):
      digest, _, name = line.strip().partition(' ')
      path = folder / name.strip().removeprefix('*')
      if len(digest) != 64 or not name:
        raise UserError(f'{sums}:{number} is not a line with a checksum and a file name')
      if path.is_file():
        check(path, digest)
        count += 1
  return count
