"""One dial for chat models: the depth decides the sizes, the batch, the tokens and the rates.

class Books(TextFiles, Chat(depth=4)):
  TRAIN_FILES = ['books/*.txt']

Widths, initial values, rates and factors follow the rules of docs/ladder.md. docs/recipes.md has
all rules and what was measured of them.
"""

import functools
import math
from typing import Any

from paxlite.config.attribute_kinds import Count, Run, Shape
from paxlite.config.attributes import derived
from paxlite.core.errors import UserError
from paxlite.experiments.gpt import GPT126M
from paxlite.experiments.granite.residual_factor import ResidualFactor
from paxlite.experiments.muon_recipe import MuonRecipe
from paxlite.experiments.parts.embedding_factors import EmbeddingFactors

_DEEPEST = 64
_HEAD = 64  # dimensions of a head at every depth
_BASE_WIDTH = 256  # for which MuonRecipe's values are, in models of one layer
_TOKENS_PER_PARAMETER = 12
_FEWEST_STEPS, _SMALLEST_BATCH = 1000, 1024  # the latter in tokens
# The best batch in tokens, and the best share of a run over which weight decay averages, by the
# tokens and by the tokens per parameter: arXiv 2505.13738, figure 1 (sequences of 2048 tokens).
_BATCH, _BATCH_EXPONENT = 0.0306 * 2048, 0.383
_AVERAGED, _AVERAGED_EXPONENT = 1.084, -0.527


class ChatByDepth(ResidualFactor, EmbeddingFactors, MuonRecipe, GPT126M, subject='One dial'):
  """A chat model whose other values follow from DEPTH unless they are set."""

  DEPTH: Shape[Count] = 4  # number of layers, from which the other values follow

  @property
  def TRAIN_TOKENS(self) -> Run[Count]:
    """Tokens to train on, from which the batch, the steps and the weight decay follow."""
    return _TOKENS_PER_PARAMETER * self._parameters

  NUM_LAYERS = derived(lambda self: max(1, self.DEPTH))
  MODEL_DIMS = derived(lambda self: _HEAD * self.NUM_LAYERS)
  NUM_HEADS = derived(lambda self: max(1, self.MODEL_DIMS // _HEAD))
  HIDDEN_DIMS = derived(lambda self: 9 * self.MODEL_DIMS // 2)
  VOCAB_SIZE = derived(lambda self: 4096 << self._doublings)
  MAX_SEQ_LEN = derived(lambda self: 256 << self._doublings)
  TRAINABLE_POSITION_EMB = False

  PERCORE_BATCH_SIZE = derived(
    lambda self: float(max(1, round(self._batch_tokens / self.MAX_SEQ_LEN / self.num_devices)))
  )
  MAX_STEPS = derived(lambda self: self._steps)
  WEIGHT_DECAY = derived(lambda self: self._weight_decay)

  INIT_STD = derived(lambda self: GPT126M.INIT_STD / math.sqrt(self._width))
  SOFTMAX_INIT_STD = GPT126M.INIT_STD
  ADAM_EPSILON = derived(lambda self: GPT126M.ADAM_EPSILON / self._width)
  LOGITS_DIVISOR = derived(lambda self: self._width)
  RESIDUAL_FACTOR = derived(lambda self: 1 / self.NUM_LAYERS)
  LEARNING_RATE_FACTORS = derived(lambda self: _of_matrices(self._rate))
  WEIGHT_DECAY_FACTORS = derived(lambda self: _of_matrices(1 / self._rate))

  @property
  def _doublings(self) -> int:
    """How often vocabulary and sequences double: beyond 4, 8 and 16 layers."""
    return min(3, ((self.NUM_LAYERS - 1) // 4).bit_length())

  @property
  def _width(self) -> float:
    return self.MODEL_DIMS / _BASE_WIDTH

  @property
  def _rate(self) -> float:
    """The factor of the learning rate of the weights of layers."""
    is_by_matrix = self.OPTIMIZER in ('muon', 'normuon')
    return math.pow(self._width, -0.5 if is_by_matrix else -1.0)

  @property
  def _parameters(self) -> int:
    """The parameters of all matrices, without biases and norms."""
    a_layer = 4 * self.NUM_HEADS * self.DIMS_PER_HEAD + 2 * self.HIDDEN_DIMS
    return self.MODEL_DIMS * (self.NUM_LAYERS * a_layer + self.VOCAB_SIZE)

  @property
  def _batch_tokens(self) -> int:
    """The tokens of the best batch, a power of two."""
    tokens = self.TRAIN_TOKENS
    best = min(_BATCH * math.pow(tokens, _BATCH_EXPONENT), tokens / _FEWEST_STEPS)
    return max(_SMALLEST_BATCH, 1 << int(math.log2(max(1, best))))

  @property
  def _steps(self) -> int:
    a_step = max(1, round(self.PERCORE_BATCH_SIZE * self.num_devices)) * self.MAX_SEQ_LEN
    return max(1, round(self.TRAIN_TOKENS / a_step))

  @property
  def _weight_decay(self) -> float:
    if not self.LEARNING_RATE:
      return 0.0
    averaged = _AVERAGED * math.pow(self.TRAIN_TOKENS / self._parameters, _AVERAGED_EXPONENT)
    return 1 / (averaged * self.MAX_STEPS * self.LEARNING_RATE)


def _of_matrices(factor: float) -> list[str]:
  return [] if factor == 1 else [f'transformer/.*/w={factor:.6g}']


def Chat(depth: int) -> Any:
  """Returns the class of a chat model of a depth, to derive experiments from.

  It is paxlite.recipes.dial.ChatN for N layers, by which commands and pickles find it. Raises
  UserError if the depth is no whole number from 1 to 64.
  """
  if type(depth) is not int or not 1 <= depth <= _DEEPEST:
    raise UserError(f'Chat(depth={depth!r}): the depth is a whole number from 1 to {_DEEPEST}')
  return _of_depth(depth)


@functools.cache
def _of_depth(depth: int) -> Any:
  make: Any = type(ChatByDepth)
  return make(
    f'Chat{depth}', (ChatByDepth,), {'DEPTH': depth, '__module__': __name__, '__doc__': None}
  )


def __getattr__(name: str) -> Any:
  if name.startswith('Chat') and (digits := name[4:]).isdecimal() and 1 <= int(digits) <= _DEEPEST:
    return Chat(int(digits))
  raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
