"""The data of the bundled recipes: plain facts, sums, and chats with a calculator.

They are drawn from a seed; there is nothing about people. Tokenizers and questions may come from
datasets of the Hub, too.
"""

import itertools
import json
import pathlib
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject
from paxlite.data import packaged

SPECIAL = ['<|end|>', '<|system|>', '<|user|>', '<|assistant|>', '<|tool|>', '<|call|>']
# Tools are written as the system message that names them, so that tasks ask in the same way.
TEMPLATE = """\
{%- if tools %}<|system|>Tools:{% for tool in tools %} {{ tool.function.name }}{% endfor %}<|end|>
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}<|assistant|>
{%- generation %}{{ m.content }}
{%- for call in m.tool_calls or [] %}<|call|>
{{- call.function.name }} {{ call.function.arguments.expression }}
{%- endfor %}<|end|>{% endgeneration %}
{%- else %}<|{{ m.role }}|>{{ m.content }}<|end|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
TOOL = {
  'type': 'function',
  'function': {
    'name': 'calculator',
    'description': 'computes',
    'parameters': {'type': 'object', 'properties': {'expression': {'type': 'string'}}},
  },
}
SYSTEM = 'Tools: calculator'

_LARGEST = 50  # of the numbers of sums that are to be known by heart
_COLORS = {('red', 'yellow'): 'orange', ('blue', 'yellow'): 'green', ('red', 'blue'): 'purple'}
_DAYS = ['Monday', 'Tuesday', 'Wednesday', 'Thursday', 'Friday', 'Saturday', 'Sunday']
_MONTHS = [
  'January', 'February', 'March', 'April', 'May', 'June', 'July', 'August', 'September', 'October',
  'November', 'December',
]  # fmt: skip
_LEGS = {'dog': 4, 'hen': 2, 'ant': 6, 'spider': 8, 'horse': 4, 'snake': 0, 'bee': 6, 'cat': 4}


def exact(record: Mapping[str, str], answer: str) -> float:
  """Returns 1 for the right sum or call of the calculator, else 0: the reward of the recipe."""
  return float(answer.strip() == record['answer'])


def use(a: int, b: int) -> str:
  """Returns a sum's split: 'asked' in evaluations, 'rewarded' only, or 'shown' with its answer.

  a + b and b + a have one use.
  """
  number = (min(a, b) * 7 + max(a, b) * 31) % 10
  return 'asked' if number == 0 else 'rewarded' if number <= 2 else 'shown'


def _sum(draw: random.Random, *uses: str) -> tuple[int, int]:
  while True:
    a, b = draw.randrange(_LARGEST), draw.randrange(_LARGEST)
    if use(a, b) in uses:
      return a, b


def _fact(draw: random.Random) -> tuple[str, str]:
  """Returns a question and its answer."""
  kind, n = draw.randrange(5), draw.randrange(1, 100)
  if kind == 0:
    i = draw.randrange(7)
    return f'Which day comes after {_DAYS[i]}?', _DAYS[(i + 1) % 7]
  if kind == 1:
    i = draw.randrange(12)
    return f'Which month comes after {_MONTHS[i]}?', _MONTHS[(i + 1) % 12]
  if kind == 2:
    pair = draw.choice([*_COLORS])
    one, two = draw.sample(pair, 2)
    return f'What do {one} and {two} make?', _COLORS[pair]
  if kind == 3:
    animal = draw.choice([*_LEGS])
    return f'How many legs has a {animal}?', str(_LEGS[animal])
  return f'Which number comes after {n}?', str(n + 1)


def _paragraphs(draw: random.Random, count: int) -> Iterator[str]:
  for _ in range(count):
    lines = []
    for _ in range(draw.randint(8, 16)):
      a, b = _sum(draw, 'shown')
      question, answer = _fact(draw)
      lines.append(f'{a} + {b} = {a + b}.' if draw.random() < 0.75 else f'{question} {answer}.')
    yield '\n'.join(lines) + '\n\n'


def _call(draw: random.Random) -> tuple[str, str, str]:
  """Returns a question for the calculator, the call, and its result."""
  a, b = draw.randint(100, 999), draw.randint(10, 99)
  sign, word, found = draw.choice([('*', 'times', a * b), ('-', 'minus', a - b)])
  return f'What is {a} {word} {b}?', f'{a} {sign} {b}', str(found)


def _user(text: str) -> JsonObject:
  return {'role': 'user', 'content': text}


def _answer(text: str) -> JsonObject:
  return {'role': 'assistant', 'content': text}


def _chat(draw: random.Random, lines: Sequence[str]) -> JsonObject:
  """Returns a chat: a sum, a fact, a line of a text and its next line, or a calculator call."""
  kind = draw.random()
  if kind < 0.5:
    a, b = _sum(draw, 'shown')
    return {'messages': [_user(f'What is {a} + {b}?'), _answer(str(a + b))]}
  if kind < 0.6:
    question, text = _fact(draw)
    return {'messages': [_user(question), _answer(text)]}
  if kind < 0.75:
    at = draw.randrange(len(lines) - 1)
    return {'messages': [_user(f'Go on: {lines[at]}'), _answer(lines[at + 1])]}
  question, expression, found = _call(draw)
  function = {'name': 'calculator', 'arguments': {'expression': expression}}
  call = {'role': 'assistant', 'content': '', 'tool_calls': [{'function': function}]}
  result = {'role': 'tool', 'content': found}
  return {'messages': [_user(question), call, result, _answer(found)], 'tools': [TOOL]}


def write_data(folder: pathlib.Path, seed: int, paragraphs: int, chats: int, prompts: int) -> None:
  """Writes facts.txt, chats.jsonl, prompts.jsonl, and the tasks text, sums and calls."""
  draw = random.Random(seed)
  (folder / 'facts.txt').write_text(''.join(_paragraphs(draw, paragraphs)))
  lines = [line for path in packaged.TEXTS for line in _lines(path, held_out=False)]
  _write(folder / 'chats.jsonl', (_chat(draw, lines) for _ in range(chats)))
  _write(folder / 'prompts.jsonl', (_prompt(draw) for _ in range(prompts)))
  pairs = itertools.product(range(_LARGEST), repeat=2)
  unseen = [(a, b) for a, b in pairs if use(a, b) == 'asked']
  asked = [_asked(a, b) for a, b in draw.sample(unseen, 100)]
  _write_task(folder, 'sums', asked)
  _write_task(folder, 'calls', [_asked_call(draw) for _ in range(50)], system=SYSTEM)
  lines = [line for path in packaged.TEXTS for line in _lines(path, held_out=True)]
  _write(folder / 'text.jsonl', ({'text': line} for line in draw.sample(lines, 200)))
  task = {'kind': 'text', 'files': 'text.jsonl', 'doc_to_target': '{{text}}'}
  (folder / 'text.json').write_text(json.dumps(task))


def _lines(path: str, held_out: bool) -> list[str]:
  """Returns lines of a text that fit into a prompt for a sum, either held out or trained on."""
  from paxlite.data.text import split_blocks

  blocks = [block for block, is_held_out in split_blocks(path) if is_held_out == held_out]
  lines = [line.strip() for block in blocks for line in block.splitlines()]
  return [line for line in lines if 40 <= len(line.encode()) <= 70]


def _asked(a: int, b: int) -> dict[str, str]:
  return {'text': f'What is {a} + {b}?', 'answer': str(a + b)}


def _asked_call(draw: random.Random) -> dict[str, str]:
  text, expression, _ = _call(draw)
  return {'text': text, 'answer': f'calculator {expression}'}


def _prompt(draw: random.Random) -> JsonObject:
  """Returns a prompt: a sum that is not evaluated, or a question for the calculator."""
  if draw.random() < 0.75:
    asked = _asked(*_sum(draw, 'shown', 'rewarded'))
    return {'messages': [_user(asked['text'])], 'answer': asked['answer']}
  asked = _asked_call(draw)
  system = {'role': 'system', 'content': SYSTEM}
  return {'messages': [system, _user(asked['text'])], 'answer': asked['answer']}


def _write(path: pathlib.Path, records: Iterable[Mapping[str, Any]]) -> None:
  with path.open('w') as file:
    file.writelines(json.dumps(record) + '\n' for record in records)


def _write_task(
  folder: pathlib.Path, name: str, records: list[dict[str, str]], **more: str
) -> None:
  _write(folder / f'{name}.jsonl', records)
  task = {
    'kind': 'generate', 'files': f'{name}.jsonl', 'doc_to_text': '{{text}}',
    'doc_to_target': '{{answer}}', 'chat': True, 'max_new_tokens': 16, **more,
  }  # fmt: skip
  (folder / f'{name}.json').write_text(json.dumps(task))


def write_questions(folder: pathlib.Path, source: str) -> None:
  """Writes prompts.jsonl from records such as GSM8K's, whose answers end in '#### NUMBER'."""
  from paxlite.data.records import read_records, text_of
  from paxlite.files.text_files import expanded

  records = (found for file in expanded([source]) for found in read_records(file))
  pairs = ([at, *(text_of(x, field, at) for field in ('question', 'answer'))] for at, x in records)
  _write(folder / 'prompts.jsonl', (_question(*pair) for pair in pairs))


