"""What an order of rotary pairs needs."""

import pytest

from paxlite.core.errors import UserError
from paxlite.experiments.deepseek import DeepSeekV3
from paxlite.experiments.phi import Phi
from paxlite.weights.families import hugging_face_entries


@pytest.mark.parametrize(
  ('experiment', 'message'),
  [
    (DeepSeekV3(ROPE_LAYOUT='half'), 'latent attention needs ROPE_LAYOUT=interleaved'),
    (Phi(ROPE_LAYOUT='interleaved'), 'ROPE_FRACTION=.* needs ROPE_LAYOUT=half'),
  ],
)
def test_pairs_that_cannot_be_reordered_are_refused(experiment, message):
  """The names of the tensors are the same, so that only their numbers would be wrong."""
  with pytest.raises(UserError, match=message):
    hugging_face_entries(experiment)
