"""How many positions a model has, and the rotary ones, which can be stretched."""

import abc
import math
from typing import Annotated, Literal

import fiddle as fdl

from paxlite.config.attribute_kinds import Bounds, Count, Function, Generation, OffAtZero, Shape
from paxlite.config.templates import template
from paxlite.core.errors import UserError
from paxlite.experiments.base import Experiment
from paxlite.layers.rotary import (
  LinearRotaryEmbedding,
  Llama3RotaryEmbedding,
  RotaryEmbedding,
  YarnRotaryEmbedding,
)

RopeScaling = Literal['llama3', 'linear', 'ntk', 'yarn', 'longrope']


class Positions(Experiment, abc.ABC, subject='Positions'):
  """The positions of a model: learned, fixed, or rotary ones, which can be stretched.

  MAX_SEQ_LEN is the length of the rows of a run. A text that the trained model reads and writes may
  be as long as the model has positions.
  """

  TRAINABLE_POSITION_EMB: Shape[bool] = False  # learned position embeddings
  USE_ROTARY_POSITION_EMB: Function[bool] = False  # rotary position embedding (RoPE)
  ROPE_THETA: Function[Annotated[float, Bounds('must be above 0', above=0)]] = 10_000.0  # RoPE base
  ROPE_LAYOUT: Function[Literal['interleaved', 'half']] = (
    'interleaved'  # dimension pairs of RoPE: adjacent, or across halves
  )
  ROPE_FACTOR: Function[float] = 1.0  # factor by which RoPE stretches positions; 1: none
  ROPE_SCALING: Function[RopeScaling] = 'llama3'  # how RoPE is stretched by ROPE_FACTOR
  ROPE_ORIGINAL_LENGTH: Function[Count] = 8192  # tokens of a sequence before RoPE was stretched
  ROPE_LOW_FREQUENCY_FACTOR: Function[float] = (
    1.0  # llama3 scaling: fully stretches waves longer than the original length over this
  )
  ROPE_HIGH_FREQUENCY_FACTOR: Function[float] = (
    4.0  # llama3 scaling: keeps waves shorter than the original length over this
  )
  ROPE_BETA_FAST: Function[float] = 32.0  # YaRN's beta_fast: waves with more turns are kept
  ROPE_BETA_SLOW: Function[float] = (
    1.0  # YaRN's beta_slow: waves with fewer turns are fully stretched
  )
  ROPE_WHOLE_PAIRS: Function[bool] = True  # YaRN: rounds both bounds to whole dimension pairs
  ROPE_ATTENTION_FACTOR: Function[OffAtZero] = (
    0.0  # factor of rotated queries and keys (YaRN, LongRoPE); 0: the papers'
  )

  @property
  def MAX_POSITION_EMBEDDINGS(self) -> Generation[Count]:
    """Maximum positions, from the initial weights or MAX_SEQ_LEN."""
    found = self.weights.positions or self.MAX_SEQ_LEN
    return found if self.has_position_table else max(found, self.MAX_SEQ_LEN)

  @property
  def has_position_table(self) -> bool:
    """Whether each position has a learned embedding, so that there are no further positions."""
    return self.TRAINABLE_POSITION_EMB and not self.USE_ROTARY_POSITION_EMB

  @property
  def num_positions(self) -> int:
    """The most tokens of a text that the model reads and writes.

    LongRoPE has factors for sequences of up to ROPE_ORIGINAL_LENGTH tokens, and others for longer
    ones.
    MAX_SEQ_LEN chooses between them, so that a model with the first takes no longer text.
    """
    if self.has_long_factors is False:
      return min(self.MAX_POSITION_EMBEDDINGS, self.ROPE_ORIGINAL_LENGTH)
    return max(self.MAX_POSITION_EMBEDDINGS, self.MAX_SEQ_LEN)

  @property
  def stretches_positions(self) -> bool:
    """Whether rotary positions are stretched, or the rotated vectors alone (YaRN with factor 1)."""
    scales = self.ROPE_SCALING in ('yarn', 'longrope') and self.ROPE_ATTENTION_FACTOR not in (0, 1)
    return self.ROPE_FACTOR > 1 or scales

  @property
  def rotary_length(self) -> float:
    """The length of a rotated vector over its length before: ROPE_ATTENTION_FACTOR, or its default.

    The defaults are those of the papers on YaRN and LongRoPE.
    """
    if self.ROPE_FACTOR <= 1 or self.ROPE_ATTENTION_FACTOR:
      return self.ROPE_ATTENTION_FACTOR or 1.0
    if self.ROPE_SCALING == 'yarn':
      return 0.1 * math.log(self.ROPE_FACTOR) + 1
    return math.sqrt(1 + math.log(self.ROPE_FACTOR) / math.log(self.ROPE_ORIGINAL_LENGTH))

  def rotary_theta(self, is_local: bool) -> float:
    """Returns the base of the wavelengths before scaling, in sliding attention or in full."""
    return self.ROPE_THETA

  def stretches(self, is_local: bool) -> bool:
    """Returns whether ROPE_SCALING is for sliding attention (`is_local`), or for full."""
    return True

  def rotary_base(self, is_local: bool = False) -> float:
    """Returns the effective base of the wavelengths; `is_local`: in sliding attention.

    NTK-aware scaling is another base: ROPE_THETA · ROPE_FACTOR^(D / (D − 2)), D the rotated
    dimensions, which stretches the longest wave by ROPE_FACTOR and keeps the shortest one. The
    dynamic scaling of transformers has this base for a text of L tokens, with ROPE_FACTOR =
    factor · L / max_position_embeddings − (factor − 1).
    """
    theta = self.rotary_theta(is_local)
    if self.ROPE_SCALING != 'ntk' or not self.stretches(is_local):
      return theta
    return theta * self.ROPE_FACTOR ** (self.rotary_dims / max(self.rotary_dims - 2, 1))

  @property
  def has_long_factors(self) -> bool | None:
    """Whether LongRoPE's factors are those for long rows; None without LongRoPE."""
    if not self.USE_ROTARY_POSITION_EMB or self.ROPE_FACTOR == 1 or self.ROPE_SCALING != 'longrope':
      return None
    return self.MAX_SEQ_LEN > self.ROPE_ORIGINAL_LENGTH

  @property
  @abc.abstractmethod
  def rotary_dims(self) -> int:
    """The number of rotated dimensions of a query or key, which depends on the attention."""

  @property
  def rotated(self) -> str:
    """The attributes that decide rotary_dims, for messages."""
    return 'DIMS_PER_HEAD'

  def validate(self) -> None:
    super().validate()
    if self.USE_ROTARY_POSITION_EMB:
      self._check_rotary()
    length, positions = self.MAX_SEQ_LEN, self.MAX_POSITION_EMBEDDINGS
    is_stretched = self.USE_ROTARY_POSITION_EMB and self.ROPE_FACTOR > 1
    if length > positions and not is_stretched:
      table = ', each with a learned embedding' if self.has_position_table else ''
      raise UserError(
        f'MAX_SEQ_LEN={length} is longer than the model: it has '
        f'MAX_POSITION_EMBEDDINGS={positions}{table}. Lower MAX_SEQ_LEN, or set '
        f'MAX_POSITION_EMBEDDINGS={length}'
      )

    if self.weights.positions is not None and self.weights.positions < length and is_stretched:
      self._check_stretching(self.weights.positions)

  def _check_rotary(self) -> None:
    """Raises UserError if no rotary positions can be made of the attributes."""
    if self.rotary_dims % 2 or self.rotary_dims == 0:
      raise UserError(
        f'rotary positions need an even {self.rotated}, above 0, not {self.rotary_dims}'
      )
    if self.ROPE_SCALING == 'ntk' and self.ROPE_FACTOR != 1 and self.rotary_dims == 2:
      raise UserError('ROPE_SCALING=ntk needs more than 2 rotated dimensions of a head')
    if self.ROPE_FACTOR < 1 or not (
      0 < self.ROPE_LOW_FREQUENCY_FACTOR <= self.ROPE_HIGH_FREQUENCY_FACTOR
    ):
      raise UserError(
        f'ROPE_FACTOR={self.ROPE_FACTOR:g} must be at least 1, and ROPE_LOW_FREQUENCY_FACTOR='
        f'{self.ROPE_LOW_FREQUENCY_FACTOR:g} positive and not above ROPE_HIGH_FREQUENCY_FACTOR='
        f'{self.ROPE_HIGH_FREQUENCY_FACTOR:g}'
      )
    lowest = 1 if self.stretches_positions and self.ROPE_SCALING == 'yarn' else 0
    if not lowest < self.ROPE_THETA:
      raise UserError(f'ROPE_THETA={self.ROPE_THETA:g} must be above {lowest}')
    if self.stretches_positions and self.ROPE_ORIGINAL_LENGTH <= 1:
      raise UserError(f'ROPE_ORIGINAL_LENGTH={self.ROPE_ORIGINAL_LENGTH} must be above 1')
    if min(self.ROPE_BETA_FAST, self.ROPE_BETA_SLOW) <= 0:
      raise UserError(
        f'ROPE_BETA_FAST={self.ROPE_BETA_FAST:g} and ROPE_BETA_SLOW={self.ROPE_BETA_SLOW:g} '
        'must be above 0'
      )
    theta = min(map(self.rotary_theta, (False, True)))
    if self.ROPE_SCALING == 'yarn' and self.ROPE_FACTOR > 1 and theta <= 1:
      raise UserError(f'ROPE_SCALING=yarn needs ROPE_THETA and its local one above 1: {theta:g}')
    if self.stretches_positions and self.ROPE_SCALING == 'longrope':
      self.long_rotary({})  # raises UserError

  def rotary(self, is_local: bool = False) -> fdl.Partial:
    """Returns the template of the rotary embedding; `is_local` means sliding attention."""
    base: dict[str, object] = dict(theta=self.rotary_base(is_local), layout=self.ROPE_LAYOUT)
    is_plain = not self.stretches_positions or not self.stretches(is_local)
    if is_plain or self.ROPE_SCALING == 'ntk':
      return template(RotaryEmbedding, **base)
    if self.ROPE_SCALING == 'linear':
      return template(LinearRotaryEmbedding, factor=self.ROPE_FACTOR, **base)
    if self.ROPE_SCALING == 'longrope':
      return self.long_rotary(base)
    if self.ROPE_SCALING == 'yarn':
      return template(
        YarnRotaryEmbedding, factor=self.ROPE_FACTOR, fast_turns=self.ROPE_BETA_FAST,
        slow_turns=self.ROPE_BETA_SLOW, original_length=self.ROPE_ORIGINAL_LENGTH,
        whole_pairs=self.ROPE_WHOLE_PAIRS, stretched=self.rotary_length, **base,
      )  # fmt: skip
    return template(
      Llama3RotaryEmbedding, factor=self.ROPE_FACTOR,
      low_frequency_factor=self.ROPE_LOW_FREQUENCY_FACTOR,
      high_frequency_factor=self.ROPE_HIGH_FREQUENCY_FACTOR,
      original_length=self.ROPE_ORIGINAL_LENGTH, **base,
    )  # fmt: skip

  def long_rotary(self, base: dict[str, object]) -> fdl.Partial:
    """Returns the template of the rotary embedding with ROPE_SCALING=longrope.

    Args:
      base: What the templates of all scalings have.
    """
    raise UserError('ROPE_SCALING=longrope needs ROPE_SHORT_FACTORS and ROPE_LONG_FACTORS')

  def _check_stretching(self, before: int) -> None:
    """Raises UserError if positions are stretched to fewer tokens than a row has.

    Args:
      before: The positions of the weights.
    """
    stretched_before = self.weights.values.get('ROPE_FACTOR', 1.0)
    assert isinstance(stretched_before, int | float)
    original, source = self.ROPE_ORIGINAL_LENGTH, 'ROPE_ORIGINAL_LENGTH'
    if self.ROPE_SCALING in ('linear', 'ntk'):  # which know no length
      original, source = round(before / stretched_before), 'the positions of the weights'
    elif stretched_before <= 1 and original > before:
      raise UserError(
        f'ROPE_ORIGINAL_LENGTH={original} is more than the {before} positions of the weights in '
        f'{self.CHECKPOINT_RESTORE_PATH}: set ROPE_ORIGINAL_LENGTH={before}'
      )
    elif self.ROPE_SCALING == 'llama3':  # published models have twice as many positions and more
      return
    if self.ROPE_FACTOR * original < self.MAX_SEQ_LEN:
      raise UserError(
        f'MAX_SEQ_LEN={self.MAX_SEQ_LEN} is longer than ROPE_FACTOR={self.ROPE_FACTOR:g} × '
        f'{source}={original}, to which ROPE_SCALING={self.ROPE_SCALING} stretches positions: set '
        f'ROPE_FACTOR={self.MAX_SEQ_LEN / original:g}'
      )

  @property
  def warnings(self) -> list[str]:
    before = self.weights.positions or self.num_positions
    if before >= self.MAX_SEQ_LEN:
      return super().warnings
    is_plain = self.USE_ROTARY_POSITION_EMB and self.ROPE_FACTOR <= 1
    hint = ' ROPE_SCALING and ROPE_FACTOR stretch rotary positions.' if is_plain else ''
    return [
      *super().warnings,
      f'MAX_SEQ_LEN={self.MAX_SEQ_LEN:,}: the weights in {self.CHECKPOINT_RESTORE_PATH} have '
      f"{before:,} positions, but this run's model has {self.num_positions:,}.{hint}",
    ]
