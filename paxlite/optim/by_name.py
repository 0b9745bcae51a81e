"""Optimizers by name, for the attribute OPTIMIZER.

Each is a function that returns an optax transformation. Its parameters are attributes of the
experiment in small letters, and `schedule` is the learning rate by update count. So the function
itself says which attributes have a meaning for the optimizer.

    @register('momentum')
    def momentum(schedule, adam_beta1):
      return optax.sgd(schedule, adam_beta1)

What holds for every optimizer, such as clipping, is in optimizers.Optimizer.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import optax
from optax import contrib

from paxlite.cli.user_code import place_of
from paxlite.core.errors import UserError
from paxlite.core.near_names import did_you_mean
from paxlite.optim.muon import scale_by_muon
from paxlite.optim.soap import scale_by_soap
from paxlite.optim.transformations import Skippable, scale_by_learning_rate, scale_by_pax_adam
from paxlite.optim.variable_groups import decayed

_F = TypeVar('_F', bound=Callable[..., optax.GradientTransformation])
_MAKERS: dict[str, Callable[..., optax.GradientTransformation]] = {}
_BY_LAYER: set[Callable[..., object]] = set()


def register(name: str, by_layer: bool = False) -> Callable[[_F], _F]:
  """Returns a decorator that makes OPTIMIZER=name an optimizer, once its module is imported.

  Args:
    name: The name; UserError if another function has it.
    by_layer: Whether each number is updated by itself, so that with OFFLOAD_OPTIMIZER the layers of
      a repeated stack are fetched and updated one by one: see moments.streamed.
  """

  def add(make: _F) -> _F:
    other = _MAKERS.get(name, make)
    if place_of(other) != place_of(make):  # a module may be imported again
      raise UserError(f'{place_of(make)}: the optimizer {name!r} is registered already')
    _MAKERS[name] = make
    _BY_LAYER.update([make] if by_layer else [])
    return make

  return add


def maker(name: str) -> Callable[..., optax.GradientTransformation]:
  """Returns the function of an optimizer; UserError if there is none of this name."""
  if name in _MAKERS:
    return _MAKERS[name]
  raise UserError(
    f'OPTIMIZER={name!r}: the optimizers are {", ".join(_MAKERS)}, and those that imported modules '
    f'register. {did_you_mean(name, _MAKERS, 0.5)}'.rstrip()
  )


def is_by_layer(make: Callable[..., object]) -> bool:
  """Whether a function is that of an optimizer which is registered with `by_layer`."""
  return make in _BY_LAYER


@register('adam', by_layer=True)
def adam(
  schedule: optax.Schedule,
  adam_beta1: float = 0.9,
  adam_beta2: float = 0.99,
  adam_epsilon: float = 1e-6,
  adam_epsilon_root: float = 0.0,
  adam_clip_threshold: float = 1.0,
  weight_decay: float = 1e-3,
  clip_gradient_norm_to_value: float = 5.0,
  weight_decay_factors: Sequence[str] = (),
) -> optax.GradientTransformation:
  """Returns Pax's Adam: scale_by_pax_adam, decay of all trainable variables, and −schedule.

  Biases, norms and embeddings decay too. If gradients are clipped, which Optimizer.clip does, the
  state has an empty entry for it, as in older checkpoints.
  """
  scaled = scale_by_pax_adam(
    adam_beta1, adam_beta2, adam_epsilon, adam_epsilon_root, adam_clip_threshold
  )
  parts = scaled, decayed(weight_decay, weight_decay_factors), scale_by_learning_rate(schedule)
  clipping = [optax.identity()] if clip_gradient_norm_to_value > 0 else []
  return Skippable(*optax.chain(*clipping, *parts))


@register('adamw', by_layer=True)
def adamw(
  schedule: optax.Schedule,
  adam_beta1: float,
  adam_beta2: float,
  adam_epsilon: float,
  adam_epsilon_root: float,
  weight_decay: float,
  weight_decay_factors: Sequence[str] = (),
) -> optax.GradientTransformation:
  """Returns optax's AdamW (https://arxiv.org/abs/1711.05101)."""
  betas, epsilons = (adam_beta1, adam_beta2), (adam_epsilon, adam_epsilon_root)
  scaled = optax.scale_by_adam(*betas, *epsilons)
  return optax.chain(
    scaled, decayed(weight_decay, weight_decay_factors), optax.scale_by_learning_rate(schedule)
  )


