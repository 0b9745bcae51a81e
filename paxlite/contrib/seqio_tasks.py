"""SeqIO tasks: those named as in Pax, over TFDS datasets, and those that a user registered."""

import dataclasses
import functools
import itertools
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from paxlite.core import shell
from paxlite.core.errors import UserError, line_of
from paxlite.data.contents import checksum, of_files
from paxlite.data.places import Place
from paxlite.data.tokenizer import open_tokenizer

# The dataset, the function from a record to its texts, and whether they are inputs and targets
# (True) or documents (False).
_BUILT_IN = {
  'the_pile_lm': ('the_pile:1.0.0', lambda x: {'targets': x['text']}, False),
  'c4': ('c4/en:3.0.1', lambda x: {'targets': x['text']}, False),
  'lambada_eval': ('lambada:1.0.0', lambda x: _last_word(x['text']), True),
  'boolq': ('bool_q:1.0.0', lambda x: _question(x), True),
}

_SAMPLED = 16  # examples of a task without files that identify its data
_SHARD_BYTES = 1e8  # SeqIO does not say how large a file is; TFDS makes all of them equally large


@dataclasses.dataclass(frozen=True)
class SeqioExample:
  """Token ids [n] and a mask of those that are targets [n]."""

  ids: np.ndarray
  is_target: np.ndarray


class SeqioSource:
  """A SeqIO task or mixture, for a StreamInput.

  Raises UserError if the package seqio is missing, the task, split or dataset does not exist, or no
  id stands before the first token of a text.

  Args:
    task: Name of a task of paxlite ('the_pile_lm', 'c4', 'lambada_eval', 'boolq'), or of one that
      the user registered.
    split: 'train', 'validation', …
    vocab_path: Path of the SentencePiece model, for paxlite's tasks.
    tfds_data_dir: Folder of the TFDS datasets; '': TFDS_DATA_DIR, or TFDS' own default.
    start_id: The first input id of a text; None: the vocabulary's BOS, or else its EOS.
  """

  def __init__(
    self,
    task: str,
    split: str,
    vocab_path: str = '',
    tfds_data_dir: str = '',
    start_id: int | None = 0,
  ):
    self.name = f'{task}/{split}'
    self.datasets = find_datasets(task, split, vocab_path, tfds_data_dir)
    self.max_token_id = max(dataset.vocab_size for dataset in self.datasets) - 1
    found = self.datasets[0].first_id if start_id is None else start_id
    if found is None:
      raise UserError(
        f'the vocabulary of {self.name} has neither BOS nor EOS to precede the first token of a '
        'text: set START_ID=ID'
      )
    self.start_id = found
    self.datasets = [dataclasses.replace(d, start_id=found) for d in self.datasets]


@dataclasses.dataclass(frozen=True)
class SeqioDataset:
  """A task, alone or in a mixture."""

  name: str  # name of the task
  task: Any  # the seqio.Task
  split: str  # the split that is read
  rate: float  # the task's share of a mixture, not normalized
  shards: Sequence[str]  # names of the shards of the split; files, if the task reads any
  vocab_size: int  # number of ids in the task's vocabulary
  # the id before the first token of a text: BOS, or else EOS; None: there is neither
  first_id: int | None
  start_id: int = 0  # the id that is there instead

  @property
  def num_shards(self) -> int:
    return len(self.shards)

  @property
  def shard_bytes(self) -> list[float]:
    return [_SHARD_BYTES] * self.num_shards

  @functools.cached_property
  def fingerprint(self) -> int:
    if all('://' in shard or os.path.isfile(shard) for shard in self.shards):
      return checksum(self.vocab_size, of_files(self.shards))
    first = itertools.islice(self.examples(0, False, None, 0), _SAMPLED)
    tokens = [(x.ids.tolist(), x.is_target.tolist()) for _, x in first]
    return checksum(self.vocab_size, self.num_shards, tokens)

  @property
  def tokens_fingerprint(self) -> int | None:
    """The start id; None if it is 0, as it was in all runs once."""
    return self.start_id or None

  names_records = False

  def record_of(self, shard: int, shuffle: bool, seed: int | None, number: int) -> int:
    """Returns `number`: SeqIO does not say which record an example of a shuffled shard is."""
    return number

  def place_of(self, shard: int, record: int) -> Place:
    detail = f'shard {shard} of {self.num_shards}, example {record} in the order of reading'
    return Place(f'{self.name}/{self.split}', detail=detail, unknown='SeqIO does not name records')

  def examples(
    self, shard: int, shuffle: bool, seed: int | None, start: int
  ) -> Iterator[tuple[int, SeqioExample]]:
    """Yields the numbers and tokenized examples of one shard: inputs, if any, and targets.

    Examples before number `start` are read too, because SeqIO cannot skip them otherwise.
    """
    import seqio

    dataset = self.task.get_dataset(
      sequence_length=None, split=self.split, shuffle=shuffle, seed=seed,
      shard_info=seqio.ShardInfo(shard, self.num_shards), num_epochs=1, use_cached=False,
      trim_output_features=False,
    )  # fmt: skip
    for number, example in enumerate(dataset.skip(start).as_numpy_iterator(), start):
      targets = np.asarray(example['targets'], np.int32)
      inputs = np.asarray(example.get('inputs', ()), np.int32)
      ids = np.concatenate([inputs, targets])
      if len(ids):
        yield number, SeqioExample(ids, np.arange(len(ids)) >= len(inputs))


