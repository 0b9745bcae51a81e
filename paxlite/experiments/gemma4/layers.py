"""Layers of Gemma 4: blocks with factors, experts beside a dense layer, and keys of earlier blocks.

Attention that hands its keys and values to later blocks, and attention that reads them, are called
with (x, positions, segments, keys of an earlier block), and return what they compute and their own
keys. See layers.linked_stack, whose blocks they belong to. Blocks may have inputs beside the
activations, as the per-layer embeddings of Gemma 3n and 4.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from paxlite.config.templates import Template, template_field
from paxlite.core.training_rules import never_trained
from paxlite.layers.activations import gate_by
from paxlite.layers.attention.attention import Attention
from paxlite.layers.embeddings import TokenEmbedding
from paxlite.layers.feedforward import FeedForward
from paxlite.layers.language_model import TransformerLm
from paxlite.layers.linked_block import LinkedBlock
from paxlite.layers.moe.moe import Routing, TopKRouter, route
from paxlite.layers.norms import RmsNorm, UnscaledRmsNorm
from paxlite.layers.projection import Projection, to_heads
from paxlite.layers.remat import recomputed
from paxlite.layers.rotary import RotaryEmbedding
from paxlite.layers.transformer import TransformerBlock
from paxlite.parallel.partitioning import param, shard

FIXED = never_trained('fixed_scale')  # a number that a model was published with


class ScaledBlock(TransformerBlock):
  """A TransformerBlock whose output is multiplied by one number, [B, T, D] to [B, T, D].

  The number, fixed_scale [1], is 1 at first. Training leaves it as it is.
  """

  # whether the feed-forward layer is called with (norm(x), paddings, x), as NormedExperts is, and
  # otherwise with (norm(x), paddings)
  ffn_sees_residual: bool = False

  @nn.compact
  def __call__(
    self, x_BTD: jax.Array, positions_BT: jax.Array, segment_ids_BT: jax.Array | None
  ) -> jax.Array:
    return self.scaled(super().__call__(x_BTD, positions_BT, segment_ids_BT))

  @nn.nowrap
  def scaled(self, x_BTD: jax.Array) -> jax.Array:
    """Returns activations times the block's number."""
    scale = param(self, FIXED, nn.initializers.ones, [1], [None])
    return x_BTD * jax.lax.stop_gradient(scale).astype(x_BTD.dtype)

  def fed_forward(self, x_BTD: jax.Array, paddings_BT: jax.Array | None) -> jax.Array:
    if not self.ffn_sees_residual:
      return super().fed_forward(x_BTD, paddings_BT)
    h_BTD = x_BTD if self.norm_tpl is None else self.norm_tpl(name='ff_layer_norm')(x_BTD)
    out_BTD: jax.Array = self.ffn_tpl(name='ff_layer')(h_BTD, paddings_BT, x_BTD)
    return out_BTD


class NormedExperts(nn.Module):
  """y = norm(shared(h)) + norm(experts(x)), [B, T, D]: a dense layer and experts, side by side."""

  experts_tpl: Template  # a MoeFeedForward, which sees the residual stream itself
  # a FeedForward, which sees what the norm before it has made of the residual stream
  shared_tpl: Template = template_field(FeedForward)
  norm_tpl: Template = template_field(RmsNorm)  # the norm of the output of either

  @nn.compact
  def __call__(
    self, h_BTD: jax.Array, paddings_BT: jax.Array | None, x_BTD: jax.Array
  ) -> jax.Array:
    shared_BTD = self.shared_tpl(name='shared')(h_BTD, paddings_BT)
    y_BTD = self.experts_tpl(name='experts')(x_BTD, paddings_BT)
    normed_BTD: jax.Array = self.norm_tpl(name='shared_norm')(shared_BTD)
    return normed_BTD + self.norm_tpl(name='experts_norm')(y_BTD)


class Keys(NamedTuple):
  """The keys and values that a block attends to, after their norms and rotations."""

  key: jax.Array  # keys, [B, S, K, H]
  value: jax.Array  # values, [B, S, K, H]
  # the slot of the first query of each row, [B], where a cache has keys before it; None: a query
  # has the slot of its own key
  start_B: jax.Array | None

  @property
  def start(self) -> jax.Array | int:
    return 0 if self.start_B is None else self.start_B


