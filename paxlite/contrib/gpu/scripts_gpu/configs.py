"""The experiments that Pax's GPU scripts name."""

from paxlite.experiment import register
from paxlite.experiments.datasets import FlatTokens, SeqioTask, Synthetic
from paxlite.experiments.gpt import GPT5B, GPT126M, GPT175B
from paxlite.experiments.language_model import LanguageModel


class Pile(SeqioTask):
  """The Pile through SeqIO, from a TFDS dataset as download_the_pile.py makes it."""

  SEQIO_TASK = 'the_pile_lm'


class Lambada(LanguageModel):
  """LAMBADA by `--mode=eval`, from a TFDS dataset as download_lambada.py makes it."""

  EVAL_TASKS: list[str] = ['lambada']
  VOCAB_PATH: str = ''


@register
class Pile126M(Pile, GPT126M):
  """python -m paxlite.main --fdl_config=Pile126M --job_log_dir=LOGS

  GPT126M on the Pile, 64 GPUs, global batch 256 of 2048 tokens.
  """


@register
class Pile5B(Pile, GPT5B):
  """python -m paxlite.main --fdl_config=Pile5B --job_log_dir=LOGS

  GPT5B on the Pile, 256 GPUs, global batch 2048 of 2048 tokens.
  """


@register
class Pile175B(Pile, GPT175B):
  """python -m paxlite.main --fdl_config=Pile175B --job_log_dir=LOGS

  GPT175B on the Pile, 256 GPUs, global batch 1536 of 2048 tokens.
  """


@register
class Lambada126M(Lambada, GPT126M):
  """python -m paxlite.main --fdl_config=Lambada126M --mode=eval --job_log_dir=LOGS

  LAMBADA with the checkpoints of a Pile126M run.
  """


@register
class Lambada5B(Lambada, GPT5B):
  """python -m paxlite.main --fdl_config=Lambada5B --mode=eval --job_log_dir=LOGS

  LAMBADA with the checkpoints of a Pile5B run.
  """


@register
class Lambada175B(Lambada, GPT175B):
  """python -m paxlite.main --fdl_config=Lambada175B --mode=eval --job_log_dir=LOGS

  LAMBADA with the checkpoints of a Pile175B run.
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
