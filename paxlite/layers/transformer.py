"""Blocks, and stacks of blocks, which are unrolled or repeated by a scan."""

from collections.abc import Sequence

import jax
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from paxlite.config.templates import Template, template_field
from paxlite.core.variable_names import REPEATED
from paxlite.layers.attention.attention import Attention
from paxlite.layers.feedforward import FeedForward
from paxlite.layers.norms import LayerNorm
from paxlite.layers.precision.einsum import FP8_COLLECTIONS
from paxlite.layers.remat import Offloaded, remat
from paxlite.layers.sown import CHOSEN, SOWN
from paxlite.parallel.partitioning import PROBES, active_kind, shard


class TransformerBlock(nn.Module):
  """x += attention(norm(x)), then x += ffn(norm(x)), [B, T, D] to [B, T, D]."""

  # template of the norms before both sublayers; None means no norm
  norm_tpl: Template | None = template_field(LayerNorm)
  # template of norms after both sublayers, before the sums, or of a factor; None means neither
  post_norm_tpl: Template | None = None
  # attention, which is called with (x, positions, segment_ids)
  attention_tpl: Template = template_field(Attention)
  # feed-forward layer, which is called with (x, paddings)
  ffn_tpl: Template = template_field(FeedForward)
  dropout: float = 0.0  # dropout rate of the output of both sublayers

  @nn.compact
  def __call__(
    self, x_BTD: jax.Array, positions_BT: jax.Array, segment_ids_BT: jax.Array | None
  ) -> jax.Array:
    h_BTD = self.before_attention(x_BTD)
    h_BTD = self.attention_tpl(name='self_attention')(h_BTD, positions_BT, segment_ids_BT)
    return self.after_attention(x_BTD, h_BTD, segment_ids_BT)

  # No methods of their own in a profile: the two are parts of the block, also of a subclass.
  @nn.nowrap
  def before_attention(self, x_BTD: jax.Array) -> jax.Array:
    """Returns what attention reads, [B, T, D]."""
    return _normed(self.norm_tpl, 'layer_norm', x_BTD)

  @nn.nowrap
  def after_attention(
    self, x_BTD: jax.Array, h_BTD: jax.Array, segment_ids_BT: jax.Array | None
  ) -> jax.Array:
    """Returns the output of the block [B, T, D], from its input and what attention returns."""
    dropout = nn.Dropout(self.dropout, deterministic=not self.has_rng('dropout'))
    paddings_BT = None if segment_ids_BT is None else segment_ids_BT == 0
    h_BTD = _normed(self.post_norm_tpl, 'post_layer_norm', h_BTD)
    x_BTD = x_BTD + dropout(h_BTD)
    if self.post_norm_tpl is None:
      x_BTD = checkpoint_name(x_BTD, 'residual')

    h_BTD = self.fed_forward(x_BTD, paddings_BT)
    h_BTD = _normed(self.post_norm_tpl, 'ff_post_layer_norm', h_BTD)
    x_BTD = x_BTD + dropout(h_BTD)
    x_BTD = shard(x_BTD, 'batch', 'residual_length', 'act_embed')
    return checkpoint_name(x_BTD, 'transformer_layer_out')

  def fed_forward(self, x_BTD: jax.Array, paddings_BT: jax.Array | None) -> jax.Array:
    """Returns ffn(norm(x)), [B, T, D]."""
    h_BTD = x_BTD if self.norm_tpl is None else self.norm_tpl(name='ff_layer_norm')(x_BTD)
    out_BTD: jax.Array = self.ffn_tpl(name='ff_layer')(h_BTD, paddings_BT)
    return out_BTD


def _normed(norm_tpl: Template | None, name: str, x_BTD: jax.Array) -> jax.Array:
  if norm_tpl is None:
    return x_BTD
  normed_BTD: jax.Array = norm_tpl(name=name)(x_BTD)
  return normed_BTD


class ParallelBlock(nn.Module):
  """x += attention(norm(x)) + ffn(norm(x)), [B, T, D] to [B, T, D], as in Phi-1."""

  norm_tpl: Template = template_field(LayerNorm)  # template of the norm before attention
  # template of a norm before the feed-forward layer; None means that this layer has the same input
  # as attention
  ff_norm_tpl: Template | None = None
  # attention, which is called with (x, positions, segment_ids)
  attention_tpl: Template = template_field(Attention)
  # feed-forward layer, which is called with (x, paddings)
  ffn_tpl: Template = template_field(FeedForward)
  dropout: float = 0.0  # dropout rate of the output of both layers

  @nn.compact
  def __call__(
    self, x_BTD: jax.Array, positions_BT: jax.Array, segment_ids_BT: jax.Array | None
  ) -> jax.Array:
    dropout = nn.Dropout(self.dropout, deterministic=not self.has_rng('dropout'))
    paddings_BT = None if segment_ids_BT is None else segment_ids_BT == 0
    h_BTD = self.norm_tpl(name='layer_norm')(x_BTD)
    in_BTD = h_BTD if self.ff_norm_tpl is None else self.ff_norm_tpl(name='ff_layer_norm')(x_BTD)
    h_BTD = self.attention_tpl(name='self_attention')(h_BTD, positions_BT, segment_ids_BT)
    y_BTD = self.ffn_tpl(name='ff_layer')(in_BTD, paddings_BT)
    x_BTD = x_BTD + dropout(h_BTD) + dropout(y_BTD)
    x_BTD = shard(x_BTD, 'batch', 'residual_length', 'act_embed')
    return checkpoint_name(x_BTD, 'transformer_layer_out')


