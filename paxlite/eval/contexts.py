"""The token ids of a context and its continuation, by the rules of EleutherAI's harness.

A context and its continuation are encoded as one text. Where the model reads text as a tokenizer
of transformers writes it, the ids are those of the harness's own class for transformers, so that
likelihoods can be compared.
"""

import dataclasses
from collections.abc import Sequence

from paxlite.chats.chat_encoding import ChatEncoding
from paxlite.core.errors import UserError
from paxlite.eval.scoring import Continuation


@dataclasses.dataclass(frozen=True)
class Contexts:
  """Encodes contexts and continuations for a model."""

  encoding: ChatEncoding  # what encodes texts and conversations for the model
  start: Sequence[int]  # the ids that a text begins with; none if the tokenizer adds none
  # the id that stands for an empty context: the start, or else BOS, or else EOS; None: there is
  # none
  prefix: int | None

  @property
  def needed_prefix(self) -> int:
    """The prefix; UserError if there is none."""
    if self.prefix is None:
      raise UserError(
        'the context is empty, and the tokenizer has neither BOS nor EOS to replace it'
      )
    return self.prefix

  def encode(self, text: str, starts: bool | None = None) -> list[int]:
    """Returns the ids of a text in which special tokens are spelled out.

    Args:
      starts: Whether it begins with `start`; None: unless it begins with the text of `prefix`, as
        that of most chat templates does.
    """
    if starts is None:
      marks = () if self.prefix is None else (self.encoding.tokenizer.decode_marked([self.prefix]),)
      starts = not text.startswith(marks)
    return (list(self.start) if starts else []) + self.encoding.marked(text)

  def pair(self, context: str, starts: bool | None, continuation: str) -> Continuation:
    """Returns the ids of a context and of its continuation.

    Spaces at the end of the context belong to the continuation, because most tokenizers have them
    at the beginning of a word. The continuation is what the whole has after the ids of the context.
    Raises UserError if there is no context, and no id that stands for it, or there is no
    continuation.

    Args:
      context: The context; '' stands for `prefix`.
      starts: Whether it begins with `start`, as in `encode`.
      continuation: What follows it.
    """
    if not context:
      before, after = [self.needed_prefix], self.encode(continuation, starts=False)
      if after and after[0] == before[0]:
        before, after = after[:1], after[1:]
    else:
      stripped = context.rstrip()
      whole = self.encode(context + continuation, starts)
      before = self.encode(stripped, starts)
      after = whole[len(before) :]
      if not after:  # the border is within a token, which belongs to the continuation
        before, after = whole[:-1], whole[-1:]
      before = before or [self.needed_prefix]
    if not after:
      raise UserError(f'the continuation {continuation[:40]!r} adds no token')
    return Continuation(before, after)
