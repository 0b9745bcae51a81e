"""A stack with blocks that also take their own inputs and other blocks' keys.

The blocks of other stacks see the activations of the block before, and nothing else. Here, two
values go past the activations:

* Inputs. TransformerLm.layer_inputs_tpl computes inputs [B, T, L, P] of all L blocks from token ids
  and embeddings, and the stack is called with them. Block i gets its own, [B, T, P].
* Keys. A block returns what later blocks may read: the keys and values of its attention
  (attention.shared_keys), or which keys its indexer has chosen (attention.shared_choices).
  `sources` names, for each block, the block whose keys it reads. The stack keeps what a later block
  reads, and hands it on as an argument. So gradients flow back to the block that computed it.

A block is called with (x, positions, segments, inputs or None, keys or None) and returns (x, keys
or None); see LinkedBlock. The keys may be any tree of arrays. The stack does not look into it.

Decoding. Attention that reads keys has no cache of its own. The earlier block appends new tokens to
its cache, and hands on the keys of all slots, with the slot of the first query. So a cache has one
copy of keys for all blocks that read it, and its layout knows nothing of sharing. The same holds
for the keys of an indexer.

Packed rows. A reader masks by the same segments and positions as the block that computed the keys.

Recomputation. Keys are an output of a block and an input of others, as activations are. A policy
keeps one copy of those that are read, and recomputes the inside of a block alone.

Meshes. Keys have the sharding that the block before gave them, by batch, length and heads; a reader
gathers or passes them on over context as its kernel does with keys of its own. Inputs are split by
batch and length, and in P as hidden units are.

Blocks that read others are not alike, so the stack is unrolled: there is no loop over repeated
layers, and no pipeline, whose stages would have to send keys too.
"""

from collections.abc import Sequence
from typing import Any

import jax
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from paxlite.config.templates import Template
from paxlite.layers.remat import Offloaded, remat
from paxlite.parallel.partitioning import PROBES


class LinkedTransformer(nn.Module):
  """A stack of blocks x_layers_0, x_layers_1 …, some of which read the keys of earlier ones."""

  block_tpls: Sequence[Template]  # templates of the blocks
  # for each block the number of the block whose keys it reads, or None
  sources: Sequence[int | None]
  # the activations that a block keeps for its backward pass; see remat
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
    inputs_BTLP: jax.Array | None = None,
  ) -> jax.Array:
    apply_block = remat(_apply_block, self.checkpoint_policy, in_scan=False)
    # Equal blocks are traced once, but not with random keys or probes, which have own names.
    if not (self.is_initializing() or self.has_rng('dropout') or PROBES in self.variables):
      apply_block = nn.jit(apply_block)
    kept: dict[int, Any] = {}
    for i, (block_tpl, source) in enumerate(zip(self.block_tpls, self.sources, strict=True)):
      input_BTP = None if inputs_BTLP is None else inputs_BTLP[:, :, i]
      read = None if source is None else kept[source]
      block = block_tpl(name=f'x_layers_{i}')
      x_BTD, keys = apply_block(block, x_BTD, positions_BT, segment_ids_BT, input_BTP, read)
      if i in self.sources:
        kept[i] = keys
    return x_BTD


def _apply_block(block: nn.Module, x_BTD: jax.Array, *args: Any) -> tuple[jax.Array, Any]:
  found: tuple[jax.Array, Any] = block(checkpoint_name(x_BTD, 'iteration_input'), *args)
  return found
