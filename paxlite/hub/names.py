"""How models and datasets of the Hugging Face Hub are written where a path may be.

org/name                a model, unless there is a folder org/name or org here
org/name@revision       a branch, a tag or a commit of it
hf:org/name             the model, whatever is here; where records are read, the dataset
hf:org/name:validation  a split of a dataset; without it, train
hf:org/name:a/*.jsonl   files of a dataset
"""

import dataclasses
import functools
import logging
import os
import pathlib
import re

log = logging.getLogger('paxlite')

_WORD = r'[A-Za-z0-9][\w.-]{0,95}'
_REVISION = r'(?!.*\.\.)\w[\w.+/-]*'
_MODEL = re.compile(rf'(hf:)?({_WORD})/({_WORD})(?:@({_REVISION}))?')
_DATASET = re.compile(rf'hf:({_WORD})/({_WORD})(?:@({_REVISION}))?(?::([^:]+))?')
_FILE = re.compile(r'[^/]+|.*\.(jsonl|ndjson|json|csv|tsv|parquet)(\.gz|\.xz|\.zst)?')
_SPLITS = 'train', 'test', 'validation', 'valid', 'dev'
COMMIT = re.compile(r'[0-9a-f]{40}')


@dataclasses.dataclass(frozen=True)
class HubName:
  """A model or a dataset."""

  repo: str  # its organization or user, a slash, and its name
  revision: str = 'main'  # a branch, a tag, or a commit
  part: str = ''  # of a dataset: a split, or a pattern of files; '': the split train
  kind: str = 'model'  # 'model' or 'dataset'

  def __str__(self) -> str:
    return self.repo if self.revision == 'main' else f'{self.repo}@{self.revision}'

  @property
  def page(self) -> str:
    """The address of its page."""
    at = os.environ.get('HF_ENDPOINT', 'https://huggingface.co').rstrip('/')
    return f'{at}/{"datasets/" * (self.kind == "dataset")}{self.repo}'

  @property
  def copies(self) -> pathlib.Path:
    """The folder of its copies in the cache that all programs share."""
    return cache() / f'{self.kind}s--{self.repo.replace("/", "--")}'


def cache() -> pathlib.Path:
  """Returns the cache that all programs share, by the rules of huggingface_hub."""
  home = os.environ.get('XDG_CACHE_HOME') or '~/.cache'
  home = os.environ.get('HF_HOME') or os.path.join(home, 'huggingface')
  place = os.environ.get('HF_HUB_CACHE') or os.path.join(home, 'hub')
  return pathlib.Path(os.path.expandvars(place)).expanduser()


def model_named(text: str) -> HubName | None:
  """Returns the model that a text names; None if it is a path."""
  found = _MODEL.fullmatch(text)
  if found is None:
    return None
  prefix, org, name, revision = found.groups()
  model = HubName(f'{org}/{name}', revision or 'main')
  if prefix:
    return model
  if os.path.exists(text):
    if model.copies.is_dir():
      _say(f'{text} is a path here, so paxlite reads it; hf:{text} names the model on the Hub')
    return None
  return None if os.path.isdir(org) else model


def dataset_named(text: str) -> HubName | None:
  """Returns the dataset whose files a text names; None for all else.

  What ends in a split after a slash, as hf:allenai/c4:en/train does, is read as a stream.
  """
  found = _DATASET.fullmatch(text)
  if found is None:
    return None
  org, name, revision, part = found.groups()
  if os.path.isdir(org) or (part and not _FILE.fullmatch(part)):
    return None
  if not part and not revision and name.partition('[')[0] in _SPLITS:
    return None
  return HubName(f'{org}/{name}', revision or 'main', part or '', 'dataset')


@functools.cache
def _say(warning: str) -> None:
  log.warning('%s', warning)
