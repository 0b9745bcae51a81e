"""Embeddings of runs of tokens, in tables that hashes of the runs index.

A token and those before it select a vector without any computation over the sequence, so that the
layers need not learn what often follows a pair or a triple of tokens. The idea is the conditional
memory of Engram (https://arxiv.org/abs/2601.07372), here without its gates and convolutions.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn

from paxlite.config.templates import Template, template_field
from paxlite.layers.attention.attention import append_to_cache, is_decoding
from paxlite.layers.embeddings import TokenEmbedding
from paxlite.layers.language_model import TransformerLm

_FACTORS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F)  # odd, one for each token of a run
LONGEST = len(_FACTORS)


class NgramEmbedding(nn.Module):
  """The sum of the embeddings of the runs that end with a token, [B, T] to [B, T, D].

  Runs that collide share a vector. A token before the start of the segment counts as one more id.
  In a cache, the module keeps the ids of a sequence, as attention keeps its keys.
  """

  rows: int  # rows of each table
  lengths: Sequence[int] = (2,)  # tokens of the runs, 2 to 4; each length has a table
  table_tpl: Template = template_field(TokenEmbedding)  # a table [rows, D]

  @nn.compact
  def __call__(self, ids_BT: jax.Array, positions_BT: jax.Array) -> jax.Array:
    """Maps token ids and their positions in their segments to embeddings."""
    run = self._run(ids_BT, positions_BT)
    tables = [self.table_tpl(name=f'of_{n}') for n in self.lengths]
    vectors = [
      table(hashed(run[:n], self.rows)) for n, table in zip(self.lengths, tables, strict=True)
    ]
    return sum(vectors[1:], vectors[0])

  def _run(self, ids_BT: jax.Array, positions_BT: jax.Array) -> list[jax.Array]:
    """Returns each token, the one before it, and so on, [B, T] each; −1 where there is none."""
    ids_BS, start = ids_BT, jnp.zeros((), jnp.int32)
    if is_decoding(self):
      (ids_BS1,), start = append_to_cache(self, ids=ids_BT[..., None])
      ids_BS = ids_BS1[..., 0]
    slots_BT = jnp.reshape(start, (-1, 1)) + jnp.arange(ids_BT.shape[1])
    slots_BT = jnp.broadcast_to(slots_BT, ids_BT.shape)

    def before(distance: int) -> jax.Array:
      found_BT = jnp.take_along_axis(ids_BS, jnp.maximum(slots_BT - distance, 0), 1)
      return jnp.where((slots_BT >= distance) & (positions_BT >= distance), found_BT, -1)

    return [ids_BT, *(before(distance) for distance in range(1, max(self.lengths)))]


def hashed(run: Sequence[jax.Array], rows: int) -> jax.Array:
  """Returns a row of a table for each run of tokens, int32 from 0 to rows − 1.

  Args:
    run: The ids of the tokens, arrays of one shape, the last token first.
    rows: The number of rows.
  """
  words = [x.astype(jnp.uint32) * jnp.uint32(f) for x, f in zip(run, _FACTORS, strict=False)]
  mixed = sum(words[1:], words[0])
  # products carry upwards alone, and the remainder of a power of two has the lowest bits
  mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(0x2C1B3C6D)
  mixed = (mixed ^ (mixed >> 12)) * jnp.uint32(0x297A2D39)
  return ((mixed ^ (mixed >> 15)) % jnp.uint32(rows)).astype(jnp.int32)


class NgramLm(TransformerLm):
  """A language model that adds embeddings of runs of tokens to those of tokens."""

  ngram_tpl: Template = template_field(NgramEmbedding)

  def setup(self) -> None:
    super().setup()
    self.ngrams = self.ngram_tpl()

  @nn.nowrap
  def embedded(self, ids_BT: jax.Array, positions_BT: jax.Array) -> jax.Array:
    return super().embedded(ids_BT, positions_BT) + self.ngrams(ids_BT, positions_BT)
