"""New tokens at an import: in the tokenizer, and as rows of the model, the mean of all others."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from paxlite.core.errors import UserError, listed
from paxlite.data.tokenizer_copies import copy_tokenizer
from paxlite.data.tokenizer_files import JSON
from paxlite.experiments.language_model import LanguageModel
from paxlite.weights.folder import Tensors
from paxlite.weights.tensor_entries import Entry

_TABLES = ('embedding/emb_var', 'softmax/w', 'logits_bias/b')


@dataclasses.dataclass(frozen=True)
class GrownTables:
  """Tensors of which some are tables with rows for new ids."""

  tensors: Tensors  # the tensors without them
  tables: Sequence[str]  # the names of the tables
  size: int  # the rows that a table is to have
  known: int  # the number of ids before the new ones
  ids: Sequence[int]  # the new ids, of which a table may have had rows that nothing used

  @property
  def shapes(self) -> Mapping[str, tuple[int, ...]]:
    found = dict(self.tensors.shapes)
    return found | {n: (self.size, *found[n][1:]) for n in self.tables if n in found}

  def read(self, name: str) -> np.ndarray:
    value = self.tensors.read(name)
    if name not in self.tables:
      return value
    table = np.zeros((self.size, *value.shape[1:]), value.dtype)
    table[: len(value)] = value
    table[[*self.ids]] = value[: self.known].astype(np.float32).mean(0)
    return table


def with_tokenizer(source: pathlib.Path | None, texts: str, to: pathlib.Path) -> list[int]:
  """Writes a tokenizer with new tokens into a folder, and returns their ids.

  Raises UserError if there is no tokenizer.json, or it has one of the tokens.

  Args:
    source: The tokenizer's file, or its folder.
    texts: The tokens, with commas between them.
  """
  from tokenizers import AddedToken, Tokenizer

  names = texts.split(',')
  if not all(names) or len({*names}) < len(names):
    raise UserError(f'--add_tokens={texts} must be texts, each once, with commas between them')
  copy_tokenizer(source, to)
  if not (to / JSON).is_file():
    raise UserError(
      f'--add_tokens needs a {JSON}, and {source or "the weights"} has none: transformers makes '
      'one with AutoTokenizer.from_pretrained(FOLDER).save_pretrained(TO), for --tokenizer=TO'
    )
  tokenizer = Tokenizer.from_file(str(to / JSON))
  if there := [name for name in names if tokenizer.token_to_id(name) is not None]:
    raise UserError(f'--add_tokens: {listed(there)} is in the tokenizer already: leave it out')
  tokenizer.add_tokens([AddedToken(name, normalized=False) for name in names])
  tokenizer.save(str(to / JSON))
  return [tokenizer.token_to_id(name) for name in names]  # type: ignore[misc]


def with_rows(
  e: LanguageModel, entries: Sequence[Entry], tensors: Tensors, ids: Sequence[int]
) -> tuple[LanguageModel, list[Entry], Tensors]:
  """Returns a model, its entries and its tensors with rows for new ids.

  Raises UserError if the model has other tables with a row for each id.
  """
  V, size = e.VOCAB_SIZE, max(e.VOCAB_SIZE, max(ids) + 1)
  others = [x.theirs for x in entries if x.shape[:1] == (V,) and x.ours not in _TABLES]
  if size > V and others:
    raise UserError(f'--add_tokens: {others[0]} has a row per id too, which is not supported')
  resized = lambda x: dataclasses.replace(
    x, shape=(size, *x.shape[1:]), our_shape=(size, *x.our_shape[1:])
  )
  grown = [resized(x) if x.ours in _TABLES else x for x in entries]
  tables = [x.theirs for x in entries if x.ours in _TABLES]
  found = GrownTables(tensors, tables, size, min(ids), ids)
  return e.replaced(VOCAB_SIZE=size), grown, found
