"""What a model learns from rewards of its own answers: the attributes and the loss."""

from collections.abc import Mapping

import fiddle as fdl

from paxlite.config.attribute_kinds import Count, NotNegative, Positive, Run, Training
from paxlite.config.templates import config
from paxlite.core.errors import UserError
from paxlite.data.base import RowArray
from paxlite.experiments.parts.objective import Objective
from paxlite.losses.policy_loss import Mean, PolicyLoss
from paxlite.losses.sown_losses import SownLosses
from paxlite.reinforcement.advantages import Scale


class Policy(Objective, subject='Reinforcement learning'):
  """Group-relative policy optimization: losses/policy_loss.py, reinforcement/rollouts.py."""

  GROUP_SIZE: Training[Count] = 8  # answers to each prompt, which are compared with each other
  REWARDS: Training[list[str]] = []  # functions of (record, answer), as my_module.my_function
  REWARD_WEIGHTS: Training[list[float]] = []  # factor of each reward; []: 1
  ENVIRONMENT: Training[str] = ''  # class with reply and reward, for episodes of several turns
  MAX_TURNS: Training[Count] = 1  # most answers of an episode
  REWARD_TIMEOUT: Run[Positive] = 10.0  # most seconds that a reward or a reply may take
  MAX_NEW_TOKENS: Training[Count] = 256  # most tokens of an answer
  ROLLOUT_TEMPERATURE: Training[Positive] = 1.0  # temperature with which answers are drawn
  ADVANTAGE_SCALE: Training[Scale] = (
    'group'  # whose standard deviation divides advantages; none is Dr. GRPO's
  )
  POLICY_MEAN: Training[Mean] = (
    'grpo'  # mean over tokens: grpo of episodes, dapo of all tokens, dr_grpo of a constant length
  )
  KL_WEIGHT: Training[NotNegative] = 0.0  # weight of the divergence from the reference; 0: none

  def validate(self) -> None:
    super().validate()
    if self.batch_size % self.GROUP_SIZE:
      raise UserError(
        f'a batch of {self.batch_size} answers is not divisible by GROUP_SIZE={self.GROUP_SIZE}: '
        'change it, or PERCORE_BATCH_SIZE'
      )
    if self.GROUP_SIZE < 2:
      raise UserError('GROUP_SIZE=1: an answer is compared with others to its prompt; 2 or more')
    if self.REWARD_WEIGHTS and len(self.REWARD_WEIGHTS) != len(self.REWARDS):
      raise UserError(f'{len(self.REWARDS)} REWARDS have {len(self.REWARD_WEIGHTS)} REWARD_WEIGHTS')
    for path in (*self.REWARDS, *filter(None, [self.ENVIRONMENT])):
      if not all(part.isidentifier() for part in path.split('.')) or '.' not in path:
        raise UserError(f'{path} is not the dotted path of a function, as my_rewards.correct')
    if self.MAX_TURNS > 1 and not self.ENVIRONMENT:
      raise UserError(f'MAX_TURNS={self.MAX_TURNS} needs an ENVIRONMENT that replies')
    if self.MAX_NEW_TOKENS >= self.MAX_SEQ_LEN:
      raise UserError(
        f'MAX_NEW_TOKENS={self.MAX_NEW_TOKENS} leaves no room for a prompt in MAX_SEQ_LEN='
        f'{self.MAX_SEQ_LEN}'
      )

  @property
  def further_arrays(self) -> Mapping[str, RowArray]:
    own = dict.fromkeys(('advantages', 'rewards'), RowArray('float32'))
    return {**own, **super().further_arrays}

  def losses(self) -> dict[str, fdl.Config]:
    loss = config(
      PolicyLoss,
      mean=self.POLICY_MEAN,
      kl_weight=self.KL_WEIGHT,
      length=self.MAX_NEW_TOKENS,
      temperature=self.ROLLOUT_TEMPERATURE,
    )
    return {'policy_loss': loss, 'aux_loss': config(SownLosses)}

  def reference(self) -> fdl.Config | None:
    return self.initial_reference() if self.KL_WEIGHT else None
