"""LoRA and DoRA: low-rank factors beside the weights, which are frozen."""

from collections.abc import Iterable
from typing import Literal

import fiddle as fdl
from fiddle import selectors

from paxlite.config.attribute_kinds import Count, Training
from paxlite.core.variable_names import DORA_VARIABLES, LORA_VARIABLES
from paxlite.experiments.parts.optimization import Optimization
from paxlite.layers.attention.attention import Attention
from paxlite.layers.dora import DoraProjection
from paxlite.layers.feedforward import FeedForward
from paxlite.layers.lora import LoraProjection
from paxlite.layers.projection import Projection


class LowRankFactors(
  Optimization, subject='LoRA', beside={'USE_LORA': 'USE_DORA LORA_RANK LORA_TARGET_LAYERS'}
):
  """Low-rank factors of the projections of attention and feed-forward layers."""

  USE_LORA: Training[bool] = False  # trains low-rank factors of weights, and freezes the weights
  USE_DORA: Training[bool] = False  # with USE_LORA, trains the lengths of weights beside factors
  LORA_RANK: Training[Count] = 8  # rank of the factors of LoRA
  LORA_TARGET_LAYERS: Training[Literal['all', 'attention', 'mlp']] = (
    'all'  # layers whose projections have factors of LoRA
  )

  @property
  def TRAINABLE_VARIABLES(self) -> Training[list[str]]:
    """Regular expressions of the variables that are trained; all others are frozen."""
    if not self.USE_LORA:
      return ['.*']
    return [DORA_VARIABLES if self.USE_DORA else LORA_VARIABLES]

  @property
  def saves_trainable_only(self) -> bool:
    return self.USE_LORA and bool(self.CHECKPOINT_RESTORE_PATH)

  def add_lora(self, lm: fdl.Config) -> None:
    """Adds low-rank factors to the projections of the targeted layers of the stack."""
    attention, mlp = self.attention_classes, (FeedForward,)
    layers = {'all': (*attention, *mlp), 'attention': attention, 'mlp': mlp}
    for layer in layers[self.LORA_TARGET_LAYERS]:
      for target in selectors.select(lm.transformer_tpl, layer, check_nonempty=False):
        without = {*map(id, self.without_factors(target))}
        for projection in selectors.select(target, Projection):
          if id(projection) not in without:
            fdl.update_callable(projection, DoraProjection if self.USE_DORA else LoraProjection)
            projection.rank = self.LORA_RANK

  @property
  def attention_classes(self) -> tuple[type, ...]:
    """The classes of layers that a model may have in the place of attention."""
    return (Attention,)

  def without_factors(self, layer: fdl.Buildable) -> Iterable[fdl.Buildable]:
    """Returns projections of a layer of attention that have no low-rank factors."""
    return ()
