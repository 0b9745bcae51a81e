"""Reward models: a language model whose logits are replaced by one number, the reward of a text.

class Judge(RewardModel, PreferenceFiles, SmolLM135M):
  TRAIN_FILES = ['pairs.jsonl']
"""

import fiddle as fdl
import jax.numpy as jnp

from paxlite.config.attribute_kinds import NotNegative, Training
from paxlite.config.attributes import derived
from paxlite.config.templates import config, template
from paxlite.core.errors import UserError
from paxlite.data.preferences import PreferenceRows
from paxlite.data.reward_rows import RewardRows
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.registry import class_of
from paxlite.layers.embeddings import LmHead
from paxlite.losses.reward_loss import BradleyTerry
from paxlite.losses.sown_losses import SownLosses

_HEAD = 'softmax/w'  # the name of the head's weight, which a language model may have as well


class RewardModel(LanguageModel, subject='Losses'):
  """Learns rewards from pairs of answers: see losses/reward_loss.py."""

  CENTER_REWARDS: Training[NotNegative] = (
    0.0  # weight of the squared sum of both rewards of a pair, which keeps rewards near 0
  )

  def _new_variables(self) -> list[str]:
    if not self.CHECKPOINT_RESTORE_PATH or self._starts_from_rewards:
      return []
    return [_HEAD] + ['logits_bias/b'] * self.USE_SOFTMAX_BIAS

  CHECKPOINT_IGNORE_RULES: list[str] = derived(lambda self: self._new_variables())  # type: ignore[assignment]

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
  def continues_text(self) -> bool:
    return False

  @property
  def preference_rows(self) -> type[PreferenceRows]:
    return RewardRows

  def language_model(self) -> fdl.Config:
    """Returns the config of the language model that it is made of."""
    return super().model()

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

  def losses(self) -> dict[str, fdl.Config]:
    reward = config(BradleyTerry, center=self.CENTER_REWARDS)
    return {'reward_loss': reward, 'aux_loss': config(SownLosses)}
