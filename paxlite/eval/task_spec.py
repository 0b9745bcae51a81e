"""The description of a zero-shot task, and the file that holds it."""

import dataclasses
import pathlib
import re
from collections.abc import Sequence
from typing import Any, Literal

from paxlite.core.errors import UserError, compiled
from paxlite.core.json_text import Json, JsonObject
from paxlite.files.json_files import parse_objects
from paxlite.files.text_files import read_text

Kind = Literal['cloze', 'multiple_choice', 'generate', 'text']
_KINDS = {'cloze', 'multiple_choice', 'generate', 'text'}
_NO_CODE = (
  "paxlite does not run programs that a model wrote: use the harness's tasks, with paxlite "
  'lm-eval in a container (docs/evaluation.md)'
)
_NUMBERS = 'max_new_tokens', 'num_fewshot', 'repeats'


@dataclasses.dataclass(frozen=True)
class TaskSpec:
  """The description of a task."""

  # 'cloze' asks whether the model would write doc_to_target after doc_to_text, token by token.
  # 'multiple_choice' asks which of doc_to_choice the model finds likeliest. 'generate' compares the
  # text that the model writes with doc_to_target. 'text' measures how well the model predicts
  # doc_to_target from its beginning
  kind: Kind
  files: tuple[str, ...]  # sources of the records, named as in data.records
  # The text that the model reads: a template, or the name of a field. Where each choice has a text
  # of its own, it is a list with one template for each choice. Not for 'text'.
  doc_to_text: str | tuple[str, ...]
  # For cloze and generate, the right text. For multiple_choice, the number of the right choice, or
  # its text or label.
  doc_to_target: str
  # the choices: a list of templates, or the name of a field that holds a list
  doc_to_choice: str | tuple[str, ...] = ()
  # name of the field with the choices' labels ("A", "B" …), if doc_to_target is a label
  doc_to_label: str = ''
  # the text between the text and the target; None: a space, or nothing in a chat
  target_delimiter: str | None = None
  # A regular expression. Its last match in the generated text is compared (its group, if it has
  # one); '' compares the entire text.
  generation_pattern: str = ''
  target_pattern: str = ''  # the same for doc_to_target
  until: tuple[str, ...] = ()  # strings that end a generated answer
  max_new_tokens: int = 128  # largest number of tokens of a generated answer
  # whether the text is a message of the user, which the chat template of the model writes, so that
  # the target is the assistant's answer
  chat: bool = False
  system: str = ''  # the message of the system that such a chat begins with; '': none
  num_fewshot: int = 0  # number of solved examples before the text; in a chat, earlier turns of it
  fewshot_files: tuple[str, ...] = ()  # their sources, from which the first ones are taken
  repeats: int = 1  # number of answers to each prompt, for generate
  # temperature with which they are drawn; None: as the experiment says, or 0.8 where there are
  # several
  temperature: float | None = None

  @property
  def generates(self) -> bool:
    """Whether the model writes answers."""
    return self.kind == 'generate'

  @property
  def delimiter(self) -> str:
    """The text between the text and the target."""
    if self.target_delimiter is not None:
      return self.target_delimiter
    return '' if self.chat else ' '

  def messages(self, text: str, shots: Sequence[tuple[str, str]] = ()) -> list[dict[str, str]]:
    """Returns the chat with a text as its last question, after solved examples."""
    said = [('system', self.system)] if self.system else []
    for asked, answer in shots:
      said += [('user', asked), ('assistant', answer)]
    return [{'role': role, 'content': content} for role, content in [*said, ('user', text)]]

  def document(self, text: str, shots: Sequence[tuple[str, str]] = ()) -> str:
    """Returns the text after solved examples, separated by empty lines."""
    solved = [f'{asked}{self.delimiter}{answer}\n\n' for asked, answer in shots]
    return ''.join([*solved, text])


def read_specs(path: pathlib.Path) -> list[tuple[str, TaskSpec]]:
  """Returns the names and descriptions of the tasks in a file.

  The file holds one task, which has the file's name unless it states a "name", or a list of tasks
  with a "name" each. Raises UserError if there is no such file, or a description is not valid.
  """
  if not path.is_file():
    raise UserError(f'{path} is missing')
  found = [values for _, values in parse_objects(read_text(str(path)), str(path))]
  if not found:
    raise UserError(f'{path} holds no task')
  specs = []
  for number, values in enumerate(found, 1):
    name = values.pop('name', path.stem if len(found) == 1 else None)
    if not isinstance(name, str) or not re.fullmatch(r'[\w.-]+', name):
      what = 'needs a "name"' if name is None else f'has the "name" {name!r}, which must be'
      raise UserError(f'{path}: task {number} {what} of letters, digits and _.-')
    where = str(path) if len(found) == 1 else f'{path}: {name}'
    specs.append((name, _spec(path, where, values)))
  return specs


