"""Prompts that a run continues while it trains."""

from paxlite.config.attribute_kinds import Run
from paxlite.experiments.base import Experiment


class Samples(
  Experiment, subject='Samples', beside={'SAMPLE_PROMPTS SAMPLE_PROMPT': 'SAMPLE_CHAT'}
):
  """Samples need a dataset with a tokenizer."""

  SAMPLE_PROMPTS: Run[list[str]] = []  # prompts that the model continues at each evaluation
  SAMPLE_PROMPT: Run[str | None] = None  # text that the model continues after training; None: none
  SAMPLE_CHAT: Run[bool | None] = (
    None  # the model answers sample prompts as a chat; None: if it learns chats
  )
