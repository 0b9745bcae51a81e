"""Matrix multiplications by Transformer Engine, in bfloat16, FP8 or NVFP4."""

import contextlib
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from flax import linen as nn
from flax.core.scope import LazyRng

from paxlite.core.errors import UserError
from paxlite.layers.precision.backends import TeRecipe
from paxlite.parallel.partitioning import active_mesh

_INSTALL_TE = (
  'Transformer Engine is not installed, or not for this JAX and Python ({}): docs/backends.md says '
  'how. Without it: USE_TE=off, and ENABLE_TE unset'
)


def te_dot_general(recipe: TeRecipe, name: str | None = None) -> nn.Module:
  """Returns dot_general by Transformer Engine's GEMMs; the parameters remain in the model."""
  te = transformer_engine()
  return te.flax.make_dot_general_cls(te_recipe(recipe))(name=name)


@contextlib.contextmanager
def te_context(recipe: TeRecipe) -> Iterator[None]:
  """A context in which Transformer Engine knows the recipe and the purposes of the mesh axes.

  Raises UserError if the device does not support the recipe.
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
    if recipe in ('MXFP8', 'NVFP4'):
      stack.enter_context(nn.intercept_methods(_quantizers))
    yield


def _quantizers(
  call: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext
) -> Any:
  """Calls a method of a module; makes Transformer Engine's quantizers for blocks work in paxlite.

  A model is initialized with one token, which is less than a block: then nothing is quantized.
  NVFP4 rounds gradients stochastically by the stream of keys 'sr_rng'. It is that of dropout, which
  differs by step, microbatch and layer; without one there is no gradient, and any key will do.
  """
  if context.method_name == 'generate_quantizer_set':
    from transformer_engine.jax.quantize import noop_quantizer_set

    if context.module.is_initializing():
      return noop_quantizer_set
    scope = context.module.scope
    assert scope is not None
    scope.rngs.setdefault('sr_rng', scope.rngs.get('dropout') or LazyRng.create(jax.random.key(0)))
    scope.rng_counters.setdefault('sr_rng', 0)
  return call(*args, **kwargs)


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
    'NVFP4': recipe.NVFP4BlockScaling,
  }
  return classes[name]()


def transformer_engine() -> types.ModuleType:
  """Returns the module transformer_engine.jax; raises UserError if it cannot be imported."""
  try:
    import transformer_engine.jax as te
    import transformer_engine.jax.flax  # noqa: F401
  except Exception as e:  # a library that cannot be loaded may raise any error
    raise UserError(_INSTALL_TE.format(f'{type(e).__name__}: {e}'.splitlines()[0])) from None
  return te
