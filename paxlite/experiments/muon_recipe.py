"""A recipe with which models learn from fewer tokens than with AdamW: values for any experiment.

class Mine(MuonRecipe, TextFiles, GPT126M):
  TRAIN_FILES = ['books/*.txt']
"""

from paxlite.config.attributes import derived
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.parts.attention import QkNorm
from paxlite.experiments.parts.optimization import Schedule
from paxlite.experiments.parts.stack import Activation


class MuonRecipe(LanguageModel):
  """Muon, norms of queries and keys, squared ReLU, projections that begin at zero, capped logits.

  docs/optimizers.md has what it gains. A model has as many parameters as one with gates whose
  HIDDEN_DIMS is two thirds of this one's. LEARNING_RATE is that of small models: larger ones need
  less, as with AdamW.
  """

  OPTIMIZER = 'muon'
  LEARNING_RATE = 5e-3
  WEIGHT_DECAY = 1e-2
  LR_SCHEDULE: Schedule = 'warmup_stable_decay'

  USE_ROTARY_POSITION_EMB = True
  QK_NORM: QkNorm = 'per_head'
  ATTEN_LOGIT_CAP = 0.0
  SOFTMAX_CAP_LOGITS = 15.0
  USE_GATED_ACTIVATION = False
  ACTIVATION_CLS: Activation = 'relu2'
  OUTPUT_INIT_STD = 0.0

  LR_WARMUP: int = derived(lambda self: min(20, self.MAX_STEPS // 10))  # type: ignore[assignment]

  @property
  def LR_DECAY_STEPS(self) -> int:
    return max(1, 2 * self.MAX_STEPS // 5)
