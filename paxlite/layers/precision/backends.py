"""The backends of a model's matrix multiplications: plain XLA, FP8, Transformer Engine, or int8.

A backend is chosen once, when an experiment is built (experiments.parts.backend). It reaches the
model as templates, so that layers do not depend on it. Optional packages are imported where they
are used.
"""

import contextlib
import dataclasses
import os
import types
from collections.abc import Iterator, Mapping
from typing import Literal

from flax import linen as nn

from paxlite.core import shell
from paxlite.core.errors import UserError
from paxlite.parallel.partitioning import active_mesh

BackendName = Literal['xla', 'xla_fp8', 'te', 'te_fp8', 'int8']
TeRecipe = Literal['bf16', 'DelayedScaling', 'Float8CurrentScaling', 'MXFP8']

_INSTALL_TE = (
  'Transformer Engine is not installed, or not for this JAX and Python ({}): docs/backends.md says '
  'how. Without it: USE_TE=off, and ENABLE_TE unset'
)
# The largest absolute value becomes 127. By qwix itself it becomes 127.5, so that the last bit of a
# weight would decide between −127 and −128.
_TO_127 = f'absmax,{127.5 / 127}'
_INSTALL_QWIX = f'USE_INT8 needs qwix: {shell.install("int8")}'


@dataclasses.dataclass(frozen=True)
class Backend:
  """A backend, and why it was chosen.

  Attributes:
    name: The name of the backend.
    reason: The attributes or environment variables that chose it, for messages.
  """

  name: BackendName
  reason: str

  def __str__(self) -> str:
    return f'{self.name} ({self.reason})'


def environment_flag(name: str) -> bool:
  """Returns whether an environment variable is on; Pax's scripts set ENABLE_TE to 1 or 0, or not.

  Raises:
    UserError: It has another value.
  """
  text = os.environ.get(name, '')
  values = {'': False, '0': False, 'false': False, '1': True, 'true': True}
  if text.lower() not in values:
    raise UserError(f'the environment has {name}={text}: it must be 1 or 0')
  return values[text.lower()]


def fused_attention() -> bool:
  """Returns whether Transformer Engine may use cuDNN's attention.

  The environment variable NVTE_FUSED_ATTN decides it. Transformer Engine reads it too.

  Raises:
    UserError: NVTE_FUSED_ATTN is neither 0 nor 1.
  """
  text = os.environ.get('NVTE_FUSED_ATTN', '1')
  if text not in ('0', '1'):
    raise UserError(f'the environment has NVTE_FUSED_ATTN={text}: it must be 1 or 0')
  return text == '1'


def te_dot_general(recipe: TeRecipe, name: str | None = None) -> nn.Module:
  """Returns dot_general by Transformer Engine's GEMMs; the parameters remain in the model."""
  te = transformer_engine()
  return te.flax.make_dot_general_cls(te_recipe(recipe))(name=name)


def int8_model(model: nn.Module, backward: bool) -> nn.Module:
  """Returns `model` with int8 × int8 → int32 in the products with the weights of its blocks.

  At every step, activations are scaled by the largest absolute value of each token, and weights by
  that of each output channel. For the gradient of a weight, the largest absolute value of each
  channel is taken over the whole batch. Parameters and checkpoints do not change.

  Args:
    model: The model; its methods `hidden` and `predicted` must apply all of its blocks.
    backward: Whether both products of the backward pass are in int8 too.

  Raises:
    UserError: qwix is not installed.
  """
  try:
    import qwix
  except ImportError:
    raise UserError(_INSTALL_QWIX) from None
  rule = qwix.QtRule(
    module_path=r'.*/einsum(_in|_out)?',
    weight_qtype='int8',
    act_qtype='int8',
    bwd_qtype='int8' if backward else None,
    weight_calibration_method=_TO_127,
    act_calibration_method=_TO_127,
    bwd_calibration_method=_TO_127,
  )
  return qwix.quantize_model(model, qwix.QtProvider([rule]), methods=['hidden', 'predicted'])


@contextlib.contextmanager
def te_context(recipe: TeRecipe) -> Iterator[None]:
  """A context in which Transformer Engine knows the recipe and the purposes of the mesh axes.

  Raises:
    UserError: The device does not support the recipe.
  """
  te = transformer_engine()
  active = active_mesh()
  resources: dict[str, str] = {}
  with contextlib.ExitStack() as stack:
    if active is not None and active[0].size > 1:
      mesh, rules = active
      resources = mesh_resources(mesh.shape)
      stack.enter_context(mesh)
      # Transformer Engine's own table would split the batch over only one of our mesh axes, and
      # arrays with our logical axes not at all.
      stack.enter_context(nn.logical_axis_rules(tuple(rules.items())))
    found = te_recipe(recipe)
    try:
      stack.enter_context(
        te.autocast(
          enabled=found is not None, recipe=found, mesh_resource=te.MeshResource(**resources)
        )
      )
    except AssertionError as e:
      raise UserError(f'TE_RECIPE={recipe}: {e}') from None
    yield


def mesh_resources(sizes: Mapping[str, int]) -> dict[str, str]:
  """Returns the arguments of Transformer Engine's MeshResource for the mesh axes larger than 1."""
  axes = dict(dp_resource='replica', fsdp_resource='data', tp_resource='mdl', cp_resource='context')
  return {name: axis for name, axis in axes.items() if sizes.get(axis, 1) > 1}


def te_recipe(name: TeRecipe) -> object:
  """Returns Transformer Engine's recipe of this name, or None for bf16."""
  if name == 'bf16':
    return None
  from transformer_engine.common import recipe

  classes = {
    'DelayedScaling': recipe.DelayedScaling,
    'Float8CurrentScaling': recipe.Float8CurrentScaling,
    'MXFP8': recipe.MXFP8BlockScaling,
  }
  return classes[name]()


def transformer_engine() -> types.ModuleType:
  """Returns the module transformer_engine.jax.

  Raises:
    UserError: It cannot be imported.
  """
  try:
    import transformer_engine.jax as te
    import transformer_engine.jax.flax  # noqa: F401
  except Exception as e:  # a library that cannot be loaded may raise any error
    raise UserError(_INSTALL_TE.format(f'{type(e).__name__}: {e}'.splitlines()[0])) from None
  return te
