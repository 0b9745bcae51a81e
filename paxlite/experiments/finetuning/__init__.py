"""Fine-tuning of published models: all of their weights (SFT), or low-rank factors (LoRA).

paxlite finetune WEIGHTS --method=lora --folder=runs/mine TRAIN_FILES=train.jsonl

HuggingFaceSFT, HuggingFaceLoRA, HuggingFacePreferences, HuggingFaceReward, HuggingFacePolicy,
HuggingFaceDistillation, HuggingFaceOnPolicyDistillation and HuggingFaceDocuments take any model:
that which MODEL names, or that of the weights.
"""

import functools
import re
from collections.abc import Mapping
from typing import Self

import fiddle as fdl

from paxlite.config.attribute_kinds import Kind, Training, names_of
from paxlite.config.attributes import attribute_types, derived
from paxlite.config.experiment_file import WeightsFacts
from paxlite.core.errors import UserError
from paxlite.data.base import RowArray
from paxlite.experiments import options
from paxlite.experiments.base import Experiment, full_name
from paxlite.experiments.datasets import DocumentFiles
from paxlite.experiments.identity import stated_values
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.parts.optimization import Schedule
from paxlite.experiments.registry import class_of, experiments, find_model, has_data, register
from paxlite.finetuning.chats.datasets import SftFiles
from paxlite.finetuning.distillation.experiment import Distillation
from paxlite.finetuning.distillation.on_policy import OnPolicyDistillation
from paxlite.finetuning.preferences.attributes import Preferences
from paxlite.finetuning.preferences.datasets import PreferenceFiles
from paxlite.finetuning.preferences.labelled_answers import LabelledRows
from paxlite.finetuning.preferences.preference_rows import PreferenceRows
from paxlite.finetuning.preferences.reward_model import RewardModel
from paxlite.finetuning.reinforcement.datasets import PromptFiles


class SFT(SftFiles):
  """Rosetta Pax's values: learning rate 1e-6, 500 warmup steps, cosine decay, 1000 steps in all.

  The warmup is at most half of the run. With NUM_EPOCHS, the decay ends with the run.
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
    is_used = self.schedule_kind == 'COS'
    return min(stated, self.MAX_STEPS // 2) if is_used or self.NUM_EPOCHS is not None else stated

  def _decay_end(self) -> int:
    if self.NUM_EPOCHS is None:
      return super().LR_COS_DECAY_END
    return max(self.MAX_STEPS, self.LR_COS_DECAY_START + 1)

  LR_COS_WARMUP: int = derived(lambda self: self._warmup())  # type: ignore[assignment]
  LR_COS_DECAY_END: int = derived(lambda self: self._decay_end())  # type: ignore[assignment]

  def train_input(self) -> fdl.Config:
    if not self.CHECKPOINT_RESTORE_PATH:
      raise UserError(
        'CHECKPOINT_RESTORE_PATH=FOLDER is missing: the weights to fine-tune, as '
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


class LinearSFT(SFT):
  """SFT with a learning rate that decays linearly to the end of the run, like trl's default."""

  LR_SCHEDULE: Schedule = 'linear'

  @property
  def LR_DECAY_ENDS(self) -> list[int]:
    return [max(self.MAX_STEPS, self.LR_WARMUP + 1)]


class Preference(PreferenceFiles, LinearSFT, Preferences):
  """Training on preferences, with the learning rate of trl's DPO."""

  LEARNING_RATE = 1e-6

  @property
  def preference_rows(self) -> type[PreferenceRows]:
    return LabelledRows if self.PREFERENCE_LOSS == 'kto' else PreferenceRows

  @property
  def row_values(self) -> Mapping[str, RowArray]:
    return self.stored_arrays

  @property
  def reference_path(self) -> str:
    # train_input() asks for the weights; a program that is only compiled needs none
    return super().reference_path if self.REFERENCE_RESTORE_PATH else ''


