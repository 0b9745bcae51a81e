"""Fine-tuning of published models: all of their weights (SFT), or low-rank factors (LoRA).

python -m paxlite.main --fdl_config=LLaMA7BLoRA --job_log_dir=LOGS
  --fdl.CHECKPOINT_RESTORE_PATH=WEIGHTS --fdl.TRAIN_FILES=train.jsonl
"""

import fiddle as fdl

from paxlite.config.attribute_kinds import Kind, names_of
from paxlite.config.attributes import attribute_types, derived
from paxlite.config.experiment_file import WeightsFacts
from paxlite.core.errors import UserError
from paxlite.experiments import deepseek, gemma, gpt_oss, llama, mixtral, olmo, phi, qwen
from paxlite.experiments.base import Experiment
from paxlite.experiments.datasets import DocumentFiles, SftFiles
from paxlite.experiments.identity import stated_values
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.llama import LLaMA
from paxlite.experiments.parts.optimization import Schedule
from paxlite.experiments.registry import find_known, register


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


class Documents(DocumentFiles):
  """Further training on plain text, with the tokenizer of the weights unless VOCAB_PATH is set."""

  MAX_SEQ_LEN = 4096
  ICI_MESH_SHAPE = [1, 8, 1]
  PERCORE_BATCH_SIZE = 2
  LEARNING_RATE = 1e-5
  MAX_STEPS = 1000
  SUMMARY_INTERVAL_STEPS = 10


def _add_variants(family: type[LLaMA]) -> None:
  """Adds the classes NAMESFT, NAMELoRA and NAMEDocuments to this module.

  The first two are registered if the class is a size, and not the family itself.
  """
  name = family.__name__
  is_size = any('NUM_LAYERS' in vars(base) for base in family.__mro__ if issubclass(base, LLaMA))
  tuned = 'of {} on prompts and answers'
  what = {
    SFT: ('TRAIN_FILES=x.jsonl', f'Fine-tunes all weights {tuned}.'),
    LoRA: ('TRAIN_FILES=x.jsonl', f'Fine-tunes low-rank factors beside the weights {tuned}.'),
    Documents: ('TRAIN_SOURCES=x.jsonl', 'Trains {} on documents.'),
  }
  for kind, (flag, does) in what.items():
    variant = f'{name}{kind.__name__}'
    doc = f'python -m paxlite.main --fdl_config={variant} --fdl.{flag} …\n\n{does.format(name)}\n'
    values = _CHANGES.get(variant, {})
    cls = type(variant, (kind, family), {'__module__': __name__, '__doc__': doc, **values})
    globals()[variant] = register(cls) if kind is not Documents and is_size else cls


class _OfWeights(Experiment):
  """An experiment whose model is that of the weights in CHECKPOINT_RESTORE_PATH."""

  @classmethod
  def chosen(cls, weights: WeightsFacts) -> tuple[type[Experiment], dict[str, object]]:
    if not weights.path:
      raise UserError(
        f'{cls.__name__} needs --fdl.CHECKPOINT_RESTORE_PATH=FOLDER: the weights that say which '
        'model it is, as paxlite import makes them'
      )
    if not weights.experiment:
      raise UserError(weights.problem)
    base = find_known(weights.experiment)
    variant = globals().get(f'{base.__name__}{cls.__name__.removeprefix("HuggingFace")}')
    if variant is None:
      raise UserError(
        f'{weights.path} is of a {base.__name__}, which {cls.__name__} does not fine-tune'
      )
    model = names_of(attribute_types(base), Kind.SHAPE, Kind.FUNCTION)
    kept = {*model, 'HEADS_SPAN_MODEL', 'EOS_IDS', 'START_ID'}
    values = {k: v for k, v in stated_values(base, weights.values).items() if k in kept}
    values['MAX_SEQ_LEN'] = min(variant.MAX_SEQ_LEN, weights.values['MAX_SEQ_LEN'])
    if issubclass(variant, Documents):
      values['VOCAB_PATH'] = weights.tokenizer
    return variant, values


@register
class HuggingFaceSFT(_OfWeights, SFT, LanguageModel):
  """python -m paxlite.main --fdl_config=HuggingFaceSFT --fdl.TRAIN_FILES=x.jsonl …

  Fine-tunes all weights of any imported model on prompts and answers.
  """


@register
class HuggingFaceLoRA(_OfWeights, LoRA, LanguageModel):
  """python -m paxlite.main --fdl_config=HuggingFaceLoRA --fdl.TRAIN_FILES=x.jsonl …

  Fine-tunes low-rank factors of any imported model on prompts and answers. Its weights are frozen.
  """


@register
class HuggingFaceDocuments(_OfWeights, Documents, LanguageModel):
  """python -m paxlite.main --fdl_config=HuggingFaceDocuments --fdl.TRAIN_SOURCES=x.jsonl …

  Trains any imported model on documents. --fdl.CHECKPOINT_IGNORE_RULES=.* starts it from scratch.
  """


# What differs from SFT and LoRA in some sizes.
_ONE_DEVICE: dict[str, object] = dict(MAX_SEQ_LEN=512, ICI_MESH_SHAPE=[1, 1, 1])
_CHANGES: dict[str, dict[str, object]] = {
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
    if isinstance(_cls, type) and _cls.__module__ == _module.__name__ and issubclass(_cls, LLaMA):
      _add_variants(_cls)