def _apply_block(block: nn.Module, x_BTD: jax.Array, *args: jax.Array | None) -> jax.Array:
  return block(checkpoint_name(x_BTD, 'iteration_input'), *args)


class UnrolledTransformer(nn.Module):
  """A stack of `num_layers` layers x_layers_0, x_layers_1 …, each with its own parameters.

  What the stack is called with beside activations, positions and segments, it passes on to blocks.
  """

  num_layers: int  # the number of equal layers
  layer_tpl: Template = template_field(TransformerBlock)  # a layer: a block, or a BlockSequence
  # other blocks before the layers, whose parameters are first_0, first_1 …
  first_tpls: Sequence[Template] = ()
  # other blocks after the layers, whose parameters are last_0, last_1 …
  last_tpls: Sequence[Template] = ()
  # the activations that a layer keeps for its backward pass; see remat
  checkpoint_policy: str | Offloaded = 'SAVE_EVERYTHING'

  @property
  def microbatches(self) -> int:
    """The number of parts of a batch that the stack computes one after another."""
    return 1

  @nn.compact
  def __call__(
    self,
    x_BTD: jax.Array,
    positions_BT: jax.Array,
    segment_ids_BT: jax.Array | None,
    *inputs: jax.Array,
  ) -> jax.Array:
    apply_block = remat(_apply_block, self.checkpoint_policy, in_scan=False)
    for i, block_tpl in enumerate(self.first_tpls):
      x_BTD = apply_block(
        block_tpl(name=f'first_{i}'), x_BTD, positions_BT, segment_ids_BT, *inputs
      )
    x_BTD = self.layers(x_BTD, positions_BT, segment_ids_BT, *inputs)
    for i, block_tpl in enumerate(self.last_tpls):
      x_BTD = apply_block(block_tpl(name=f'last_{i}'), x_BTD, positions_BT, segment_ids_BT, *inputs)
    return x_BTD

  def layers(
    self,
    x_BTD: jax.Array,
    positions_BT: jax.Array,
    segment_ids_BT: jax.Array | None,
    *inputs: jax.Array,
  ) -> jax.Array:
    """Applies the equal layers."""
    apply_block = remat(_apply_block, self.checkpoint_policy, in_scan=False)
    # Equal layers are traced once, but not with random keys or probes, which have own names.
    if not (self.is_initializing() or self.has_rng('dropout') or PROBES in self.variables):
      apply_block = nn.jit(apply_block)
    for i in range(self.num_layers):
      layer = self.layer_tpl(name=f'x_layers_{i}')
      x_BTD = apply_block(layer, x_BTD, positions_BT, segment_ids_BT, *inputs)
    return x_BTD


class RepeatedTransformer(UnrolledTransformer):
  """A stack that scans one layer over parameters with a leading dimension [L, …].

  The scan is a loop, whose compile time does not depend on the number of layers. A loop copies the
  activations that a layer keeps into an array of all layers.
  """

  checkpoint_policy: str | Offloaded = 'SAVE_NOTHING'
  # the kinds of devices for whose programs there is no loop: cpu, gpu, tpu
  unrolled_on: Sequence[str] = ()

  def layers(
    self,
    x_BTD: jax.Array,
    positions_BT: jax.Array,
    segment_ids_BT: jax.Array | None,
    *inputs: jax.Array,
  ) -> jax.Array:
    is_loop = self.is_initializing() or active_kind() not in self.unrolled_on
    apply_block = remat(_apply_block, self.checkpoint_policy, in_scan=is_loop)

    def step(block: nn.Module, x: jax.Array, _: None) -> tuple[jax.Array, None]:
      return apply_block(block, x, positions_BT, segment_ids_BT, *inputs), None

    scan = nn.scan(
      step,
      variable_axes=dict.fromkeys(['params', PROBES, 'cache', *FP8_COLLECTIONS, *SOWN, CHOSEN], 0),
      split_rngs={'params': True, 'dropout': True}, length=self.num_layers,
      unroll=1 if is_loop else self.num_layers, metadata_params={nn.PARTITION_NAME: 'layers'},
    )  # fmt: skip
    return scan(self.layer_tpl(name=REPEATED), x_BTD, None)[0]
