"""An optimizer by name, with an attribute of its own."""

import optax

from paxlite.config.attribute_kinds import Below1, Training
from paxlite.optim.by_name import register


@register('thrifty')
class thrifty:
  thrift: Training[Below1] = 0.5  # share of each gradient that is saved

  def transformation(self, schedule):
    return optax.chain(optax.scale(1 - self.thrift), optax.scale_by_learning_rate(schedule))
