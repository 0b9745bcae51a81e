"""The blocks that Transformer Engine's layer replaces, and those that it refuses."""

import pytest

from paxlite.core.errors import UserError
from paxlite.experiments.demo import TinyGPT
from paxlite.transformer_engine.templates import check_supported


def test_te_refuses_blocks_that_it_does_not_know():
  """It also refuses a method that is overridden deep in the block, where no attribute differs."""
  plain = dict(ATTEN_LOGIT_CAP=-1.0, PACKED_INPUT=False)
  check_supported(TinyGPT(**plain))

  class Mine(TinyGPT):
    def dot_product_attention(self):
      attention = super().dot_product_attention()
      attention.sink_logit = 0.0
      return attention

  with pytest.raises(UserError, match='the blocks of Mine, which compute something else'):
    check_supported(Mine(**plain))
