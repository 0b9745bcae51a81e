"""Zero-shot tasks: records of JSON lines as prompts by templates, scored or generated, and counted.

A task is a few lines of JSON, in the terms of EleutherAI's evaluation harness:

    {"kind": "multiple_choice", "files": ["piqa.jsonl"],
     "doc_to_text": "Question: {{goal}}\\nAnswer:", "doc_to_choice": ["{{sol1}}", "{{sol2}}"],
     "doc_to_target": "{{label}}"}

Templates are Jinja's, over the fields of a record. LAMBADA and BoolQ are built in.
"""

import dataclasses
import json
import math
import os
import pathlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from paxlite.errors import UserError, located
from paxlite.inference import Inference
from paxlite.inputs.files import read_object, read_records
from paxlite.scoring import Continuation, Score, Scorer

Found = tuple[dict[str, 'Metric'], list[dict[str, Any]]]  # metrics, and what was found of each

Kind = Literal['cloze', 'multiple_choice', 'generate']
_KINDS = {'cloze', 'multiple_choice', 'generate'}


@dataclasses.dataclass(frozen=True)
class TaskSpec:
  """What a task's file says.

  Attributes:
    kind: 'cloze' asks whether doc_to_target is what the model would write after doc_to_text, token
      by token; 'multiple_choice' which of doc_to_choice it finds likeliest; 'generate' what it
      writes, compared with doc_to_target.
    files: JSON lines.
    doc_to_text: What the model reads; for a choice that changes it, a list of as many templates.
    doc_to_target: cloze and generate: the right text. multiple_choice: the number of the right
      choice, or its text or label.
    doc_to_choice: The choices: a list of templates, or the name of a field with a list.
    doc_to_label: Field with the choices' labels ("A", "B" …), where doc_to_target names one.
    target_delimiter: Stands between text and target.
    generation_pattern: A regular expression whose last match in what was written is compared (its
      group, if it has one); '' takes the whole text.
    target_pattern: The same for doc_to_target.
    until: What ends a generated answer.
    max_new_tokens: The most tokens of one.
  """

  kind: Kind
  files: tuple[str, ...]
  doc_to_text: str | tuple[str, ...]
  doc_to_target: str
  doc_to_choice: str | tuple[str, ...] = ()
  doc_to_label: str = ''
  target_delimiter: str = ' '
  generation_pattern: str = ''
  target_pattern: str = ''
  until: tuple[str, ...] = ()
  max_new_tokens: int = 128


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


_TFDS = {'lambada': 'tfds:lambada:1.0.0/test', 'boolq': 'tfds:bool_q:1.0.0/validation'}

# of each, the first whose fields a record has
_BUILT_IN: dict[str, list[dict[str, Any]]] = {
  'lambada': [
    dict(
      fields=('context', 'continuation'),
      kind='cloze',
      doc_to_text='{{context}}',
      doc_to_target='{{continuation}}',
    ),
    dict(
      fields=('text',),
      kind='cloze',
      doc_to_text="{{text.rsplit(' ', 1)[0]}}",
      doc_to_target="{{text.rsplit(' ', 1)[1]}}",
    ),
  ],
  'boolq': [
    dict(
      fields=('passage', 'question', 'answer'),
      kind='multiple_choice',
      doc_to_text='{{passage}}\nquestion: {{question}}?\nanswer:',
      doc_to_choice=('no', 'yes'),
      doc_to_target='{{answer | int}}',
    ),
    dict(
      fields=('query', 'choices', 'gold'),
      kind='multiple_choice',
      doc_to_text='{{query}}\nAnswer:',
      doc_to_choice='choices',
      doc_to_target='{{gold}}',
    ),
  ],
}


