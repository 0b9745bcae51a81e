"""Tables with a few trained rows, for tokens added to a tokenizer later."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from paxlite.layers.embeddings import LmHead, TokenEmbedding
from paxlite.parallel.partitioning import param


class RowsEmbedding(TokenEmbedding):
  """A TokenEmbedding with lora_rows [R, D], which starts at 0, added to the rows `row_ids`."""

  row_ids: tuple[int, ...] = ()

  def setup(self) -> None:
    super().setup()
    self.lora_rows = _rows(self, self.row_ids, self.model_dims)

  def looked_up(self, ids_BT: jax.Array) -> jax.Array:
    is_row_BTR = ids_BT[..., None] == jnp.array(self.row_ids)
    more_BTD = jnp.einsum('BTR,RD->BTD', is_row_BTR.astype(jnp.float32), self.lora_rows)
    return super().looked_up(ids_BT) + more_BTD.astype(self.dtype)

  def weight(self) -> jax.Array:
    return _with_rows(super().weight(), self.row_ids, self.lora_rows)


class RowsHead(LmHead):
  """An LmHead with the same."""

  row_ids: tuple[int, ...] = ()

  def weight(self) -> jax.Array:
    weight_VD = super().weight()
    return _with_rows(weight_VD, self.row_ids, _rows(self, self.row_ids, self.model_dims))


def _rows(module: nn.Module, ids: tuple[int, ...], dims: int) -> jax.Array:
  return param(module, 'lora_rows', nn.initializers.zeros, [len(ids), dims], [None, 'embed'])


def _with_rows(table_VD: jax.Array, ids: tuple[int, ...], rows_RD: jax.Array) -> jax.Array:
  return table_VD.at[jnp.array(ids)].add(rows_RD.astype(table_VD.dtype))