class Reward(RewardModel, PreferenceFiles, LinearSFT):
  """Training of a reward model on preferences, with trl's learning rate."""

  LEARNING_RATE = 1e-4


class PolicyTraining(PromptFiles, LinearSFT):
  """Training on rewards of the model's own answers, with the learning rate of trl's GRPO."""

  LEARNING_RATE = 1e-6
  DCN_MESH_SHAPE = [1, 1, 1]
  MAX_SEQ_LEN = 1024


class DistilledSFT(Distillation, SFT):
  """Training on prompts and answers, and on what a teacher makes of them."""

  LEARNING_RATE = 1e-5

  @property
  def row_values(self) -> Mapping[str, RowArray]:
    return self.stored_arrays


class AnswersDistillation(OnPolicyDistillation, LinearSFT):
  """Training on the model's own answers, and on what a teacher makes of them."""

  LEARNING_RATE = 1e-5
  DCN_MESH_SHAPE = [1, 1, 1]
  MAX_SEQ_LEN = 1024


class _OneDevicePreference(Preference):
  """Values for a small model."""

  MAX_SEQ_LEN = 1024
  ICI_MESH_SHAPE = [1, 1, 1]
  DCN_MESH_SHAPE = [1, 1, 1]
  LEARNING_RATE = 5e-6


class _OneDeviceReward(Reward):
  """The same for a reward model."""

  MAX_SEQ_LEN = 1024
  ICI_MESH_SHAPE = [1, 1, 1]
  DCN_MESH_SHAPE = [1, 1, 1]


class _OneDevicePolicy(PolicyTraining):
  """The same for rewards."""

  MAX_SEQ_LEN = 512
  ICI_MESH_SHAPE = [1, 1, 1]
  PERCORE_BATCH_SIZE = 16
  LEARNING_RATE = 5e-6


class _OneDeviceAnswersDistillation(AnswersDistillation):
  """The same for a teacher of its answers."""

  MAX_SEQ_LEN = 512
  ICI_MESH_SHAPE = [1, 1, 1]


class _OneDeviceSFT(SFT):
  """Values for a small model, which fits on one device and learns faster."""

  MAX_SEQ_LEN = 512
  ICI_MESH_SHAPE = [1, 1, 1]
  DCN_MESH_SHAPE = [1, 1, 1]
  LEARNING_RATE = 1e-5

  def _warmup(self) -> int:
    return min(50, super()._warmup())


class _OneDeviceDistillation(DistilledSFT, _OneDeviceSFT):
  """The same with a teacher."""


class _OneDeviceLoRA(LoRA):
  """The same for low-rank factors."""

  MAX_SEQ_LEN = 512
  ICI_MESH_SHAPE = [1, 1, 1]
  LEARNING_RATE = 1e-3


class ShardedLoRA(LoRA):
  """Values for weights that do not fit on one device."""

  ICI_MESH_SHAPE = [1, 8, 1]


# What differs in a method for a model.
_DIFFERENT: dict[tuple[type[LanguageModel], str], type[LanguageModel]] = {
  (SFT, 'SmolLM135M'): _OneDeviceSFT, (LoRA, 'SmolLM135M'): _OneDeviceLoRA,
  (Preference, 'SmolLM135M'): _OneDevicePreference, (Reward, 'SmolLM135M'): _OneDeviceReward,
  (PolicyTraining, 'SmolLM135M'): _OneDevicePolicy,
  (DistilledSFT, 'SmolLM135M'): _OneDeviceDistillation,
  (AnswersDistillation, 'SmolLM135M'): _OneDeviceAnswersDistillation,
  (LoRA, 'LLaMA70B'): ShardedLoRA,
}  # fmt: skip


# what weights say of texts, whichever class their model has
_OF_TEXT = 'EOS_IDS', 'START_ID', 'REPETITION_PENALTY', 'GENERATION_CONFIG'


