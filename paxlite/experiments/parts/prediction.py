"""Multi-token prediction: modules behind the stack that predict the tokens after the next one."""

import fiddle as fdl

from paxlite.config.attribute_kinds import NotNegative, NotNegativeInt, Shape, Training
from paxlite.config.templates import config, template
from paxlite.core.errors import UserError
from paxlite.core.variable_names import NOT_PREDICTIONS
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.parts.stack import BlockKind
from paxlite.layers.multi_token_prediction import PredictionModule
from paxlite.losses.prediction_loss import PredictionLoss


class MultiTokenPrediction(LanguageModel, subject='Multi-token prediction'):
  """A LanguageModel with modules that predict further tokens, as in DeepSeek-V3.

  See layers/multi_token_prediction.py. The logits of the model do not depend on them.
  """

  NUM_PREDICTION_MODULES: Shape[NotNegativeInt] = (
    0  # modules after the last layer that predict further tokens ahead
  )

  @property
  def PREDICTION_LOSS_WEIGHT(self) -> Training[NotNegative]:
    """Weight of prediction modules' mean loss (DeepSeek-V3: 0.3, later 0.1); 0: frozen."""
    return 0.3 if self.learns_predictions else 0.0

  @property
  def TRAINABLE_VARIABLES(self) -> Training[list[str]]:
    """Regular expressions of trained variables; others are frozen."""
    trainable = super().TRAINABLE_VARIABLES
    if trainable != ['.*'] or not self.NUM_PREDICTION_MODULES or self.PREDICTION_LOSS_WEIGHT:
      return trainable
    return [NOT_PREDICTIONS]

  @property
  def learns_predictions(self) -> bool:
    """Whether prediction modules can be trained: not beside other losses than the cross-entropy.

    Low-rank factors are in the layers of the stack alone.
    """
    return self.learns_next_tokens and not self.USE_LORA

  @property
  def prediction_kind(self) -> BlockKind:
    """The kind of the block of each prediction module."""
    return self.block_kinds[-1]

  @property
  def trained_kinds(self) -> list[BlockKind]:
    return [*super().trained_kinds, *[self.prediction_kind] * self.trained_modules]

  @property
  def trained_modules(self) -> int:
    """The number of prediction modules that a step of training computes."""
    return self.NUM_PREDICTION_MODULES if self.PREDICTION_LOSS_WEIGHT else 0

  def validate(self) -> None:
    super().validate()
    stated = f'NUM_PREDICTION_MODULES={self.NUM_PREDICTION_MODULES}'
    if self.NUM_PREDICTION_MODULES and not self.takes_modules:
      raise UserError(f'{stated} is not supported with links between blocks of the model')
    if self.NUM_PREDICTION_MODULES and self.num_stages > 1:
      raise UserError(f'{stated} needs a mesh without an axis stage: modules come after the stack')
    if self.trained_modules and not self.learns_predictions:
      why = 'USE_LORA=True' if self.USE_LORA else f'the losses of {type(self).__name__}'
      raise UserError(
        f'{stated} cannot be trained with {why}: PREDICTION_LOSS_WEIGHT=0 leaves the modules as '
        'they are'
      )

  def losses(self) -> dict[str, fdl.Config]:
    found = super().losses()
    modules = self.trained_modules
    predictions = {
      f'mtp_{i}_xent': config(
        PredictionLoss, distance=i, coefficient=self.PREDICTION_LOSS_WEIGHT / modules
      )
      for i in range(1, modules + 1)
    }
    # first those that compute the modules, and then what all layers have sown
    sown = {name: found.pop(name) for name in ['aux_loss'] if name in found}
    return found | predictions | sown

  def prediction_modules(self) -> list[fdl.Partial]:
    """Returns the templates of the prediction modules."""
    return [
      template(
        PredictionModule, model_dims=self.MODEL_DIMS, norm_tpl=self.norm(),
        block_tpl=self.block_of(self.prediction_kind),
        checkpoint_policy=self.kept_activations(self.CHECKPOINT_POLICY),
      )
      for _ in range(self.NUM_PREDICTION_MODULES)
    ]  # fmt: skip

  @property
  def matmul_params(self) -> int:
    projection = 2 * self.MODEL_DIMS**2
    of_module = projection + self.block_params(self.prediction_kind)
    return super().matmul_params + self.trained_modules * of_module
