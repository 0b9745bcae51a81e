"""The experiments that Pax's GPU scripts name.

The classes that they are derived from in Pax are here too, so that yours can be derived from them:

    class Mine(configs.GPT126MBase, configs.PileUnsupervisedDataset):
      NUM_LAYERS = 6
"""

from paxlite.config.attributes import StoredPath
from paxlite.contrib.datasets import SeqioTask
from paxlite.experiments import llama
from paxlite.experiments.datasets import FlatTokens, FromTfds, Synthetic
from paxlite.experiments.glam import GLaM64B64E, GLaM126M64E
from paxlite.experiments.gpt import GPT5B, GPT126M, GPT175B
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.registry import register


class Pile(SeqioTask):
  """The Pile through SeqIO, from the TFDS dataset that download_the_pile.py makes."""

  SEQIO_TASK = 'the_pile_lm'


class C4(SeqioTask):
  """C4 through SeqIO, from the TFDS dataset c4/en:3.0.1."""

  SEQIO_TASK = 'c4'


class BoolQ(SeqioTask):
  """BoolQ through SeqIO, from the TFDS dataset that download_boolq.py makes.

  Training has its loss on the answers; `--mode=eval` evaluates zero-shot.
  """

  SEQIO_TASK = 'boolq'
  SEQIO_ROWS = 'packed'
  EVAL_TASKS: list[StoredPath] = ['boolq']


class Lambada(FromTfds, LanguageModel):
  """LAMBADA, from download_lambada.py, for the checkpoints of a run on the Pile."""

  EVAL_TASKS: list[StoredPath] = ['lambada']


# Pax's names for classes to derive from; in paxlite, the models of gpt.py have no dataset either
GPT126MBase, GPT5BBase, GPT175BBase = GPT126M, GPT5B, GPT175B
GLaM126M64EBase, GLaM64B64EBase = GLaM126M64E, GLaM64B64E
BaseLLaMA = llama.LLaMA
PileUnsupervisedDataset, C4UnsupervisedDataset, BoolQDataset = Pile, C4, BoolQ
LambadaDataset, SyntheticDataset = Lambada, Synthetic


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
  """python -m paxlite.main --fdl_config=Lambada126M --mode=eval --job_log_dir=LOGS"""


@register
class Lambada5B(Lambada, GPT5B):
  """python -m paxlite.main --fdl_config=Lambada5B --mode=eval --job_log_dir=LOGS"""


@register
class Lambada175B(Lambada, GPT175B):
  """python -m paxlite.main --fdl_config=Lambada175B --mode=eval --job_log_dir=LOGS"""


@register
class PileGLaM126M64E(Pile, GLaM126M64E):
  """python -m paxlite.main --fdl_config=PileGLaM126M64E --job_log_dir=LOGS

  GLaM126M64E on the Pile, 64 GPUs, global batch 256 of 2048 tokens.
  """


@register
class PileGLaM64B64E(Pile, GLaM64B64E):
  """python -m paxlite.main --fdl_config=PileGLaM64B64E --job_log_dir=LOGS

  GLaM64B64E on the Pile, 512 GPUs, global batch 2048 of 1024 tokens.
  """


@register
class LambadaGLaM126M64E(Lambada, GLaM126M64E):
  """python -m paxlite.main --fdl_config=LambadaGLaM126M64E --mode=eval --job_log_dir=LOGS"""


@register
class LambadaGLaM64B64E(Lambada, GLaM64B64E):
  """python -m paxlite.main --fdl_config=LambadaGLaM64B64E --mode=eval --job_log_dir=LOGS"""


@register
class C4GPT126M(C4, GPT126M):
  """python -m paxlite.main --fdl_config=C4GPT126M --job_log_dir=LOGS

  GPT126M on C4, 64 GPUs, global batch 256 of 2048 tokens.
  """


@register
class C4GPT5B(C4, GPT5B):
  """python -m paxlite.main --fdl_config=C4GPT5B --job_log_dir=LOGS

  GPT5B on C4, 256 GPUs, global batch 2048 of 2048 tokens.
  """


@register
class C4GPT175B(C4, GPT175B):
  """python -m paxlite.main --fdl_config=C4GPT175B --job_log_dir=LOGS

  GPT175B on C4, 256 GPUs, global batch 1536 of 2048 tokens.
  """


@register
class LLaMA7B(BoolQ, llama.LLaMA7B):
  """python -m paxlite.main --fdl_config=LLaMA7B --fdl.CHECKPOINT_RESTORE_PATH=WEIGHTS …

  6,738,415,616 parameters: LLaMA 7B and Llama 2 7B. Fine-tunes on BoolQ, or evaluates on it with
  --mode=eval.
  """


@register
class LLaMA13B(BoolQ, llama.LLaMA13B):
  """python -m paxlite.main --fdl_config=LLaMA13B --fdl.CHECKPOINT_RESTORE_PATH=WEIGHTS …

  13,015,864,320 parameters: LLaMA 13B and Llama 2 13B. Fine-tunes on BoolQ, or evaluates on it with
  --mode=eval.
  """


@register
class LLaMA70B(BoolQ, llama.LLaMA70B):
  """python -m paxlite.main --fdl_config=LLaMA70B --fdl.CHECKPOINT_RESTORE_PATH=WEIGHTS …

  68,976,648,192 parameters: Llama 2 70B, with 8 key-value heads. Fine-tunes on BoolQ, or evaluates
  on it with --mode=eval.
  """


@register
class SyntheticGLaM126M64E(Synthetic, GLaM126M64E):
  """python -m paxlite.main --fdl_config=SyntheticGLaM126M64E --job_log_dir=LOGS

  GLaM126M64E on random tokens, to measure speed. It needs no files.
  """


@register
class Synthetic126M(Synthetic, GPT126M):
  """python -m paxlite.main --fdl_config=Synthetic126M --job_log_dir=LOGS

  GPT126M on random tokens, to measure speed. It needs no files; 100 steps, as in Pax.
  """

  MAX_STEPS = 100


@register
class Synthetic5B(Synthetic, GPT5B):
  """python -m paxlite.main --fdl_config=Synthetic5B --job_log_dir=LOGS

  GPT5B on random tokens, to measure speed. It needs no files; 100 steps, as in Pax.
  """

  MAX_STEPS = 100


@register
class Synthetic175B(Synthetic, GPT175B):
  """python -m paxlite.main --fdl_config=Synthetic175B --job_log_dir=LOGS

  GPT175B on random tokens, to measure speed. It needs no files; 100 steps, as in Pax.
  """

  MAX_STEPS = 100


@register
class FlatTokens126M(FlatTokens, GPT126M):
  """python -m paxlite.main --fdl_config=FlatTokens126M --fdl.DATASET_PATH=DATA --job_log_dir=LOGS

  GPT126M on a dataset that `paxlite tokenize` or seqax wrote.
  """


@register
class FlatTokens5B(FlatTokens, GPT5B):
  """python -m paxlite.main --fdl_config=FlatTokens5B --fdl.DATASET_PATH=DATA --job_log_dir=LOGS

  GPT5B on a dataset that `paxlite tokenize` or seqax wrote.
  """


@register
class FlatTokens175B(FlatTokens, GPT175B):
  """python -m paxlite.main --fdl_config=FlatTokens175B --fdl.DATASET_PATH=DATA --job_log_dir=LOGS

  GPT175B on a dataset that `paxlite tokenize` or seqax wrote.
  """
