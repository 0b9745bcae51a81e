"""Reward models: language models with one number, the reward of a text, in place of logits.

class Judge(RewardModel, PreferenceFiles, SmolLM135M):
  TRAIN_FILES = ['pairs.jsonl']
"""

from collections.abc import Mapping

import fiddle as fdl
import jax.numpy as jnp

from paxlite.config.attribute_kinds import NotNegative, Training
from paxlite.config.templates import config, template
from paxlite.core import shell
from paxlite.core.errors import UserError
from paxlite.core.variable_names import PREDICTIONS
from paxlite.data.base import RowArray
from paxlite.experiments.base import Experiment
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.parts.prediction import MultiTokenPrediction
from paxlite.experiments.registry import class_of
from paxlite.finetuning.preferences.preference_rows import PreferenceRows, RewardRows
from paxlite.finetuning.preferences.reward_loss import BradleyTerry
from paxlite.layers.embeddings import LmHead
from paxlite.losses.sown_losses import SownLosses

_HEAD = 'softmax/w'  # the name of the head's weight, which a language model may have as well


class RewardModel(LanguageModel, subject='Losses'):
  """Learns rewards from pairs of answers: see reward_loss.py."""

  CENTER_REWARDS: Training[NotNegative] = (
    0.0  # weight of a pair's squared reward sum, which keeps rewards near 0
  )

  @property
  def ignored_variables(self) -> list[str]:
    if not self.CHECKPOINT_RESTORE_PATH or self._starts_from_rewards:
      return super().ignored_variables
    return [
      *super().ignored_variables,
      _HEAD,
      *['logits_bias/b'] * (self.logits_bias() is not None),
    ]

  @property
  def _starts_from_rewards(self) -> bool:
    facts = self.weights
    if not facts.experiment:
      return False
    try:
      cls = class_of({'experiment': facts.experiment, 'values': facts.values})
    except UserError:  # its module is not imported
      return False
    return issubclass(cls, RewardModel)

  @property
  def gives_rewards(self) -> bool:
    return True

  @property
  def continues_text(self) -> bool:
    return False

  @property
  def learns_next_tokens(self) -> bool:
    return False

  @property
  def preference_rows(self) -> type[PreferenceRows]:
    return RewardRows

  def validate(self) -> None:
    super().validate()
    if isinstance(self, MultiTokenPrediction) and self.NUM_PREDICTION_MODULES:
      raise UserError(
        f'NUM_PREDICTION_MODULES={self.NUM_PREDICTION_MODULES}: a reward model predicts no tokens; '
        f'leave its modules out: NUM_PREDICTION_MODULES=0 '
        f'{shell.flag("CHECKPOINT_IGNORE_RULES", [PREDICTIONS])}'
      )
    if self.USE_LORA:
      raise UserError(
        'USE_LORA=True is not supported: it would not train the new head of a reward model. Leave '
        'it out, and save memory with ADAM_MOMENTS_DTYPE'
      )

  def language_model(self) -> fdl.Config:
    return super().model()

  def model_of(self, writer: Experiment) -> fdl.Config:
    if isinstance(writer, RewardModel):
      return super().model_of(writer)
    return self.language_model()  # its head is new

  def model(self) -> fdl.Config:
    lm = self.language_model()
    lm.head_tpl = template(
      LmHead,
      vocab_size=1,
      model_dims=self.MODEL_DIMS,
      dtype=jnp.float32,
      w_init=self.weight_init(self.SOFTMAX_INIT_STD),
    )
    lm.logits_bias_tpl, lm.logit_cap, lm.num_loss_chunks = None, 0.0, 1
    return lm

  @property
  def further_arrays(self) -> Mapping[str, RowArray]:
    return {'preferences': RowArray('int32')}

  def losses(self) -> dict[str, fdl.Config]:
    reward = config(BradleyTerry, center=self.CENTER_REWARDS)
    return {'reward_loss': reward, 'aux_loss': config(SownLosses)}
