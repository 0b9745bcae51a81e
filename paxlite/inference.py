"""A trained or imported model, ready to continue text."""

import contextlib
import dataclasses
import json
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import fiddle as fdl
import jax
from jax.sharding import Mesh

from paxlite import partitioning
from paxlite.decoding import Generator
from paxlite.errors import UserError
from paxlite.experiment import find
from paxlite.experiments.decoding import DECODING
from paxlite.experiments.language_model import LanguageModel
from paxlite.inputs.files import read_records
from paxlite.inputs.tokenizer import ChatFormat, Tokenizer, open_tokenizer
from paxlite.optimizers import path_name
from paxlite.params import convert, derived, parse
from paxlite.restoring import Plan, Restore, Source, find_source, read_values

# ids that a model has beyond its tokenizer's: rounding to a multiple, at most
_SPARE_IDS = 1024


@dataclasses.dataclass(frozen=True)
class Inference:
  """A model with its tokenizer.

  Attributes:
    experiment: Its numbers, layers unrolled.
    model: The model.
    params: On the mesh, in the experiment's FPROP_DTYPE.
    mesh: Where.
    tokenizer: Text to ids and back.
  """

  experiment: LanguageModel
  model: Any
  params: Any
  mesh: Mesh
  tokenizer: Tokenizer

  def generator(self) -> Generator:
    e = self.experiment
    eos = e.EOS_IDS or [self.tokenizer.eos_id]
    return Generator(
      self.model,
      self.params,
      e.MAX_SEQ_LEN,
      e.sampling,
      eos_ids=[i for i in eos if i >= 0],
      vocab_size=self.tokenizer.vocab_size,
      mesh=self.mesh,
      rules=e.rules,
    )

  def encode(self, text: str) -> list[int]:
    """A text as the model's rows begin: with its start id, if it has one."""
    return start_ids(self.experiment, self.tokenizer) + self.tokenizer.encode(text)

  def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """A conversation up to where the answer begins."""
    chat = ChatFormat(self.experiment.CHAT_TEMPLATE, self.tokenizer.path)
    return self.tokenizer.encode_marked(chat.render(messages, prompt=True))


def load(
  experiment: LanguageModel, source: Source, restore: Restore, tokenizer_path: str = ''
) -> Inference:
  """Loads the weights of `restore` into the experiment's model.

  Args:
    experiment: As trained; a copy of it is unrolled here, and decodes without recomputation.
    source: Where a tokenizer may be.
    restore: Which weights, and by which rules.
    tokenizer_path: '' looks beside the weights and in VOCAB_PATH.

  Raises:
    UserError: no tokenizer, one of another vocabulary, or weights of another shape.
  """
  tokenizer = open_tokenizer(tokenizer_path or str(tokenizer_folder(source, experiment)))
  check_tokenizer(tokenizer, experiment)
  decoding = dict(USE_REPEATED_LAYER=False, CHECKPOINT_POLICY='SAVE_EVERYTHING')
  unrolled = type(experiment)(**(explicit_values(experiment) | decoding))
  mesh = partitioning.make_mesh(experiment.ICI_MESH_SHAPE, experiment.DCN_MESH_SHAPE)
  task = fdl.build(unrolled.task())
  boxed = jax.eval_shape(task.init_params, jax.random.key(0))
  like = lambda x: x.update(dtype=unrolled.FPROP_DTYPE)
  shapes = partitioning.sharded_shapes(boxed, mesh, unrolled.rules)
  abstract = {'params': jax.tree.map(like, shapes)}
  plan = Plan(restore, abstract)
  missing = plan.fresh + plan.ignored
  if missing:
    raise UserError(f'{source.folder} lacks {missing[0]}, without which there is no text')
  load_one = lambda path, like: plan.load(path_name(path), like)
  params = jax.tree_util.tree_map_with_path(load_one, abstract)['params']
  return Inference(unrolled, task.model, params, mesh, tokenizer)


