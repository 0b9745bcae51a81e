"""The proof of an export: the model's identity, and its outputs for a few prompts.

proof.json lies beside the weights. Whoever has it can check any other form of the model: the facts
(config, tensors, tokenizer, chat template) where that form states them, and the log-probabilities
of the prompts where it only answers.
"""

import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from paxlite.core.errors import UserError, listed
from paxlite.core.json_text import Json, JsonObject
from paxlite.files.json_files import read_object

FILE = 'proof.json'
VERSION = 1
# The largest difference of log-probabilities that the rounding of weights explains, by their type.
# The differences of SmolLM2-135M are 0, 0.01, 0.31 and 0.66 for f32, f16, q8_0 and q4_k; what
# computes in bfloat16, or rounds activations too, as llama.cpp does for q8_0, differs more.
TOLERANCES = {'f32': 1e-3, 'f16': 0.05, 'bf16': 0.4, 'q8_0': 0.6, 'q4_k': 1.5}
# Tokens below this probability say little, and differ most. The likeliest one is always compared.
_RARE = math.log(0.01)


class ReplyComparison(NamedTuple):
  """The difference between a reply and the proof's."""

  prompt: str  # the text of the prompt
  same_ids: bool | None  # whether the prompt has the same ids; None: it is not known
  # the first step at which another token is the likeliest; None: there is none
  differs_at: int | None
  # by how much the proof's token was likelier there than the next, in log-probability
  margin: float
  # the largest difference of log-probabilities; None: there are none to compare
  largest: float | None

  @property
  def line(self) -> str:
    ids = {True: 'equal', False: 'different', None: 'not known'}[self.same_ids]
    at = self.differs_at
    text = 'equal' if at is None else f'different from token {at + 1} (margin {self.margin:.2g})'
    largest = 'none' if self.largest is None else f'{self.largest:.3g}'
    return f'{self.prompt!r}: ids {ids}, text {text}, largest difference {largest}'

  def problem(self, tolerance: float) -> str | None:
    """Returns what shows that another model has replied, or None."""
    if self.same_ids is False:
      return f'{self.prompt!r} has other token ids: the tokenizer differs'
    if self.largest is not None and not self.largest <= tolerance:
      return (
        f'the log-probabilities of {self.prompt!r} differ by {self.largest:.3g}, but rounding '
        f"explains only {tolerance:g}: the weights are another model's"
      )
    # two tokens may change places if each of them moves by the tolerance
    if self.differs_at is not None and self.margin > 2 * tolerance:
      return f"{self.prompt!r} is continued differently: the weights are another model's"
    return None


class Facts(NamedTuple):
  """The comparison of a model's facts with a proof's, as texts."""

  proven: list[str]  # what is as the proof says
  problems: list[str]  # what is not
  unproven: list[str]  # what the model does not say, or says in another form
  has_other_config: bool  # whether a value of the config differs


def read_proof(path: pathlib.Path) -> JsonObject:
  """Returns the contents of proof.json.

  Raises UserError if the file is missing, is none, or is of a later version.
  """
  if not path.is_file():
    raise UserError(
      f'{path} is missing: --proof=FILE names a proof, and `paxlite export --proof` writes it'
    )
  found = read_object(path)
  if found.get('proof') != VERSION:
    raise UserError(f'{path} is not a proof of version {VERSION}, the one that this paxlite reads')
  if not _is_whole(found):
    raise UserError(f'{path} is damaged: export the model again')
  return found


def _is_whole(proof: JsonObject) -> bool:
  """Returns whether a proof has what is read of it."""
  try:
    replies, facts = proof['replies'], proof['facts']
    tokens, named = facts['tokenizer'], (facts['tensors'], facts['config'])
    whole = all(isinstance(value, dict) for value in (tokens, *named))
    whole &= facts['type'] in TOLERANCES and isinstance(proof['model'], str)
    whole &= {'kind', 'tokens', 'crc32'} <= tokens.keys()
    whole &= {'format', 'chat_template', 'start_ids', 'eos_ids'} <= facts.keys()
    return bool(replies) and whole and all(_is_reply(reply) for reply in replies)
  except (KeyError, TypeError, ValueError, AttributeError):
    return False


def _is_reply(reply: JsonObject) -> bool:
  """Returns whether a reply has the ids and numbers that are read; may raise TypeError."""
  ids, continuation = reply['ids'], reply['continuation']
  tops, numbers = reply['top'], list(reply['log_probabilities'])
  named = [token for top in tops for token, _ in top]
  numbers += [number for top in tops for _, number in top]
  return (
    len(ids) == len(reply['log_probabilities']) + 1 > 1
    and len(tops) == len(continuation) == len(reply['tokens'])
    and all(len(top) > 1 for top in tops)
    and all(type(token) is int and token >= 0 for token in (*ids, *continuation, *named))
    and all(type(number) is float for number in numbers)
    and all(isinstance(text, str) for text in (reply['text'], *reply['tokens']))
  )


def worst(found: Sequence[ReplyComparison], tolerance: float) -> list[str]:
  """Returns the largest difference that proves another model replied, or nothing."""
  wrong = [c for c in found if c.problem(tolerance) is not None]
  wrong.sort(key=lambda c: (c.same_ids is not False, -(c.largest or 0)))
  return [str(wrong[0].problem(tolerance))] if wrong else []


