"""Scales hyperparameters from one model size to another.

The rules are those of muP for the width (https://arxiv.org/abs/2203.03466, table 8) and of
CompleteP for the depth (https://arxiv.org/abs/2505.01618, table 1, α = 1). Muon's updates follow
the spectral condition (https://arxiv.org/abs/2310.17813). They are values of attributes: no layer
and no optimizer knows of them.

With m times the width and d times the depth of the model for which the values hold:

| what | changes by the factor |
|---|---|
| initial values of weights, INIT_STD and OUTPUT_INIT_STD | 1 / √m |
| embeddings, their initial values and those of the output head | 1 |
| logits | 1 / m |
| what attention and feed-forward layers add to the activations | 1 / d |
| learning rate of weights whose inputs grow, by Adam, AdamW, Lion and SOAP | 1 / m |
| the same by Muon, whose updates have one RMS | 1 / √m |
| the same by Muon with Keller Jordan's scale | 1 |
| learning rate of embeddings, the output head, norms and biases | 1 |
| weight decay, beside the learning rate | its inverse |
| Adam's ε | 1 / m, and 1 / m² under the root |
"""

import math
import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import fiddle as fdl
import jax
from flax import linen as nn

from paxlite.core.errors import UserError
from paxlite.core.trees import PyTree
from paxlite.core.variable_names import path_name
from paxlite.experiments import options
from paxlite.experiments.language_model import LanguageModel
from paxlite.ladder import sizes
from paxlite.ladder.sizes import Parameters, Size
from paxlite.optim import muon, variable_groups
from paxlite.parallel import quantized_weights
from paxlite.parallel.weight_dims import WeightDims, dims_of

_BY_ENTRY = {'adam', 'adamw', 'lion', 'soap'}  # whose updates have one size for every number
_BY_MATRIX = {'muon', 'normuon'}


def check(experiment: LanguageModel) -> None:
  """Raises UserError if the rules do not cover an experiment's variables or optimizer."""
  name = type(experiment).__name__
  if experiment.OPTIMIZER not in _BY_ENTRY | _BY_MATRIX:
    raise UserError(
      f'OPTIMIZER={experiment.OPTIMIZER}: its learning rate at other widths is unknown: choose '
      f'one of {", ".join(sorted(_BY_ENTRY | _BY_MATRIX))}'
    )
  if experiment.USE_LORA or not experiment.trains_all or experiment.CHECKPOINT_RESTORE_PATH:
    raise UserError(f'{name} starts from weights; a ladder predicts training from the beginning')
  if experiment.WEIGHT_INIT != 'normal':
    raise UserError(
      f'WEIGHT_INIT={experiment.WEIGHT_INIT} does not scale with the width as a ladder needs: set '
      'WEIGHT_INIT=normal and INIT_STD'
    )
  if not experiment.USE_ROTARY_POSITION_EMB and experiment.TRAINABLE_POSITION_EMB:
    raise UserError(
      f'{name} learns position embeddings, which would start with INIT_STD: set '
      'USE_ROTARY_POSITION_EMB=True'
    )


def base_of(experiment: LanguageModel, of_sizes: Iterable[Size]) -> Size:
  """Returns the default base size, for which an experiment's values were chosen.

  Its width is the experiment's. A RESIDUAL_FACTOR of 1 is for the least deep model of its kind, so
  that deeper ones have less. Any other is for the experiment's own depth. If all sizes have one
  depth, it does not matter.

  Args:
    of_sizes: All sizes of a ladder.
  """
  own, depths = Size.of(experiment), {size.layers for size in of_sizes}
  if len(depths) == 1:
    return Size(own.width, *depths)
  is_for_own = options.value(experiment, 'RESIDUAL_FACTOR') != 1
  return own if is_for_own else Size(own.width, sizes.fewest_layers(experiment))


def check_depths(experiment: LanguageModel, of_sizes: Iterable[Size]) -> None:
  """Raises UserError if sizes have several depths, and the blocks have no RESIDUAL_FACTOR."""
  own, depths = Size.of(experiment), {size.layers for size in of_sizes}
  if len(depths) > 1 and not experiment.has_plain_blocks:
    policy, order = experiment.NORM_POLICY, options.value(experiment, 'BLOCK_ORDER')
    raise UserError(
      f'blocks with NORM_POLICY={policy} and BLOCK_ORDER={order} '
      'have no RESIDUAL_FACTOR, which follows the depth: state --rungs that are as deep as the '
      f'model, such as {sizes.step_of_widths(experiment)}x{own.layers}'
    )


def values_of(experiment: LanguageModel, size: Size, base: Size) -> dict[str, object]:
  """Returns the values of all scaled attributes at another size.

  Raises UserError if the experiment has no such size.

  Args:
    size: The size that it gets.
    base: The size at which the values of the experiment hold as they are.
  """
  shape = sizes.values_of(experiment, size)
  m, d = size.width / base.width, size.layers / base.layers
  found: dict[str, object] = dict(shape)
  if m != 1:
    found |= _of_width(experiment, m)
    at = lambda width: experiment.replaced(**sizes.values_of(experiment, Size(width, size.layers)))
    found |= _of_variables(experiment, variables(at(size.width)), variables(at(base.width)))
  if d != 1:
    found['RESIDUAL_FACTOR'] = options.value(experiment, 'RESIDUAL_FACTOR') / d
  return {name: float(f'{x:.6g}') if isinstance(x, float) else x for name, x in found.items()}


