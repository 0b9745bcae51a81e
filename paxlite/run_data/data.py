"""paxlite data [FILES…] [--fdl_config=EXPERIMENT] [--vocab=FILE] [NAME=VALUE …]
paxlite data RUN --step=N|--spike|--counts|--without=RECORDS, or RUN RUN

Shows what a run would see of FILES: format, examples and tokens, a histogram of lengths, how full
sequences are, what is cut or left out, what is odd (empty answers, chats that end with a question,
duplicates, special tokens in text), all records that a run refuses, steps per epoch, and examples.
Learned text is green, or in [[ ]] without color. FILES default to the experiment's data. Without an
experiment, sequences have MAX_SEQ_LEN tokens and a step PERCORE_BATCH_SIZE sequences; without a
tokenizer, the demo's gives rough counts. None of this writes a file.

RUN is a run folder. --step shows a step's texts, with files and records; --spike those of the step
with the recorded loss furthest above the steps before it; --counts how often each document was
seen. --without writes a file of records for a continuation to leave out. Two runs are compared
batch by batch.

Examples:
  paxlite data chats.jsonl
  paxlite data runs/chats --step=1200 --row=3
  paxlite data runs/chats runs/chats_again
  paxlite data chats.jsonl --fdl_config=HuggingFaceLoRA CHECKPOINT_RESTORE_PATH=weights/smollm
"""

import argparse
import itertools
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from paxlite import extensions
from paxlite.cli.parser import Parser, local, stored
from paxlite.cli.terminal import has_color
from paxlite.core.errors import UserError, located
from paxlite.core.fields import Fields
from paxlite.core.foreign_text import printable
from paxlite.core.wording import amount
from paxlite.files.schemes import is_address

if TYPE_CHECKING:
  from paxlite.data.base import RowInput
  from paxlite.data.record_files import Raw
  from paxlite.data.refused_records import RefusedRecords
  from paxlite.data.streams import StreamInput
  from paxlite.experiments.base import Experiment
  from paxlite.experiments.rows import Rows
  from paxlite.run_data.odd_records import Oddities

_E = TypeVar('_E', bound='Experiment')
_MOST_LOOKED_AT = 100  # records, for one that has a format
_MOST_TOKENS, _FEWEST_TOKENS = 1000, 100  # of all examples, and of one
# shows conversations where there is no model whose template could be used
_TEMPLATE = (
  "{% if tools %}tools: {{ tools | tojson }}{{ '\\n' }}{% endif %}"
  "{% for m in messages %}{{ m.role }}: {{ m.content or '' }}"
  "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{{ '\\n' }}{% endfor %}"
  '{% if add_generation_prompt %}assistant:{% endif %}'
)

PARSER = Parser(__doc__)
PARSER.option('files', 'files, or other sources of docs/data.md', nargs='*')
PARSER.option('--fdl_config', 'experiment to train on them')
PARSER.option('--vocab', "tokenizer (the experiment's)", stored)
PARSER.option('--chat_template', 'Jinja template, or its file', stored)
PARSER.option('--step', 'texts of this step of RUN, as in metrics.jsonl', int)
PARSER.option('--row', 'only this sequence of the step, from 0, with all tokens', int)
PARSER.option('--spike', 'texts of the step with the largest loss spike', bool)
PARSER.option('--counts', 'how often RUN saw each document', bool)
PARSER.option(
  '--without', 'plan a continuation of RUN without FILE:RECORD,… or STEP:ROW,…', metavar='RECORDS'
)
PARSER.option('--output', 'file for LEAVE_OUT, of --without (left_out.txt)', local)
PARSER.option('--json', 'print one JSON object with all ids and texts', bool)
PARSER.option('--examples', 'examples to show (3)', int, default=3)
PARSER.attributes()


