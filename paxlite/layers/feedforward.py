"""Feed-forward layers with F hidden units, [B, T, D] to [B, T, D]."""

from collections.abc import Callable

import jax
from flax import linen as nn

from paxlite.config.templates import Template, template_field
from paxlite.layers.activations import ACTIVATIONS, gate_by
from paxlite.layers.projection import Projection
from paxlite.layers.remat import recomputed
from paxlite.parallel.partitioning import shard


class FeedForward(nn.Module):
  """w2·activation(w1·x + b1) + b2; the output of padded positions is 0, as in Pax."""

  model_dims: int  # D
  hidden_dims: int  # F
  activation: str = 'gelu'  # a key of ACTIVATIONS; 'gelu' is the tanh approximation
  projection_tpl: Template = template_field(Projection)  # template of the products with the weights
  output_tpl: Template | None = None  # template of the product with w2; None means projection_tpl
  dropout: float = 0.0  # dropout rate of the hidden units

  @nn.compact
  def __call__(self, x_BTD: jax.Array, paddings_BT: jax.Array | None = None) -> jax.Array:
    hidden_BTF = self.hidden(x_BTD)
    hidden_BTF = zero_padding(shard(hidden_BTF, 'batch', 'length', 'act_mlp'), paddings_BT)
    hidden_BTF = nn.Dropout(self.dropout, deterministic=not self.has_rng('dropout'))(hidden_BTF)
    y_BTD = self.down(hidden_BTF)
    y_BTD = shard(y_BTD, 'batch', 'residual_length', 'act_embed')
    return zero_padding(y_BTD, paddings_BT)

  def hidden(self, x_BTD: jax.Array) -> jax.Array:
    return recomputed(self.activate)(*(self.up(x_BTD, name) for name in self.up_names))

  @property
  def up_names(self) -> tuple[str, ...]:
    """The names of the projections that make the arguments of `activate`."""
    return ('ffn_layer1',)

  @property
  def activate(self) -> Callable[..., jax.Array]:
    """The function that makes the hidden units."""
    return ACTIVATIONS[self.activation]

  def up(self, x_BTD: jax.Array, name: str) -> jax.Array:
    """Returns a projection to F."""
    return self.projection_tpl(
      equation='BTD,DF->BTF', shape=(self.model_dims, self.hidden_dims), axes=('embed', 'mlp'),
      name=name,
    )(x_BTD)  # fmt: skip

  def down(self, hidden_BTF: jax.Array) -> jax.Array:
    """Returns the projection to D."""
    return (self.output_tpl or self.projection_tpl)(
      equation='BTF,FD->BTD', shape=(self.hidden_dims, self.model_dims), axes=('mlp', 'embed'),
      name='ffn_layer2',
    )(hidden_BTF)  # fmt: skip


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
