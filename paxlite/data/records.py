"""Records of files and datasets, each with its location for error messages.

    corpus.jsonl.zst                  JSON lines
    corpus.json                       the same, a list of objects, or objects over several lines
    corpus.csv                        rows below a header, also .tsv
    corpus.parquet                    rows of Parquet
    corpus.txt.xz                     one record, the whole text in the field 'text'
    tfds:c4/en:3.0.1/train            a split of a TFDS dataset (TFDS_DATA_DIR)
    hf:allenai/c4:en/train            a split of a Hugging Face dataset, its configuration after ':'
    hf:/data/wiki/train               a dataset that was saved to disk, or a folder of its files

A source is read shard by shard. The records of a shard have a fixed order, and reading can start at
any of them.
"""

import abc
import functools
import itertools
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Protocol

from paxlite.core import shell
from paxlite.core.errors import UserError, line_of
from paxlite.data.contents import checksum, of_files
from paxlite.data.record_files import Raw, Record, open_file, read_errors, without_nulls
from paxlite.files.json_files import parse_line
from paxlite.files.schemes import is_address

_RECORD_BYTES = 1000  # the size assumed for a record of a dataset that does not state its size
_SAMPLED = 16  # records of a dataset without files that identify it


class Records(Protocol):
  """A source of records."""

  name: str  # name by which the user calls the source
  num_shards: int  # number of shards; each can be read alone
  size: int | None  # size of all shards together, in any unit; None: not known
  done: int  # how much of `size` has been read, in the same unit

  @property
  def shard_bytes(self) -> float:
    """About how large a shard is; 0 if that is not known."""
    ...

  @property
  def fingerprint(self) -> int:
    """A cheap checksum of the contents; other contents nearly always have another one."""
    ...

  def read(self, shard: int, start: int = 0) -> Iterator[tuple[int, Raw]]:
    """Yields the numbers and records of a shard, from record `start` on.

    Raises UserError if the source cannot be read.
    """
    ...

  def place(self, shard: int, number: int) -> str:
    """Returns the location of a record, for error messages."""
    ...


def canonical(name: str) -> str:
  """Returns one name for a source, whichever of its names is given."""
  is_name = name.startswith(('tfds:', 'hf:')) or is_address(name)
  return name if is_name else os.path.realpath(name)


def open_records(name: str, tfds_data_dir: str = '') -> Records:
  """Opens the source called `name`.

  Raises UserError if the source does not exist, or the package that reads it is missing.

  Args:
    name: A file, or a dataset named as in the module's docstring.
    tfds_data_dir: Folder of the TFDS datasets; '': TFDS_DATA_DIR, or TFDS' own default.
  """
  if name.startswith('tfds:'):
    return _Tfds(name, tfds_data_dir)
  if name.startswith('hf:'):
    return _HuggingFace(name)
  return open_file(name)


def read_records(name: str) -> Iterator[tuple[str, Record]]:
  """Yields the location and the record of every record of a source."""
  for place, raw in raw_records(name):
    yield place, parsed(raw, place)


def raw_records(name: str) -> Iterator[tuple[str, Raw]]:
  """Yields the location of every record of a source, and what `parsed` makes a record of."""
  source = open_records(name)
  for shard in range(source.num_shards):
    for number, raw in source.read(shard):
      yield source.place(shard, number), raw


def parsed(raw: Raw, place: str) -> Record:
  """Returns the record that was read at `place`; raises UserError if a line holds no record."""
  if isinstance(raw, str):
    return {'text': raw}
  return parse_line(raw, place) if isinstance(raw, bytes) else raw


def text_of(record: Record, field: str, place: str) -> str:
  """Returns the text in a field; raises UserError if the field is missing or holds no text."""
  text = record.get(field)
  if not isinstance(text, str):
    if field in record:
      raise UserError(f'{place}: the field {field!r} holds no text')
    raise UserError(f'{place} has no text field {field!r}; it has {", ".join(record)}')
  return text


class _DatasetSplit(abc.ABC):
  """A source that is a split of a dataset; `done` counts records.

  Its files identify it, or its first records if it is made of none.
  """

  def __init__(self, name: str):
    self.name = name
    path, slash, self._split = name.partition(':')[2].rpartition('/')
    if not slash or not path or not self._split:
      raise UserError(f'{name} names no split: write {name.rstrip("/")}/train')
    self._path = path
    self.done = 0

  @property
  def shard_bytes(self) -> float:
    return _RECORD_BYTES * (self.size or 0) / self.num_shards

  @functools.cached_property
  def fingerprint(self) -> int:
    part = self._split if '[' in self._split else ''  # a slice of the same files
    if self._files:
      with read_errors(self.name):
        return checksum(part, self.num_shards, of_files(self._files))
    done = self.done
    first = [record for _, record in itertools.islice(self.read(0), _SAMPLED)]
    self.done = done
    return checksum(part, self.num_shards, self.size, first)

  def place(self, shard: int, number: int) -> str:
    return f'{self.name}[{shard}]:{number}' if self.num_shards > 1 else f'{self.name}:{number}'

  @abc.abstractmethod
  def read(self, shard: int, start: int = 0) -> Iterator[tuple[int, Raw]]:
    """Yields the numbers and records of a shard; see Records."""

  num_shards = 1
  size: int | None = None
  _files: Sequence[str] = ()


