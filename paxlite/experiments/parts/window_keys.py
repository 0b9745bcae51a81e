"""Attention to windows of the text by one key each: its attributes and its templates."""

from collections.abc import Iterable
from typing import Any

import fiddle as fdl
from fiddle import selectors

from paxlite.config.attribute_kinds import Count, Function, Shape
from paxlite.config.templates import template
from paxlite.core.errors import UserError
from paxlite.experiments.parts.attention import AttentionKind
from paxlite.experiments.parts.latent_queries import Indexers
from paxlite.layers.attention.attention import AttentionSinks
from paxlite.layers.attention.compressed_keys import KeyCompressor, OverlappingKeyCompressor
from paxlite.layers.attention.shared_key_attention import SharedKeyAttention, WindowAttention
from paxlite.layers.attention.window_indexer import WindowIndexer
from paxlite.layers.norms import UnscaledRmsNorm
from paxlite.layers.projection import Projection
from paxlite.layers.rotary import PartialRotary, TrailingRotary

_WINDOWS: set[AttentionKind] = {'sparse_windows', 'windows'}


class WindowKeys(Indexers, subject='Keys of windows (DeepSeek-V4)'):
  """A LanguageModel with one key for all heads, and blocks whose queries see windows by a key each.

  A query sees the latest tokens in all blocks ('sliding'). In those of 'windows', it sees a key for
  each complete window of its text; in those of 'sparse_windows', keys of other windows, which
  overlap, and of which an indexer chooses.
  """

  WINDOW_RATE: Function[Count] = 128  # tokens of a window, for which there is one key
  SPARSE_WINDOW_RATE: Function[Count] = (
    4  # tokens of a window of which an indexer chooses; its key is made of the window before too
  )
  OUTPUT_GROUPS: Shape[Count] = 8  # groups of heads, each of which is projected by itself
  OUTPUT_GROUP_DIMS: Shape[Count] = 1024  # width of what a group of heads is projected to
  # Kinds of attention of the first blocks, before ATTENTION_PATTERN begins.
  FIRST_ATTENTION: Function[list[AttentionKind]] = []  # kinds of attention of the first blocks

  @property
  def state_kinds(self) -> set[AttentionKind]:
    """The kinds of attention that the model may have, and that are no usual attention."""
    return super().state_kinds | _WINDOWS

  @property
  def windows(self) -> list[int]:
    kinds = {kind.attention for kind in self.block_kinds}
    return [self.SLIDING_WINDOW if self.SLIDING_WINDOW < self.MAX_SEQ_LEN else 0][
      : 'sliding' in kinds
    ]

  def validate(self) -> None:
    super().validate()
    name = type(self).__name__
    kinds: list[AttentionKind] = [*self.FIRST_ATTENTION, *self.ATTENTION_PATTERN]
    if not self.ATTENTION_PATTERN or (set(kinds) - _WINDOWS - {'sliding'}):
      raise UserError(
        f'FIRST_ATTENTION={self.FIRST_ATTENTION} and ATTENTION_PATTERN={self.ATTENTION_PATTERN} of '
        f'{name} must have sliding, sparse_windows and windows, and the pattern at least one'
      )
    if self.SLIDING_WINDOW <= 0:
      raise UserError(f'attention of {name} needs a SLIDING_WINDOW above 0')
    if self.NUM_HEADS % self.OUTPUT_GROUPS:
      raise UserError(
        f'NUM_HEADS={self.NUM_HEADS} is not divisible by OUTPUT_GROUPS={self.OUTPUT_GROUPS}'
      )
    if 'sparse_windows' in kinds and self.rotary_dims > self.INDEXER_DIMS_PER_HEAD:
      raise UserError(
        f'INDEXER_DIMS_PER_HEAD={self.INDEXER_DIMS_PER_HEAD} must be at least the '
        f'{self.rotary_dims} rotated dimensions of a head'
      )
    fixed: dict[str, object] = dict(
      NUM_KV_HEADS=1, USE_ATTENTION_SINKS=True, USE_ROTARY_POSITION_EMB=True, QK_NORM='none',
      USE_PER_DIM_SCALE=False, QUERY_GROWTH=0, USE_BIAS=False,
      USE_QKV_BIAS=False,
    )  # fmt: skip
    for attribute, value in fixed.items():
      if (found := getattr(self, attribute, value)) != value:  # parts may be absent
        raise UserError(
          f'{attribute}={found} is not implemented for attention of {name}: it must be {value}'
        )
    if self.ATTEN_LOGIT_CAP > 0:
      raise UserError(
        f'ATTEN_LOGIT_CAP={self.ATTEN_LOGIT_CAP:g} is not implemented for attention of {name}: it '
        'must be at most 0'
      )

  def rotary(self, is_local: bool = False) -> fdl.Partial:
    rotary = super().rotary(is_local)
    if fdl.get_callable(rotary) is PartialRotary:
      rotary = rotary.rotary_tpl
    return template(TrailingRotary, dims=self.rotary_dims, rotary_tpl=rotary)

  def attention(self) -> fdl.Partial:
    return template(
      SharedKeyAttention,
      model_dims=self.MODEL_DIMS,
      num_heads=self.NUM_HEADS,
      head_dim=self.DIMS_PER_HEAD,
      query_latent_dims=self.QUERY_LATENT_DIMS,
      num_groups=self.OUTPUT_GROUPS,
      group_dims=self.OUTPUT_GROUP_DIMS,
      norm_tpl=self.norm(),
      query_norm_tpl=template(
        UnscaledRmsNorm, epsilon=self.LAYERNORM_EPSILON, dtype=self.FPROP_DTYPE
      ),
      rotary_tpl=self.rotary(),
      attention_tpl=self.dot_product_attention(),
    )

  def attention_with_state(self, kind: AttentionKind) -> fdl.Partial:
    if kind not in _WINDOWS:
      return super().attention_with_state(kind)
    attention = self.attention()
    attention.attention_tpl = template(
      WindowAttention,
      query_scale=self.attention_scale,
      window=self.SLIDING_WINDOW,
      sinks_tpl=template(AttentionSinks, num_heads=self.NUM_HEADS),
      dropout=self.DROPOUT_PROB,
      block_size=self.ATTENTION_BLOCK_SIZE,
    )
    of_keys: dict[str, Any] = dict(norm_tpl=self.norm(), rotary_tpl=self.rotary())
    if kind == 'windows':
      attention.rate = self.WINDOW_RATE
      attention.keys_tpl = template(KeyCompressor, **of_keys)
      return attention
    attention.rate = self.SPARSE_WINDOW_RATE
    attention.keys_tpl = template(OverlappingKeyCompressor, **of_keys)
    attention.selection_tpl = template(
      WindowIndexer,
      model_dims=self.MODEL_DIMS,
      query_latent_dims=self.QUERY_LATENT_DIMS,
      num_heads=self.INDEXER_HEADS,
      head_dim=self.INDEXER_DIMS_PER_HEAD,
      top_k=self.INDEXER_TOP_K,
      keys_tpl=template(OverlappingKeyCompressor, norm_tpl=self.norm(), rotary_tpl=self.rotary()),
      rotary_tpl=self.rotary(),
    )
    return attention

  @property
  def attention_classes(self) -> tuple[type, ...]:
    return (*super().attention_classes, SharedKeyAttention)

  def without_factors(self, layer: fdl.Buildable) -> Iterable[fdl.Buildable]:
    """Returns the groups of heads too, and the indexer, whose choice has no gradient."""
    yield from super().without_factors(layer)
    if isinstance(groups := getattr(layer, 'groups_tpl', None), fdl.Buildable):
      yield groups
    for indexer in selectors.select(layer, WindowIndexer, check_nonempty=False):
      yield from selectors.select(indexer, Projection)

  def attention_params_of(self, kind: AttentionKind | None) -> int:
    D, N, H, Q = self.MODEL_DIMS, self.NUM_HEADS, self.DIMS_PER_HEAD, self.QUERY_LATENT_DIMS
    G, R = self.OUTPUT_GROUPS, self.OUTPUT_GROUP_DIMS
    found = Q * (D + N * H) + D * H + N * H * R + G * R * D
    return found + {'windows': 2, 'sparse_windows': 4}.get(str(kind), 0) * D * H

  def attention_flops_of(self, kind: AttentionKind | None) -> float:
    """Returns the same with the windows that a query sees, and with the indexer's forward pass."""
    T, N = self.MAX_SEQ_LEN, self.NUM_HEADS
    found = super().attention_flops_of('sliding')
    if kind == 'windows':
      return found + 12.0 * N * self.DIMS_PER_HEAD * T / (2 * self.WINDOW_RATE)
    if kind != 'sparse_windows':
      return found
    W, D, H = T / self.SPARSE_WINDOW_RATE, self.MODEL_DIMS, self.INDEXER_DIMS_PER_HEAD
    k = min(self.INDEXER_TOP_K, W)
    found += 12.0 * N * self.DIMS_PER_HEAD * (k - k**2 / (2 * W))
    if self.INDEXER_TOP_K >= W:
      return found
    weights = self.QUERY_LATENT_DIMS * self.INDEXER_HEADS * H + D * (self.INDEXER_HEADS + 4 * H)
    return found + 2.0 * weights + self.INDEXER_HEADS * (H + 1) * W
