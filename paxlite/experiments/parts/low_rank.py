"""LoRA and DoRA: low-rank factors beside the weights, which are frozen."""

from typing import Literal

import fiddle as fdl
from fiddle import selectors

from paxlite.config.attribute_kinds import Count, Training
from paxlite.core.variable_names import DORA_VARIABLES, LORA_VARIABLES
from paxlite.experiments.parts.optimization import Optimization
from paxlite.layers.attention.attention import Attention
from paxlite.layers.attention.latent_attention import LatentAttention
from paxlite.layers.attention.shared_key_attention import SharedKeyAttention
from paxlite.layers.attention.sparse_indexer import SparseIndexer
from paxlite.layers.attention.window_indexer import WindowIndexer
from paxlite.layers.dora import DoraProjection
from paxlite.layers.feedforward import FeedForward
from paxlite.layers.linear_attention.kinds import LAYERS_WITH_STATE
from paxlite.layers.lora import LoraProjection
from paxlite.layers.projection import Projection


class LowRankFactors(Optimization, subject='LoRA'):
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

  def add_lora(self, lm: fdl.Config) -> None:
    """Adds low-rank factors to the projections of the targeted layers of the stack."""
    attention, mlp = (
      (Attention, LatentAttention, SharedKeyAttention, *LAYERS_WITH_STATE),
      (FeedForward,),
    )
    layers = {'all': (*attention, *mlp), 'attention': attention, 'mlp': mlp}
    for layer in layers[self.LORA_TARGET_LAYERS]:
      for target in selectors.select(lm.transformer_tpl, layer, check_nonempty=False):
        without = [id(getattr(target, 'groups_tpl', None))]  # of which each group has its own
        for kind in (SparseIndexer, WindowIndexer):  # what chooses keys has no gradient
          for indexer in selectors.select(target, kind, check_nonempty=False):
            without += map(id, selectors.select(indexer, Projection))
        for projection in selectors.select(target, Projection):
          if id(projection) in without:
            continue
          fdl.update_callable(projection, DoraProjection if self.USE_DORA else LoraProjection)
          projection.rank = self.LORA_RANK
