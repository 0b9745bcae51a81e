"""Completions of a server with the API of OpenAI, as vLLM and llama.cpp have it."""

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject, parsed

_SECONDS = 300
_MOST_BYTES = 1 << 24


class CompletionServer:
  """A server; its errors are one clear line.

  Raises UserError if it cannot be reached, or has no model.

  Args:
    url: Its address, with or without /v1.
  """

  def __init__(self, url: str):
    self.url = url.rstrip('/').removesuffix('/v1')
    models = self._request('/v1/models', None).get('data')
    if not isinstance(models, list) or not models or not isinstance(models[0], Mapping):
      raise UserError(f'{self.url}/v1/models lists no model')
    self.model = str(models[0].get('id'))

  def completion(self, prompt: str, steps: int, top: int) -> JsonObject:
    """Returns the most likely continuation of a prompt.

    Its `tokens` are texts, its `tops` the log-probabilities of the likeliest tokens of each step by
    their texts, and `prompt_tokens` is the number of the prompt's tokens, or None. Raises UserError
    if the server gives no log-probabilities.
    """
    asked = {'model': self.model, 'prompt': prompt, 'max_tokens': steps, 'temperature': 0}
    found = self._request('/v1/completions', asked | {'logprobs': top})
    try:
      choice = found['choices'][0]
      told = choice['logprobs']
      tokens, tops = list(told['tokens']), [dict(top) for top in told['top_logprobs']]
      for i, token in enumerate(tokens):  # a server may leave the chosen token out
        tops[i].setdefault(token, float(told['token_logprobs'][i]))
      count = (found.get('usage') or {}).get('prompt_tokens')
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
      raise UserError(
        f'{self.url}/v1/completions returns no log-probabilities: the server must return logprobs '
        '(llama.cpp: --logits_all true)'
      ) from None
    return {'tokens': tokens, 'tops': tops, 'prompt_tokens': count}

  def _request(self, path: str, body: Mapping[str, Any] | None) -> JsonObject:
    data = None if body is None else json.dumps(body).encode()
    headers = {'Content-Type': 'application/json'}
    request = urllib.request.Request(f'{self.url}{path}', data, headers)
    try:
      with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
        found = parsed(answer.read(_MOST_BYTES))
    except (urllib.error.URLError, OSError, ValueError) as e:
      reason = getattr(e, 'reason', None) or e
      raise UserError(
        f'{self.url}{path} does not answer as an OpenAI API server ({reason})'
      ) from None
    if not isinstance(found, dict):
      raise UserError(f'{self.url}{path} does not answer with a JSON object')
    return found