def main(argv: Sequence[str]) -> None:
  args = PARSER.parsed(argv)
  if args.examples < 0:
    raise UserError(f'--examples={args.examples} must be at least 0')
  runs = [name for name in args.files if _is_run(name)]
  of_run = args.step, args.row, args.without
  is_of_run = args.spike or args.counts or args.json or any(x is not None for x in of_run)
  if is_of_run or len(runs) > 1:
    from paxlite.run_data.command import show

    show(args, runs)
    return
  if not args.files and not args.fdl_config:
    raise UserError('name FILES, or an experiment with --fdl_config=EXPERIMENT')

  experiment = _experiment(args, args.attributes)
  from paxlite.experiments.rows import Rows

  if isinstance(experiment, Rows) and experiment.prompts is not None:
    refused = [_show_prompts(experiment, args.examples)]
  else:
    refused = _show_all(experiment, args.examples)
  count = sum(each.count for each in refused)
  if count and not experiment.values().get('SKIP_UNREADABLE'):
    raise UserError(f'a run refuses these data: {count:,} of the records cannot be read; '
                    'SKIP_UNREADABLE=True leaves them out')  # fmt: skip


def _show_prompts(e: 'Rows', num_examples: int) -> 'RefusedRecords':
  """Shows the prompts of rollouts; returns the refused ones."""
  import fiddle as fdl
  import numpy as np

  from paxlite.data import data_summary

  prompts = _tolerant(e).prompts
  assert prompts is not None
  found = fdl.build(prompts)
  tokenizer = fdl.build(prompts.encoding).tokenizer
  _print_block('Refused', found.refused.messages)
  lengths = np.array([len(prompt.ids) for prompt in found])
  print(f'Data      {found.name}')
  print(f'Contents  {amount(len(lengths), "prompt")}, {lengths.sum():,} tokens')
  _print_block('Lengths', data_summary.histogram(lengths))
  for number in range(min(num_examples, len(lengths))):
    ids = np.array(found[number].ids[:_MOST_TOKENS])
    text = data_summary.masked_text(tokenizer, ids, np.zeros(len(ids), bool), has_color())
    print(f'\nExample {number + 1}:\n{text}')
  return found.refused


def _show_all(experiment: 'Experiment', num_examples: int) -> 'list[RefusedRecords]':
  """Shows all data of an experiment; returns the refused records."""
  oddities = _oddities(experiment)
  _print_block('Odd', oddities.lines() if oddities else [])
  if oddities and oddities.refused.is_all:
    raise UserError(oddities.refused.messages[0])
  inputs = _inputs(experiment)
  refused = _refused(inputs, oddities)
  _print_block('Refused', [message for each in refused for message in each.messages])
  for data in inputs:
    _show(data, experiment, num_examples)
  return refused


def _print_block(name: str, lines: Sequence[str]) -> None:
  for start, line in zip(
    itertools.chain([f'{name:10}'], itertools.repeat(10 * ' ')), lines, strict=False
  ):
    print(printable(start + line))


def _refused(
  inputs: 'Sequence[RowInput | StreamInput]', oddities: 'Oddities | None'
) -> 'list[RefusedRecords]':
  """Returns the unreadable records of fine-tuning examples or documents."""
  from paxlite.data.example_rows import ExampleRows

  sources = [data.source for data in inputs]
  of_examples = [source.refused for source in sources if isinstance(source, ExampleRows)]
  return of_examples or ([oddities.refused] if oddities else [])


def _is_run(name: str) -> bool:
  if is_address(name):
    return not pathlib.PurePath(name).suffix  # files have one
  return os.path.isfile(os.path.join(name, 'experiment.json'))


def _experiment(args: argparse.Namespace, overrides: Mapping[str, str]) -> 'Experiment':
  """Returns the experiment whose data are shown, with the changes of the arguments."""
  if len(args.files) == 1 and _is_run(args.files[0]) and not args.fdl_config:
    return _of_run(args.files[0], overrides)
  from paxlite.experiments.registry import find
  from paxlite.programs.launch import build_experiment

  changes: dict[str, object] = {}
  if args.vocab:
    changes['VOCAB_PATH'] = args.vocab
  if args.chat_template:
    changes['CHAT_TEMPLATE'] = args.chat_template
  if args.fdl_config:
    named = _files_of(find(args.fdl_config), args.files) if args.files else {}
    named_files = {
      name: value if isinstance(value, str) else repr(value) for name, value in named.items()
    }
    e = build_experiment(args.fdl_config, [], {**overrides, **named_files})
  else:
    e = _plain(args.files, overrides, args.vocab)
  e = e.replaced(**changes)
  e.validate()
  return e


