"""The parts of a published model family."""

import dataclasses
from collections.abc import Callable, Container, Mapping, Sequence

from paxlite.experiments.language_model import LanguageModel
from paxlite.weights import tensor_names
from paxlite.weights.config_keys import Key
from paxlite.weights.layout import LayerEntries
from paxlite.weights.packed_experts import with_packed
from paxlite.weights.tensor_entries import Entry


@dataclasses.dataclass(frozen=True)
class Family:
  """How a family is published on Hugging Face."""

  architecture: str  # the class in transformers
  # the class whose attributes are those of all models of the family
  experiment: type[LanguageModel]
  keys: Sequence[Key]  # the keys of config.json that differ between models of the family
  # names of the tensors by role; see tensor_names
  names: Mapping[str, str] = dataclasses.field(default_factory=lambda: tensor_names.HUGGING_FACE)
  rotary: str = 'half'  # layout of the rotary pairs in queries and keys; see RotaryEmbedding
  # parts of names of tensors, by those that some files have instead
  other_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
  # as for decoder_entries
  layers: Mapping[str, LayerEntries] = dataclasses.field(default_factory=dict)
  attention: LayerEntries | None = None  # as for decoder_entries
  # returns the entries of the tensors, where decoder_entries does not
  entries: Callable[[LanguageModel], list[Entry]] | None = None
  # transformers' class of reward models; '': that of the architecture; None: none
  classifier: str | None = ''
  # returns a regular expression for the names of tensors that files may have beside those of the
  # entries, and that no model reads; None: there are none
  unread: Callable[[LanguageModel], str] | None = None
  # whether files may have one tensor for all experts of a block; see with_packed
  packs_experts: bool = False

  def found(self, entries: Sequence[Entry], names: Container[str]) -> list[Entry]:
    """Returns entries with the names of tensors that a file has.

    Args:
      entries: The entries with the usual names.
      names: The names in the file.
    """

    def other(name: str) -> str:
      parts = (p for p in self.other_names.items() if name not in names and p[1] in name)
      others = (name.replace(usual, instead) for instead, usual in parts)
      return next((n for n in others if n in names), name)

    usual = with_packed(entries, names) if self.packs_experts else entries
    return [dataclasses.replace(entry, theirs=other(entry.theirs)) for entry in usual]

  @property
  def attributes(self) -> set[str]:
    """The attributes that may differ between models of the family."""
    return {name for key in self.keys for name in key.ours}
