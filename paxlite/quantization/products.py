"""Products in FP8 or int8 in the config of a task, as USE_FP8 and USE_INT8 say."""

import fiddle as fdl
import jax
import jax.numpy as jnp
from fiddle import selectors
from flax import linen as nn

from paxlite.config.templates import template
from paxlite.core import shell
from paxlite.core.errors import UserError
from paxlite.experiments.language_model import LanguageModel
from paxlite.layers.precision.einsum import Einsum, with_bias
from paxlite.quantization.fp8_matmul import Fp8Einsum, begin_step

# The largest absolute value becomes 127. By qwix itself it becomes 127.5, so that the last bit of a
# weight would decide between −127 and −128.
_TO_127 = f'absmax,{127.5 / 127}'
_INSTALL_QWIX = f'USE_INT8 needs qwix: {shell.install("int8")}'


def in_fp8(e: LanguageModel, task: fdl.Config) -> None:
  """Edits the config of a task in plain XLA so that its products are in FP8."""
  for einsum in selectors.select(task.model, Einsum, check_nonempty=False):
    fdl.update_callable(einsum, Fp8Einsum)
  task.begin_step = template(begin_step)


def in_int8(e: LanguageModel, task: fdl.Config) -> None:
  """Edits the config of a task in plain XLA so that its products are in int8."""
  plain = selectors.select(task.model, Einsum, match_subclasses=False, check_nonempty=False)
  for einsum in plain:
    fdl.update_callable(einsum, JnpEinsum)
  backward = e.USE_INT8 == 'forward_backward'
  task.model = fdl.Config(int8_model, model=task.model, backward=backward)


class JnpEinsum(Einsum):
  """The same product by jnp.einsum, which qwix replaces by its own function."""

  @nn.compact
  def __call__(self, x: jax.Array, w: jax.Array, b: jax.Array | None = None) -> jax.Array:
    return with_bias(jnp.einsum(self.equation, x, w), b)


def int8_model(model: nn.Module, backward: bool) -> nn.Module:
  """Returns `model` with int8 × int8 → int32 in the products with the weights of its blocks.

  At every step, activations are scaled by the largest absolute value of each token, and weights by
  that of each output channel. For the gradient of a weight, the largest absolute value of each
  channel is taken over the whole batch. Parameters and checkpoints do not change. Raises UserError
  if qwix is not installed.

  Args:
    model: The model; its methods `hidden` and `predicted` must apply all of its blocks.
    backward: Whether both products of the backward pass are in int8 too.
  """
  try:
    import qwix
  except ImportError:
    raise UserError(_INSTALL_QWIX) from None
  rule = qwix.QtRule(
    module_path=r'.*/einsum(_in|_out)?', weight_qtype='int8', act_qtype='int8',
    bwd_qtype='int8' if backward else None, weight_calibration_method=_TO_127,
    act_calibration_method=_TO_127, bwd_calibration_method=_TO_127,
  )  # fmt: skip
  return qwix.quantize_model(model, qwix.QtProvider([rule]), methods=['hidden', 'predicted'])
