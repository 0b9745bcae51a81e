"""Responses in the format of OpenAI's API."""

import secrets
import time
from collections.abc import Sequence
from typing import Any

from paxlite.core.json_text import JsonObject
from paxlite.data.tokenizer import Tokenizer
from paxlite.generation.request import Completion, TokenScore
from paxlite.generation.spelling import SpelledToken, Spelling, shown, spelled
from paxlite.serving.bodies import CompletionRequest
from paxlite.serving.speech import Said, Speech

Choices = list[dict[str, Any]]


class Reply:
  """The response to one request, whole or in chunks."""

  kind = 'text_completion'
  chunk_kind = 'text_completion'
  prefix = 'cmpl'

  def __init__(self, asked: CompletionRequest, tokenizer: Tokenizer, model: str):
    self.asked, self.tokenizer = asked, tokenizer
    self._model = model
    self._id, self._created = f'{self.prefix}-{secrets.token_hex(12)}', int(time.time())

  def whole(self, answers: Sequence[Completion]) -> JsonObject:
    """Returns the response with all answers."""
    choices = [self.choice(i, answer) for i, answer in enumerate(answers)]
    return self._response(self.kind, choices, self.usage(answers))

  def opening(self, index: int) -> JsonObject | None:
    """Returns the first chunk of a stream for one of the answers."""
    if not self.asked.echo and not self.asked.ids:
      return None
    text = self._prompt_text(index) if self.asked.echo else ''
    choice = dict(index=index, text=text, logprobs=None, finish_reason=None)
    return self.chunk([choice | self._prompt_ids(index)])

  def piece(self, index: int, parts: Sequence[str], answer: Completion | None) -> JsonObject | None:
    """Returns a chunk of a stream; None if there is nothing new.

    Args:
      index: The number of the answer.
      parts: Its new parts.
      answer: The whole answer, with its last piece.
    """
    text = shown(parts)
    if not text and answer is None:
      return None
    finish = None if answer is None else finish_reason(answer)
    # log-probabilities belong to tokens, and pieces to text: they come with the last one
    told = None if answer is None else self._logprobs(index, answer, with_prompt=False)
    choice = dict(index=index, text=text, logprobs=told, finish_reason=finish)
    return self.chunk([choice | self._answer_ids(answer)])

  def last(self, answers: Sequence[Completion]) -> JsonObject:
    """Returns the chunk with the token counts."""
    return self._response(self.chunk_kind, [], self.usage(answers))

  def choice(self, index: int, answer: Completion) -> dict[str, Any]:
    """Returns one of the answers."""
    text = answer.text
    if self.asked.echo:
      text = self._prompt_text(index) + text
    logprobs = self._logprobs(index, answer, with_prompt=self.asked.echo)
    found = dict(index=index, text=text, logprobs=logprobs, finish_reason=finish_reason(answer))
    return found | self._prompt_ids(index) | self._answer_ids(answer)

  def usage(self, answers: Sequence[Completion]) -> JsonObject:
    """Returns the token counts."""
    prompt = sum(map(len, self.asked.prompts))
    new = sum(len(answer.scores) for answer in answers)
    shared = sum(answer.shared for answer in answers[:: self.asked.n])
    return dict(
      prompt_tokens=prompt, completion_tokens=new, total_tokens=prompt + new,
      prompt_tokens_details=dict(cached_tokens=shared),
    )  # fmt: skip

  def chunk(self, choices: Choices) -> JsonObject:
    """Returns a chunk of a stream."""
    return self._response(self.chunk_kind, choices, None)

  def _response(self, kind: str, choices: Choices, usage: JsonObject | None) -> JsonObject:
    found: dict[str, Any] = dict(
      id=self._id, object=kind, created=self._created, model=self._model, choices=choices
    )
    return found if usage is None else found | {'usage': usage}

  def _logprobs(self, index: int, answer: Completion, with_prompt: bool) -> JsonObject | None:
    if self.asked.logprobs is None:
      return None
    ids = [*answer.ids]
    known: list[TokenScore | None] = [*answer.scores]  # with the token that ended it, as in vLLM
    if answer.end is not None:
      ids.append(answer.end)
    before = self._prompt(index)
    if with_prompt:
      ids, before = [*before, *ids], []
      known = [*answer.prompt_scores, *known]
    likeliest = [[] if score is None else [*score.top] for score in known]
    told = spelled(self.tokenizer, ids, before, likeliest)
    offsets, at = [], 0
    for piece, _ in told:
      offsets.append(at)
      at += 0 if piece.data is None else len(piece.text)
    tops = [None if s is None else _by_text(s, o) for s, (_, o) in zip(known, told, strict=True)]
    return dict(
      tokens=[piece.text for piece, _ in told],
      token_logprobs=[None if score is None else score.log_prob for score in known],
      top_logprobs=tops if self.asked.logprobs else None,
      text_offset=offsets,
    )

  def _prompt(self, index: int) -> list[int]:
    return self.asked.prompts[index // self.asked.n]

  def _prompt_ids(self, index: int) -> JsonObject:
    """Returns a prompt's ids, if the request wants them; the field is vLLM's, as the next one."""
    return {'prompt_token_ids': self._prompt(index)} if self.asked.ids else {}

  def _answer_ids(self, answer: Completion | None) -> JsonObject:
    """Returns the ids of a complete answer, with the token that ended it, if they are wanted."""
    if answer is None or not self.asked.ids:
      return {}
    return {'token_ids': answer.ids + ([] if answer.end is None else [answer.end])}

  def _prompt_text(self, index: int) -> str:
    """Returns the text of a prompt, without a character that the answer may complete."""
    spelling = Spelling(self.tokenizer)
    pieces = [spelling.add(token) for token in self._prompt(index)]
    return ''.join(piece.text for piece in pieces if piece.data is not None)


class ChatReply(Reply):
  """The response to a request of a chat."""

  kind = 'chat.completion'
  chunk_kind = 'chat.completion.chunk'
  prefix = 'chatcmpl'

  def __init__(self, asked: CompletionRequest, tokenizer: Tokenizer, model: str):
    super().__init__(asked, tokenizer, model)
    self._speeches: dict[int, Speech] = {}

  def whole(self, answers: Sequence[Completion]) -> JsonObject:
    return super().whole(answers) | self._prompt_ids(0)

  def opening(self, index: int) -> JsonObject:
    delta = dict(role='assistant', content='')
    choice = dict(index=index, delta=delta, logprobs=None, finish_reason=None)
    return self.chunk([choice]) | self._prompt_ids(index)

  def piece(self, index: int, parts: Sequence[str], answer: Completion | None) -> JsonObject | None:
    said = self._speech(index).add(parts, answer is not None)
    delta: dict[str, Any] = {}
    if said.reasoning:
      delta['reasoning_content'] = said.reasoning
    if said.content:
      delta['content'] = said.content
    if said.calls:
      delta['tool_calls'] = [{'index': i, **call} for i, call in enumerate(said.calls)]
    if answer is None and not delta:
      return None
    told = None if answer is None else self._logprobs(index, answer, with_prompt=False)
    finish = None if answer is None else _finish(answer, said)
    choice = dict(index=index, delta=delta, logprobs=told, finish_reason=finish)
    return self.chunk([choice | self._answer_ids(answer)])

  def choice(self, index: int, answer: Completion) -> dict[str, Any]:
    said = self._speech(index).add(answer.parts, True)
    message: dict[str, Any] = dict(
      role='assistant', content=said.content or (None if said.calls else '')
    )
    if said.reasoning:
      message['reasoning_content'] = said.reasoning
    if said.calls:
      message['tool_calls'] = said.calls
    return dict(
      index=index, message=message, logprobs=self._logprobs(index, answer, with_prompt=False),
      finish_reason=_finish(answer, said), **self._answer_ids(answer),
    )  # fmt: skip

  def _speech(self, index: int) -> Speech:
    if index not in self._speeches:
      self._speeches[index] = Speech(self.asked.thinking, self.asked.tools)
    return self._speeches[index]

  def _logprobs(self, index: int, answer: Completion, with_prompt: bool) -> JsonObject | None:
    if self.asked.logprobs is None:
      return None
    likeliest = [score.top for score in answer.scores]
    told = spelled(self.tokenizer, answer.ids, self._prompt(index), likeliest)
    content = [
      {
        **_token(piece, score.log_prob),
        'top_logprobs': [_token(*each) for each in zip(others, score.top.values(), strict=True)],
      }
      for (piece, others), score in zip(told, answer.scores, strict=False)
    ]
    return dict(content=content)


def _token(piece: SpelledToken, log_prob: float) -> dict[str, Any]:
  """Returns a token in OpenAI's form; the bytes of all tokens make up the text."""
  data = None if piece.data is None else [*piece.data]
  return dict(token=piece.text, logprob=log_prob, bytes=data)


def _by_text(score: TokenScore, pieces: Sequence[SpelledToken]) -> dict[str, float]:
  """Returns the most likely tokens by text; of several with one text, the most likely."""
  found: dict[str, float] = {}
  for piece, log_prob in zip(pieces, score.top.values(), strict=True):
    found.setdefault(piece.text, log_prob)
  return found


def _finish(answer: Completion, said: Said) -> str:
  return 'tool_calls' if said.calls else finish_reason(answer)


def finish_reason(answer: Completion) -> str:
  """Returns OpenAI's word for why an answer ended."""
  return 'length' if answer.finish == 'length' else 'stop'
