"""Zero-shot tasks: their records, and the templates that turn records into prompts.

A task is described by a few lines of JSON, with the names of EleutherAI's evaluation harness:

    {"kind": "multiple_choice", "files": ["piqa.jsonl"],
     "doc_to_text": "Question: {{goal}}\\nAnswer:", "doc_to_choice": ["{{sol1}}", "{{sol2}}"],
     "doc_to_target": "{{label}}"}

Templates are Jinja templates over the fields of a record. LAMBADA and BoolQ are built in.
"""

import contextlib
import dataclasses
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from paxlite.core import shell
from paxlite.core.errors import UserError, located
from paxlite.core.json_text import JsonObject
from paxlite.data.record_files import Record
from paxlite.data.records import Raw, open_records, parsed
from paxlite.eval.task_spec import TaskSpec, as_list, read_specs

_TFDS = {'lambada': 'tfds:lambada:1.0.0/test', 'boolq': 'tfds:bool_q:1.0.0/validation'}

# The first variant of a task whose fields are all in the first record is used.
_BUILT_IN: dict[str, list[JsonObject]] = {
  'lambada': [
    dict(
      fields=('context', 'continuation'), kind='cloze', doc_to_text='{{context}}',
      doc_to_target='{{continuation}}',
    ),
    dict(
      fields=('text',), kind='cloze', doc_to_text="{{text.strip().rsplit(' ', 1)[0]}}",
      doc_to_target="{{text.strip().rsplit(' ', 1)[1]}}",
    ),
  ],
  'boolq': [
    dict(
      fields=('passage', 'question', 'answer'), kind='multiple_choice',
      doc_to_text='{{passage}}\nquestion: {{question}}?\nanswer:', doc_to_choice=('no', 'yes'),
      doc_to_target='{{answer | truth}}',
    ),
    dict(
      fields=('query', 'choices', 'gold'), kind='multiple_choice', doc_to_text='{{query}}\nAnswer:',
      doc_to_choice='choices', doc_to_target='{{gold}}',
    ),
  ],
}  # fmt: skip


def _names(text: str) -> list[str]:
  """Splits a text at commas into tasks.

  A part that does not name a task is another file of the task before it.
  """
  names: list[str] = []
  for piece in text.split(','):
    if not names or piece.partition(':')[0] in _BUILT_IN or piece.endswith('.json'):
      names.append(piece)
    else:
      names[-1] += f',{piece}'
  return names


def find_tasks(text: str, tfds_data_dir: str = '') -> list[tuple[str, TaskSpec]]:
  """Returns the names and descriptions of the tasks that the command line names.

  They are those of TASK.json, or a built-in one: lambada:FILE[,FILE…]. Raises UserError if there is
  no such task or file, or the description is not valid.
  """
  name, colon, files = text.partition(':')
  if not colon and text.endswith('.json'):
    return read_specs(pathlib.Path(text))
  if name not in _BUILT_IN:
    raise UserError(
      f'--tasks: {text!r} is neither the .json file of a task nor NAME:FILE.jsonl with a NAME of '
      f'{", ".join(_BUILT_IN)}'
    )
  paths = tuple(files.split(',')) if files else (_TFDS[name],)
  first = _first_record(paths, tfds_data_dir)
  for variant in _BUILT_IN[name]:
    if all(field in first for field in variant['fields']):
      fields = {k: v for k, v in variant.items() if k != 'fields'}
      return [(name, TaskSpec(files=paths, **fields))]
  wanted = ' or '.join(', '.join(v['fields']) for v in _BUILT_IN[name])
  raise UserError(f'{paths[0]}: {name} needs the fields {wanted}; it has {", ".join(first)}')


def _first_record(paths: Sequence[str], tfds_data_dir: str) -> Record:
  """Returns the first record that can be read, or {} if there is none; opens every source."""
  for source in [open_records(path, tfds_data_dir) for path in paths]:
    for shard in range(source.num_shards):
      for number, raw in source.read(shard):
        with contextlib.suppress(UserError):  # read_examples will report or skip it
          return parsed(raw, source.place(shard, number))
  return {}


_T = TypeVar('_T')