class KVSourceAttention(Attention):
  """Attention that also returns its keys; it ignores those of other blocks."""

  @nn.compact
  def __call__(  # type: ignore[override]
    self,
    x_BTD: jax.Array,
    positions_BT: jax.Array,
    segment_ids_BT: jax.Array | None,
    keys: Keys | None,
  ) -> tuple[jax.Array, Keys | None]:
    query, key, value, start = self.heads(x_BTD, positions_BT)
    out_BTD = self.attended(x_BTD, query, key, value, positions_BT, segment_ids_BT, start)
    return out_BTD, Keys(key, value, None if isinstance(start, int) else start)


class KVSharedAttention(Attention):
  """Attention that reads the keys and values of an earlier block, and has queries alone.

  It has no cache: that of the earlier block is the only copy of the keys.

  Attributes:
    qkv_tpl: Computes queries, as QueryProjection. There are no norms and no rotations but theirs.
  """

  @nn.compact
  def __call__(  # type: ignore[override]
    self,
    x_BTD: jax.Array,
    positions_BT: jax.Array,
    segment_ids_BT: jax.Array | None,
    keys: Keys | None,
  ) -> tuple[jax.Array, Keys | None]:
    assert keys is not None
    query = self.qkv_tpl(name='qkv')(x_BTD)
    if self.qk_norm_tpl is not None:
      query = self.qk_norm_tpl(name='query_norm')(query)
    if self.rotary_tpl is not None:
      query = self.rotary_tpl(name='rotary')(query, positions_BT)
    if self.rotated_norm_tpl is not None:
      query = self.rotated_norm_tpl(name='query_norm')(query)
    if self.qk_norm_tpl is None and self.rotated_norm_tpl is None:
      query = checkpoint_name(query, 'attention_input')
    if self.query_scale_tpl is not None:
      query = self.query_scale_tpl(name='per_dim_scale')(query)
    if self.position_scale_tpl is not None:
      query = self.position_scale_tpl(name='position_scale')(query, positions_BT)
    out_BTD = self.attended(
      x_BTD, query, keys.key, keys.value, positions_BT, segment_ids_BT, keys.start
    )
    return out_BTD, None


class QueryProjection(nn.Module):
  """Queries alone, [B, T, D] to [B, T, N, H], in the place of SeparateQkv."""

  model_dims: int
  num_heads: int
  head_dim: int
  query_tpl: Template = template_field(Projection)

  @nn.compact
  def __call__(self, x_BTD: jax.Array) -> jax.Array:
    shape = (self.model_dims, self.num_heads, self.head_dim)
    query = to_heads(self.query_tpl, 'query', x_BTD, shape)
    return shard(checkpoint_name(query, 'query_proj'), 'batch', 'length', 'act_heads', None)


class PerLayerEmbeddings(nn.Module):
  """(norm(w·x / √D) + table[ids]) / √2: inputs [B, T, L, P] of L blocks.

  Each block has a slice of the table of its own, and one of w.
  """

  model_dims: int  # D
  num_layers: int  # L
  input_dims: int  # P
  table_tpl: Template = template_field(TokenEmbedding)  # the table [V, L·P], a TokenEmbedding
  projection_tpl: Template = template_field(Projection)  # the product with w [D, L, P]
  norm_tpl: Template = template_field(RmsNorm)  # the norm over P

  @nn.compact
  def __call__(self, ids_BT: jax.Array, x_BTD: jax.Array) -> jax.Array:
    """Maps token ids [B, T] and their embeddings [B, T, D] to the inputs [B, T, L, P]."""
    layers = self.num_layers, self.input_dims
    axes = 'outer_batch', 'length', None, 'act_mlp'
    projected_BTLP = self.projection_tpl(
      equation='BTD,DLP->BTLP', shape=(self.model_dims, *layers), axes=('embed', None, 'mlp'),
      name='projection',
    )(x_BTD)  # fmt: skip
    projected_BTLP = shard(projected_BTLP / math.sqrt(self.model_dims), *axes)
    normed_BTLP = self.norm_tpl(name='norm')(projected_BTLP)
    # of whole rows first: a slice of a block does not lie on one device otherwise
    table_BTE = shard(self.table_tpl(name='table')(ids_BT), 'outer_batch', 'length', None)
    table_BTLP = shard(table_BTE.reshape(*ids_BT.shape, *layers), *axes)
    inputs_BTLP: jax.Array = (normed_BTLP + table_BTLP) / math.sqrt(2)
    return inputs_BTLP


