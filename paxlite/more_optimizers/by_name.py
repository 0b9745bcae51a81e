"""More optimizers by name, besides optim.by_name."""

from typing import Any

import optax
from optax import contrib

from paxlite.config.attribute_kinds import Count, Training
from paxlite.core.errors import UserError
from paxlite.more_optimizers.soap import scale_by_soap
from paxlite.optim.by_name import Decayed, register
from paxlite.optim.transformations import Skippable, scale_by_learning_rate, scale_by_pax_adam
from paxlite.optim.variable_groups import decayed


@register('soap')
class soap(Decayed):
  """SOAP for matrices, and Adam for embeddings, norms, biases and the output head."""

  adam_beta1: float
  adam_beta2: float
  adam_epsilon: float
  soap_frequency: Training[Count] = 10  # updates between changes of SOAP's bases
  soap_max_size: Training[Count] = 10_000  # most inputs or outputs with a basis in SOAP

  def transformation(self, schedule: optax.Schedule) -> optax.GradientTransformation:
    of_adam = self.adam_beta1, self.adam_beta2, self.adam_epsilon
    own = self.soap_frequency, self.soap_max_size
    scaled = scale_by_soap(*of_adam, *own, scale_by_pax_adam(*of_adam))
    return Skippable(*self.chained(scaled, scale_by_learning_rate(schedule)))


@register('lion', by_layer=True)
class lion(Decayed):
  """optax's Lion (https://arxiv.org/abs/2302.06675)."""

  adam_beta1: float
  adam_beta2: float

  def transformation(self, schedule: optax.Schedule) -> optax.GradientTransformation:
    scaled = optax.scale_by_lion(self.adam_beta1, self.adam_beta2)
    return self.chained(scaled, optax.scale_by_learning_rate(schedule))


@register('sgd', by_layer=True)
class sgd(Decayed):
  """Gradient descent with the momentum `adam_beta1`, and decoupled weight decay."""

  adam_beta1: float

  def transformation(self, schedule: optax.Schedule) -> optax.GradientTransformation:
    return self.chained(optax.trace(self.adam_beta1), optax.scale_by_learning_rate(schedule))


@register('adafactor')
class adafactor(Decayed):
  """optax's Adafactor (https://arxiv.org/abs/1804.04235) without momentum.

  The decay is multiplied by the learning rate, as that of all others here. In optax it is not.
  """

  def transformation(self, schedule: optax.Schedule) -> optax.GradientTransformation:
    # the updates before the decay are negative
    decay = decayed(-self.weight_decay, self.weight_decay_factors)
    rate = optax.scale_by_learning_rate(schedule, flip_sign=False)
    return optax.chain(optax.adafactor(None), decay, rate)


@register('schedule_free')
class schedule_free:
  """optax's schedule-free AdamW (https://arxiv.org/abs/2405.15682).

  The parameters are those at which gradients are computed, y. Their average x, which the paper
  evaluates, is optax.contrib.schedule_free_eval_params of the state and the parameters.
  """

  adam_beta1: float
  adam_beta2: float
  adam_epsilon: float
  weight_decay: float

  def transformation(self, schedule: optax.Schedule) -> optax.GradientTransformation:
    if self.adam_beta1 <= 0:
      raise UserError('OPTIMIZER=schedule_free needs ADAM_BETA1 above 0')
    rate: Any = schedule  # which optax declares as a number
    of_adam = self.adam_beta1, self.adam_beta2, self.adam_epsilon
    return contrib.schedule_free_adamw(rate, None, *of_adam, weight_decay=self.weight_decay)