def find_task(text: str) -> tuple[str, TaskSpec]:
  """A task by what the command line says: TASK.json, or lambada:FILE[,FILE…] as built in.

  Raises:
    UserError: there is no such task or file, or the description is not one.
  """
  name, colon, files = text.partition(':')
  if not colon and text.endswith('.json'):
    path = pathlib.Path(text)
    return path.stem, _spec(path)
  if name not in _BUILT_IN:
    raise UserError(
      f'--tasks: {text!r} is neither the .json file of a task nor NAME:FILE.jsonl with a NAME of '
      f'{", ".join(_BUILT_IN)}'
    )
  paths = tuple(files.split(',')) if files else (_TFDS[name],)
  _, first = next(iter(_records(paths[0])), ('', {}))
  for variant in _BUILT_IN[name]:
    if all(field in first for field in variant['fields']):
      return name, TaskSpec(files=paths, **{k: v for k, v in variant.items() if k != 'fields'})
  wanted = ' or '.join(', '.join(v['fields']) for v in _BUILT_IN[name])
  raise UserError(f'{paths[0]}: {name} needs the fields {wanted}; there are {", ".join(first)}')


def _records(file: str) -> Iterator[tuple[str, dict[str, Any]]]:
  """The records of JSON lines, or of a TFDS dataset 'tfds:name:version/split', with places."""
  if not file.startswith('tfds:'):
    yield from read_records(file)
    return
  dataset, _, split = file.removeprefix('tfds:').rpartition('/')
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
  try:
    import tensorflow_datasets as tfds
  except ImportError as e:
    raise UserError(
      f'{dataset} is a TFDS dataset ({e}): name a file, or pip install "paxlite[seqio]"'
    ) from None
  folder = os.environ.get('TFDS_DATA_DIR') or None
  try:
    found = tfds.load(dataset, split=split, data_dir=folder, download=False)
  except Exception as e:  # TFDS has dozens
    raise UserError(
      f'there is no TFDS dataset {dataset} with a split {split} in '
      f'{folder or "its own folder (TFDS_DATA_DIR)"} ({str(e).strip().splitlines()[0]}): name a '
      'file, NAME:FILE.jsonl, or make it with download_lambada or download_boolq of '
      'paxlite.contrib.gpu.scripts_gpu'
    ) from None
  text = lambda x: x.decode() if isinstance(x, bytes) else x.item() if hasattr(x, 'item') else x
  for number, record in enumerate(tfds.as_numpy(found)):
    yield f'{dataset}/{split}:{number}', {k: text(v) for k, v in record.items()}


def _spec(path: pathlib.Path) -> TaskSpec:
  values = read_object(path)
  fields = {f.name: f for f in dataclasses.fields(TaskSpec)}
  for name in values.keys() - fields.keys():
    raise UserError(f'{path}: {name!r} is none of {", ".join(fields)}')
  for name in ('kind', 'files', 'doc_to_text', 'doc_to_target'):
    if name not in values:
      raise UserError(f'{path} has no {name!r}')
  if values['kind'] not in _KINDS:
    raise UserError(f'{path}: kind {values["kind"]!r} is none of {", ".join(sorted(_KINDS))}')
  if values['kind'] == 'multiple_choice' and not values.get('doc_to_choice'):
    raise UserError(f'{path}: multiple_choice needs doc_to_choice')
  for name in ('generation_pattern', 'target_pattern'):
    try:
      re.compile(values.get(name, ''))
    except (re.error, TypeError) as e:
      raise UserError(f'{path}: {name} is not a regular expression: {e}') from None
  values['files'] = [str(path.parent / f) for f in _list(values['files'])]
  arguments: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
  return TaskSpec(**arguments)


class Templates:
  """Renders Jinja templates over records; each is compiled once."""

  def __init__(self) -> None:
    try:
      import jinja2.sandbox
    except ImportError:
      raise UserError("tasks need the package jinja2: pip install 'paxlite[weights]'") from None
    self._environment = jinja2.sandbox.SandboxedEnvironment(
      undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )
    self._compiled: dict[str, Any] = {}

  def __call__(self, template: str, record: Mapping[str, Any]) -> str:
    """Raises UserError where the template is none, or names a field that the record has not."""
    import jinja2

    try:
      if template not in self._compiled:
        self._compiled[template] = self._environment.from_string(template)
      return self._compiled[template].render(**record)
    except (jinja2.TemplateError, IndexError, TypeError, ValueError) as e:
      raise UserError(f'{template!r} cannot be written: {e}') from None