def _question(place: str, question: str, answer: str) -> JsonObject:
  number = _number(answer.rpartition('####')[2])
  if not number:
    raise UserError(f'{place}: the answer {answer[-60:]!r} has no number, such as #### 12')
  return {'messages': [_user(question)], 'answer': number}


def _number(text: str) -> str:
  """Returns the last number in a text, without commas; '' if there is none."""
  found = re.findall(r'-?\d[\d,]*(?:\.\d+)?', text)
  return found[-1].replace(',', '') if found else ''


def last_number(record: Mapping[str, str], answer: str) -> float:
  """Returns 1 if the last number of an answer is the right one, else 0: the reward of chat_d20."""
  number = _number(answer)
  return float(number != '' and float(number) == float(record['answer']))


def write_tokenizer(
  folder: pathlib.Path, files: list[str], vocab_size: int, characters: int = 20_000_000
) -> None:
  """Trains byte-level BPE, with a token for each digit, on the first characters of sources.

  What a run would hold out of them is left out. Text files are read as by TextFiles, and all other
  sources as by DocumentFiles.
  """
  import tokenizers
  from tokenizers import decoders, models, pre_tokenizers, trainers

  tokenizer = tokenizers.Tokenizer(models.BPE())
  parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
  tokenizer.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=vocab_size, special_tokens=SPECIAL,
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
  )  # fmt: skip
  texts = _first(itertools.chain.from_iterable(map(_shown, files)), characters)
  tokenizer.train_from_iterator(texts, trainer)
  tokenizer.save(str(folder / 'tokenizer.json'))
  (folder / 'tokenizer_config.json').write_text(json.dumps({'eos_token': SPECIAL[0]}))
  (folder / 'chat_template.jinja').write_text(TEMPLATE)


def _shown(source: str) -> Iterator[str]:
  """Yields the training texts of a source, without the held-out ones."""
  from paxlite.data.held_out import is_held_out, text_identity
  from paxlite.data.records import read_records, text_of
  from paxlite.data.text import split_blocks
  from paxlite.experiments.datasets import DocumentFiles
  from paxlite.files.text_files import expanded, kind

  if not source.startswith(('hf:', 'tfds:')) and kind(source) == '.txt':
    yield from (block for block, is_held in split_blocks(source) if not is_held)
    return
  for place, record in itertools.chain.from_iterable(map(read_records, expanded([source]))):
    text = text_of(record, DocumentFiles.TEXT_FIELD, place)
    if not is_held_out(text_identity(text), 1 / DocumentFiles.HELD_OUT_EVERY):
      yield text


def _first(texts: Iterator[str], characters: int) -> Iterator[str]:
  """Yields texts up to a total number of characters."""
  for text in texts:
    yield text
    if (characters := characters - len(text)) <= 0:
      return