@register('muon')
def muon(
  schedule: optax.Schedule,
  adam_beta1: float,
  adam_beta2: float,
  adam_epsilon: float,
  adam_epsilon_root: float,
  muon_momentum: float,
  muon_update_rms: float,
  muon_split_heads: bool,
  weight_decay: float,
  weight_decay_factors: Sequence[str] = (),
) -> optax.GradientTransformation:
  """Returns Muon for matrices, and Adam for embeddings, norms, biases and the output head."""
  adam = scale_by_pax_adam(adam_beta1, adam_beta2, adam_epsilon, adam_epsilon_root)
  scaled = scale_by_muon(muon_momentum, muon_update_rms, muon_split_heads, adam=adam)
  return _muon(scaled, decayed(weight_decay, weight_decay_factors), schedule)


@register('normuon')
def normuon(
  schedule: optax.Schedule,
  adam_beta1: float,
  adam_beta2: float,
  adam_epsilon: float,
  adam_epsilon_root: float,
  muon_momentum: float,
  muon_update_rms: float,
  muon_split_heads: bool,
  weight_decay: float,
  weight_decay_factors: Sequence[str] = (),
) -> optax.GradientTransformation:
  """Returns Muon whose outputs have updates of one size (https://arxiv.org/abs/2510.05491)."""
  adam = scale_by_pax_adam(adam_beta1, adam_beta2, adam_epsilon, adam_epsilon_root)
  scaled = scale_by_muon(muon_momentum, muon_update_rms, muon_split_heads, adam_beta2, adam)
  return _muon(scaled, decayed(weight_decay, weight_decay_factors), schedule)


@register('soap')
def soap(
  schedule: optax.Schedule,
  adam_beta1: float,
  adam_beta2: float,
  adam_epsilon: float,
  soap_frequency: int,
  soap_max_size: int,
  weight_decay: float,
  weight_decay_factors: Sequence[str] = (),
) -> optax.GradientTransformation:
  """Returns SOAP for matrices, and Adam for embeddings, norms, biases and the output head."""
  adam = scale_by_pax_adam(adam_beta1, adam_beta2, adam_epsilon)
  scaled = scale_by_soap(adam_beta1, adam_beta2, adam_epsilon, soap_frequency, soap_max_size, adam)
  return _muon(scaled, decayed(weight_decay, weight_decay_factors), schedule)


def _muon(
  scaled: optax.GradientTransformation,
  decay: optax.GradientTransformation,
  schedule: optax.Schedule,
) -> Skippable:
  return Skippable(*optax.chain(scaled, decay, scale_by_learning_rate(schedule)))


@register('lion', by_layer=True)
def lion(
  schedule: optax.Schedule,
  adam_beta1: float,
  adam_beta2: float,
  weight_decay: float,
  weight_decay_factors: Sequence[str] = (),
) -> optax.GradientTransformation:
  """Returns optax's Lion (https://arxiv.org/abs/2302.06675)."""
  return optax.chain(
    optax.scale_by_lion(adam_beta1, adam_beta2),
    decayed(weight_decay, weight_decay_factors),
    optax.scale_by_learning_rate(schedule),
  )


@register('sgd', by_layer=True)
def sgd(
  schedule: optax.Schedule,
  adam_beta1: float,
  weight_decay: float,
  weight_decay_factors: Sequence[str] = (),
) -> optax.GradientTransformation:
  """Returns gradient descent with the momentum `adam_beta1`, and decoupled weight decay."""
  decay, rate = decayed(weight_decay, weight_decay_factors), optax.scale_by_learning_rate(schedule)
  return optax.chain(optax.trace(adam_beta1), decay, rate)


@register('adafactor')
def adafactor(
  schedule: optax.Schedule, weight_decay: float, weight_decay_factors: Sequence[str] = ()
) -> optax.GradientTransformation:
  """Returns optax's Adafactor (https://arxiv.org/abs/1804.04235) without momentum.

  The decay is multiplied by the learning rate, as that of all others here. In optax it is not.
  """
  decay = decayed(-weight_decay, weight_decay_factors)  # the updates before it are negative
  return optax.chain(
    optax.adafactor(None), decay, optax.scale_by_learning_rate(schedule, flip_sign=False)
  )


@register('schedule_free')
def schedule_free(
  schedule: optax.Schedule,
  adam_beta1: float,
  adam_beta2: float,
  adam_epsilon: float,
  weight_decay: float,
) -> optax.GradientTransformation:
  """Returns optax's schedule-free AdamW (https://arxiv.org/abs/2405.15682).

  The parameters are those at which gradients are computed, y. Their average x, which the paper
  evaluates, is optax.contrib.schedule_free_eval_params of the state and the parameters.
  """
  if adam_beta1 <= 0:
    raise UserError('OPTIMIZER=schedule_free needs ADAM_BETA1 above 0')
  rate: Any = schedule  # which optax declares as a number
  return contrib.schedule_free_adamw(
    rate, None, adam_beta1, adam_beta2, adam_epsilon, weight_decay=weight_decay
  )
