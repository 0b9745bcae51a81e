"""Pairs of answers for a reward model, which reads each answer with its end."""

import dataclasses

import numpy as np

from paxlite.chats.conversations import Conversation
from paxlite.chats.sft_formats import Pair
from paxlite.finetuning.chats.sft import SftExample
from paxlite.finetuning.preferences.preference_rows import PreferenceRows


class RewardRows(PreferenceRows):
  """A RowSource of pairs; see PreferenceRows. `weights` is 1 at the last token of each answer.

  A language model predicts the last token of an answer, and does not read it. A reward model reads
  it, and gives the reward there. So a row has one more token of each answer.
  """

  def _example(self, place: str, contents: Pair | Conversation) -> SftExample:
    example = super()._example(place, contents)
    ids = np.append(example.ids, example.ids[-1:])  # a label that no loss reads
    is_last = np.arange(len(ids)) == len(ids) - 1
    return dataclasses.replace(example, ids=ids, is_answer=is_last)
