"""Attributes and losses of training on preferences."""

from collections.abc import Mapping
from typing import Literal, Self

import fiddle as fdl
import jax

from paxlite.config.attribute_kinds import Fraction, NotNegative, Training
from paxlite.config.templates import config
from paxlite.core.errors import UserError
from paxlite.data.base import RowArray
from paxlite.finetuning.preferences import preference_losses
from paxlite.finetuning.preferences.kto_loss import Kto
from paxlite.finetuning.reference import LOG_PROBS, StoredReference
from paxlite.finetuning.stored_values import StoredValues
from paxlite.losses.outputs import Outputs
from paxlite.losses.sown_losses import SownLosses

PreferenceLoss = Literal['sigmoid', 'hinge', 'ipo', 'robust', 'orpo', 'simpo', 'kto']

_BETAS = {'orpo': 0.1, 'simpo': 2.0}  # of the papers


class Preferences(StoredValues, subject='Losses'):
  """Losses of pairs of answers, or of labelled ones: preference_losses.py, kto_loss.py."""

  PREFERENCE_LOSS: Training[PreferenceLoss] = (
    'sigmoid'  # pair loss (sigmoid: DPO), or kto for labelled answers
  )
  SIMPO_GAMMA: Training[NotNegative] = 1.0  # SimPO's margin between a pair's rewards
  PREFERENCES_FLIPPED: Training[Fraction] = (
    0.0  # share of wrongly ordered pairs that PREFERENCE_LOSS=robust assumes
  )
  PRECOMPUTE_REFERENCE: Training[bool] = (
    False  # computes the reference's log-probabilities once, before training, and keeps no copy
  )
  DESIRABLE_WEIGHT: Training[NotNegative] = 1.0  # weight of good answers in KTO
  UNDESIRABLE_WEIGHT: Training[NotNegative] = 1.0  # weight of bad answers in KTO

  @property
  def PREFERENCE_BETA(self) -> Training[NotNegative]:
    """β of pair losses; larger values stay closer to the reference."""
    return _BETAS.get(self.PREFERENCE_LOSS, 0.1)

  def validate(self) -> None:
    super().validate()
    if not self.PREFERENCE_BETA:
      raise UserError('PREFERENCE_BETA=0: nothing would be learned from preferences')
    if self.PRECOMPUTE_REFERENCE:
      _ = self.with_reference.reference_path  # raises UserError
      if self.CHECKPOINT_IGNORE_RULES:
        raise UserError(
          'PRECOMPUTE_REFERENCE needs all variables of the reference, but CHECKPOINT_IGNORE_RULES '
          'leaves some out: drop one of the two'
        )
    if not self.PREFERENCES_FLIPPED < 0.5:
      raise UserError(
        f'PREFERENCES_FLIPPED={self.PREFERENCES_FLIPPED:g} must be below 0.5: above it, the '
        'rejected answers would be the better ones'
      )

  @property
  def learns_next_tokens(self) -> bool:
    return False

  @property
  def further_arrays(self) -> Mapping[str, RowArray]:
    return {'preferences': RowArray('int32'), **super().further_arrays}

  @property
  def stored_arrays(self) -> Mapping[str, RowArray]:
    is_stored = self.PRECOMPUTE_REFERENCE and self.reference() is not None
    return {LOG_PROBS: RowArray('float32')} if is_stored else {}

  def made_of(self, outputs: Outputs) -> Mapping[str, jax.Array]:
    return {LOG_PROBS: outputs.log_probs}

  @property
  def with_reference(self) -> Self:
    return self.replaced(PRECOMPUTE_REFERENCE=False)

  @property
  def warnings(self) -> list[str]:
    found = list(super().warnings)
    if self.PREFERENCES_FLIPPED and self.PREFERENCE_LOSS != 'robust':
      found.append(
        f'PREFERENCES_FLIPPED={self.PREFERENCES_FLIPPED:g} has no effect without '
        'PREFERENCE_LOSS=robust.'
      )
    if self.PRECOMPUTE_REFERENCE and self.reference() is None:
      found.append(
        f'PRECOMPUTE_REFERENCE=True has no effect: {self.PREFERENCE_LOSS} has no reference model.'
      )
    for name in ('DESIRABLE_WEIGHT', 'UNDESIRABLE_WEIGHT'):
      if getattr(self, name) != 1 and self.PREFERENCE_LOSS != 'kto':
        found.append(f'{name}={getattr(self, name):g} has no effect without PREFERENCE_LOSS=kto.')
    return found

  def losses(self) -> dict[str, fdl.Config]:
    kind, beta = self.PREFERENCE_LOSS, self.PREFERENCE_BETA
    if kind == 'simpo':
      found = {'simpo': config(preference_losses.SimPo, beta=beta, gamma=self.SIMPO_GAMMA)}
    elif kind == 'kto':
      weights = {
        'desirable_weight': self.DESIRABLE_WEIGHT,
        'undesirable_weight': self.UNDESIRABLE_WEIGHT,
      }
      found = {'kto': config(Kto, beta=beta, **weights)}
    elif kind == 'orpo':
      found = {
        'nll_loss': config(preference_losses.ChosenLoss),
        'odds_ratio': config(preference_losses.OddsRatio, beta=beta),
      }
    else:
      flipped = self.PREFERENCES_FLIPPED if kind == 'robust' else 0.0
      found = {'dpo': config(preference_losses.Dpo, kind=kind, beta=beta, flipped=flipped)}
    return found | {'aux_loss': config(SownLosses)}

  def reference(self) -> fdl.Config | None:
    if self.PREFERENCE_LOSS in ('simpo', 'orpo'):
      return None
    return config(StoredReference) if self.PRECOMPUTE_REFERENCE else self.initial_reference()
