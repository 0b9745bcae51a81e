"""Zero-shot evaluation: scores or continues each example once."""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np

from paxlite.config.generation import Sampling
from paxlite.core.errors import UserError, located
from paxlite.core.json_text import JsonObject
from paxlite.core.trees import PyTree
from paxlite.core.wording import amount
from paxlite.eval.answer_writer import AnswerWriter
from paxlite.eval.contexts import Contexts
from paxlite.eval.eval_tasks import TaskExample, TaskSpec, ZeroShotTask, matched
from paxlite.eval.scoring import Continuation, Score, Scorer
from paxlite.generation.inference import TextModel
from paxlite.generation.request import Completion
from paxlite.generation.spelling import Mark

_TEMPERATURE = 0.8  # of several answers to a prompt
TooLong = Literal['truncate', 'error']
Found = tuple[dict[str, 'Metric'], list[JsonObject]]  # metrics, and findings of each example


@dataclasses.dataclass(frozen=True)
class Metric:
  """A metric of all examples and its standard error, which is 0 for a single example."""

  value: float
  stderr: float


@dataclasses.dataclass(frozen=True)
class Result:
  """The result of one task."""

  metrics: dict[str, Metric]  # metrics by name
  # findings of each example, such as its log-likelihood and whether it is right
  examples: list[JsonObject]
  seconds: float  # duration of the evaluation
  unreadable: int  # number of records that were left out

  @property
  def values(self) -> dict[str, float]:
    """The metrics and their standard errors, by name."""
    errors = {f'{name}_stderr': metric.stderr for name, metric in self.metrics.items()}
    return {name: metric.value for name, metric in self.metrics.items()} | errors

  @property
  def truncated(self) -> int:
    """Number of examples with texts cut at the beginning, because they were too long."""
    return sum(example['truncated'] for example in self.examples)

  def line(self) -> str:
    metrics = [f'{k} {m.value:.4f} ± {m.stderr:.4f}' for k, m in self.metrics.items()]
    size = f'{amount(len(self.examples), "example")} in {self.seconds:.1f} s'
    return '  '.join([*metrics, size, *self.warnings])

  @property
  def warnings(self) -> list[str]:
    """Warnings about prompts that were cut off and about records that were left out."""
    found = []
    if self.truncated:
      found.append(
        f"{amount(self.truncated, 'prompt')} longer than the model's context, cut at the beginning"
      )
    if self.unreadable:
      found.append(f'{self.unreadable:,} unreadable records left out')
    return found

  def table(self, name: str) -> str:
    n = len(self.examples)
    lines = [f'{name}: {amount(n, "example")}, {n / self.seconds:,.1f} a second']
    lines += [f'  {k:22}{m.value:10.4f} ± {m.stderr:.4f}' for k, m in self.metrics.items()]
    lines += [f'  {warning}' for warning in self.warnings]
    return '\n'.join(lines)