def _of_run(folder: str, overrides: Mapping[str, str]) -> 'Experiment':
  """Returns the experiment of a run."""
  from paxlite.experiments.registry import find_known
  from paxlite.programs.launch import build_experiment, run_in

  run = run_in(folder)
  if run is None:
    raise UserError(f'{folder} is not the folder of a run: it holds no experiment.json')
  find_known(run['experiment'])
  return build_experiment(run['experiment'], [], overrides, run)


def _files_of(cls: type, files: Sequence[str]) -> dict[str, object]:
  """Returns the attribute of an experiment that names its files, with these files."""
  from paxlite.config.attributes import attribute_types

  known = attribute_types(cls)
  for name in ('TRAIN_FILES', 'TRAIN_SOURCES', 'SOURCES'):
    if name in known:
      return {name: list(files)}
  if 'DATASET_PATH' in known and len(files) == 1:
    return {'DATASET_PATH': files[0]}
  raise UserError(f'{cls.__name__} reads no files: leave FILES or --fdl_config out')


def _plain(files: Sequence[str], overrides: Mapping[str, str], vocab: str | None) -> 'Experiment':
  """Returns an experiment without a model that reads these files."""
  from paxlite.config.attributes import parse
  from paxlite.data import packaged
  from paxlite.data.tokenizer import open_tokenizer
  from paxlite.experiments import datasets
  from paxlite.experiments.rows import Rows

  cls = _dataset_of(files, overrides)
  values = {name: parse(cls, name, text) for name, text in overrides.items()}
  stated = values.get('VOCAB_PATH')
  if not vocab and isinstance(stated, str):
    vocab = stated
  needed: dict[str, object] = {'START_ID': None}
  if not vocab:
    print("Counts    by the demo's tokenizer; --vocab or --fdl_config gives those of a model")
    needed['VOCAB_PATH'] = vocab = packaged.VOCAB
    if cls.example_input is not Rows.example_input:
      needed['CHAT_TEMPLATE'] = _TEMPLATE
  needed['VOCAB_SIZE'] = open_tokenizer(vocab).vocab_size
  if cls is datasets.TextFiles:
    needed['EVAL_FRACTION'] = 0.0
  return cls(**needed | values | _files_of(cls, files))


def _dataset_of(files: Sequence[str], overrides: Mapping[str, str]) -> 'type[Rows]':
  """Returns the dataset that reads files of this kind, by the first record that has a format."""
  from paxlite.data.record_files import Text
  from paxlite.data.records import open_records, raw_records
  from paxlite.data.refused_records import RefusedRecords
  from paxlite.experiments import datasets
  from paxlite.files.text_files import expanded

  first = expanded(files)[0]
  if isinstance(open_records(first), Text):
    return datasets.TextFiles
  refused = RefusedRecords()
  for place, raw in itertools.islice(raw_records(first), _MOST_LOOKED_AT):
    found = refused.attempt(_dataset_of_record, place, raw, overrides)
    if found is not None:
      return found
  raise UserError(refused.messages[0] if refused.count else f'{first} holds no record')


def _dataset_of_record(place: str, raw: 'Raw', overrides: Mapping[str, str]) -> 'type[Rows]':
  from paxlite.data.records import parsed
  from paxlite.experiments import datasets

  record = parsed(raw, place)
  if isinstance(record.get('text'), str) or 'TEXT_FIELD' in overrides:
    return datasets.DocumentFiles
  dataset_of = extensions.hook('data of examples')
  with located(place):
    found: type[Rows] = dataset_of(Fields(record))
  return found


def _oddities(e: 'Experiment') -> 'Oddities | None':
  """Returns the oddities of the records; None if the data has no records."""
  import fiddle as fdl

  from paxlite.data.record_files import OF_RECORDS
  from paxlite.data.tokenizer import open_tokenizer
  from paxlite.experiments.datasets import DocumentFiles
  from paxlite.experiments.rows import Rows
  from paxlite.files.text_files import expanded, kind
  from paxlite.run_data.odd_records import Oddities

  odd_in = None
  examples = e.replaced(LEAVE_OUT='').example_input() if isinstance(e, Rows) else None
  if examples is not None:
    source = examples.source
    files, field, vocab = expanded(source.files), '', source.vocab_path
    odd_in = cast(Any, fdl.get_callable(source)).odd_in
  elif isinstance(e, DocumentFiles):
    files, field, vocab = expanded(e.TRAIN_SOURCES), e.TEXT_FIELD, e.tokenizer_path
  else:
    return None
  files = [f for f in files if kind(f) in OF_RECORDS]
  oddities = Oddities(open_tokenizer(vocab) if vocab else None, field, odd_in)
  oddities.read(files)
  return oddities