def load_checkpoint(
  checkpoint: str, tokenizer_path: str = '', overrides: Mapping[str, str] | None = None
) -> Inference:
  """The model of a job_log_dir or of imported weights, over all devices that are present.

  Args:
    checkpoint: See restoring.find_source.
    tokenizer_path: See load.
    overrides: Text of experiment attributes, as --fdl.NAME has it.
  """
  source = find_source(checkpoint)
  trained = experiment_of(source)
  here = dict(ICI_MESH_SHAPE=[1, 1, jax.device_count()], DCN_MESH_SHAPE=[1, 1, 1])
  cls = type(trained)
  changes = {k: parse(cls, k, text) for k, text in (overrides or {}).items()}
  without: dict[str, Any] = {
    'CHECKPOINT_RESTORE_PATH': '',
    'CHECKPOINT_IGNORE_RULES': [],
    'CHECKPOINT_RENAME_RULES': [],
    'CHECKPOINT_RESTORE_STATE': False,
  }
  experiment = cls(
    **(explicit_values(trained) | without | here | {'PERCORE_BATCH_SIZE': 1.0} | changes)
  )
  experiment.validate()
  return load(experiment, source, Restore(checkpoint), tokenizer_path)


def experiment_of(source: Source) -> LanguageModel:
  """The experiment that a checkpoint is of.

  Raises:
    UserError: it is not known, or no language model.
  """
  found = read_values(source)
  cls = find(found['experiment'])
  if not issubclass(cls, LanguageModel):
    raise UserError(f'{source.experiment}: {found["experiment"]} is no language model')
  known = {k: v for k, v in found['values'].items() if hasattr(cls, k)}  # others are of old
  return cls(**known)


def explicit_values(experiment: LanguageModel) -> dict[str, Any]:
  """The experiment's values, those left to be derived left out."""
  cls = type(experiment)
  return {
    k: convert(cls, k, v)
    for k, v in experiment.values().items()
    if not isinstance(getattr(cls, k), derived) or k in vars(experiment)
  }


def tokenizer_folder(source: Source, experiment: LanguageModel) -> pathlib.Path:
  """Where the tokenizer is: beside the weights, in VOCAB_PATH, or beside what LoRA started from.

  Without any, the folder of the weights.
  """
  candidates = [source.folder, pathlib.Path(getattr(experiment, 'VOCAB_PATH', '') or source.folder)]
  with contextlib.suppress(UserError):
    base = read_values(source)['values'].get('CHECKPOINT_RESTORE_PATH')
    candidates += [pathlib.Path(base)] if base else []
  for folder in candidates:
    with contextlib.suppress(UserError):
      return pathlib.Path(open_tokenizer(str(folder)).path)
  return source.folder


def start_ids(e: Any, tokenizer: Tokenizer) -> list[int]:
  """What a text begins with for the experiment's model."""
  start = tokenizer.bos_id if e.START_ID is None else e.START_ID
  return [start] if start >= 0 else []


def check_tokenizer(tokenizer: Tokenizer, experiment: LanguageModel) -> None:
  """Raises UserError where the tokenizer cannot be the model's."""
  spare = experiment.VOCAB_SIZE - tokenizer.vocab_size
  if not 0 <= spare < _SPARE_IDS:
    raise UserError(
      f'{tokenizer.path} has {tokenizer.vocab_size:,} ids and the model VOCAB_SIZE='
      f'{experiment.VOCAB_SIZE:,}: it is the tokenizer of another model'
    )


@dataclasses.dataclass(frozen=True)
class Prompt:
  """One line of a file of prompts.

  Attributes:
    record: The line.
    ids: Its tokens.
  """

  record: dict[str, Any]
  ids: list[int]


def read_prompts(files: Sequence[str], inference: Inference) -> list[Prompt]:
  """The prompts of JSON lines: {"inputs": text} or {"messages": [{"role", "content"} …]}.

  Raises:
    UserError: a line is neither, or longer than the model takes (file and line are named).
  """
  prompts = []
  for file in files:
    for place, record in read_records(file):
      if isinstance(record.get('messages'), list):
        ids = inference.encode_chat(record['messages'])
      elif isinstance(record.get('inputs'), str):
        ids = inference.encode(record['inputs'])
      else:
        raise UserError(f'{place} has neither a text "inputs" nor a list "messages"')
      if not 0 < len(ids) < inference.experiment.MAX_SEQ_LEN:
        raise UserError(
          f'{place}: a prompt of {len(ids):,} tokens; the model takes 1 to '
          f'MAX_SEQ_LEN − 1 = {inference.experiment.MAX_SEQ_LEN - 1:,}'
        )
      prompts.append(Prompt(record, ids))
  if not prompts:
    raise UserError(f'{", ".join(files) or "DECODE_FILES"}: no prompts')
  return prompts