def _spec(path: pathlib.Path, where: str, values: JsonObject) -> TaskSpec:
  if values.get('kind') == 'code':
    raise UserError(f'{where}: {_NO_CODE}')
  fields = {f.name: f for f in dataclasses.fields(TaskSpec)}
  for name in values.keys() - fields.keys():
    raise UserError(f'{where}: {name!r} is unknown; use one of {", ".join(fields)}')
  if values.get('kind') == 'text':
    for name in ('doc_to_text', 'chat', 'num_fewshot'):
      if values.get(name):
        raise UserError(f'{where}: {name} is not for kind "text", which has no prompt')
    values = {**values, 'doc_to_text': '', 'target_delimiter': ''}
  for name in ('kind', 'files', 'doc_to_text', 'doc_to_target'):
    if name not in values:
      raise UserError(f'{where} has no {name!r}')
  for name, value in values.items():
    _check_type(where, name, value)
  if values['kind'] not in _KINDS:
    raise UserError(
      f'{where}: kind {values["kind"]!r} is unknown; use one of {", ".join(sorted(_KINDS))}'
    )
  if values['kind'] == 'multiple_choice' and not values.get('doc_to_choice'):
    raise UserError(f'{where}: multiple_choice needs doc_to_choice')
  if values['kind'] != 'multiple_choice' and not isinstance(values['doc_to_text'], str):
    raise UserError(f'{where}: only multiple_choice has a doc_to_text for each choice')
  for name in ('generation_pattern', 'target_pattern'):
    compiled(values.get(name, ''), f'{where}: {name}')
  for name in ('files', 'fewshot_files'):
    values[name] = [_source(path, file) for file in as_list(values.get(name, []))]
  if values.get('system') and not values.get('chat'):
    raise UserError(f'{where}: "system" is the beginning of a chat, and needs "chat": true')
  values['until'] = as_list(values.get('until', []))
  _check_numbers(where, values)
  arguments: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
  return TaskSpec(**arguments)


def _check_type(where: str, name: str, value: Json) -> None:
  are_strings = isinstance(value, list) and all(isinstance(v, str) for v in value)
  good = isinstance(value, str)
  is_number = isinstance(value, int | float) and not isinstance(value, bool)
  if name in _NUMBERS:
    good = is_number and isinstance(value, int) and value >= (name != 'num_fewshot')
  elif name == 'temperature':
    good = is_number and value >= 0
  elif name == 'chat':
    good = isinstance(value, bool)
  elif name in ('files', 'fewshot_files', 'doc_to_text', 'doc_to_choice', 'until'):
    good = good or are_strings
  if not good:
    raise UserError(f'{where}: {name} cannot be {value!r}')


def _source(path: pathlib.Path, file: str) -> str:
  """Returns the path that a task's file names, relative to it, unless it is a dataset."""
  return file if file.startswith(('hf:', 'tfds:')) else str(path.parent / file)


def _check_numbers(where: str, values: JsonObject) -> None:
  """Raises UserError if values of a task contradict each other."""
  if bool(values.get('num_fewshot')) != bool(values['fewshot_files']):
    raise UserError(f'{where}: num_fewshot and fewshot_files need each other')
  if values.get('num_fewshot') and not isinstance(values['doc_to_text'], str):
    raise UserError(f'{where}: num_fewshot needs one doc_to_text')
  kind, repeats = values['kind'], values.get('repeats', 1)
  if kind != 'generate' and (repeats != 1 or 'temperature' in values):
    raise UserError(f'{where}: repeats and temperature are for generate')
  if repeats > 1 and values.get('temperature') == 0:
    raise UserError(f'{where}: with temperature 0 all {repeats} repeats are the same answer')


def as_list(value: str | Sequence[str]) -> list[str]:
  """Returns a list; a text becomes a list of one."""
  return [value] if isinstance(value, str) else list(value)
