"""What a published model family consists of."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from paxlite.experiments.language_model import LanguageModel
from paxlite.weights import tensor_names
from paxlite.weights.config_keys import Key
from paxlite.weights.layout import Entry


@dataclasses.dataclass(frozen=True)
class Family:
  """How a family is published on Hugging Face.

  Attributes:
    architecture: The class in transformers.
    experiment: The class whose attributes are those of all models of the family.
    keys: The keys of config.json that differ between models of the family.
    names: Names of the tensors by role; see tensor_names.
    rotary: Layout of the rotary pairs in queries and keys; see RotaryEmbedding.
    entries: Returns the entries of the tensors, where decoder_entries does not.
  """

  architecture: str
  experiment: type[LanguageModel]
  keys: Sequence[Key]
  names: Mapping[str, str] = dataclasses.field(default_factory=lambda: tensor_names.HUGGING_FACE)
  rotary: str = 'half'
  entries: Callable[[LanguageModel], list[Entry]] | None = None

  @property
  def attributes(self) -> set[str]:
    """The attributes that may differ between models of the family."""
    return {name for key in self.keys for name in key.ours}