def compared_facts(expected: Mapping[str, Any], found: Mapping[str, Any]) -> Facts:
  """Compares what identifies two models."""
  config, theirs = expected['config'], found['config']
  changed = [
    f'{key} is {theirs[key]!r}, but {value!r} in the proof'
    for key, value in config.items()
    if key in theirs and theirs[key] != value
  ]
  problems = [f'the config has changed: {text}' for text in changed]
  facts = Facts([], problems, [*found.get('unproven', ())], bool(changed))
  if not changed:
    facts.proven.append(f'config ({len(config)} values)')
  _compare_tensors(expected, found, facts)
  if found['tokenizer'] is None:
    facts.unproven.append('the tokenizer, which it does not have')
    return facts
  tokens, kind = expected['tokenizer'], found['tokenizer']['kind']
  if tokens['kind'] != kind:
    facts.unproven.append(
      f'the vocabulary, which it has as {kind} and the proof as {tokens["kind"]}'
    )
  elif tokens != found['tokenizer']:
    facts.problems.append(
      f'the tokenizer has changed: its {found["tokenizer"]["tokens"]:,} tokens, or their merges, '
      f'are not the {tokens["tokens"]:,} of the proof'
    )
  else:
    facts.proven.append(f'tokenizer ({tokens["tokens"]:,} tokens)')
  names = {
    'chat_template': 'chat template',
    'start_ids': 'start of texts',
    # some formats have a place for the end of an answer too; older proofs do not name it
    'chat_eos_ids' if 'chat_eos_ids' in expected else 'eos_ids': 'end of texts',
  }
  for name, what in names.items():
    is_set = what == 'end of texts'  # any one of them ends a text, in whichever order
    if expected[name] == found[name] or (is_set and {*expected[name]} == {*found[name]}):
      facts.proven.append(what)
    else:
      ids = '' if name == 'chat_template' else f': {found[name]}, and {expected[name]} in the proof'
      facts.problems.append(f'the {what} has changed{ids}')
  return facts


def _compare_tensors(expected: Mapping[str, Any], found: Mapping[str, Any], facts: Facts) -> None:
  form = lambda one: f'{one["format"]} {one["type"]}'
  ours, theirs = expected['tensors'], found['tensors']
  if form(expected) != form(found):
    facts.unproven.append(
      f'the bits of the weights, which it has as {form(found)} and the proof as {form(expected)}'
    )
    return
  missing = sorted(ours.keys() ^ theirs.keys())
  if missing:
    where = 'in the proof alone' if missing[0] in ours else 'not in the proof'
    facts.problems.append(f'the tensors have changed: {missing[0]} is {where}')
  changed = [name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name]]
  if changed:
    facts.problems.append(f'weights have changed: {listed(sorted(changed))}')
  if not missing and not changed:
    facts.proven.append(f'all bits of {len(ours)} tensors')


def compared_reply(
  expected: JsonObject, found: JsonObject, ids: Sequence[int] | None
) -> ReplyComparison:
  """Compares the reply of a model, for the continuation of a proof, with the proof's.

  Args:
    expected: The reply in the proof.
    found: The reply of the model.
    ids: The ids that the model's own tokenizer gives the prompt; None: it is not at hand.
  """
  of_prompt = zip(expected['log_probabilities'], found['log_probabilities'], strict=True)
  pairs = [(p, q) for p, q in of_prompt if p >= _RARE]
  for top, other in zip(expected['top'], found['top'], strict=True):
    both = zip(top, other, strict=True)
    pairs += [(p, q) for i, ((_, p), (_, q)) in enumerate(both) if i == 0 or p >= _RARE]
  same = None if ids is None else list(ids) == expected['ids']
  return _comparison(expected, same, found['likeliest'], expected['continuation'], pairs)


def compared_completion(expected: JsonObject, found: JsonObject) -> ReplyComparison:
  """Compares what a server has completed with the reply of a proof, as far as texts are equal.

  Args:
    expected: The reply in the proof.
    found: The tokens of the completion, as texts, their tops, and the number of the prompt's
      tokens; see completion_server.
  """
  spelled, pairs = expected['tokens'], []
  for top, own, own_top, token in zip(
    expected['top'], found['tokens'], found['tops'], spelled, strict=False
  ):
    pairs.append((top[0][1], own_top.get(token)))
    if own != token:
      break
  known = [(p, q) for p, q in pairs if q is not None]
  count = found['prompt_tokens']
  same = None if count is None else count == len(expected['ids'])
  return _comparison(expected, same, found['tokens'], spelled[: len(found['tokens'])], known)


def _comparison(
  expected: JsonObject,
  same_ids: bool | None,
  likeliest: Sequence[Json],
  continuation: Sequence[Json],
  pairs: Sequence[tuple[float, float]],
) -> ReplyComparison:
  steps = enumerate(zip(continuation, likeliest, strict=False))
  at = next((i for i, (ours, theirs) in steps if ours != theirs), None)
  margin = 0.0
  if at is not None:
    (_, first), (_, second) = expected['top'][at][:2]
    margin = first - second
  differences = [abs(p - q) for p, q in pairs]
  largest = float(np.max(differences)) if differences else None  # NaN, if one of them is
  return ReplyComparison(expected['text'], same_ids, at, margin, largest)
