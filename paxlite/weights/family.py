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
  """How a family is published on Hugging Face.

  Attributes:
    architecture: The class in transformers.
    experiment: The class whose attributes are those of all models of the family.
    keys: The keys of config.json that differ between models of the family.
    names: Names of the tensors by role; see tensor_names.
    rotary: Layout of the rotary pairs in queries and keys; see RotaryEmbedding.
    other_names: Parts of names of tensors, by those that some files have instead.
    layers: As for decoder_entries.
    attention: As for decoder_entries.
    entries: Returns the entries of the tensors, where decoder_entries does not.
    classifier: transformers' class of reward models; '': that of the architecture; None: none.
    unread: Returns a regular expression for the names of tensors that files may have beside those
      of the entries, and that no model reads; None: there are none.
    packs_experts: Whether files may have one tensor for all experts of a block; see with_packed.
  """

  architecture: str
  experiment: type[LanguageModel]
  keys: Sequence[Key]
  names: Mapping[str, str] = dataclasses.field(default_factory=lambda: tensor_names.HUGGING_FACE)
  rotary: str = 'half'
  other_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
  layers: Mapping[str, LayerEntries] = dataclasses.field(default_factory=dict)
  attention: LayerEntries | None = None
  entries: Callable[[LanguageModel], list[Entry]] | None = None
  classifier: str | None = ''
  unread: Callable[[LanguageModel], str] | None = None
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