class Templates:
  """Renders Jinja templates over records; each template is compiled once.

  A field that is null cannot be rendered.
  """

  def __init__(self) -> None:
    try:
      import jinja2.sandbox
    except ImportError:
      raise UserError(f'tasks need the package jinja2: {shell.install("weights")}') from None
    self._environment = jinja2.sandbox.SandboxedEnvironment(
      undefined=jinja2.StrictUndefined, keep_trailing_newline=True, finalize=_not_null
    )
    self._environment.filters['truth'] = _truth
    self._compiled: dict[str, Any] = {}

  def __call__(self, template: str, record: Record) -> str:
    """Returns the rendered template, or the field of the record that `template` names.

    Raises UserError if the template is not valid, or it names a field that is null or missing.
    """
    if template in record:
      return str(_not_null(record[template]))
    try:
      if template not in self._compiled:
        self._compiled[template] = self._environment.from_string(template)
      return self._compiled[template].render(**record)
    except Exception as e:  # Jinja raises many types, and so does the code that a template calls
      raise UserError(f'{template!r} cannot be written: {e}') from None


def _not_null(value: _T) -> _T:
  if value is None:
    raise UserError('a field is null')
  return value


def _truth(value: object) -> int:
  """Returns 1 for a value that means yes and 0 for one that means no."""
  text = str(value).strip().lower()
  if text not in ('true', 'yes', '1', 'false', 'no', '0'):
    raise UserError(f'{value!r} says neither yes nor no')
  return int(text in ('true', 'yes', '1'))


