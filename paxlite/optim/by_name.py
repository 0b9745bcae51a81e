"""Optimizers by name, for the attribute OPTIMIZER.

Each is a function that returns an optax transformation. A parameter of the function is an attribute
of the experiment in small letters, and `schedule` is the learning rate by update count. So the
function itself says which attributes have a meaning for the optimizer.

    @register('signed')
    def signed(schedule, weight_decay):
      return optax.sign_sgd(schedule)

What holds for every optimizer, such as clipping, is in optimizers.Optimizer.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import optax
from optax import contrib

from paxlite.core.errors import UserError
from paxlite.core.near_names import did_you_mean
from paxlite.core.own_code import place_of
from paxlite.optim.transformations import Skippable, scale_by_learning_rate, scale_by_pax_adam

_F = TypeVar('_F', bound=Callable[..., optax.GradientTransformation])


class _Named(NamedTuple):
  make: Callable[..., optax.GradientTransformation]
  by_layer: bool


_NAMED: dict[str, _Named] = {}


def register(name: str, by_layer: bool = False) -> Callable[[_F], _F]:
  """Returns a decorator that makes OPTIMIZER=name an optimizer. The module must be imported.

  Args:
    name: The name; UserError if another function has it.
    by_layer: Whether each number is updated by itself, so that with OFFLOAD_OPTIMIZER the layers of
      a repeated stack are fetched and updated one by one: see moments.streamed.
  """

  def add(make: _F) -> _F:
    other = _NAMED.setdefault(name, _Named(make, by_layer)).make
    if (other.__module__, other.__qualname__) != (make.__module__, make.__qualname__):
      raise UserError(f'{place_of(make)}: the optimizer {name!r} is registered already')
    _NAMED[name] = _Named(make, by_layer)
    return make

  return add


def maker(name: str) -> Callable[..., optax.GradientTransformation]:
  """Returns the function of an optimizer; UserError if there is none of this name."""
  if name in _NAMED:
    return _NAMED[name].make
  raise UserError(
    f'OPTIMIZER={name!r}: the optimizers are {", ".join(_NAMED)}, and those of modules that '
    f'register their own. {did_you_mean(name, _NAMED, 0.5)}'.rstrip()
  )


def is_by_layer(make: Callable[..., object]) -> bool:
  """Whether a function is that of an optimizer which is registered with `by_layer`."""
  return any(make is named.make and named.by_layer for named in _NAMED.values())


def parameters(make: Callable[..., object]) -> Mapping[str, bool]:
  """Returns the parameters of an optimizer's function, and whether each needs an attribute."""
  found = inspect.signature(make).parameters.values()
  named = (p for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
  return {p.name: p.default is p.empty for p in named}


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
) -> optax.GradientTransformation:
  """Returns Pax's Adam: Adam, decay of all trainable variables, and the learning rate.

  Args:
    schedule: Learning rate by update count.
    adam_beta1, adam_beta2, adam_epsilon, adam_epsilon_root, adam_clip_threshold: The arguments of
      scale_by_pax_adam.
    weight_decay: This factor times a variable is added to its update, also for biases, norms and
      embeddings.
    clip_gradient_norm_to_value: If positive, the state has an empty entry for the clipping, as in
      older checkpoints. Optimizer.clip does the clipping.
  """
  return Skippable(
    *optax.chain(
      *([optax.identity()] if clip_gradient_norm_to_value > 0 else []),
      scale_by_pax_adam(
        adam_beta1, adam_beta2, adam_epsilon, adam_epsilon_root, adam_clip_threshold
      ),
      optax.add_decayed_weights(weight_decay),
      scale_by_learning_rate(schedule),
    )
  )


@register('adamw', by_layer=True)
def adamw(
  schedule: optax.Schedule,
  adam_beta1: float,
  adam_beta2: float,
  adam_epsilon: float,
  adam_epsilon_root: float,
  weight_decay: float,
) -> optax.GradientTransformation:
  """Returns optax's AdamW (https://arxiv.org/abs/1711.05101)."""
  return optax.adamw(
    schedule, adam_beta1, adam_beta2, adam_epsilon, adam_epsilon_root, weight_decay=weight_decay
  )


@register('lion', by_layer=True)
def lion(
  schedule: optax.Schedule, adam_beta1: float, adam_beta2: float, weight_decay: float
) -> optax.GradientTransformation:
  """Returns optax's Lion (https://arxiv.org/abs/2302.06675)."""
  return optax.lion(schedule, adam_beta1, adam_beta2, weight_decay=weight_decay)


@register('sgd', by_layer=True)
def sgd(
  schedule: optax.Schedule, adam_beta1: float, weight_decay: float
) -> optax.GradientTransformation:
  """Returns gradient descent with the momentum `adam_beta1`, and decoupled weight decay."""
  return optax.chain(
    optax.trace(adam_beta1),
    optax.add_decayed_weights(weight_decay),
    optax.scale_by_learning_rate(schedule),
  )


@register('adafactor')
def adafactor(schedule: optax.Schedule, weight_decay: float) -> optax.GradientTransformation:
  """Returns optax's Adafactor (https://arxiv.org/abs/1804.04235) without momentum.

  The decay is multiplied by the learning rate, as that of all others here. In optax it is not.
  """
  return optax.chain(
    optax.adafactor(None),  # its updates are negative
    optax.add_decayed_weights(-weight_decay),
    optax.scale_by_learning_rate(schedule, flip_sign=False),
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
    rate, b1=adam_beta1, b2=adam_beta2, eps=adam_epsilon, weight_decay=weight_decay
  )