# what factors are, which are trained further as they began
_OF_FACTORS = re.compile('USE_REPEATED_LAYER|USE_DORA|LORA_.*')


class _OfAnyModel(LanguageModel, subject='Checkpoints'):
  """An experiment with the model that MODEL names, or else the weights' model."""

  MODEL: Training[str] = ''  # the model's experiment; '': from the weights

  _method: type[LanguageModel]
  _generic: type['_OfAnyModel'] | None = None  # the class without a model, of one with a model

  def __new__(cls, **values: object) -> Self:
    if not issubclass(cls.of_values(values), cls):
      raise UserError(f'MODEL={values["MODEL"]}: the model is a {cls.MODEL} and cannot be replaced')
    return super().__new__(cls, **values)

  @classmethod
  def of_values(cls, values: Mapping[str, object]) -> type[Experiment]:
    model = str(values.get('MODEL') or cls.MODEL)
    if not model or (cls._generic and model == cls.MODEL):
      return super().of_values(values)
    return options.with_parts(composed(cls._generic or cls, model), values)

  @classmethod
  def chosen(cls, weights: WeightsFacts) -> tuple[type[Experiment], dict[str, object]]:
    if cls._generic:
      default = cls()
      stated = {k: v for k in _OF_TEXT if (v := weights.values.get(k)) not in (None, [], {})}
      return cls, {k: v for k, v in stated.items() if not default.is_stated_by_user(k)}
    if not weights.path:
      raise UserError(
        f'{cls.__name__} needs CHECKPOINT_RESTORE_PATH=FOLDER: the weights that say which '
        'model it is, as paxlite import makes them; or a model, such as MODEL=LLaMA3_8B'
      )
    if not weights.experiment:
      raise UserError(weights.problem)
    base = class_of({'experiment': weights.experiment, 'values': weights.values})
    has_factors = weights.values.get('USE_LORA')
    if has_factors and not cls.USE_LORA:
      raise UserError(
        f'{weights.path} holds low-rank factors and other weights: --method=lora trains them '
        'further; for other methods, merge them with paxlite export and paxlite import, and start '
        'from the result'
      )
    model = _model_of(base)
    if model is None:
      raise UserError(
        f'{weights.path} is of a {base.__name__}, which {cls.__name__} does not fine-tune'
      )
    is_ours = model.__module__.startswith('paxlite.')
    variant = composed(cls, model.__name__ if is_ours else full_name(model))
    decide_model = names_of(attribute_types(base), Kind.SHAPE, Kind.FUNCTION)
    kept = {*decide_model, 'HEADS_SPAN_MODEL', *_OF_TEXT}
    is_kept = lambda k: k in kept or (has_factors and _OF_FACTORS.fullmatch(k))
    values = {k: v for k, v in stated_values(base, weights.values).items() if is_kept(k)}
    longest = weights.values['MAX_SEQ_LEN']
    values['MAX_SEQ_LEN'] = min(variant.MAX_SEQ_LEN, longest)  # type: ignore[call-overload]
    if issubclass(variant, Documents):
      values['VOCAB_PATH'] = weights.tokenizer
    return options.with_parts(variant, values), values


def _model_of(cls: type[Experiment]) -> type[Experiment] | None:
  """Returns the class of an experiment's model, without its dataset."""
  return next(
    (c for c in cls.__mro__ if getattr(c, '_is_published', False) and not has_data(c)), None
  )


