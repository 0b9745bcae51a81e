"""The backends of a model's matrix multiplications: plain XLA, FP8, Transformer Engine, or int8.

A backend is chosen once, when an experiment is built (see experiments.backend), and reaches the
model as templates: no layer knows of it. What is optional is imported where it is used.
"""

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from flax import linen as nn
from flax.linen import fp8_ops

from paxlite.core import shell
from paxlite.core.errors import UserError
from paxlite.parallel.partitioning import active_mesh

BackendName = Literal['xla', 'xla_fp8', 'te', 'te_fp8', 'int8']
TeRecipe = Literal['bf16', 'DelayedScaling', 'Float8CurrentScaling', 'MXFP8']

_INSTALL_TE = (
  'Transformer Engine is not installed, or not for this JAX and Python ({}): docs/backends.md says '
  'how. Without it: --fdl.USE_TE=off, and ENABLE_TE unset'
)
_INSTALL_QWIX = f'USE_INT8 needs qwix: {shell.install("int8")}'


@dataclasses.dataclass(frozen=True)
class Backend:
  """Attributes:

  name: What it is.
  reason: What asked for it, in the words of who did.
  """

  name: BackendName
  reason: str

  def __str__(self) -> str:
    return f'{self.name} ({self.reason})'


def environment_flag(name: str) -> bool:
  """Whether an environment variable is on, as Pax's scripts set ENABLE_TE: 1, 0 or not at all.

  Raises:
    UserError: it is something else.
  """
  text = os.environ.get(name, '')
  values = {'': False, '0': False, 'false': False, '1': True, 'true': True}
  if text.lower() not in values:
    raise UserError(f'the environment has {name}={text}: it must be 1 or 0')
  return values[text.lower()]


def fused_attention() -> bool:
  """Whether Transformer Engine may take cuDNN's attention: NVTE_FUSED_ATTN, which it reads itself.

  Raises:
    UserError: it would not understand it.
  """
  text = os.environ.get('NVTE_FUSED_ATTN', '1')
  if text not in ('0', '1'):
    raise UserError(f'the environment has NVTE_FUSED_ATTN={text}: it must be 1 or 0')
  return text == '1'


def fp8_dot_general(name: str | None = None) -> nn.Module:
  """dot_general in FP8: e4m3 forward, e5m2 gradients, delayed scaling over 1024 steps.

  XLA turns it into cuBLASLt's FP8 matmuls on GPUs that have them, and computes it elsewhere too.
  """
  return fp8_ops.Fp8DirectDotGeneralOp(name=name)


def te_dot_general(recipe: TeRecipe, name: str | None = None) -> nn.Module:
  """dot_general by Transformer Engine's GEMMs; parameters stay the model's own."""
  te = transformer_engine()
  return te.flax.make_dot_general_cls(te_recipe(recipe))(name=name)


def int8_model(model: nn.Module, backward: bool) -> nn.Module:
  """`model` with int8 × int8 → int32 where it multiplies by the weights of its blocks.

  Values are scaled by the largest of each token's activations and each output channel of a weight,
  at every step; the gradient of a weight by the largest of each channel over the whole batch.
  Parameters stay as they are, and so do checkpoints.

  Args:
    model: Whose method `hidden` holds all of its blocks.
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
  )
  return qwix.quantize_model(model, qwix.QtProvider([rule]), methods=['hidden'])


@contextlib.contextmanager
def te_context(recipe: TeRecipe) -> Iterator[None]:
  """Tells Transformer Engine the recipe of its own layers, and what our mesh axes are for.

  Raises:
    UserError: the device cannot compute the recipe.
  """
  te = transformer_engine()
  active = active_mesh()
  resources: dict[str, str] = {}
  with contextlib.ExitStack() as stack:
    if active is not None and active[0].size > 1:
      mesh, rules = active
      resources = mesh_resources(mesh.shape)
      stack.enter_context(mesh)
      # its own table knows one axis of the batch, and those of ours it would leave whole
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
  """The arguments of Transformer Engine's MeshResource: what each mesh axis of several is for."""
  axes = dict(dp_resource='replica', fsdp_resource='data', tp_resource='mdl', cp_resource='context')
  return {name: axis for name, axis in axes.items() if sizes.get(axis, 1) > 1}


def te_recipe(name: TeRecipe) -> Any:
  """Transformer Engine's recipe of this name; None for bf16."""
  if name == 'bf16':
    return None
  from transformer_engine.common import recipe

  classes = {
    'DelayedScaling': recipe.DelayedScaling,
    'Float8CurrentScaling': recipe.Float8CurrentScaling,
    'MXFP8': recipe.MXFP8BlockScaling,
  }
  return classes[name]()


def transformer_engine() -> Any:
  """The module transformer_engine.jax.

  Raises:
    UserError: it cannot be imported.
  """
  try:
    import transformer_engine.jax as te
    import transformer_engine.jax.flax  # noqa: F401
  except Exception as e:  # a library that does not load may raise any error
    raise UserError(_INSTALL_TE.format(f'{type(e).__name__}: {e}'.splitlines()[0])) from None
  return te
