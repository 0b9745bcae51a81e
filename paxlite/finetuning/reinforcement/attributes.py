"""What a model learns from its own answers, and from rewards of them: attributes and the loss."""

from collections.abc import Mapping
from typing import Any

import fiddle as fdl

from paxlite.config.attribute_kinds import (
  Count,
  NotNegative,
  NotNegativeInt,
  OffAtZero,
  OffAtZeroInt,
  Positive,
  Run,
  Training,
)
from paxlite.config.templates import config
from paxlite.core.errors import UserError
from paxlite.data.base import RowArray
from paxlite.experiments.parts.objective import Objective
from paxlite.finetuning.reinforcement.advantages import Credit, Scale
from paxlite.finetuning.reinforcement.policy_loss import (
  BEHAVIOUR,
  OLD,
  STALENESS,
  Mean,
  PolicyLoss,
  Ratio,
)
from paxlite.losses.sown_losses import SownLosses


class Answering(Objective, subject='Reinforcement learning'):
  """Training on answers of the model itself: answer_rollouts.py."""

  MAX_NEW_TOKENS: Training[Count] = 256  # maximum tokens per answer
  ROLLOUT_TEMPERATURE: Training[Positive] = 1.0  # sampling temperature of answers
  BATCHES_PER_ROLLOUT: Training[Count] = 1  # batches generated at once, for as many steps
  UPDATES_PER_BATCH: Training[Count] = 1  # updates on each batch
  MAX_STALENESS: Training[NotNegativeInt] = (
    0  # updates that rollouts are generated ahead of training and their rewards; 0: none
  )
  ROLLOUT_DEVICES: Run[NotNegativeInt] = (
    0  # devices, besides those of the mesh, that generate while the mesh trains; 0: none
  )
  KEPT_EPISODES: Run[NotNegativeInt] = (
    16  # episodes per batch kept in episodes.jsonl, with rewards; 0: none
  )
  ENGINE_CHECK_INTERVAL: Run[OffAtZeroInt] = (
    50  # rollouts between comparisons of generation with training, for a microbatch; 0: none
  )

  @property
  def ENGINE_TOLERANCE(self) -> Run[float]:
    """Largest difference of a drawn token's log-probabilities in both before an alarm.

    Tokens for which both chose other experts are not counted.
    """
    return 1e-3 if self._is_exact else 1.0

  @property
  def ENGINE_EXPERTS_TOLERANCE(self) -> Run[float]:
    """Largest share of drawn tokens with other experts in both before an alarm."""
    return 1e-3 if self._is_exact else 0.25

  @property
  def _is_exact(self) -> bool:
    e: Any = self  # another part has FPROP_DTYPE
    return bool(e.FPROP_DTYPE == 'float32')

  def validate(self) -> None:
    super().validate()
    if self.MAX_STALENESS % self.steps_per_rollout:
      raise UserError(
        f'MAX_STALENESS={self.MAX_STALENESS} is not divisible by the {self.steps_per_rollout} '
        'updates of a rollout, UPDATES_PER_BATCH × BATCHES_PER_ROLLOUT'
      )

  @property
  def is_off_policy(self) -> bool:
    """Whether older parameters than those of the first step may have written tokens."""
    return self.MAX_STALENESS > 0

  @property
  def steps_per_rollout(self) -> int:
    """The number of steps that train on answers generated together."""
    return self.BATCHES_PER_ROLLOUT * self.UPDATES_PER_BATCH

  @property
  def learns_next_tokens(self) -> bool:
    return False

  def losses(self) -> dict[str, fdl.Config]:
    return {'aux_loss': config(SownLosses)}