@functools.cache
def composed(generic: type[_OfAnyModel], name: str) -> type[_OfAnyModel]:
  """Returns the class of an experiment of any model for one model.

  It has the name of the former, and MODEL says the rest: experiment.json names both. Raises
  UserError if there is no such model, or it has a dataset already, or no class to be put into.

  Args:
    generic: The experiment, such as HuggingFaceSFT.
    name: The model, as MODEL names it.
  """
  model = find_model(name)
  if not getattr(model, '_is_published', False):
    raise UserError(f'MODEL={name} is a model that {generic.__name__} does not fine-tune')
  if has_data(model):
    plain = _model_of(model)
    hint = f': name the model alone, MODEL={plain.__name__}' if plain else ''
    raise UserError(f'MODEL={name} has a dataset{hint}')
  different = _DIFFERENT.get((generic._method, model.__name__))
  bases = (generic, model) if different is None else (generic, different, model)
  values = {
    '__module__': generic.__module__, '__qualname__': generic.__qualname__,
    '__doc__': generic.__doc__, 'MODEL': name, '_generic': generic,
  }  # fmt: skip
  return type(generic.__name__, bases, values)


@register
class HuggingFaceSFT(_OfAnyModel, SFT):
  """python -m paxlite.main --fdl_config=HuggingFaceSFT --fdl.TRAIN_FILES=x.jsonl …

  Fine-tunes all weights of any imported model on prompts and answers.
  """

  _method = SFT


@register
class HuggingFaceLoRA(_OfAnyModel, LoRA):
  """python -m paxlite.main --fdl_config=HuggingFaceLoRA --fdl.TRAIN_FILES=x.jsonl …

  Fine-tunes low-rank factors of any imported model on prompts and answers. Its weights are frozen.
  """

  _method = LoRA


@register
class HuggingFacePreferences(_OfAnyModel, Preference):
  """python -m paxlite.main --fdl_config=HuggingFacePreferences --fdl.TRAIN_FILES=x.jsonl …

  Trains any imported model on pairs of a chosen and a rejected answer (DPO, IPO, ORPO, SimPO), or
  on answers that are labelled as good or bad (KTO). With USE_LORA=True, low-rank factors learn, and
  the weights beside them are the reference.
  """

  _method = Preference


@register
class HuggingFaceReward(_OfAnyModel, Reward):
  """python -m paxlite.main --fdl_config=HuggingFaceReward --fdl.TRAIN_FILES=x.jsonl …

  Makes a reward model of any imported model, from pairs of a chosen and a rejected answer.
  """

  _method = Reward


@register
class HuggingFacePolicy(_OfAnyModel, PolicyTraining):
  """python -m paxlite.main --fdl_config=HuggingFacePolicy '--fdl.REWARDS=["my_rewards.correct"]' …

  Trains any imported model on rewards of its own answers (GRPO, Dr. GRPO, DAPO, GSPO). A reward is
  a function of Python.
  """

  _method = PolicyTraining


@register
class HuggingFaceDistillation(_OfAnyModel, DistilledSFT):
  """python -m paxlite.main --fdl_config=HuggingFaceDistillation --fdl.TRAIN_FILES=x.jsonl …

  Trains any imported model on prompts and answers, and on what a TEACHER makes of them.
  """

  _method = DistilledSFT


@register
class HuggingFaceOnPolicyDistillation(_OfAnyModel, AnswersDistillation):
  """python -m paxlite.main --fdl_config=HuggingFaceOnPolicyDistillation --fdl.TEACHER=FOLDER …

  Trains any imported model on its own answers to prompts, and on what a TEACHER makes of them.
  With USE_LORA=True and no TEACHER, the weights beside the low-rank factors are the teacher.
  """

  _method = AnswersDistillation


@register
class HuggingFaceDocuments(_OfAnyModel, Documents):
  """python -m paxlite.main --fdl_config=HuggingFaceDocuments --fdl.TRAIN_SOURCES=x.jsonl …

  Trains any imported model on documents. CHECKPOINT_IGNORE_RULES=.* starts it from scratch.
  """

  _method = Documents


def __getattr__(name: str) -> type[Experiment]:
  """Returns an experiment of Pax's that has its dotted path here, such as LLaMA7BSFT."""
  if name.startswith('_'):
    raise AttributeError(name)
  cls = experiments().get(name)
  if cls is None or cls.__module__ != __name__:
    raise AttributeError(f'{__name__} has no {name}')
  return cls