class _Tfds(_DatasetSplit):
  def __init__(self, name: str, data_dir: str):
    super().__init__(name)
    os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')  # silences TensorFlow's dozen lines
    try:
      import tensorflow_datasets as tfds
    except ImportError as e:
      raise UserError(
        f'{name} is a TFDS dataset ({e}): name a file, or {shell.install("seqio")}'
      ) from None
    folder = data_dir or os.environ.get('TFDS_DATA_DIR') or None
    try:
      self._builder = tfds.builder(self._path, data_dir=folder)
      splits = self._builder.info.splits
      info = splits[self._split]
    except Exception as e:  # TFDS has dozens of exception classes
      raise UserError(
        f'no TFDS dataset {self._path} with split {self._split} in '
        f'{folder or "its own folder (TFDS_DATA_DIR)"} ({line_of(e)}): name a file, or make it '
        'with a download_*.py of paxlite.contrib.gpu.scripts_gpu'
      ) from None
    self.num_shards = 1 if '[' in self._split else info.num_shards  # a slice is read as one shard
    self.size = info.num_examples
    self._files = [str(path) for path in info.filepaths]

  def read(self, shard: int, start: int = 0) -> Iterator[tuple[int, Raw]]:
    import tensorflow_datasets as tfds

    with read_errors(self.name):
      split = self._split if self.num_shards == 1 else f'{self._split}[{shard}shard]'
      # Files are read one after the other, so that a number always means the same record.
      order = tfds.ReadConfig(interleave_cycle_length=1, try_autocache=False)
      found = self._builder.as_dataset(split=split, shuffle_files=False, read_config=order)
      for number, record in enumerate(tfds.as_numpy(found.skip(start)), start):
        self.done += 1
        yield number, {k: _plain(v) for k, v in record.items()}


class _HuggingFace(_DatasetSplit):
  """A split of a Hugging Face dataset, read as a stream without downloading all of it."""

  def __init__(self, name: str):
    super().__init__(name)
    try:
      import datasets
    except ImportError:
      raise UserError(
        f'{name} is a Hugging Face dataset, which needs a package: {shell.install("hf")}, or '
        'name a file'
      ) from None
    folder = pathlib.Path(self._path)
    with read_errors(name):
      if any((folder / f).is_file() for f in ('dataset_dict.json', 'state.json')):
        saved = datasets.load_from_disk(str(folder))
        if isinstance(saved, dict) and self._split not in saved:
          raise UserError(f'{name} is not a split; the dataset has {", ".join(saved)}')
        found = saved[self._split] if isinstance(saved, dict) else saved
        self.size = len(found)
        self._files = [file['filename'] for file in found.cache_files]
        shards = max(1, min(len(self._files), len(found)))
        self._dataset = found.to_iterable_dataset(num_shards=shards)
      else:
        path, _, configuration = self._path.partition(':')
        builder = datasets.load_dataset_builder(path, configuration or None)
        self._files = list((builder.config.data_files or {}).get(self._split, ()))
        self._dataset = builder.as_streaming_dataset(split=self._split)
        splits = self._dataset.info.splits or {}
        self.size = splits[self._split].num_examples if self._split in splits else None
    self.num_shards = self._dataset.num_shards

  def read(self, shard: int, start: int = 0) -> Iterator[tuple[int, Raw]]:
    with read_errors(self.name):
      found = self._dataset.shard(num_shards=self.num_shards, index=shard)
      for number, record in enumerate(found.skip(start) if start else found, start):
        self.done += 1
        yield number, without_nulls(record)


def _plain(value: object) -> object:
  """Converts bytes to text and NumPy numbers to Python numbers."""
  if isinstance(value, bytes):
    return value.decode('utf-8', 'replace')
  return value.item() if hasattr(value, 'item') and getattr(value, 'ndim', None) == 0 else value


def share_done(sources: Sequence[Records]) -> float | None:
  """The fraction of all sources that has been read; None if a size is not known."""
  sizes = [s.size for s in sources]
  if any(size is None for size in sizes):
    return None
  return sum(s.done for s in sources) / max(1, sum(size or 0 for size in sizes))