class ZeroShot:
  """Evaluates a model on tasks.

  Args:
    batch_tokens: Approximate number of tokens in a batch.
    too_long: What happens to a text that is longer than the model takes: 'truncate' cuts off its
      beginning, 'error' raises UserError.
  """

  def __init__(
    self, inference: TextModel, batch_tokens: int = 4096, too_long: TooLong = 'truncate'
  ):
    self._inference = inference
    self._write = AnswerWriter(inference)
    self._too_long = too_long
    self._contexts = contexts_of(inference)
    e = inference.experiment
    self._score = Scorer(
      inference.model, inference.params, inference.max_length, batch_tokens, inference.mesh, e.rules
    )

  def set_params(self, params: PyTree | None) -> None:
    """Sets the parameters to evaluate; None frees them."""
    self._score.params = params
    self._write.set_params(params)

  def __call__(
    self, task: ZeroShotTask, report: Callable[[int, int], None] = lambda done, total: None
  ) -> Result:
    """Evaluates a task.

    `report` is called with the number of rows or prompts done, and the number of all of them.
    Raises UserError if a text is too long or gives no context (the message names the file and
    line).
    """
    started = time.perf_counter()
    if task.spec.generates:
      metrics, found = self._generated(task.spec, task.examples, report)
    else:
      asked = [self._asked(task.spec, example) for example in task.examples]
      scores = iter(self._score([c for row in asked for c in row], report))
      by_example = [[next(scores) for _ in row] for row in asked]
      metrics, found = _METRICS[task.spec.kind](task.examples, by_example)
      for entry, row in zip(found, by_example, strict=True):
        entry['truncated'] = any(s.is_truncated for s in row)
    return Result(metrics, found, time.perf_counter() - started, task.unreadable)

  def _generated(
    self, spec: TaskSpec, examples: Sequence[TaskExample], report: Callable[[int, int], None]
  ) -> Found:
    prompts = [self._prompt(spec, example) for example in examples]
    each = [prompt for prompt in prompts for _ in range(spec.repeats)]
    written = self._write(
      each, spec.max_new_tokens, spec.until, self._sampling(spec), report, spec.chat
    )
    texts = [compared_text(answer, spec.generation_pattern) for answer in written]
    count = spec.repeats
    answers = [texts[i * count : (i + 1) * count] for i in range(len(examples))]
    metrics, found = _exact_match(spec, examples, answers)
    most = self._max_len - spec.max_new_tokens
    for entry, prompt in zip(found, prompts, strict=True):
      entry['truncated'] = len(prompt) > most
    return metrics, found

  def _sampling(self, spec: TaskSpec) -> Sampling:
    stated = self._inference.settings.sampling
    if spec.temperature is None and (spec.repeats == 1 or stated.temperature):
      return stated
    temperature = _TEMPERATURE if spec.temperature is None else spec.temperature
    return dataclasses.replace(stated, temperature=temperature)

  def _asked(self, spec: TaskSpec, example: TaskExample) -> list[Continuation]:
    with located(example.place):
      contexts = {prompt: self._context(spec, prompt, example.shots) for prompt in example.prompts}
      asked = [self._contexts.pair(*contexts[prompt], after) for prompt, after in example.asked]
      for c in asked:
        self._check(len(c.context) + len(c.continuation) - 1, 0)
        self._check(len(c.continuation), 0, can_be_cut=False)
      return asked

  def _context(
    self, spec: TaskSpec, prompt: str, shots: Sequence[tuple[str, str]]
  ) -> tuple[str, bool | None]:
    """Returns the text that the model reads, and whether it begins as documents do.

    A chat template writes all of a chat, so that nothing is put before it, as in training.
    """
    if not spec.chat:
      return spec.document(prompt, shots), None
    return self._inference.encoding.chat_text(spec.messages(prompt, shots), True), False

  def _prompt(self, spec: TaskSpec, example: TaskExample) -> list[int]:
    with located(example.place):
      ids = self._contexts.encode(*self._context(spec, example.prompts[0], example.shots))
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
  inference: TextModel, adds_bos: bool | None = None, prefix: int | None = None
) -> Contexts:
  """Returns the encoder of contexts and continuations for a model.

  Args:
    adds_bos: Whether a text begins with BOS; None: as the model and its tokenizer say.
    prefix: The id that stands for an empty context; None: the start of a text, BOS or EOS.
  """
  encoding = inference.encoding
  start, bos = encoding.start_ids, inference.tokenizer.special_id('bos_token')
  if adds_bos is not None:
    start = [bos] if adds_bos and bos is not None else []
  stated = [] if inference.experiment.START_ID is None else start
  found = [*stated, encoding.stand_in] if prefix is None else [prefix]
  return Contexts(encoding, start, found[0])


