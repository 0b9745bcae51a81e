"""Zero-shot evaluation: each example is scored or continued, and counts once."""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np

from paxlite.core.errors import UserError, located
from paxlite.core.json_text import JsonObject
from paxlite.eval.contexts import Contexts
from paxlite.eval.eval_tasks import TaskExample, TaskSpec, ZeroShotTask, matched
from paxlite.eval.inference import Inference
from paxlite.eval.scoring import Continuation, Score, Scorer
from paxlite.generation.request import Request
from paxlite.generation.sampling import Sampling

TooLong = Literal['truncate', 'error']
Found = tuple[dict[str, 'Metric'], list[JsonObject]]  # metrics, and findings of each example


@dataclasses.dataclass(frozen=True)
class Metric:
  """A metric of all examples and its standard error, which is 0 for a single example."""

  value: float
  stderr: float


@dataclasses.dataclass(frozen=True)
class Result:
  """The result of one task.

  Attributes:
    metrics: Metrics by name.
    examples: Findings of each example, such as its log-likelihood and whether it is right.
    seconds: Duration of the evaluation.
    unreadable: Number of records that were left out.
  """

  metrics: dict[str, Metric]
  examples: list[JsonObject]
  seconds: float
  unreadable: int

  @property
  def truncated(self) -> int:
    """Number of examples whose text was too long for the model and lost its beginning."""
    return sum(example['truncated'] for example in self.examples)

  def line(self) -> str:
    metrics = [f'{k} {m.value:.4f} ± {m.stderr:.4f}' for k, m in self.metrics.items()]
    size = f'{len(self.examples):,} examples in {self.seconds:.1f} s'
    return '  '.join([*metrics, size, *self.warnings])

  @property
  def warnings(self) -> list[str]:
    """Warnings about prompts that were cut off and about records that were left out."""
    found = []
    if self.truncated:
      found.append(f'{self.truncated:,} prompts longer than the model takes lost their beginning')
    if self.unreadable:
      found.append(f'{self.unreadable:,} unreadable records left out')
    return found

  def table(self, name: str) -> str:
    n = len(self.examples)
    lines = [f'{name}: {n:,} examples, {n / self.seconds:,.1f} a second']
    lines += [f'  {k:22}{m.value:10.4f} ± {m.stderr:.4f}' for k, m in self.metrics.items()]
    lines += [f'  {warning}' for warning in self.warnings]
    return '\n'.join(lines)


class ZeroShot:
  """Evaluates a model on tasks.

  Args:
    inference: The model.
    batch_tokens: Approximate number of tokens in a batch.
    too_long: What happens to a text that is longer than the model takes: 'truncate' cuts off its
      beginning, 'error' raises UserError.
  """

  def __init__(
    self, inference: Inference, batch_tokens: int = 4096, too_long: TooLong = 'truncate'
  ):
    self._inference = inference
    self._too_long = too_long
    self._contexts = contexts_of(inference)
    e = inference.experiment
    self._score = Scorer(
      inference.model, inference.params, inference.max_length, batch_tokens, inference.mesh, e.rules
    )

  def __call__(
    self, task: ZeroShotTask, report: Callable[[int, int], None] = lambda done, total: None
  ) -> Result:
    """Evaluates a task.

    `report` is called with the number of rows or prompts done, and the number of all of them.

    Raises:
      UserError: A text is too long or gives no context (the message names the file and line).
    """
    started = time.perf_counter()
    if task.spec.kind == 'generate':
      prompts = [self._prompt(task.spec, example) for example in task.examples]
      metrics, found = _generated(task.spec, task.examples, prompts, self._inference, report)
    else:
      asked = [self._asked(task.spec, example) for example in task.examples]
      scores = iter(self._score([c for row in asked for c in row], report))
      by_example = [[next(scores) for _ in row] for row in asked]
      of_kind = _cloze if task.spec.kind == 'cloze' else _multiple_choice
      metrics, found = of_kind(task.examples, by_example)
      for entry, row in zip(found, by_example, strict=True):
        entry['truncated'] = any(s.is_truncated for s in row)
    return Result(metrics, found, time.perf_counter() - started, task.unreadable)

  def _asked(self, spec: TaskSpec, example: TaskExample) -> list[Continuation]:
    with located(example.place):
      contexts = {prompt: self._context(spec, prompt) for prompt in example.prompts}
      asked = [self._contexts.pair(*contexts[prompt], after) for prompt, after in example.asked]
      for c in asked:
        self._check(len(c.context) + len(c.continuation) - 1, 0)
        self._check(len(c.continuation), 0, can_be_cut=False)
      return asked

  def _context(self, spec: TaskSpec, prompt: str) -> tuple[str, bool | None]:
    """Returns the text that the model reads, and whether it begins as documents do.

    A chat template writes all of a chat, so that nothing is put before it, as in training.
    """
    if not spec.chat:
      return prompt, None
    return self._inference.encoding.chat_text(spec.messages(prompt), True), False

  def _prompt(self, spec: TaskSpec, example: TaskExample) -> list[int]:
    with located(example.place):
      ids = self._contexts.encode(*self._context(spec, example.prompts[0]))
      if not ids:
        raise UserError('the prompt is empty, and the model has no start token')
      self._check(len(ids), spec.max_new_tokens, can_be_cut=spec.max_new_tokens < self._max_len)
    return ids

  @property
  def _max_len(self) -> int:
    return self._inference.max_length

  def _check(self, length: int, new: int, can_be_cut: bool = True) -> None:
    most = self._max_len
    if length + new > most and (self._too_long == 'error' or not can_be_cut):
      answer = f' and an answer of up to {new:,}' if new else ''
      raise UserError(f'a text of {length:,} tokens{answer} is too long: the model takes {most:,}')


