"""Quantized weights in the config of a task, as FROZEN_DTYPE says."""

import fiddle as fdl
from fiddle import selectors

from paxlite.experiments.parts.memory_savings import MemorySavings
from paxlite.layers.projection import Projection
from paxlite.quantization.four_bits import Int4, Nf4
from paxlite.quantization.quantized_projection import QUANTIZED
from paxlite.quantization.schemes import Int8, QuantizationScheme, register_scheme, scheme_named

for _name, _scheme in {'int8': Int8, 'int4': Int4, 'nf4': Nf4}.items():
  register_scheme(_name)(_scheme)


def quantize(e: MemorySavings, task: fdl.Config) -> None:
  """Edits the config of a task so that FROZEN_DTYPE, which is no dtype, quantizes its weights."""
  scheme = scheme_named(e.FROZEN_DTYPE)
  assert scheme is not None
  task.frozen_dtype = scheme.rest
  for model in _frozen_models(task):
    put_scheme(model, scheme)


def _frozen_models(task: fdl.Config) -> list[fdl.Config]:
  """Returns the models that have frozen variables, or should have."""
  reference = getattr(task.reference, 'model', None)  # one that is stored has no model
  references = [] if reference is None else [reference]
  trains_all = '.*' in task.optimizer.trainable
  return references if references and trains_all else [task.model, *references]


def put_scheme(model: fdl.Config, scheme: type[QuantizationScheme]) -> None:
  """Quantizes the weights of all projections of a model, in place of another scheme.

  Experts, embeddings and logits keep the dtype of their weights, as do subclasses of a user's.
  """
  for projection in selectors.select(model, Projection, check_nonempty=False):
    kind = fdl.get_callable(projection)
    if kind in QUANTIZED:
      fdl.update_callable(projection, QUANTIZED[kind])
    if kind in QUANTIZED or kind in QUANTIZED.values():
      projection.scheme = fdl.Config(scheme)
