"""How many positions a model has, which is not how long the rows are that a run trains it on."""

from paxlite.config.attribute_kinds import Count, Generation, Shape
from paxlite.core.errors import UserError
from paxlite.experiments.parts.rotary_positions import RotaryPositions


class Positions(RotaryPositions, subject='Positions'):
  """The positions of a model, learned, rotary or fixed.

  MAX_SEQ_LEN is the length of the rows of a run. A text that the trained model reads and writes may
  be as long as the model has positions.
  """

  TRAINABLE_POSITION_EMB: Shape[bool] = False  # adds learned position embeddings

  @property
  def MAX_POSITION_EMBEDDINGS(self) -> Generation[Count]:
    """Most positions of the model: those of the weights it starts from, or MAX_SEQ_LEN."""
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

  def validate(self) -> None:
    super().validate()
    length, positions = self.MAX_SEQ_LEN, self.MAX_POSITION_EMBEDDINGS
    is_stretched = self.USE_ROTARY_POSITION_EMB and self.ROPE_FACTOR > 1
    if length > positions and not is_stretched:
      table = ', each with a learned embedding' if self.has_position_table else ''
      raise UserError(
        f'MAX_SEQ_LEN={length} is longer than the model: it has MAX_POSITION_EMBEDDINGS='
        f'{positions}{table}. Shorten the rows, or set MAX_POSITION_EMBEDDINGS={length}'
      )

    if self.weights.positions is not None and self.weights.positions < length and is_stretched:
      self._check_stretching(self.weights.positions)

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
      f'{before:,} positions, and the model of this run has {self.num_positions:,}.{hint}',
    ]
