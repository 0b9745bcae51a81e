"""Which dataset reads a record that is an example for fine-tuning."""

from paxlite.chats.sft_formats import LABELS, format_of
from paxlite.core.errors import UserError
from paxlite.core.fields import Fields
from paxlite.experiments.rows import Rows
from paxlite.finetuning.chats.datasets import SftFiles
from paxlite.finetuning.preferences.datasets import LabelledFiles, PreferenceFiles
from paxlite.finetuning.preferences.preference_rows import KEYS


def dataset_of(record: Fields) -> type[Rows]:
  """Returns the dataset that reads a record; UserError if it is in no known format."""
  if all(key in record for key in KEYS):
    return PreferenceFiles
  if any(key in record for key in LABELS):
    return LabelledFiles
  try:
    format_of(record)
  except UserError as e:
    raise UserError(
      f'{e}; or to text, for pretraining, or name that field with TEXT_FIELD; '
      '--fdl_config=HuggingFacePolicy shows prompts without answers'
    ) from None
  return SftFiles