def _cloze(examples: Sequence[TaskExample], scores: Sequence[Sequence[Score]]) -> Found:
  right = [s.is_greedy for (s,) in scores]
  nats = np.array([-s.log_likelihood for (s,) in scores])
  words = np.array([max(1, len(e.target.split())) for e in examples])
  per_word = _ratio(nats, words)
  perplexity = math.exp(min(per_word.value, 700.0))
  return {
    'acc': _mean(right),
    # exp multiplies the standard error by its derivative.
    'perplexity_per_word': Metric(perplexity, perplexity * per_word.stderr),
  }, [dict(log_likelihood=-float(n), right=bool(r)) for n, r in zip(nats, right, strict=True)]


def _text(examples: Sequence[TaskExample], scores: Sequence[Sequence[Score]]) -> Found:
  bits = np.array([-s.log_likelihood for (s,) in scores]) / math.log(2)
  sizes = np.array([len(e.target.encode()) for e in examples])
  found = [dict(bits=float(b), bytes=int(n)) for b, n in zip(bits, sizes, strict=True)]
  return {'bits_per_byte': _ratio(bits, sizes)}, found


def _ratio(values: np.ndarray, sizes: np.ndarray) -> Metric:
  """Returns a ratio of sums; its standard error comes from the residuals."""
  ratio = values.sum() / sizes.sum()
  return Metric(float(ratio), _mean((values - ratio * sizes) / sizes.mean()).stderr)


def _multiple_choice(examples: Sequence[TaskExample], scores: Sequence[Sequence[Score]]) -> Found:
  raw, normalized, found = [], [], []
  for example, row in zip(examples, scores, strict=True):
    likelihoods = np.array([s.log_likelihood for s in row])
    lengths = np.array([max(1, len(c.strip())) for c in example.choices])
    raw.append(int(likelihoods.argmax()) == example.gold)
    normalized.append(int((likelihoods / lengths).argmax()) == example.gold)
    found.append(dict(log_likelihoods=likelihoods.tolist(), gold=example.gold, right=raw[-1]))
  return {'acc': _mean(raw), 'acc_norm': _mean(normalized)}, found


_METRICS = {'cloze': _cloze, 'text': _text, 'multiple_choice': _multiple_choice}


def compared_text(answer: Completion, pattern: str) -> str:
  """Returns the text of an answer, with those special tokens alone that a pattern names."""
  named = pattern.replace('\\', '')  # without escapes, as in <\|end\|>
  return ''.join(x for x in answer.parts if not isinstance(x, Mark) or x in named)


def _exact_match(
  spec: TaskSpec, examples: Sequence[TaskExample], answers: Sequence[Sequence[str]]
) -> Found:
  """Each example counts as the share of its answers that are right."""
  right, found = [], []
  for example, texts in zip(examples, answers, strict=True):
    given = [matched(text, spec.generation_pattern) for text in texts]
    target = matched(example.target, spec.target_pattern)
    are_right = [answer is not None and answer == target for answer in given]
    right.append(float(np.mean(are_right)))
    found.append(
      dict(prediction=texts[0], answer=given[0], target=target, right=are_right[0])
      | (dict(predictions=list(texts), are_right=are_right) if len(texts) > 1 else {})
    )
  return {'exact_match': _mean(right)}, found


def _mean(values: Sequence[float] | np.ndarray) -> Metric:
  x = np.asarray(values, np.float64)
  stderr = x.std(ddof=1) / math.sqrt(len(x)) if len(x) > 1 else 0.0
  return Metric(float(x.mean()), float(stderr))


def as_json(results: Mapping[str, Result]) -> str:
  """Returns the results as JSON."""
  found = {
    name: {
      'num_examples': len(result.examples), 'seconds': round(result.seconds, 3),
      'truncated': result.truncated, 'unreadable': result.unreadable,
      'metrics': {k: dataclasses.asdict(m) for k, m in result.metrics.items()},
    }
    for name, result in results.items()
  }  # fmt: skip
  return json.dumps(found, indent=2)