def _inputs(e: 'Experiment') -> 'list[RowInput | StreamInput]':
  """Returns the training data of an experiment; the parts of a mixture, one by one."""
  import fiddle as fdl

  from paxlite.data.base import RowInput
  from paxlite.data.example_rows import ExampleRows
  from paxlite.data.mixture import MixtureInput
  from paxlite.data.rows import TokenRows
  from paxlite.data.streams import StreamInput
  from paxlite.experiments.rows import Rows

  tolerant = _tolerant(e)
  examples = tolerant.example_input() if isinstance(tolerant, Rows) else None
  data = fdl.build(examples or tolerant.train_input())
  inputs = list(data.inputs) if isinstance(data, MixtureInput) else [data]
  for each in inputs:
    rows = isinstance(each, RowInput) and isinstance(each.source, ExampleRows | TokenRows)
    if not rows and not isinstance(each, StreamInput):
      raise UserError(f'{type(e).__name__} trains on {e.dataset}, which paxlite data cannot show')
  return inputs


def _tolerant(e: '_E') -> '_E':
  """Returns an experiment that leaves out the records that a run would refuse."""
  values = e.values()
  left_out: dict[str, object] = {'SKIP_UNREADABLE': True} if 'SKIP_UNREADABLE' in values else {}
  if values.get('TOO_LONG') == 'error':
    left_out['TOO_LONG'] = 'skip'
  return e.replaced(**left_out)


def _show(data: 'RowInput | StreamInput', e: 'Experiment', num_examples: int) -> None:
  import fiddle as fdl

  from paxlite.data import data_summary
  from paxlite.data.example_rows import ExampleRows
  from paxlite.experiments.epochs import max_steps
  from paxlite.run_data import data_report

  source = data.source
  print(f'Data      {printable(data.name)}')
  if isinstance(source, ExampleRows):
    formats = (f'{keys} ({count:,})' for keys, count in source.formats.most_common())
    of = f', of {amount(source.refused.num_read, "record")}' if source.refused.count else ''
    print(printable(f'Format    {"; ".join(formats)}{of}'))
  for line in data_report.report(data):
    print(printable(line))
  if e.NUM_EPOCHS is not None:
    print(f'          NUM_EPOCHS={e.NUM_EPOCHS:g} is {amount(max_steps(e, data), "step")}')
  if isinstance(source, ExampleRows) and (too_long := e.values().get('TOO_LONG')):
    if source.num_skipped and too_long == 'error':
      print('          TOO_LONG=error: a run refuses this data; other values are skip and truncate')
    for cfg in _tolerant(e).eval_inputs().values():
      print(f'Held out  {data_summary.examples(fdl.build(cfg).source)}')
  color = has_color()
  for number, text in enumerate(_examples(data, e, color, num_examples), 1):
    marked = f', {data_summary.how_learned(color)}' if number == 1 else ''
    print(f'\nExample {number}{marked}:\n{text}')


def _examples(
  data: 'RowInput | StreamInput', e: 'Experiment', color: bool, count: int
) -> Iterator[str]:
  """Yields the first examples as text, or the first row of other data."""
  import numpy as np

  from paxlite.data import data_summary
  from paxlite.data.base import RowInput
  from paxlite.data.example_rows import ExampleRows
  from paxlite.data.tokenizer import open_tokenizer

  if not count:
    return
  most = max(_FEWEST_TOKENS, _MOST_TOKENS // count)
  if isinstance(data, RowInput) and isinstance(data.source, ExampleRows):
    for number in range(min(count, data.source.num_examples)):
      yield data_summary.example_text(data.source, number, color, most)
    return
  path = e.tokenizer_path or os.environ.get('VOCAB_PATH', '')
  if not path:
    return
  batch = next(data.eval_batches(slice(0, 1)))
  ids = batch['labels'][0][batch['weights'][0] > 0]
  end = '' if len(ids) <= _MOST_TOKENS else ' …'
  learned = np.ones(len(ids), bool)[:_MOST_TOKENS]
  yield data_summary.masked_text(open_tokenizer(path), ids[:_MOST_TOKENS], learned, color) + end
