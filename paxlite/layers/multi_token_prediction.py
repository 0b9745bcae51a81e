"""Modules that predict the tokens after the next one: multi-token prediction of DeepSeek-V3."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from paxlite.config.templates import Template, template_field
from paxlite.layers.norms import RmsNorm
from paxlite.layers.projection import Projection
from paxlite.layers.remat import Offloaded, remat
from paxlite.layers.transformer import TransformerBlock
from paxlite.parallel.partitioning import shard


class PredictionModule(nn.Module):
  """Maps what predicts a token, and this token, to what predicts the token after it, [B, T, D].

  It is norm(block(w · [norm(embedding); norm(x)])), one of the modules of DeepSeek-V3
  (https://arxiv.org/abs/2412.19437, section 2.2). The embedding and the weight of the logits are
  those of the model. As in transformers, what the first module reads is the output of the model's
  final norm, and what a further one reads is the output of this module's last norm.
  """

  model_dims: int  # D
  # template of the norms of the embedding, of x, and of the output of the block
  norm_tpl: Template = template_field(RmsNorm)
  # template of w [2, D, D], whose first half reads the embedding
  projection_tpl: Template = template_field(Projection)
  block_tpl: Template = template_field(TransformerBlock)  # template of the block
  # the activations that the block keeps for its backward pass; see remat
  checkpoint_policy: str | Offloaded = 'SAVE_EVERYTHING'

  @nn.compact
  def __call__(
    self,
    x_BTD: jax.Array,
    embedding_BTD: jax.Array,
    positions_BT: jax.Array,
    segment_ids_BT: jax.Array | None,
  ) -> jax.Array:
    both_BT2D = jnp.stack(
      [
        self.norm_tpl(name='embedding_norm')(embedding_BTD),
        self.norm_tpl(name='hidden_norm')(x_BTD),
      ],
      axis=2,
    )
    projection = self.projection_tpl(
      equation='BTSD,SDE->BTE', shape=(2, self.model_dims, self.model_dims),
      axes=(None, 'embed', None), name='projection',
    )  # fmt: skip
    x_BTD = shard(projection(both_BT2D), 'outer_batch', 'residual_length', 'act_embed')
    apply_block = remat(_apply_block, self.checkpoint_policy, in_scan=False)
    x_BTD = apply_block(self.block_tpl(name='block'), x_BTD, positions_BT, segment_ids_BT)
    x_BTD = shard(x_BTD, 'outer_batch', 'residual_length', 'act_embed')
    return self.norm_tpl(name='norm')(x_BTD)


def _apply_block(block: nn.Module, *args: jax.Array | None) -> jax.Array:
  return block(*args)


def following(
  values_BT: jax.Array, distance: int, segment_ids_BT: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
  """Returns the value `distance` tokens after each token, and whether there is one, [B, T] each.

  There is none behind the end of the token's segment, or of its row; the value is 0 there.

  Args:
    values_BT: A value of each token.
    distance: A number of tokens, at least 1.
    segment_ids_BT: Segment of each token; 0 is padding. None means one segment per row.
  """
  T = values_BT.shape[1]
  later = lambda x: jnp.pad(x[:, distance:], [(0, 0), (0, min(distance, T))])
  if segment_ids_BT is None:
    exists_BT = jnp.broadcast_to(jnp.arange(T) < T - distance, values_BT.shape)
  else:
    exists_BT = (later(segment_ids_BT) == segment_ids_BT) & (segment_ids_BT > 0)
  return jnp.where(exists_BT, later(values_BT), 0), exists_BT
