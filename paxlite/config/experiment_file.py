"""The file experiment.json, which says which experiment wrote a run or imported weights."""

import dataclasses
import pathlib
import re
from collections.abc import Mapping

from paxlite.config.former_names import current_values
from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject
from paxlite.files.json_files import read_object

EXPERIMENT = 'experiment.json'
# The experiments that fine-tune any model, by the method of `paxlite finetune`.
FINE_TUNING = {
  'sft': 'HuggingFaceSFT', 'lora': 'HuggingFaceLoRA', 'qlora': 'HuggingFaceLoRA',
  'documents': 'HuggingFaceDocuments', 'distill': 'HuggingFaceDistillation',
  'dpo': 'HuggingFacePreferences', 'ipo': 'HuggingFacePreferences',
  'orpo': 'HuggingFacePreferences', 'simpo': 'HuggingFacePreferences',
  'kto': 'HuggingFacePreferences', 'reward': 'HuggingFaceReward', 'grpo': 'HuggingFacePolicy',
  'opd': 'HuggingFaceOnPolicyDistillation',
}  # fmt: skip
# What a method states beside its experiment.
VALUES_OF_METHODS: Mapping[str, Mapping[str, str]] = {
  'qlora': {'FROZEN_DTYPE': 'nf4'},
  **{name: {'PREFERENCE_LOSS': name} for name in ('ipo', 'orpo', 'simpo', 'kto')},
}
# Earlier versions had a class for each model and method, LLaMA3_8BSFT for example, which is
# HuggingFaceSFT with MODEL=LLaMA3_8B. Those that are still there are kept.
_FORMER = re.compile(
  r'(paxlite\.experiments\.finetuning\.)(?!HuggingFace|LLaMA(?:7|13|70)B(?:SFT|LoRA)$)'
  r'(\w+)(SFT|LoRA|Documents)'
)
_PATHS = 'VOCAB_PATH', 'CHECKPOINT_RESTORE_PATH'
_PATH_CHARS = 4096  # The kernel accepts no longer paths.


@dataclasses.dataclass(frozen=True)
class WeightsFacts:
  """The facts about a model in the files next to its weights; missing facts are unknown."""

  path: str = ''  # where the weights are: a CHECKPOINT_RESTORE_PATH
  experiment: str = ''  # the dotted path of the experiment that wrote them; ''
  # the values of its attributes
  values: Mapping[str, object] = dataclasses.field(default_factory=dict)
  tokenizer: str = ''  # the path of its tokenizer; ''
  problem: str = ''  # why some of this is unknown; ''

  @property
  def positions(self) -> int | None:
    """The number of positions of the model."""
    found = self.values.get('MAX_POSITION_EMBEDDINGS')
    return found if isinstance(found, int) else None


UNKNOWN = WeightsFacts()


def read_experiment(path: pathlib.Path) -> JsonObject:
  """Returns what an experiment.json holds: {'experiment': dotted path, 'values': {…}, …}.

  'started_in' is the folder from which relative paths among the values are named; '': not known.
  Raises UserError if the file is missing or damaged.
  """
  if not path.is_file():
    raise UserError(f'{path} is missing, so the model of {path.parent} is unknown')
  found = read_object(path)
  try:
    name, values = str(found['experiment']), dict(found['values'])
  except (ValueError, KeyError, TypeError) as e:
    raise UserError(f'{path} is damaged ({e!r})') from None
  for key in _PATHS:
    value = values.get(key) or ''
    if not isinstance(value, str) or len(value) > _PATH_CHARS or '\0' in value:
      raise UserError(f'{path} is damaged: its {key} is not a path')
  started_in = str(found.get('started_in', ''))
  return renewed({'experiment': name, 'values': values, 'started_in': started_in})


def renewed(found: JsonObject) -> JsonObject:
  """Returns what an experiment.json holds, with today's names of the experiment and its
  attributes.

  Raises:
    KeyError: It lacks the experiment or its values.
    TypeError, AttributeError: They are no text and no object.
  """
  values, former = found['values'], _FORMER.fullmatch(found['experiment'])
  values = current_values(values, say=False)
  if former is None:
    return {**found, 'values': values}
  module, model, method = former.groups()
  name = f'{module}HuggingFace{method}'
  return {**found, 'experiment': name, 'values': {**values, 'MODEL': model}}
