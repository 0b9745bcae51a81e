"""The experiments that Pax's GPU scripts name."""

import fiddle as fdl

from paxlite.errors import UserError
from paxlite.experiment import register
from paxlite.experiments.datasets import FlatTokens, Synthetic
from paxlite.experiments.gpt import GPT5B, GPT126M, GPT175B
from paxlite.experiments.language_model import LanguageModel


class Pile(LanguageModel):
  """The Pile through SeqIO. Its input is not there yet: see the error for what works today."""

  VOCAB_PATH: str = ''

  @property
  def dataset(self) -> str:
    return 'the Pile'

  def train_input(self) -> fdl.Config:
    raise UserError(
      f'{type(self).__name__}: reading the Pile through SeqIO is not implemented yet. Until then '
      'tokenize it with python -m paxlite.tools.tokenize and train '
      f'{type(self).__name__.replace("Pile", "FlatTokens")} with --fdl.DATASET_PATH'
    )


@register
class Pile126M(Pile, GPT126M):
  """python -m paxlite.main --fdl_config=Pile126M --job_log_dir=LOGS

  GPT126M on the Pile, 64 GPUs, global batch 256 of 2048 tokens. No data yet, see Pile.
  """


@register
class Pile5B(Pile, GPT5B):
  """python -m paxlite.main --fdl_config=Pile5B --job_log_dir=LOGS

  GPT5B on the Pile, 256 GPUs, global batch 2048 of 2048 tokens. No data yet, see Pile.
  """


@register
class Pile175B(Pile, GPT175B):
  """python -m paxlite.main --fdl_config=Pile175B --job_log_dir=LOGS

  GPT175B on the Pile, 256 GPUs, global batch 1536 of 2048 tokens. No data yet, see Pile.
  """


@register
class Synthetic126M(Synthetic, GPT126M):
  """python -m paxlite.main --fdl_config=Synthetic126M --job_log_dir=LOGS

  GPT126M on random tokens, for speed: no file needed.
  """


@register
class Synthetic5B(Synthetic, GPT5B):
  """python -m paxlite.main --fdl_config=Synthetic5B --job_log_dir=LOGS

  GPT5B on random tokens, for speed: no file needed.
  """


@register
class Synthetic175B(Synthetic, GPT175B):
  """python -m paxlite.main --fdl_config=Synthetic175B --job_log_dir=LOGS

  GPT175B on random tokens, for speed: no file needed.
  """


@register
class FlatTokens126M(FlatTokens, GPT126M):
  """python -m paxlite.main --fdl_config=FlatTokens126M --fdl.DATASET_PATH=DATA --job_log_dir=LOGS

  GPT126M on a dataset that `python -m paxlite.tools.tokenize` or seqax wrote.
  """


@register
class FlatTokens5B(FlatTokens, GPT5B):
  """python -m paxlite.main --fdl_config=FlatTokens5B --fdl.DATASET_PATH=DATA --job_log_dir=LOGS

  GPT5B on a dataset that `python -m paxlite.tools.tokenize` or seqax wrote.
  """


@register
class FlatTokens175B(FlatTokens, GPT175B):
  """python -m paxlite.main --fdl_config=FlatTokens175B --fdl.DATASET_PATH=DATA --job_log_dir=LOGS

  GPT175B on a dataset that `python -m paxlite.tools.tokenize` or seqax wrote.
  """