def contexts_of(
  inference: Inference, adds_bos: bool | None = None, prefix: int | None = None
) -> Contexts:
  """Returns what encodes contexts and continuations for a model.

  Args:
    inference: The model.
    adds_bos: Whether a text begins with BOS; None: as the model and its tokenizer say.
    prefix: The id that stands for an empty context; None: the start of a text, BOS or EOS.
  """
  encoding, tokenizer = inference.encoding, inference.tokenizer
  start, bos = encoding.start_ids, tokenizer.special_id('bos_token')
  if adds_bos is not None:
    start = [bos] if adds_bos and bos >= 0 else []
  stated = [] if inference.experiment.START_ID is None else start
  found = [*stated, bos, tokenizer.eos_id] if prefix is None else [prefix]
  return Contexts(encoding, start, next((i for i in found if i >= 0), -1))


def _cloze(examples: Sequence[TaskExample], scores: Sequence[Sequence[Score]]) -> Found:
  right = [s.is_greedy for (s,) in scores]
  nats = np.array([-s.log_likelihood for (s,) in scores])
  words = np.array([max(1, len(e.target.split())) for e in examples])
  log_perplexity = nats.sum() / words.sum()
  perplexity = math.exp(min(log_perplexity, 700.0))
  # The standard error of a ratio of sums comes from the residuals; exp multiplies it by its
  # derivative.
  residuals = (nats - log_perplexity * words) / words.mean()
  return {
    'acc': _mean(right),
    'perplexity_per_word': Metric(perplexity, perplexity * _mean(residuals).stderr),
  }, [dict(log_likelihood=-float(n), right=bool(r)) for n, r in zip(nats, right, strict=True)]


def _multiple_choice(examples: Sequence[TaskExample], scores: Sequence[Sequence[Score]]) -> Found:
  raw, normalized, found = [], [], []
  for example, row in zip(examples, scores, strict=True):
    likelihoods = np.array([s.log_likelihood for s in row])
    lengths = np.array([max(1, len(c.strip())) for c in example.choices])
    raw.append(int(likelihoods.argmax()) == example.gold)
    normalized.append(int((likelihoods / lengths).argmax()) == example.gold)
    found.append(dict(log_likelihoods=likelihoods.tolist(), gold=example.gold, right=raw[-1]))
  return {'acc': _mean(raw), 'acc_norm': _mean(normalized)}, found


def _generated(
  spec: TaskSpec,
  examples: Sequence[TaskExample],
  prompts: Sequence[list[int]],
  inference: Inference,
  report: Callable[[int, int], None],
) -> Found:
  most = inference.max_length - spec.max_new_tokens
  truncated = [len(prompt) > most for prompt in prompts]
  answers = continued(
    inference, prompts, spec.max_new_tokens, spec.until, report=report, chat=spec.chat
  )
  right, found = [], []
  for example, text, cut in zip(examples, answers, truncated, strict=True):
    answer = matched(text, spec.generation_pattern)
    target = matched(example.target, spec.target_pattern)
    right.append(answer is not None and answer == target)
    found.append(
      dict(prediction=text, answer=answer, target=target, right=right[-1], truncated=cut)
    )
  return {'exact_match': _mean(right)}, found


def continued(
  inference: Inference,
  prompts: Sequence[Sequence[int]],
  max_new_tokens: int,
  until: Sequence[str] = (),
  sampling: Sampling | None = None,
  report: Callable[[int, int], None] = lambda done, total: None,
  chat: bool = False,
) -> list[str]:
  """Returns the text that the model writes after each prompt, up to one of `until`.

  Args:
    inference: The model.
    prompts: Token ids of the prompts. A prompt that leaves no room loses its beginning.
    max_new_tokens: Largest number of new tokens for each prompt.
    until: Strings that end the generated text.
    sampling: How tokens are sampled; None: as the experiment says.
    report: Called with the number of prompts done and the number of all prompts.
    chat: Whether the prompts are those of a chat; see Inference.ends.

  Raises:
    UserError: The new tokens leave no room for a prompt.
  """
  room = inference.max_length - max_new_tokens
  if room < 1:
    raise UserError(
      f'an answer of {max_new_tokens:,} new tokens leaves no room for a prompt: the model takes '
      f'{inference.max_length:,} tokens. Ask for fewer new ones'
    )
  engine = inference.engine(sampling, chat)
  requests = [
    Request(prompt[-room:], max_new_tokens, engine.sampling, sample=i, ends=engine.ends, stop=until)
    for i, prompt in enumerate(prompts)
  ]
  return [answer.text for answer in engine.generate(requests, report)]


def _mean(values: Sequence[float] | np.ndarray) -> Metric:
  x = np.asarray(values, np.float64)
  stderr = x.std(ddof=1) / math.sqrt(len(x)) if len(x) > 1 else 0.0
  return Metric(float(x.mean()), float(stderr))


def as_json(results: Mapping[str, Result]) -> str:
  """Returns the results as JSON."""
  found = {
    name: {
      'num_examples': len(result.examples),
      'seconds': round(result.seconds, 3),
      'truncated': result.truncated,
      'unreadable': result.unreadable,
      'metrics': {k: dataclasses.asdict(m) for k, m in result.metrics.items()},
    }
    for name, result in results.items()
  }
  return json.dumps(found, indent=2)
