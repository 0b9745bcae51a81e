"""Zero-shot evaluation: examples are scored or continued, and counted once each."""

import dataclasses
import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from paxlite.errors import UserError
from paxlite.eval_tasks import Example, Task, TaskSpec
from paxlite.inference import Inference
from paxlite.scoring import Continuation, Score, Scorer

Found = tuple[dict[str, 'Metric'], list[dict[str, Any]]]  # metrics, and what was found of each


@dataclasses.dataclass(frozen=True)
class Metric:
  """A mean over examples and its standard error; the latter is 0 for a single example."""

  value: float
  stderr: float


@dataclasses.dataclass(frozen=True)
class Result:
  """Of one task.

  Attributes:
    metrics: By name.
    examples: What was found of each.
    seconds: How long it took.
  """

  metrics: dict[str, Metric]
  examples: list[dict[str, Any]]
  seconds: float

  def line(self) -> str:
    metrics = [f'{k} {m.value:.4f} ± {m.stderr:.4f}' for k, m in self.metrics.items()]
    return '  '.join([*metrics, f'{len(self.examples):,} examples in {self.seconds:.1f} s'])

  def table(self, name: str) -> str:
    n = len(self.examples)
    lines = [f'{name}: {n:,} examples, {n / self.seconds:,.1f} a second']
    lines += [f'  {k:22}{m.value:10.4f} ± {m.stderr:.4f}' for k, m in self.metrics.items()]
    return '\n'.join(lines)


class ZeroShot:
  """Evaluates a model on tasks.

  Args:
    inference: The model.
    batch_tokens: Tokens of a batch, about.
  """

  def __init__(self, inference: Inference, batch_tokens: int = 4096):
    self._inference = inference
    e = inference.experiment
    self._score = Scorer(
      inference.model, inference.params, e.MAX_SEQ_LEN, batch_tokens, inference.mesh, e.rules
    )

  def __call__(
    self, task: Task, report: Callable[[int, int], None] = lambda done, total: None
  ) -> Result:
    """What came out for every example; `report` is called with what is done, and all."""
    started = time.perf_counter()
    if task.spec.kind == 'generate':
      metrics, found = _generated(task.spec, task.examples, self._inference, report)
    else:
      asked = [
        _continuation(self._inference, text, choice)
        for example in task.examples
        for text, choice in example.asked
      ]
      scores = iter(self._score(asked, report))
      by_example = [[next(scores) for _ in example.choices] for example in task.examples]
      of_kind = _cloze if task.spec.kind == 'cloze' else _multiple_choice
      metrics, found = of_kind(task.examples, by_example)
    return Result(metrics, found, time.perf_counter() - started)


def _continuation(inference: Inference, text: str, continuation: str) -> Continuation:
  """The ids of both: where a token spans the border, it belongs to the continuation."""
  whole, context = inference.encode(text + continuation), inference.encode(text)
  start = len(context)
  while start and whole[:start] != context[:start]:
    start -= 1
  start = min(start, len(whole) - 1)
  if start < 1:
    raise UserError(
      f'{text[:40]!r} is no context: the model has no start token, and there is no text'
    )
  return Continuation(whole[:start], whole[start:])


def _cloze(examples: Sequence[Example], scores: Sequence[Sequence[Score]]) -> Found:
  right = [s.is_greedy for (s,) in scores]
  nats = np.array([-s.log_likelihood for (s,) in scores])
  words = np.array([max(1, len(e.target.split())) for e in examples])
  log_perplexity = nats.sum() / words.sum()
  perplexity = math.exp(min(log_perplexity, 700.0))
  # of a ratio of sums, by the residuals; through exp by its derivative
  residuals = (nats - log_perplexity * words) / words.mean()
  return {
    'acc': _mean(right),
    'perplexity_per_word': Metric(perplexity, perplexity * _mean(residuals).stderr),
  }, [dict(log_likelihood=-float(n), right=bool(r)) for n, r in zip(nats, right, strict=True)]


def _multiple_choice(examples: Sequence[Example], scores: Sequence[Sequence[Score]]) -> Found:
  raw, normalised, found = [], [], []
  for example, row in zip(examples, scores, strict=True):
    likelihoods = np.array([s.log_likelihood for s in row])
    lengths = np.array([max(1, len(c.strip())) for c in example.choices])
    raw.append(int(likelihoods.argmax()) == example.gold)
    normalised.append(int((likelihoods / lengths).argmax()) == example.gold)
    found.append(dict(log_likelihoods=likelihoods.tolist(), gold=example.gold, right=raw[-1]))
  return {'acc': _mean(raw), 'acc_norm': _mean(normalised)}, found


def _generated(
  spec: TaskSpec,
  examples: Sequence[Example],
  inference: Inference,
  report: Callable[[int, int], None],
) -> Found:
  e = inference.experiment
  generator = inference.generator()
  prompts = [inference.encode(x.texts[0]) for x in examples]
  for prompt in prompts:
    if len(prompt) + spec.max_new_tokens > e.MAX_SEQ_LEN:
      raise UserError(
        f'a prompt of {len(prompt):,} tokens and max_new_tokens={spec.max_new_tokens} are more '
        f'than MAX_SEQ_LEN={e.MAX_SEQ_LEN:,}'
      )
  order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
  texts = [''] * len(prompts)
  size = e.DECODE_BATCH_SIZE
  for start in range(0, len(order), size):
    batch = order[start : start + size]
    padded = batch + batch[-1:] * (size - len(batch))  # one program for all
    rows = generator.generate([prompts[i] for i in padded], spec.max_new_tokens, row_ids=padded)
    for i, ids in zip(batch, rows, strict=False):
      texts[i] = _cut(inference.tokenizer.decode(ids), spec.until)
    report(start + len(batch), len(order))
  right, found = [], []
  for example, text in zip(examples, texts, strict=True):
    answer = matched(text, spec.generation_pattern)
    target = matched(example.target, spec.target_pattern)
    right.append(answer is not None and answer == target)
    found.append(dict(prediction=text, answer=answer, target=target, right=right[-1]))
  return {'exact_match': _mean(right)}, found


def _cut(text: str, until: Sequence[str]) -> str:
  ends = [text.find(u) for u in until if u in text]
  return text[: min(ends)] if ends else text


def matched(text: str, pattern: str) -> str | None:
  """The last match of a pattern (its first group, if it has one), stripped; None: there is none."""
  if not pattern:
    return text.strip()
  matches = list(re.finditer(pattern, text))
  if not matches:
    return None
  return (matches[-1][1] if matches[-1].re.groups else matches[-1][0]).strip()


def _mean(values: Sequence[Any] | np.ndarray) -> Metric:
  x = np.asarray(values, np.float64)
  stderr = x.std(ddof=1) / math.sqrt(len(x)) if len(x) > 1 else 0.0
  return Metric(float(x.mean()), float(stderr))


def as_json(results: Mapping[str, Result]) -> str:
  """Results as JSON."""
  found = {
    name: {
      'num_examples': len(result.examples),
      'seconds': round(result.seconds, 3),
      'metrics': {k: dataclasses.asdict(m) for k, m in result.metrics.items()},
    }
    for name, result in results.items()
  }
  return json.dumps(found, indent=2)