@dataclasses.dataclass(frozen=True)
class TaskExample:
  """A record rendered with the templates of a task."""

  prompts: tuple[str, ...]  # what the model reads before an answer: one, or one for each choice
  # continuations that may follow; one for cloze and text, none for generate
  choices: tuple[str, ...]
  gold: int  # number of the right choice
  # the rendered doc_to_target; for generate, the right text; for code, a program with GENERATED
  # where the answer belongs
  target: str
  place: str  # location of the record, for messages
  # texts and right answers of other records, which come before it
  shots: tuple[tuple[str, str], ...] = ()

  def answer(self, delimiter: str) -> str:
    """Returns the right answer without the delimiter that choices begin with."""
    return self.choices[self.gold].removeprefix(delimiter) if self.choices else self.target

  @property
  def asked(self) -> list[tuple[str, str]]:
    """The pair (prompt, choice) of every choice."""
    prompts = self.prompts * (len(self.choices) // len(self.prompts))
    return list(zip(prompts, self.choices, strict=True))


@dataclasses.dataclass(frozen=True)
class ZeroShotTask:
  """A task with its records."""

  name: str  # name of the task in tables and summaries
  spec: TaskSpec  # description of the task
  examples: list[TaskExample]  # the records, rendered
  unreadable: int = 0  # number of records that were left out


def read_tasks(
  names: Sequence[str],
  limit: int | None = None,
  skip_unreadable: bool = False,
  tfds_data_dir: str = '',
  chat: bool = False,
) -> list[ZeroShotTask]:
  """Reads the tasks that a command line names ('lambada,boolq').

  Args:
    names: What names them; see find_tasks.
    limit, skip_unreadable, tfds_data_dir: See read_examples.
    chat: Whether all of them are asked in a chat, as TaskSpec.chat says of one.
  """
  found = [
    (name, dataclasses.replace(spec, chat=True) if chat and spec.kind != 'text' else spec)
    for text in names
    for part in _names(text)
    for name, spec in find_tasks(part, tfds_data_dir)
  ]
  tasks = [name for name, _ in found]
  if len(set(tasks)) < len(tasks):
    raise UserError(f'the task {max(tasks, key=tasks.count)} is listed twice: leave one out')
  return [
    ZeroShotTask(name, spec, *read_examples(spec, limit, skip_unreadable, tfds_data_dir))
    for name, spec in found
  ]


def read_examples(
  spec: TaskSpec, limit: int | None = None, skip_unreadable: bool = False, tfds_data_dir: str = ''
) -> tuple[list[TaskExample], int]:
  """Returns the examples of a task in their order, and how many records were left out.

  Raises UserError if a record cannot be read, lacks a field, or has an answer that is empty or is
  not one of the choices (the message names the file and line); or there are no records.

  Args:
    spec: Description of the task.
    limit: Largest number of examples; None: all.
    skip_unreadable: Whether unreadable records are left out instead of raising UserError.
    tfds_data_dir: Folder of the TFDS datasets; '': TFDS_DATA_DIR, or TFDS' own default.
  """
  templates, unreadable = Templates(), 0
  examples: list[TaskExample] = []
  shots = _shots(spec, templates, skip_unreadable, tfds_data_dir)
  for place, raw in _raw_records(spec.files, tfds_data_dir):
    if limit is not None and len(examples) == limit:
      break
    try:
      record = parsed(raw, place)
      with located(place):
        found = _example(spec, record, templates, place)
    except UserError:
      if not skip_unreadable:
        raise
      unreadable += 1
      continue
    before = [shot for shot in shots if shot.place != place][: spec.num_fewshot]
    solved = tuple((shot.prompts[0], shot.answer(spec.delimiter)) for shot in before)
    examples.append(dataclasses.replace(found, shots=solved))
  if not examples:
    raise UserError(f'{", ".join(spec.files)}: no records')
  return examples, unreadable


def _raw_records(files: Sequence[str], tfds_data_dir: str) -> Iterator[tuple[str, Raw]]:
  """Yields the location of each record, and the record."""
  for file in files:
    source = open_records(file, tfds_data_dir)
    for shard in range(source.num_shards):
      for number, raw in source.read(shard):
        yield source.place(shard, number), raw


def _shots(
  spec: TaskSpec, templates: Templates, skip_unreadable: bool, tfds_data_dir: str
) -> list[TaskExample]:
  """Returns the solved examples: one more than shown, because none precedes itself."""
  if not spec.num_fewshot:
    return []
  found: list[TaskExample] = []
  for place, raw in _raw_records(spec.fewshot_files, tfds_data_dir):
    try:
      record = parsed(raw, place)
      with located(place):
        found.append(_example(spec, record, templates, place))
    except UserError:
      if not skip_unreadable:
        raise
    if len(found) > spec.num_fewshot:
      break
  if len(found) < spec.num_fewshot:
    files = ', '.join(spec.fewshot_files)
    raise UserError(f'{files}: {len(found)} records are too few for num_fewshot={spec.num_fewshot}')
  return found


def _example(spec: TaskSpec, record: Record, templates: Templates, place: str) -> TaskExample:
  prompts = tuple(templates(t, record) for t in as_list(spec.doc_to_text))
  target = templates(spec.doc_to_target, record)
  if not target.strip():
    raise UserError(f'the answer {spec.doc_to_target!r} is empty')
  if spec.generates:
    if spec.target_pattern and matched(target, spec.target_pattern) is None:
      raise UserError(f'target_pattern {spec.target_pattern!r} is not in the answer {target!r}')
    return TaskExample(prompts, (), 0, target, place)
  if spec.kind in ('cloze', 'text'):
    return TaskExample(prompts, (spec.delimiter + target,), 0, target, place)
  if isinstance(spec.doc_to_choice, str):
    found = _field(record, spec.doc_to_choice)
    if not isinstance(found, list) or not found:
      raise UserError(f'{spec.doc_to_choice!r} holds no list of choices')
    choices = tuple(str(_not_null(choice)) for choice in found)
  else:
    choices = tuple(templates(c, record) for c in spec.doc_to_choice)
  labels = _labels(record, spec.doc_to_label, len(choices))
  if not all(c.strip() for c in choices):
    raise UserError(f'a choice is empty: {list(choices)}')
  if len(prompts) not in (1, len(choices)):
    raise UserError(f'doc_to_text has {len(prompts)} templates for {len(choices)} choices')
  gold = _gold(target, choices, labels)
  return TaskExample(prompts, tuple(spec.delimiter + c for c in choices), gold, target, place)


def _gold(target: str, choices: Sequence[str], labels: Sequence[str]) -> int:
  """Returns the number of the right choice: `target` is a label, a number or a text.

  Labels are tried first, then numbers, then texts.
  """
  if target in labels:
    return labels.index(target)
  if re.fullmatch(r'\d{1,9}', target) and int(target) < len(choices):
    return int(target)
  if target not in choices:
    raise UserError(
      f'the answer {target!r} is neither a label nor a number of a choice (0 to {len(choices) - 1})'
    )
  return choices.index(target)


def _labels(record: Record, field: str, count: int) -> list[str]:
  if not field:
    return []
  found = _field(record, field)
  if not isinstance(found, list) or len(found) != count:
    raise UserError(f'{field!r} holds no list of {count} labels')
  return [str(label) for label in found]


def matched(text: str, pattern: str) -> str | None:
  """Returns the last match of a pattern (its first group that matched), stripped, or None.

  An empty pattern matches the entire text.
  """
  found = last_match(text, pattern)
  return None if found is None else found.strip()


def last_match(text: str, pattern: str) -> str | None:
  """Like `matched`, without stripping."""
  if not pattern:
    return text
  matches = list(re.finditer(pattern, text))
  if not matches:
    return None
  groups = [g for g in matches[-1].groups() if g is not None]
  return (groups or [matches[-1][0]])[0]


def _field(record: Record, path: str) -> object:
  """Returns the field at a path such as 'choices.text'."""
  value: object = record
  for part in path.split('.'):
    if not isinstance(value, Mapping) or part not in value:
      raise UserError(f'field {path!r} is missing')
    value = value[part]
  return value
