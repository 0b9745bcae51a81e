"""The limits of an engine, by which it refuses requests before they enter."""

import dataclasses
from collections.abc import Sequence

from paxlite.core.errors import UserError
from paxlite.generation.request import Request, check_ids


@dataclasses.dataclass(frozen=True)
class EngineLimits:
  """The limits of an engine."""

  max_length: int  # the most tokens of a prompt and its answer that the model takes
  # the most tokens that the engine was made for; None: as many as the model takes
  fixed_slots: int | None
  vocab_size: int  # the number of token ids of the model
  has_tokenizer: bool  # whether the engine knows the texts of tokens

  def check(self, request: Request, what: str) -> None:
    """Raises UserError if a request cannot be answered; messages call its prompt `what`."""
    length, new = len(request.prompt), request.max_tokens
    self.check_prompt(request.prompt, what, new)
    if self.fixed_slots is not None and length + new > self.fixed_slots:
      raise UserError(
        f'{what} has {length:,} tokens and requests {new:,} new ones: the engine was made for '
        f'{self.fixed_slots:,}'
      )
    check_ids([*request.bias], self.vocab_size, f'the bias of {what}')
    if any(not 0 <= token < 1 << 31 for token in request.ends):
      raise UserError(f'{what} ends with {[*request.ends]}, which are not all token ids')
    if request.stop and not self.has_tokenizer:
      raise UserError(f'{what} has stop texts, but the engine has no tokenizer')

  def check_prompt(self, prompt: Sequence[int], what: str, new: int = 1) -> None:
    """Raises UserError if a prompt is empty or leaves no room for the new tokens."""
    if not len(prompt):
      raise UserError('a prompt is empty: write a text, or set START_ID, the first token')
    check_ids(prompt, self.vocab_size, what)
    if len(prompt) + new > self.max_length:
      if new <= 1:
        raise UserError(
          f'a prompt of {len(prompt)} tokens leaves no room for a new token: the limit is '
          f'{self.max_length}; shorten it, or raise MAX_SEQ_LEN if positions are rotary'
        )
      raise UserError(
        f'{what} has {len(prompt):,} tokens and requests {new:,} new ones: the limit is '
        f'{self.max_length:,}'
      )
