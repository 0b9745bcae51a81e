"""Datasets of preferences as mixins: `class Mine(PreferenceFiles, Preferences, SmolLM135M)`."""

import fiddle as fdl

from paxlite.core.errors import UserError
from paxlite.data.text import Split
from paxlite.finetuning.chats.datasets import SftFiles
from paxlite.finetuning.preferences.labelled_answers import LabelledRows
from paxlite.finetuning.preferences.preference_rows import PreferenceRows


class PreferenceFiles(SftFiles):
  """Pairs of a chosen and a rejected answer to one prompt, packed (see preference_rows.py)."""

  @property
  def dataset(self) -> str:
    return 'preferences'

  def validate(self) -> None:
    super().validate()
    if self.CHAT_EXAMPLES != 'conversations':
      raise UserError(
        f'CHAT_EXAMPLES={self.CHAT_EXAMPLES}: preferences compare the last answers; leave it out'
      )
    if self.TOO_LONG == 'truncate':
      raise UserError(
        'TOO_LONG=truncate would compare answers that were cut: TOO_LONG=skip leaves such pairs out'
      )
    if not self.PACKED_INPUT:
      raise UserError(
        'PACKED_INPUT=False: both answers of a pair share a sequence; leave PACKED_INPUT as it is'
      )

  @property
  def preference_rows(self) -> type[PreferenceRows]:
    """The RowSource of the records."""
    return PreferenceRows

  def _source(self, files: list[str], split: Split) -> fdl.Config:
    source = super()._source(files, split)
    fdl.update_callable(source, self.preference_rows)
    return source


class LabelledFiles(PreferenceFiles):
  """Answers that are labelled as good or bad, packed (see labelled_answers.py)."""

  @property
  def preference_rows(self) -> type[PreferenceRows]:
    return LabelledRows
