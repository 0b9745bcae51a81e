"""Answers in the form that OpenAI's API gives them."""

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from paxlite.core.json_text import JsonObject
from paxlite.data.tokenizer import Tokenizer
from paxlite.generation.request import Answer, TokenScore
from paxlite.serving import tool_calls
from paxlite.serving.bodies import Asked

Choices = list[dict[str, Any]]


class Reply:
  """The response to one request, whole or in chunks.

  Args:
    asked: The request.
    tokenizer: The tokenizer.
    model: The name of the model.
  """

  kind = 'text_completion'
  chunk_kind = 'text_completion'
  prefix = 'cmpl'

  def __init__(self, asked: Asked, tokenizer: Tokenizer, model: str):
    self.asked, self.tokenizer = asked, tokenizer
    self._model = model
    self._id, self._created = f'{self.prefix}-{secrets.token_hex(12)}', int(time.time())

  def whole(self, answers: Sequence[Answer]) -> JsonObject:
    """Returns the response with all answers."""
    choices = [self.choice(i, answer) for i, answer in enumerate(answers)]
    return self._response(self.kind, choices, self.usage(answers))

  def opening(self, index: int) -> JsonObject | None:
    """Returns what a stream begins with for one of the answers."""
    if not self.asked.echo:
      return None
    prompt = self.tokenizer.decode(self.asked.prompts[index // self.asked.n])
    return self.chunk([dict(index=index, text=prompt, logprobs=None, finish_reason=None)])

  def piece(self, index: int, text: str, answer: Answer | None) -> JsonObject | None:
    """Returns a chunk of a stream; None if there is nothing to tell.

    Args:
      index: The number of the answer.
      text: Its new text.
      answer: The whole answer, with its last piece.
    """
    if not text and answer is None:
      return None
    finish = None if answer is None else finish_reason(answer)
    # log-probabilities belong to tokens, and pieces to text: they come with the last one
    told = None if answer is None else self._logprobs(index, answer, with_prompt=False)
    return self.chunk([dict(index=index, text=text, logprobs=told, finish_reason=finish)])

  def last(self, answers: Sequence[Answer]) -> JsonObject:
    """Returns the chunk with the numbers of tokens."""
    return self._response(self.chunk_kind, [], self.usage(answers))

  def choice(self, index: int, answer: Answer) -> dict[str, Any]:
    """Returns one of the answers."""
    text = answer.text
    if self.asked.echo:
      text = self.tokenizer.decode(self.asked.prompts[index // self.asked.n]) + text
    logprobs = self._logprobs(index, answer, with_prompt=self.asked.echo)
    return dict(index=index, text=text, logprobs=logprobs, finish_reason=finish_reason(answer))

  def usage(self, answers: Sequence[Answer]) -> JsonObject:
    """Returns the numbers of tokens."""
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

  def _logprobs(self, index: int, answer: Answer, with_prompt: bool) -> JsonObject | None:
    if self.asked.logprobs is None:
      return None
    ids = [*answer.ids]
    known: list[TokenScore | None] = [*answer.scores]  # with the token that ended it, as in vLLM
    if answer.end is not None:
      ids.append(answer.end)
    if with_prompt:
      ids = self.asked.prompts[index // self.asked.n] + ids
      known = [*answer.prompt_scores, *known]
    texts = [self.text_of(i) for i in ids]
    offsets, at = [], 0
    for text in texts:
      offsets.append(at)
      at += len(text)
    tops = [None if score is None else self._by_text(score) for score in known]
    return dict(
      tokens=texts,
      token_logprobs=[None if score is None else score.log_prob for score in known],
      top_logprobs=tops if self.asked.logprobs else None,
      text_offset=offsets,
    )

  def _by_text(self, score: TokenScore) -> dict[str, float]:
    """Returns the likeliest tokens by their texts; of several with one text, the likeliest."""
    found: dict[str, float] = {}
    for token, log_prob in score.top.items():
      found.setdefault(self.text_of(token), log_prob)
    return found

  def text_of(self, token: int) -> str:
    """Returns the text of one token."""
    return self.tokenizer.decode_marked([token])


class ChatReply(Reply):
  """The response to a request of a chat."""

  kind = 'chat.completion'
  chunk_kind = 'chat.completion.chunk'
  prefix = 'chatcmpl'

  def opening(self, index: int) -> JsonObject:
    delta = dict(role='assistant', content='')
    return self.chunk([dict(index=index, delta=delta, logprobs=None, finish_reason=None)])

  def piece(self, index: int, text: str, answer: Answer | None) -> JsonObject | None:
    if self.asked.tools:
      return self._piece_with_tools(index, answer)
    if not text and answer is None:
      return None
    delta = dict(content=text) if text else {}
    return self._delta(index, delta, answer, None if answer is None else finish_reason(answer))

  def _piece_with_tools(self, index: int, answer: Answer | None) -> JsonObject | None:
    """Returns the whole answer at its end: only then it is known what of it are calls."""
    if answer is None:
      return None
    text, calls = tool_calls.parted(answer.text)
    delta: dict[str, Any] = dict(content=text) if text else {}
    if calls:
      delta['tool_calls'] = [{'index': i, **call} for i, call in enumerate(calls)]
    return self._delta(index, delta, answer, 'tool_calls' if calls else finish_reason(answer))

  def _delta(
    self, index: int, delta: Mapping[str, Any], answer: Answer | None, finish: str | None
  ) -> JsonObject:
    told = None if answer is None else self._logprobs(index, answer, with_prompt=False)
    return self.chunk([dict(index=index, delta=delta, logprobs=told, finish_reason=finish)])

  def choice(self, index: int, answer: Answer) -> dict[str, Any]:
    text, calls = tool_calls.parted(answer.text) if self.asked.tools else (answer.text, [])
    message: dict[str, Any] = dict(role='assistant', content=text or (None if calls else ''))
    if calls:
      message['tool_calls'] = calls
    return dict(
      index=index,
      message=message,
      logprobs=self._logprobs(index, answer, with_prompt=False),
      finish_reason='tool_calls' if calls else finish_reason(answer),
    )

  def _logprobs(self, index: int, answer: Answer, with_prompt: bool) -> JsonObject | None:
    if self.asked.logprobs is None:
      return None
    content = [
      {
        **self._token(token, score.log_prob),
        'top_logprobs': [self._token(i, p) for i, p in score.top.items()],
      }
      for token, score in zip(answer.ids, answer.scores, strict=False)
    ]
    return dict(content=content)

  def _token(self, token: int, log_prob: float) -> dict[str, Any]:
    text = self.text_of(token)
    whole = '\ufffd' not in text  # a part of a character has no text of its own
    return dict(token=text, logprob=log_prob, bytes=list(text.encode()) if whole else None)


def finish_reason(answer: Answer) -> str:
  """Returns OpenAI's word for why an answer ended."""
  return 'length' if answer.finish == 'length' else 'stop'