@dataclasses.dataclass(frozen=True)
class Example:
  """A record as a task sees it.

  Attributes:
    texts: What the model reads: one, or one a choice.
    choices: What may follow; one for cloze, none for generate.
    gold: Number of the right choice.
    target: The right text (generate).
  """

  texts: tuple[str, ...]
  choices: tuple[str, ...]
  gold: int
  target: str

  @property
  def asked(self) -> list[tuple[str, str]]:
    """(text, choice) of every choice."""
    texts = self.texts * (len(self.choices) // len(self.texts))
    return list(zip(texts, self.choices, strict=True))


@dataclasses.dataclass(frozen=True)
class Task:
  """A task with its records.

  Attributes:
    name: In tables and summaries.
    spec: What is asked.
    examples: Of whom.
  """

  name: str
  spec: TaskSpec
  examples: list[Example]


def read_tasks(texts: Sequence[str], limit: int | None = None) -> list[Task]:
  """The tasks that a command line names; see find_task and read_examples."""
  found = [find_task(text) for text in texts]
  names = [name for name, _ in found]
  if len(set(names)) < len(names):
    raise UserError(f'the task {max(names, key=names.count)} stands there twice')
  return [Task(name, spec, read_examples(spec, limit)) for name, spec in found]


def read_examples(spec: TaskSpec, limit: int | None = None) -> list[Example]:
  """The records of a task, in their order.

  Raises:
    UserError: a record lacks a field, or its answer is none of the choices (file and line named).
  """
  templates = Templates()
  examples: list[Example] = []
  for file in spec.files:
    for place, record in _records(file):
      if limit is not None and len(examples) == limit:
        return examples
      with located(place):
        examples.append(_example(spec, record, templates))
  if not examples:
    raise UserError(f'{", ".join(spec.files)}: no records')
  return examples


def _example(spec: TaskSpec, record: Mapping[str, Any], templates: Templates) -> Example:
  texts = tuple(templates(t, record) for t in _list(spec.doc_to_text))
  target = templates(spec.doc_to_target, record)
  if spec.kind == 'generate':
    return Example(texts, (), 0, target)
  if spec.kind == 'cloze':
    return Example(texts, (spec.target_delimiter + target,), 0, target)
  if isinstance(spec.doc_to_choice, str):
    found = _field(record, spec.doc_to_choice)
    if not isinstance(found, list) or not found:
      raise UserError(f'{spec.doc_to_choice!r} holds no list of choices')
    choices = tuple(map(str, found))
  else:
    choices = tuple(templates(c, record) for c in spec.doc_to_choice)
  labels = [str(x) for x in _field(record, spec.doc_to_label)] if spec.doc_to_label else []
  if len(texts) not in (1, len(choices)):
    raise UserError(f'doc_to_text has {len(texts)} templates and there are {len(choices)} choices')
  gold = _gold(target, choices, labels)
  return Example(texts, tuple(spec.target_delimiter + c for c in choices), gold, target)


def _gold(target: str, choices: Sequence[str], labels: Sequence[str]) -> int:
  for candidates in (labels, choices):
    if target in candidates:
      return list(candidates).index(target)
  if not re.fullmatch(r'\d+', target) or int(target) >= len(choices):
    raise UserError(f'the answer {target!r} is none of {len(choices)} choices, from 0, nor a label')
  return int(target)


def _field(record: Mapping[str, Any], path: str) -> Any:
  """A field by its path, 'choices.text'."""
  value: Any = record
  for part in path.split('.'):
    if not isinstance(value, Mapping) or part not in value:
      raise UserError(f'there is no field {path!r}')
    value = value[part]
  return value


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


def _list(value: Any) -> list[Any]:
  return [value] if isinstance(value, str) else list(value)


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