class Policy(Answering, subject='Reinforcement learning'):
  """Group-relative policy optimization: policy_loss.py, policy_rollouts.py."""

  GROUP_SIZE: Training[Count] = 8  # answers per prompt, compared with each other
  REWARDS: Training[list[str]] = []  # functions of (record, answer), as my_module.my_function
  REWARD_WEIGHTS: Training[list[float]] = []  # factor of each reward; []: 1
  ENVIRONMENT: Training[str] = ''  # class with reply and reward, for multi-turn episodes
  TOOLS: Training[list[str]] = []  # functions that answers may call, as my_tools.calculator
  MAX_TURNS: Training[Count] = 1  # maximum answers per episode
  REWARD_TIMEOUT: Run[Positive] = 10.0  # maximum seconds per reward or reply
  EPISODE_TIMEOUT: Run[NotNegative] = (
    0.0  # maximum seconds of an episode, checked between its answers; 0: none
  )
  TURN_CREDIT: Training[Credit] = (
    'episode'  # what an answer learns from: the whole reward, or (turn) rewards from its turn on
  )
  ADVANTAGE_SCALE: Training[Scale] = (
    'group'  # standard deviation that divides advantages; none: Dr. GRPO
  )
  POLICY_MEAN: Training[Mean] = (
    'grpo'  # token mean: per episode (grpo), all (dapo), over a constant length (dr_grpo)
  )
  CLIP_LOW: Training[Positive] = 0.2  # lower clip of the probability ratio, 1 - CLIP_LOW
  CLIP_HIGH: Training[Positive] = 0.2  # upper clip of the probability ratio, 1 + CLIP_HIGH
  POLICY_RATIO: Training[Ratio] = (
    'token'  # probability ratio: per token, or an answer's mean (sequence, GSPO)
  )
  DYNAMIC_SAMPLING_ROUNDS: Training[Count] = (
    1  # maximum draws of prompts for enough groups with unequal rewards (DAPO); 1: once
  )
  PARTIAL_ROLLOUTS: Training[NotNegativeInt] = (
    0  # further groups generated at a time, whose answers go on in the next rollout; 0: none
  )
  ROLLOUTS_PER_ANSWER: Training[Count] = (
    8  # maximum rollouts an answer goes on for, with PARTIAL_ROLLOUTS; older ones are waited for
  )
  MAX_IMPORTANCE: Training[OffAtZero] = (
    2.0  # largest importance ratio of tokens that older weights wrote (TIS); 0: unlimited
  )
  KL_WEIGHT: Training[NotNegative] = 0.0  # weight of the divergence from the reference; 0: none

  def validate(self) -> None:
    super().validate()
    if self.GROUP_SIZE < 2:
      raise UserError('GROUP_SIZE=1: an answer is compared with others to its prompt; 2 or more')
    if self.REWARD_WEIGHTS and len(self.REWARD_WEIGHTS) != len(self.REWARDS):
      raise UserError(f'{len(self.REWARDS)} REWARDS have {len(self.REWARD_WEIGHTS)} REWARD_WEIGHTS')
    for path in (*self.REWARDS, *self.TOOLS, *filter(None, [self.ENVIRONMENT])):
      if not all(part.isidentifier() for part in path.split('.')) or '.' not in path:
        raise UserError(f'{path} is not the dotted path of a function, as my_rewards.correct')
    if self.MAX_TURNS > 1 and not self.ENVIRONMENT and not self.TOOLS:
      raise UserError(f'MAX_TURNS={self.MAX_TURNS} needs an ENVIRONMENT that replies, or TOOLS')
    if self.TOOLS and self.MAX_TURNS == 1:
      raise UserError('MAX_TURNS=1: TOOLS need another answer after the call of one; 2 or more')
    for name, none in (('EPISODE_TIMEOUT', 0), ('TURN_CREDIT', 'episode')):
      if self.MAX_TURNS == 1 and (value := getattr(self, name)) != none:
        raise UserError(f'{name}={value} has no effect on episodes of one answer: set MAX_TURNS')
    if self.TURN_CREDIT == 'turn' and not self.ENVIRONMENT:
      raise UserError('TURN_CREDIT=turn needs an ENVIRONMENT whose reward returns one per answer')
    if self.CLIP_LOW >= 1:
      raise UserError(f'CLIP_LOW={self.CLIP_LOW:g}: a ratio of probabilities is above 0; below 1')
    for name in ('CLIP_LOW', 'CLIP_HIGH', 'POLICY_RATIO'):
      value = getattr(self, name)
      if self.steps_per_rollout == 1 and value != getattr(Policy, name):
        raise UserError(
          f'{name}={value} has no effect while the ratio of probabilities is 1, because each '
          'answer is generated by the parameters that it changes: set UPDATES_PER_BATCH or '
          'BATCHES_PER_ROLLOUT to 2 or more'
        )
    if self.is_off_policy and self.DYNAMIC_SAMPLING_ROUNDS > 1:
      raise UserError(
        f'DYNAMIC_SAMPLING_ROUNDS={self.DYNAMIC_SAMPLING_ROUNDS} needs the rewards of a rollout at '
        'once, which come later with MAX_STALENESS and PARTIAL_ROLLOUTS: leave it out'
      )
    if not self.is_off_policy and self.MAX_IMPORTANCE != Policy.MAX_IMPORTANCE:
      raise UserError(
        f'MAX_IMPORTANCE={self.MAX_IMPORTANCE:g} has no effect: set MAX_STALENESS or '
        'PARTIAL_ROLLOUTS'
      )

  @property
  def is_off_policy(self) -> bool:
    return super().is_off_policy or self.PARTIAL_ROLLOUTS > 0

  @property
  def further_arrays(self) -> Mapping[str, RowArray]:
    names = ['advantages', 'rewards', *([OLD] if self.steps_per_rollout > 1 else [])]
    names += [BEHAVIOUR, STALENESS] if self.is_off_policy else []
    return {**dict.fromkeys(names, RowArray('float32')), **super().further_arrays}

  def losses(self) -> dict[str, fdl.Config]:
    loss = config(
      PolicyLoss,
      mean=self.POLICY_MEAN,
      ratio=self.POLICY_RATIO,
      clip_low=self.CLIP_LOW,
      clip_high=self.CLIP_HIGH,
      kl_weight=self.KL_WEIGHT,
      length=self.MAX_NEW_TOKENS,
      temperature=self.ROLLOUT_TEMPERATURE,
    )
    if self.is_off_policy:
      loss.most_importance = self.MAX_IMPORTANCE
    return {'policy_loss': loss, **super().losses()}

  def reference(self) -> fdl.Config | None:
    return self.initial_reference() if self.KL_WEIGHT else None
