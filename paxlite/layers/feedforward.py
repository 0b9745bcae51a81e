"""Feed-forward layers with F hidden units, [B, T, D] to [B, T, D]."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from paxlite.core.templates import Template, template_field
from paxlite.layers.projection import Projection
from paxlite.layers.remat import recomputed
from paxlite.parallel.partitioning import active_platform, shard


def gelu(x: jax.Array) -> jax.Array:
  """GELU by the approximation x/2 · (1 + tanh(u)) with u = √(2/π) · (x + 0.044715 x³).

  On GPUs it is computed as x · sigmoid(2u), which is the same. XLA writes a tanh to memory if the
  backward pass uses it too, and computes a sigmoid again.
  """
  if active_platform() not in ('gpu', 'cuda'):
    return jax.nn.gelu(x, approximate=True)
  return x * jax.nn.sigmoid(2 * math.sqrt(2 / math.pi) * (x * (1 + 0.044715 * x * x)))


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
  'gelu': gelu,
  'gelu_exact': functools.partial(jax.nn.gelu, approximate=False),
  'relu': jax.nn.relu,
  'silu': jax.nn.silu,
}


def _clamped_swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
  """gpt-oss' gate · sigmoid(1.702 · gate) · (up + 1), with both arguments limited to 7."""
  gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
  return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)


def gate_by(activation: str) -> Callable[[jax.Array, jax.Array], jax.Array]:
  """Returns the function (gate, up) → activation(gate) · up, or another one of that name."""
  if activation == 'clamped_swiglu':
    return _clamped_swiglu
  return lambda gate, up: ACTIVATIONS[activation](gate) * up


class FeedForward(nn.Module):
  """w2·activation(w1·x + b1) + b2; the output of padded positions is 0, as in Pax.

  Attributes:
    model_dims: D.
    hidden_dims: F.
    activation: A key of ACTIVATIONS; 'gelu' is the tanh approximation.
    projection_tpl: Template of both matrix multiplications.
    dropout: Dropout rate of the hidden units.
  """

  model_dims: int
  hidden_dims: int
  activation: str = 'gelu'
  projection_tpl: Template = template_field(Projection)
  dropout: float = 0.0

  @nn.compact
  def __call__(self, x_BTD: jax.Array, paddings_BT: jax.Array | None = None) -> jax.Array:
    hidden_BTF = self.hidden(x_BTD)
    hidden_BTF = zero_padding(shard(hidden_BTF, 'batch', 'length', 'act_mlp'), paddings_BT)
    hidden_BTF = nn.Dropout(self.dropout, deterministic=not self.has_rng('dropout'))(hidden_BTF)
    y_BTD = self.down_tpl()(hidden_BTF)
    y_BTD = shard(y_BTD, 'batch', 'residual_length', 'act_embed')
    return zero_padding(y_BTD, paddings_BT)

  def hidden(self, x_BTD: jax.Array) -> jax.Array:
    return recomputed(self.activate)(*(self.up_tpl(name=name)(x_BTD) for name in self.up_names))

  @property
  def up_names(self) -> tuple[str, ...]:
    """The names of the projections that make the arguments of `activate`."""
    return ('ffn_layer1',)

  @property
  def activate(self) -> Callable[..., jax.Array]:
    """The function that makes the hidden units."""
    return ACTIVATIONS[self.activation]

  @property
  def up_tpl(self) -> Template:
    """The template of a projection from D to F."""
    shape = self.model_dims, self.hidden_dims
    return functools.partial(
      self.projection_tpl, equation='BTD,DF->BTF', shape=shape, axes=('embed', 'mlp')
    )

  @property
  def down_tpl(self) -> Template:
    """The template of the projection from F to D."""
    return functools.partial(
      self.projection_tpl,
      equation='BTF,FD->BTD',
      shape=(self.hidden_dims, self.model_dims),
      axes=('mlp', 'embed'),
      name='ffn_layer2',
    )


class GatedFeedForward(FeedForward):
  """w2·(activation(w_gate·x) ⊙ (w1·x)), https://arxiv.org/abs/2002.05202."""

  @property
  def up_names(self) -> tuple[str, ...]:
    return 'ffn_layer1_gate', 'ffn_layer1'

  @property
  def activate(self) -> Callable[..., jax.Array]:
    return gate_by(self.activation)


def zero_padding(x: jax.Array, paddings_BT: jax.Array | None) -> jax.Array:
  """Returns x [B, T, …], with 0 where `paddings_BT` is 1."""
  return x if paddings_BT is None else x * (1 - paddings_BT[..., None]).astype(x.dtype)
