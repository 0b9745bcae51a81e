"""Fine-tuning of published models: all of their weights (SFT), or low-rank factors (LoRA).

python -m paxlite.main --fdl_config=LLaMA7BLoRA --job_log_dir=LOGS
  --fdl.CHECKPOINT_RESTORE_PATH=WEIGHTS --fdl.TRAIN_FILES=train.jsonl
"""

from typing import Any

import fiddle as fdl

from paxlite.core.attributes import derived
from paxlite.core.errors import UserError
from paxlite.experiments import deepseek, gemma, gpt_oss, llama, mixtral, olmo, phi, qwen
from paxlite.experiments.datasets import SftFiles
from paxlite.experiments.llama import LLaMA
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


def _is_size(cls: type) -> bool:
  """Returns whether a class is a size of a family, and not the family itself."""
  return any('NUM_LAYERS' in vars(base) for base in cls.__mro__ if issubclass(base, LLaMA))


def _register_variants(size: type[LLaMA]) -> None:
  """Registers the experiments SIZESFT and SIZELoRA, as classes of this module."""
  what = {SFT: 'all weights', LoRA: 'low-rank factors, which are added to the frozen weights,'}
  for kind, trained in what.items():
    name = f'{size.__name__}{kind.__name__}'
    doc = (
      f'python -m paxlite.main --fdl_config={name} --fdl.TRAIN_FILES=x.jsonl …\n\n'
      f'Fine-tunes {trained} of {size.__name__} on prompts and answers.\n'
    )
    values = _CHANGES.get(name, {})
    variant = type(name, (kind, size), {'__module__': __name__, '__doc__': doc, **values})
    globals()[name] = register(variant)


# What differs from SFT and LoRA in some sizes.
_ONE_DEVICE: dict[str, Any] = dict(MAX_SEQ_LEN=512, ICI_MESH_SHAPE=[1, 1, 1])
_CHANGES: dict[str, dict[str, Any]] = {
  'LLaMA70BLoRA': dict(ICI_MESH_SHAPE=[1, 8, 1]),  # the weights do not fit on one device
  'SmolLM135MSFT': _ONE_DEVICE
  | dict(
    DCN_MESH_SHAPE=[1, 1, 1],
    LEARNING_RATE=1e-5,
    _warmup=lambda self: min(50, SFT._warmup(self)),
  ),
  'SmolLM135MLoRA': _ONE_DEVICE | dict(LEARNING_RATE=1e-3),
}
for _module in (llama, gemma, qwen, olmo, phi, mixtral, deepseek, gpt_oss):
  for _cls in list(vars(_module).values()):
    if isinstance(_cls, type) and _cls.__module__ == _module.__name__ and _is_size(_cls):
      _register_variants(_cls)