def _of_width(experiment: LanguageModel, m: float) -> dict[str, object]:
  found: dict[str, object] = dict(
    SOFTMAX_INIT_STD=experiment.SOFTMAX_INIT_STD,
    LOGITS_DIVISOR=options.value(experiment, 'LOGITS_DIVISOR') * m,
    ADAM_EPSILON=experiment.ADAM_EPSILON / m,
    ADAM_EPSILON_ROOT=experiment.ADAM_EPSILON_ROOT / m**2,
    INIT_STD=experiment.INIT_STD / math.sqrt(m),
    OUTPUT_INIT_STD=experiment.OUTPUT_INIT_STD / math.sqrt(m),
  )
  if options.value(experiment, 'SCALE_EMBEDDING'):  # by √MODEL_DIMS, which must not grow
    found['EMBEDDING_FACTOR'] = options.value(experiment, 'EMBEDDING_FACTOR') / math.sqrt(m)
  return found


def variables(experiment: LanguageModel) -> dict[str, tuple[tuple[int, ...], WeightDims]]:
  """Returns the shape of each parameter, and what its dimensions are, by its name."""
  return _variables(_parameters(experiment))


def _variables(boxed: PyTree) -> dict[str, tuple[tuple[int, ...], WeightDims]]:
  is_box = lambda x: isinstance(x, nn.LogicallyPartitioned)
  leaves = jax.tree_util.tree_leaves_with_path(boxed, is_leaf=is_box)
  return {path_name(path): (x.value.shape, dims_of(x)) for path, x in leaves if is_box(x)}


def counted(experiment: LanguageModel) -> Parameters:
  """Returns the numbers of parameters of an experiment's model."""
  boxed = _parameters(experiment)
  tables = [math.prod(shape) for shape, dims in _variables(boxed).values() if dims.is_table]
  every = quantized_weights.num_parameters(boxed)
  return Parameters(every, every - sum(tables))


def _parameters(experiment: LanguageModel) -> PyTree:
  task = fdl.build(experiment.plain.build_task())
  return jax.eval_shape(task.init_params, jax.random.key(0))


def _of_variables(
  experiment: LanguageModel,
  at_size: Mapping[str, tuple[tuple[int, ...], WeightDims]],
  at_base: Mapping[str, tuple[tuple[int, ...], WeightDims]],
) -> dict[str, object]:
  """Returns the factors of learning rates and of weight decays."""
  stated = {
    name: variable_groups.parsed(getattr(experiment, name), name)
    for name in ('LEARNING_RATE_FACTORS', 'WEIGHT_DECAY_FACTORS')
  }
  rates: dict[str, float] = {}
  decays: dict[str, float] = {}
  for name, (shape, dims) in at_size.items():
    factor = _rate_factor(experiment, shape, at_base[name][0], dims)
    rates[name] = factor * variable_groups.factor_of(stated['LEARNING_RATE_FACTORS'], name)
    decays[name] = variable_groups.factor_of(stated['WEIGHT_DECAY_FACTORS'], name) / factor
  found: dict[str, object] = {'LEARNING_RATE_FACTORS': _patterns(rates)}
  if experiment.WEIGHT_DECAY:
    found['WEIGHT_DECAY_FACTORS'] = _patterns(decays)
  return found


def _rate_factor(
  experiment: LanguageModel, shape: tuple[int, ...], base: tuple[int, ...], dims: WeightDims
) -> float:
  """Returns the factor of the learning rate of a variable."""
  if dims.is_table or not dims.inputs:
    return 1.0
  if experiment.OPTIMIZER in _BY_MATRIX and dims.is_matrix:
    values: Mapping[str, Any] = experiment.values()
    if values['MUON_SPLIT_HEADS']:
      dims = muon.by_heads(dims)
    wanted = lambda s: math.sqrt(_product(s, dims.outputs) / _product(s, dims.inputs))
    made = lambda s: muon.spectral_norm(s, dims, values['MUON_UPDATE_RMS'])
    return wanted(shape) / made(shape) * made(base) / wanted(base)
  return _product(base, dims.inputs) / _product(shape, dims.inputs)


def _product(shape: tuple[int, ...], dims: tuple[int, ...]) -> int:
  return math.prod(shape[i] for i in dims)


def _patterns(factors: Mapping[str, float]) -> list[str]:
  """Returns 'PATTERN=FACTOR' for all variables whose factor is not 1.

  Variables with one factor have one pattern, if there is one that matches no other variable.
  """
  groups: dict[str, list[str]] = {}
  for name, factor in factors.items():
    if factor != 1:
      groups.setdefault(f'{factor:.6g}', []).append(name)
  return [
    f'{pattern}={factor}'
    for factor, names in groups.items()
    for pattern in _matching(names, [name for name in factors if name not in names])
  ]


def _matching(names: Sequence[str], others: Sequence[str]) -> list[str]:
  """Returns regular expressions that match all of some names and none of the others."""
  reverse = lambda name: '/'.join(reversed(name.split('/')))
  begin = posixpath.commonpath(names)
  end = reverse(posixpath.commonpath([reverse(name) for name in names]))
  if begin and end and len(names) > 1:
    pattern = f'{re.escape(begin)}/.*/{re.escape(end)}'
    is_right = lambda name: re.fullmatch(pattern, name) is not None
    if all(map(is_right, names)) and not any(map(is_right, others)):
      return [pattern]
  numbered = lambda name: re.sub(r'_\d+(?=/)', r'_\\d+', re.escape(name))
  free = {numbered(name) for name in others}
  return sorted({re.escape(n) if numbered(n) in free else numbered(n) for n in names})
