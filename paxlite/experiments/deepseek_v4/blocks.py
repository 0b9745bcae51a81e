"""DeepSeek-V4's blocks: manifold-constrained hyper-connections.

See https://arxiv.org/abs/2512.24880, and https://arxiv.org/abs/2409.19606 for hyper-connections
without the constraint. A layer reads a weighted sum of the N streams [B, T, N, D]. What it returns
is added to each stream with a weight, and the streams are mixed by a matrix [N, N] of each token,
whose rows and columns sum to 1.

Experts have limited arguments of their activation. In the first blocks, a table of token ids
chooses them, as in https://arxiv.org/abs/2106.04426.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from paxlite.config.templates import Template, template_field
from paxlite.core.training_rules import never_trained
from paxlite.layers.activations import gate_by
from paxlite.layers.attention.attention import Attention
from paxlite.layers.feedforward import FeedForward, GatedFeedForward
from paxlite.layers.language_model import TransformerLm
from paxlite.layers.moe.group_router import GroupRouter
from paxlite.layers.moe.moe import MoeFeedForward, Routing, TopKRouter
from paxlite.layers.norms import RmsNorm
from paxlite.layers.rotary import RotaryEmbedding
from paxlite.parallel.partitioning import param, shard

EXPERTS_OF_IDS = never_trained('fixed_experts')  # a table of the experts of token ids


class Connection(NamedTuple):
  """How one layer is connected to the streams, for each token."""

  read_BTD: jax.Array  # what the layer reads
  write_BTN: jax.Array  # the weight of what it returns, in each stream, in float32
  # how much of each stream, the first N, goes into each of the new ones, in float32
  mix_BTNN: jax.Array

  def joined(self, x_BTND: jax.Array, h_BTD: jax.Array) -> jax.Array:
    """Returns the new streams [B, T, N, D], from the old ones and what the layer returns."""
    mixed_BTND = jnp.einsum('BTNM,BTND->BTMD', self.mix_BTNN.astype(x_BTND.dtype), x_BTND)
    written_BTND = self.write_BTN.astype(x_BTND.dtype)[..., None] * h_BTD[:, :, None]
    return shard(written_BTND + mixed_BTND, 'batch', 'residual_length', None, 'act_embed')


class StreamWeights(nn.Module):
  """w·norm(x), [B, T, N, D] to [B, T, M] in float32, with the norm over all N · D elements."""

  num_weights: int  # M
  epsilon: float = 1e-6  # ε of the norm, which has no scale

  @nn.compact
  def __call__(self, x_BTND: jax.Array) -> jax.Array:
    shape, axes = [self.num_weights, *x_BTND.shape[2:]], [None, None, 'embed']
    equation = 'BTND,MND->BTM'
    w_MND = param(self, 'w', nn.initializers.normal(0.02), shape, axes, equation=equation)
    x_BTND = x_BTND.astype(jnp.float32)
    square_BT11 = jnp.square(x_BTND).mean((2, 3), keepdims=True)
    return jnp.einsum(equation, x_BTND * jax.lax.rsqrt(square_BT11 + self.epsilon), w_MND)


class HyperConnection(nn.Module):
  """Computes from the streams [B, T, N, D] how a layer is connected to them.

  w·norm(x) has three parts. Each is multiplied by a number of its own, and a bias is added. The
  weights of reading are sigmoids of the first part, and those of writing twice the sigmoids of the
  second. The mixing matrix is a softmax of the third, which is then normalized in turn along its
  columns and its rows (the iterations of Sinkhorn and Knopp).
  """

  iterations: int = 20  # how often the matrix is normalized along its columns
  floor: float = 1e-6  # what is added to weights and to sums, so that none is 0
  epsilon: float = 1e-6  # ε of the norm of the streams

  @nn.compact
  def __call__(self, x_BTND: jax.Array) -> Connection:
    N = x_BTND.shape[2]
    parts = [N, 2 * N]
    M = 2 * N + N * N
    weights_BTM = StreamWeights(M, self.epsilon, name='weights')(x_BTND)
    b_M = param(self, 'b', nn.initializers.zeros, [M], [None])
    scale_3 = param(self, 'scale', nn.initializers.ones, [3], [None])
    read_BTN, write_BTN, mix_BTX = (
      w * scale + b
      for w, scale, b in zip(
        jnp.split(weights_BTM, parts, axis=-1), scale_3, jnp.split(b_M, parts), strict=True
      )
    )
    read_BTN = jax.nn.sigmoid(read_BTN) + self.floor
    mix_BTNN = jax.nn.softmax(mix_BTX.reshape(*mix_BTX.shape[:2], N, N), axis=-1) + self.floor
    return Connection(
      weighted_sum(read_BTN, x_BTND),
      2 * jax.nn.sigmoid(write_BTN),
      balanced(mix_BTNN, self.iterations, self.floor),
    )


class MergedStreams(nn.Module):
  """A weighted sum of the streams, [B, T, N, D] to [B, T, D]: the last block of such a stack.

  The weights are sigmoid(s · w·norm(x) + b), [B, T, N].
  """

  floor: float = 1e-6  # what is added to the weights
  epsilon: float = 1e-6  # ε of the norm of the streams

  @nn.compact
  def __call__(
    self,
    x_BTND: jax.Array,
    positions_BT: jax.Array,
    segment_ids_BT: jax.Array | None,
    *inputs: jax.Array,
  ) -> jax.Array:
    del positions_BT, segment_ids_BT, inputs
    N = x_BTND.shape[2]
    weights_BTN = StreamWeights(N, self.epsilon, name='weights')(x_BTND)
    b_N = param(self, 'b', nn.initializers.zeros, [N], [None])
    scale_1 = param(self, 'scale', nn.initializers.ones, [1], [None])
    read_BTN = jax.nn.sigmoid(weights_BTN * scale_1 + b_N) + self.floor
    return shard(weighted_sum(read_BTN, x_BTND), 'batch', 'residual_length', 'act_embed')


class EqualStreams(nn.Module):
  """N streams that are the same, [B, T, D] to [B, T, N, D]: the first block of such a stack."""

  num_streams: int  # N

  @nn.compact
  def __call__(
    self,
    x_BTD: jax.Array,
    positions_BT: jax.Array,
    segment_ids_BT: jax.Array | None,
    *inputs: jax.Array,
  ) -> jax.Array:
    del positions_BT, segment_ids_BT, inputs
    B, T, D = x_BTD.shape
    x_BTND = jnp.broadcast_to(x_BTD[:, :, None], (B, T, self.num_streams, D))
    return shard(x_BTND, 'batch', 'residual_length', None, 'act_embed')


def weighted_sum(weights_BTN: jax.Array, x_BTND: jax.Array) -> jax.Array:
  """Returns the weighted sum of the streams, computed in float32, in their dtype, [B, T, D]."""
  return (weights_BTN[..., None] * x_BTND).sum(2).astype(x_BTND.dtype)


def balanced(mix_BTNN: jax.Array, iterations: int, floor: float) -> jax.Array:
  """Returns positive matrices whose columns sum to 1, and nearly their rows, [..., N, N].

  Args:
    mix_BTNN: Positive matrices.
    iterations: How often they are normalized along their columns; before each time but the first,
      along their rows.
    floor: What is added to the sums.
  """
  columns = lambda x: x / (x.sum(-2, keepdims=True) + floor)
  rows = lambda x: x / (x.sum(-1, keepdims=True) + floor)
  step = lambda x, _: (columns(rows(x)), None)
  return jax.lax.scan(step, columns(mix_BTNN), None, length=iterations - 1)[0]


class HyperBlock(nn.Module):
  """Attention and a feed-forward layer, each with a connection, [B, T, N, D] to [B, T, N, D]."""

  norm_tpl: Template = template_field(RmsNorm)  # template of the norms of what both layers read
  # template of their connections to the streams
  connection_tpl: Template = template_field(HyperConnection)
  # attention, which is called with (x, positions, segment_ids)
  attention_tpl: Template = template_field(Attention)
  # feed-forward layer, which is called with (x, paddings)
  ffn_tpl: Template = template_field(FeedForward)
  dropout: float = 0.0  # dropout rate of the output of both layers

  @nn.compact
  def __call__(
    self,
    x_BTND: jax.Array,
    positions_BT: jax.Array,
    segment_ids_BT: jax.Array | None,
    *inputs: jax.Array,
  ) -> jax.Array:
    dropout = nn.Dropout(self.dropout, deterministic=not self.has_rng('dropout'))
    paddings_BT = None if segment_ids_BT is None else segment_ids_BT == 0
    connection = self.connection_tpl(name='connection')(x_BTND)
    h_BTD = self.norm_tpl(name='layer_norm')(connection.read_BTD)
    h_BTD = self.attention_tpl(name='self_attention')(h_BTD, positions_BT, segment_ids_BT)
    x_BTND = checkpoint_name(connection.joined(x_BTND, dropout(h_BTD)), 'residual')
    connection = self.connection_tpl(name='ff_connection')(x_BTND)
    h_BTD = self.norm_tpl(name='ff_layer_norm')(connection.read_BTD)
    h_BTD = self.fed_forward(h_BTD, paddings_BT, *inputs)
    return checkpoint_name(connection.joined(x_BTND, dropout(h_BTD)), 'transformer_layer_out')

  def fed_forward(
    self, h_BTD: jax.Array, paddings_BT: jax.Array | None, *inputs: jax.Array
  ) -> jax.Array:
    """Returns what the feed-forward layer makes of its input, [B, T, D]."""
    del inputs
    out_BTD: jax.Array = self.ffn_tpl(name='ff_layer')(h_BTD, paddings_BT)
    return out_BTD


class TokenHyperBlock(HyperBlock):
  """A HyperBlock whose feed-forward layer is called with (x, paddings, token ids)."""

  def fed_forward(
    self, h_BTD: jax.Array, paddings_BT: jax.Array | None, *inputs: jax.Array
  ) -> jax.Array:
    out_BTD: jax.Array = self.ffn_tpl(name='ff_layer')(h_BTD, paddings_BT, *inputs)
    return out_BTD


def root_softplus(logits: jax.Array) -> jax.Array:
  """Returns √softplus(x)."""
  return jnp.sqrt(jax.nn.softplus(logits))


class RootSoftplusRouter(GroupRouter):
  """A GroupRouter whose scores are √softplus(x·gate)."""

  def scores(self, logits_JME: jax.Array) -> jax.Array:
    return root_softplus(logits_JME)


class HashRouter(TopKRouter):
  """A router whose experts are those that a table [V, X] has for the id of a token.

  The weights are the scores √softplus(x·gate) of the chosen experts, over their sum if
  `normalized`, times a factor. The table holds numbers of experts; training leaves it alone.
  Without published weights, an id has X different experts at random.
  """

  vocab_size: int = 1  # V
  scale: float = 1.0  # factor of the weights

  @nn.compact
  def __call__(  # type: ignore[override]
    self, x_JMD: jax.Array, is_token_JM: jax.Array, ids_JM: jax.Array
  ) -> Routing:
    shape = [self.vocab_size, self.top_k]
    table_VX = param(self, EXPERTS_OF_IDS, self._drawn, shape, [None, None])
    scores_JME = root_softplus(self.logits(x_JMD))
    experts_JMX = jax.lax.stop_gradient(table_VX)[ids_JM].astype(jnp.int32)
    values_JMX = jnp.take_along_axis(scores_JME, experts_JMX, axis=-1)
    if self.normalized:
      values_JMX = values_JMX / (values_JMX.sum(-1, keepdims=True) + 1e-20)
    weights_JMX = self.scale * values_JMX * is_token_JM[..., None]
    probabilities_JME = scores_JME / scores_JME.sum(-1, keepdims=True)
    return Routing(experts_JMX, weights_JMX, probabilities_JME, is_token_JM)

  def _drawn(self, key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """Returns the numbers of X experts of each id, which are different."""
    drawn_VE = jax.random.uniform(key, (shape[0], self.num_experts))
    return jax.lax.top_k(drawn_VE, shape[1])[1].astype(dtype)


class LimitedExperts(MoeFeedForward):
  """A MoeFeedForward whose experts are gated, with limited arguments; see gate_within."""

  limit: float = 10.0

  @property
  def activate(self) -> Callable[..., jax.Array]:
    return gate_within(self.activation, self.limit)


class TokenIdLm(TransformerLm):
  """A language model whose stack, and so each block, is called with the token ids [B, T] too."""

  @nn.nowrap
  def stack_inputs(self, ids_BT: jax.Array, x_BTD: jax.Array) -> tuple[jax.Array, ...]:
    return (ids_BT,)


def gate_within(activation: str, limit: float) -> Callable[[jax.Array, jax.Array], jax.Array]:
  """Returns the function of gate_by, with a gate of at most `limit`, and up within ±limit."""
  gated = gate_by(activation)
  return lambda gate, up: gated(jnp.minimum(gate, limit), jnp.clip(up, -limit, limit))


class LimitedGatedFeedForward(GatedFeedForward):
  """A GatedFeedForward whose activation has limited arguments; see gate_within."""

  limit: float = 10.0

  @property
  def activate(self) -> Callable[..., jax.Array]:
    return gate_within(self.activation, self.limit)


class TrailingRotary(nn.Module):
  """Rotates the last `dims` dimensions of a head, and leaves the others as they are."""

  dims: int
  rotary_tpl: Template = template_field(RotaryEmbedding)

  @nn.compact
  def __call__(self, x_BTNH: jax.Array, positions_BT: jax.Array) -> jax.Array:
    plain, turned = jnp.split(x_BTNH, [x_BTNH.shape[-1] - self.dims], axis=-1)
    rotated = self.rotary_tpl(name='rotary')(turned, positions_BT)
    return jnp.concatenate([plain, rotated], axis=-1)