class PerLayerEmbeddingLm(TransformerLm):
  """A language model whose stack, a LinkedTransformer, has inputs of its blocks."""

  # computes them from token ids and embeddings, as PerLayerEmbeddings
  layer_inputs_tpl: Template = template_field(PerLayerEmbeddings)

  def setup(self) -> None:
    super().setup()
    self.layer_inputs = self.layer_inputs_tpl()

  @nn.nowrap
  def stack_inputs(self, ids_BT: jax.Array, x_BTD: jax.Array) -> tuple[jax.Array, ...]:
    return (self.layer_inputs(ids_BT, x_BTD),)


class ScaledRouter(TopKRouter):
  """A TopKRouter of scale · norm(x) / √D, whose weights are multiplied by a factor of each expert.

  The norm is that of an RmsNorm without a scale. `scale` [D] and `expert_scale` [E] start at 1.
  Weights of a token's experts sum to 1 before their factors.
  """

  epsilon: float = 1e-6  # ε of the norm

  @nn.compact
  def __call__(self, x_JMD: jax.Array, is_token_JM: jax.Array) -> Routing:
    D, ones = x_JMD.shape[-1], nn.initializers.ones
    scale_D = param(self, 'scale', ones, [D], ['norm'])
    scale_E = param(self, 'expert_scale', ones, [self.num_experts], [None])
    normed_JMD = UnscaledRmsNorm(self.epsilon, jnp.float32, name='norm')(x_JMD)
    logits_JME = self.logits(normed_JMD * scale_D * D**-0.5)
    routing = route(logits_JME, is_token_JM, self.top_k, self.normalized)
    return routing._replace(weights_JMX=routing.weights_JMX * scale_E[routing.experts_JMX])


class InputGate(nn.Module):
  """x + norm(w2·(activation(w1·x) ⊙ input)), [B, T, D] and an input [B, T, P] to [B, T, D]."""

  model_dims: int  # D
  input_dims: int  # P
  activation: str = 'gelu'  # a key of ACTIVATIONS
  projection_tpl: Template = template_field(Projection)  # template of the products with w1 and w2
  norm_tpl: Template = template_field(RmsNorm)  # the norm

  @nn.compact
  def __call__(self, x_BTD: jax.Array, input_BTP: jax.Array) -> jax.Array:
    D, P = self.model_dims, self.input_dims
    gate_BTP = self.projection_tpl(
      equation='BTD,DP->BTP', shape=(D, P), axes=('embed', 'mlp'), name='gate'
    )(x_BTD)
    h_BTP = recomputed(gate_by(self.activation))(gate_BTP, input_BTP)
    y_BTD = self.projection_tpl(
      equation='BTP,PD->BTD', shape=(P, D), axes=('mlp', 'embed'), name='projection'
    )(shard(h_BTP, 'batch', 'length', 'act_mlp'))
    y_BTD = shard(y_BTD, 'batch', 'residual_length', 'act_embed')
    return shard(x_BTD + self.norm_tpl(name='norm')(y_BTD), 'batch', 'residual_length', 'act_embed')


class LinkedScaledBlock(LinkedBlock, ScaledBlock):  # type: ignore[misc]
  """The same as a ScaledBlock, whose number is also a factor of what the input adds."""

  @nn.nowrap
  def finished(self, x_BTD: jax.Array) -> jax.Array:
    return self.scaled(x_BTD)


class SharedKeyValue(nn.Module):
  """As SeparateQkv, with the keys also as the values: two weights."""

  model_dims: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  query_tpl: Template = template_field(Projection)
  key_tpl: Template = template_field(Projection)

  @nn.compact
  def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    shape = (self.model_dims, self.num_heads, self.head_dim)
    query = checkpoint_name(to_heads(self.query_tpl, 'query', x_BTD, shape), 'query_proj')
    shape = (self.model_dims, self.num_kv_heads, self.head_dim)
    key = checkpoint_name(to_heads(self.key_tpl, 'key', x_BTD, shape, 'kv_heads'), 'key_proj')
    return shard(query, 'batch', 'length', 'act_heads', None), key, key


class ProportionalRotaryEmbedding(RotaryEmbedding):
  """A rotary embedding of the first pairs of a head, with the wavelengths of the whole head.

  This is rope_type "proportional" in Hugging Face's configs. PartialRotary has the wavelengths of a
  head that is as wide as its rotated part.
  """

  share: float = 1.0  # the share of the pairs that are rotated; the others stay as they are

  def rates(self, half: int) -> jax.Array:
    return jnp.where(jnp.arange(half) < int(self.share * half), super().rates(half), 0.0)