def find_datasets(name: str, split: str, vocab_path: str, tfds_data_dir: str) -> list[SeqioDataset]:
  """Returns the task called `name`, or the tasks of that mixture with their rates.

  Raises UserError if the package seqio is missing, or the task, split or dataset does not exist.
  """
  if name in _BUILT_IN:
    open_tokenizer(vocab_path)  # a mistake is answered before TensorFlow is imported, which is slow
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')  # silences TensorFlow's dozen lines
  try:
    import seqio
  except ImportError as e:
    raise UserError(
      f'{name} is read through SeqIO, which is missing ({e}): {shell.install("seqio")}'
    ) from None
  folder = tfds_data_dir or os.environ.get('TFDS_DATA_DIR', '')
  if folder:
    if not pathlib.Path(folder).is_dir() and '://' not in folder:
      raise UserError(f'--tfds_data_dir={folder} is not a folder')
    seqio.set_tfds_data_dir_override(folder)
  if name in _BUILT_IN:
    if name in {*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()}:
      raise UserError(f'the SeqIO task {name} is also a task of paxlite: rename yours')
    return [_dataset(_built_in(name, vocab_path), split, 1.0, folder)]
  try:
    found = seqio.get_mixture_or_task(name)
  except ValueError:
    raise UserError(
      f'no SeqIO task or mixture is named {name!r}: paxlite has {", ".join(_BUILT_IN)}; '
      "'SEQIO_MODULES=[my.tasks]' names modules that register more"
    ) from None
  if not isinstance(found, seqio.Mixture):
    return [_dataset(found, split, 1.0, folder)]
  return [_dataset(task, split, float(found.get_rate(task)), folder) for task in found.tasks]


def _dataset(task: Any, split: str, rate: float, folder: str) -> SeqioDataset:
  """Makes a SeqioDataset of a task; raises UserError if its dataset or the split does not exist."""
  try:
    splits = list(task.splits)
    shards = tuple(task.source.list_shards(split)) if split in splits else ()
  except Exception as e:  # TFDS and TensorFlow have dozens of classes
    where = f'in {folder}' if folder else 'where TFDS looks (TFDS_DATA_DIR, --tfds_data_dir)'
    raise UserError(
      f'{task.name}: its dataset is not {where}: {line_of(e)}. '
      'paxlite/contrib/gpu/scripts_gpu/download_*.py make those of paxlite'
    ) from None
  if split not in splits:
    raise UserError(f'{task.name} has no split {split!r}; it has {", ".join(splits)}')
  vocabulary = task.output_features['targets'].vocabulary
  ids = (getattr(vocabulary, name, None) for name in ('bos_id', 'eos_id'))
  return SeqioDataset(
    task.name, task, split, rate, shards, int(vocabulary.vocab_size),
    next((int(i) for i in ids if i is not None and i >= 0), None),
  )  # fmt: skip


@functools.cache
def _built_in(name: str, vocab_path: str) -> Any:
  import seqio

  vocabulary = seqio.SentencePieceVocabulary(vocab_path)
  dataset, texts, has_inputs = _BUILT_IN[name]
  return seqio.Task(
    name,
    source=seqio.TfdsDataSource(dataset),
    preprocessors=[
      seqio.map_over_dataset(texts),
      seqio.preprocessors.tokenize,
      *([] if has_inputs else [seqio.preprocessors.append_eos]),
    ],
    output_features={
      **({'inputs': seqio.Feature(vocabulary, add_eos=False)} if has_inputs else {}),
      'targets': seqio.Feature(vocabulary, add_eos=not has_inputs),
    },
  )


def _last_word(text: object) -> dict[str, object]:
  """Splits a text into the text before its last word, and ' ' + that word."""
  import tensorflow as tf

  words = tf.strings.split(tf.strings.strip(text), ' ')
  return {
    'inputs': tf.strings.reduce_join(words[:-1], separator=' '),
    'targets': tf.strings.join([' ', words[-1]]),
  }


def _question(x: Mapping[str, object]) -> dict[str, object]:
  """Returns a passage with its question as inputs, and ' yes' or ' no' as targets."""
  import tensorflow as tf

  asked = [x['passage'], '\nquestion: ', x['question'], '?\nanswer:']
  return {'inputs': tf.strings.join(asked), 'targets': tf.where(x['answer'], ' yes', ' no')}