def decode_file(inference: Inference, prompts: Sequence[Prompt], output: pathlib.Path) -> int:
  """Continues every prompt into `output`, JSON lines in their order; goes on where it was stopped.

  What is done lies in OUTPUT.partial until all is. Prompts of similar length share a batch. The
  sampling of a prompt depends on the seed and on its own place alone.

  Returns:
    How many were continued now; the others had been before.
  """
  from rich.console import Console
  from rich.progress import track

  e = inference.experiment
  _check_settings(output, e)
  partial = output.with_name(f'{output.name}.partial')
  if output.exists():
    return 0
  done = _finished(partial, prompts)
  todo = sorted(set(range(len(prompts))) - done.keys(), key=lambda i: len(prompts[i].ids))
  todo_batches = [
    todo[i : i + e.DECODE_BATCH_SIZE] for i in range(0, len(todo), e.DECODE_BATCH_SIZE)
  ]
  generator = inference.generator()
  console = Console(stderr=True)
  with partial.open('a', encoding='utf-8') as f:
    for batch in track(todo_batches, 'decoding', console=console, disable=not console.is_terminal):
      padded = batch + batch[-1:] * (e.DECODE_BATCH_SIZE - len(batch))  # one program for all
      rows = generator.generate(
        [prompts[i].ids for i in padded], e.MAX_DECODE_STEPS, seed=e.SEED, row_ids=padded
      )
      for i, ids in zip(batch, rows, strict=False):
        text = inference.tokenizer.decode(ids)
        done[i] = {'index': i, **prompts[i].record, 'prediction': text}
        f.write(json.dumps(done[i], ensure_ascii=False) + '\n')
      f.flush()
      os.fsync(f.fileno())
  ordered = output.with_name(f'{output.name}.tmp')
  with ordered.open('w', encoding='utf-8') as f:
    for i in range(len(prompts)):
      f.write(json.dumps(done[i], ensure_ascii=False) + '\n')
  ordered.replace(output)
  partial.unlink()
  return len(todo)


def _check_settings(output: pathlib.Path, e: LanguageModel) -> None:
  """Notes beside `output` how it is decoded; raises UserError where it was begun otherwise."""
  settings = {k: getattr(e, k) for k in ('DECODE_FILES', 'SEED', *DECODING)}
  path = output.with_name(f'{output.name}.settings')
  if not path.exists():
    path.write_text(json.dumps(settings, indent=2) + '\n')
    return
  before = json.loads(path.read_text())
  changed = [f'{k} {before.get(k)!r} → {v!r}' for k, v in settings.items() if before.get(k) != v]
  if changed:
    raise UserError(
      f'{output} was decoded with other settings: {"; ".join(changed)}. '
      f'Remove {path} and {output.name}* to begin anew'
    )


def _finished(partial: pathlib.Path, prompts: Sequence[Prompt]) -> dict[int, dict[str, Any]]:
  """What an interrupted decoding has written, a torn last line cut off.

  Raises:
    UserError: it is of other prompts.
  """
  if not partial.exists():
    return {}
  data = partial.read_bytes()
  whole = data[: data.rfind(b'\n') + 1]
  if len(whole) < len(data):
    partial.write_bytes(whole)
  done: dict[int, dict[str, Any]] = {}
  for place, record in read_records(str(partial)) if whole else ():
    i: Any = record.get('index')
    mine = prompts[i].record if isinstance(i, int) and 0 <= i < len(prompts) else None
    if mine is None or any(record.get(k) != v for k, v in mine.items()):
      raise UserError(f'{place} is of other prompts: remove {partial} to begin anew')
    done[i] = record
  return done


def text_stream(tokenizer: Tokenizer, ids: Iterator[int]) -> Iterator[str]:
  """Pieces of text as tokens come; a character of several tokens waits for its last one."""
  so_far: list[int] = []
  shown = ''
  for i in ids:
    so_far.append(i)
    text = tokenizer.decode(so_far)
    if not text.endswith('\ufffd') and len(text) > len(shown):
      yield text[len(shown) :]
      shown = text
  rest = tokenizer.decode(so_far)[len(shown) :]
  if rest:
    yield rest
