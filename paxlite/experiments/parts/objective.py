"""The training objective: losses, and the frozen model that losses may read."""

from collections.abc import Mapping

import fiddle as fdl

from paxlite import extensions
from paxlite.config import edits
from paxlite.config.attribute_kinds import Fraction, NotNegative, Run, Training
from paxlite.config.attributes import StoredPath
from paxlite.config.templates import config
from paxlite.core.errors import UserError
from paxlite.core.variable_names import DORA_VARIABLES, LORA_VARIABLES
from paxlite.data.base import RowArray
from paxlite.experiments.parts.optimization import Optimization
from paxlite.losses.sown_losses import SownLosses
from paxlite.losses.token_losses import CrossEntropy, Uniform, ZLoss


class Objective(Optimization, subject='Losses'):
  """Next-token prediction. A subclass overrides `losses`, and `reference` if a loss reads one."""

  LABEL_SMOOTHING: Training[Fraction] = 0.0  # uniform share of the cross-entropy labels
  Z_LOSS_WEIGHT: Training[NotNegative] = 0.0  # weight of the z-loss, (log Σ exp(logits))²

  @property
  def REFERENCE_RESTORE_PATH(self) -> Run[StoredPath]:
    """Weights of the frozen reference model, for losses that read one."""
    return self.CHECKPOINT_RESTORE_PATH

  @property
  def learns_next_tokens(self) -> bool:
    """Whether the losses are those of next-token prediction, beside which others can be added."""
    return True

  def validate(self) -> None:
    super().validate()
    _ = self.reference_path  # raises UserError

  @property
  def further_arrays(self) -> Mapping[str, RowArray]:
    """The arrays [B, T, …] of a batch that the losses read beside those of all, by their names."""
    return {}

  def model(self) -> fdl.Config:
    """Returns the config of the model that is trained."""
    raise UserError(f'{type(self).__name__} has no model: derive it from LanguageModel')

  def language_model(self) -> fdl.Config:
    """Returns the config of the language model that the model is made of."""
    return self.model()

  def losses(self) -> dict[str, fdl.Config]:
    """Returns the configs of the losses, by the names of their metrics: see losses/loss.py."""
    smoothing = self.LABEL_SMOOTHING
    found = {'avg_xent': config(CrossEntropy, coefficient=1 - smoothing)}
    if smoothing:
      found['uniform_xent'] = config(Uniform, coefficient=smoothing)
    if self.Z_LOSS_WEIGHT:
      found['z_loss'] = config(ZLoss, coefficient=self.Z_LOSS_WEIGHT)
    return found | {'aux_loss': config(SownLosses)}

  def reference(self) -> fdl.Config | None:
    """Returns the config of the Reference, a frozen model that losses read; None: there is none."""
    return None

  def initial_reference(self) -> fdl.Config:
    """Returns the config of a Reference: the model with the weights that training starts from.

    If LoRA trains its factors alone, it is the base, which has no copy. Otherwise it is a frozen
    copy. CONFIG_EDITS of the model are its own too.
    """
    model = self.model()
    is_base = list(self.TRAINABLE_VARIABLES) in ([LORA_VARIABLES], [DORA_VARIABLES])
    if self.USE_LORA or is_base:
      is_base &= extensions.hook('a model without factors')(model)
    model = edits.edited(model, self.CONFIG_EDITS, 'task.model')
    return config(extensions.hook('a reference model'), model=model, is_base=is_base)

  @property
  def warnings(self) -> list[str]:
    found = list(super().warnings)
    if self.reference() is not None and self.backend.name != 'xla':
      found.append(
        f'The reference model runs in plain XLA, but the trained one on {self.backend.name}: '
        'their outputs differ before the first step.'
      )
    return found

  @property
  def reference_path(self) -> str:
    reference = self.reference()
    if reference is None or reference.is_base:
      return ''
    if not self.REFERENCE_RESTORE_PATH:
      raise UserError(
        f'{type(self).__name__} needs the weights of its reference model: set '
        'REFERENCE_RESTORE_PATH=FOLDER, imported weights or a run'
      )
    if self.CHECKPOINT_IGNORE_RULES and self.REFERENCE_RESTORE_PATH == self.CHECKPOINT_RESTORE_PATH:
      raise UserError(
        'CHECKPOINT_IGNORE_RULES leaves variables of the reference model without values: name '
        'complete weights with REFERENCE_RESTORE_PATH=FOLDER'
      )
    return self.REFERENCE_RESTORE_PATH
