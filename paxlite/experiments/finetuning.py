"""Fine-tuning of published models: all of their weights (SFT), or low-rank factors (LoRA).

python -m paxlite.main --fdl_config=LLaMA7BLoRA --job_log_dir=LOGS
  --fdl.CHECKPOINT_RESTORE_PATH=WEIGHTS --fdl.TRAIN_FILES=train.jsonl
"""

import fiddle as fdl

from paxlite.core.attributes import derived
from paxlite.core.errors import UserError
from paxlite.experiments.datasets import SftFiles
from paxlite.experiments.gemma import Gemma2B, Gemma7B
from paxlite.experiments.llama import (
  LLaMA3_8B,
  LLaMA7B,
  LLaMA13B,
  LLaMA70B,
  Mistral7B,
  SmolLM135M,
)
from paxlite.experiments.optimization import Schedule
from paxlite.experiments.registry import register


class SFT(SftFiles):
  """Rosetta Pax's values: learning rate 1e-6, 500 warmup steps, cosine decay, 1000 steps in all.

  With NUM_EPOCHS, the decay ends with the run, and the warmup is at most half of it.
  """

  MAX_SEQ_LEN = 4096
  ICI_MESH_SHAPE = [1, 8, 1]
  DCN_MESH_SHAPE = [1, 2, 1]
  PERCORE_BATCH_SIZE = 2
  LEARNING_RATE = 1e-6
  MAX_STEPS = 1000
  SUMMARY_INTERVAL_STEPS = 10
  CHECKPOINT_EVERY_N_STEPS = 100

  def _warmup(self) -> int:
    stated = super().LR_COS_WARMUP
    return stated if self.NUM_EPOCHS is None else min(stated, self.MAX_STEPS // 2)

  def _decay_end(self) -> int:
    if self.NUM_EPOCHS is None:
      return super().LR_COS_DECAY_END
    return max(self.MAX_STEPS, self.LR_COS_DECAY_START + 1)

  LR_COS_WARMUP: int = derived(lambda self: self._warmup())  # type: ignore[assignment]
  LR_COS_DECAY_END: int = derived(lambda self: self._decay_end())  # type: ignore[assignment]

  def train_input(self) -> fdl.Config:
    if not self.CHECKPOINT_RESTORE_PATH:
      raise UserError(
        '--fdl.CHECKPOINT_RESTORE_PATH=FOLDER is missing: the weights to fine-tune, as '
        'paxlite import makes them'
      )
    return super().train_input()


class LoRA(SFT):
  """Rosetta Pax's values: rank 32, learning rate 1e-4, 600 steps."""

  USE_LORA = True
  LORA_RANK = 32
  ICI_MESH_SHAPE = [8, 1, 1]
  DCN_MESH_SHAPE = [1, 1, 1]
  LEARNING_RATE = 1e-4
  LR_SCHEDULE: Schedule = 'constant'
  MAX_STEPS = 600


@register
class LLaMA7BSFT(SFT, LLaMA7B):
  """python -m paxlite.main --fdl_config=LLaMA7BSFT --fdl.TRAIN_FILES=x.jsonl …

  Fine-tunes all weights of LLaMA7B on prompts and answers.
  """


@register
class LLaMA7BLoRA(LoRA, LLaMA7B):
  """python -m paxlite.main --fdl_config=LLaMA7BLoRA --fdl.TRAIN_FILES=x.jsonl …

  Fine-tunes low-rank factors of LLaMA7B on prompts and answers. Its weights are frozen.
  """


@register
class LLaMA13BSFT(SFT, LLaMA13B):
  """python -m paxlite.main --fdl_config=LLaMA13BSFT --fdl.TRAIN_FILES=x.jsonl …

  Fine-tunes all weights of LLaMA13B on prompts and answers.
  """


@register
class LLaMA13BLoRA(LoRA, LLaMA13B):
  """python -m paxlite.main --fdl_config=LLaMA13BLoRA --fdl.TRAIN_FILES=x.jsonl …

  Fine-tunes low-rank factors of LLaMA13B on prompts and answers. Its weights are frozen.
  """


@register
class LLaMA70BSFT(SFT, LLaMA70B):
  """python -m paxlite.main --fdl_config=LLaMA70BSFT --fdl.TRAIN_FILES=x.jsonl …

  Fine-tunes all weights of LLaMA70B on prompts and answers.
  """


@register
class LLaMA70BLoRA(LoRA, LLaMA70B):
  """python -m paxlite.main --fdl_config=LLaMA70BLoRA --fdl.TRAIN_FILES=x.jsonl …

  Fine-tunes low-rank factors of LLaMA70B on prompts and answers. Its weights are frozen.
  """

  ICI_MESH_SHAPE = [1, 8, 1]  # the weights do not fit on one device


@register
class LLaMA3_8BSFT(SFT, LLaMA3_8B):
  """python -m paxlite.main --fdl_config=LLaMA3_8BSFT --fdl.TRAIN_FILES=x.jsonl …

  Fine-tunes all weights of LLaMA3_8B on prompts and answers.
  """


@register
class LLaMA3_8BLoRA(LoRA, LLaMA3_8B):
  """python -m paxlite.main --fdl_config=LLaMA3_8BLoRA --fdl.TRAIN_FILES=x.jsonl …

  Fine-tunes low-rank factors of LLaMA3_8B on prompts and answers. Its weights are frozen.
  """


@register
class Mistral7BSFT(SFT, Mistral7B):
  """python -m paxlite.main --fdl_config=Mistral7BSFT --fdl.TRAIN_FILES=x.jsonl …

  Fine-tunes all weights of Mistral7B on prompts and answers.
  """


@register
class Mistral7BLoRA(LoRA, Mistral7B):
  """python -m paxlite.main --fdl_config=Mistral7BLoRA --fdl.TRAIN_FILES=x.jsonl …

  Fine-tunes low-rank factors of Mistral7B on prompts and answers. Its weights are frozen.
  """


@register
class Gemma2BSFT(SFT, Gemma2B):
  """python -m paxlite.main --fdl_config=Gemma2BSFT --fdl.TRAIN_FILES=x.jsonl …

  Fine-tunes all weights of Gemma2B on prompts and answers.
  """


@register
class Gemma2BLoRA(LoRA, Gemma2B):
  """python -m paxlite.main --fdl_config=Gemma2BLoRA --fdl.TRAIN_FILES=x.jsonl …

  Fine-tunes low-rank factors of Gemma2B on prompts and answers. Its weights are frozen.
  """


@register
class Gemma7BSFT(SFT, Gemma7B):
  """python -m paxlite.main --fdl_config=Gemma7BSFT --fdl.TRAIN_FILES=x.jsonl …

  Fine-tunes all weights of Gemma7B on prompts and answers.
  """


@register
class Gemma7BLoRA(LoRA, Gemma7B):
  """python -m paxlite.main --fdl_config=Gemma7BLoRA --fdl.TRAIN_FILES=x.jsonl …

  Fine-tunes low-rank factors of Gemma7B on prompts and answers. Its weights are frozen.
  """


@register
class SmolLM135MSFT(SFT, SmolLM135M):
  """python -m paxlite.main --fdl_config=SmolLM135MSFT --fdl.TRAIN_FILES=x.jsonl …

  Fine-tunes all weights of SmolLM135M on prompts and answers. For one device.
  """

  MAX_SEQ_LEN = 512
  ICI_MESH_SHAPE = [1, 1, 1]
  DCN_MESH_SHAPE = [1, 1, 1]
  LEARNING_RATE = 1e-5

  def _warmup(self) -> int:
    return min(50, super()._warmup())


@register
class SmolLM135MLoRA(LoRA, SmolLM135M):
  """python -m paxlite.main --fdl_config=SmolLM135MLoRA --fdl.TRAIN_FILES=x.jsonl …

  Fine-tunes low-rank factors of SmolLM135M on prompts and answers. Its weights are frozen. For one
  device.
  """

  MAX_SEQ_LEN = 512
  ICI_MESH_SHAPE = [1, 1, 1]
  LEARNING_RATE = 1e-3
