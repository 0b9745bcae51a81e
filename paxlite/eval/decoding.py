"""Runs --mode=decode, which continues prompts."""

import argparse
import dataclasses
import json
import os
import pathlib
import shlex
import zlib
from collections.abc import Iterable, Sequence

from paxlite.chats.sft_formats import SYSTEM, chat, check_unread
from paxlite.checkpointing.restore import Restore
from paxlite.checkpointing.source import find_source
from paxlite.cli.terminal import say
from paxlite.config.attribute_kinds import Kind
from paxlite.config.former_names import current_values
from paxlite.core.errors import UserError, located
from paxlite.core.fields import Fields
from paxlite.core.json_text import JsonObject
from paxlite.core.run_files import open_file, write_file
from paxlite.core.wording import amount
from paxlite.experiments.language_model import LanguageModel
from paxlite.files.json_files import read_json_lines, read_object
from paxlite.files.text_files import expanded
from paxlite.generation import inference
from paxlite.generation.inference import Inference
from paxlite.generation.request import Completion, Request
from paxlite.programs.agreement import compare_configs
from paxlite.programs.first_start import as_begun
from paxlite.programs.run import Run
from paxlite.programs.run_folder import (
  check_evaluated,
  check_present,
  holding,
  holds_weights,
  make_folder,
)
from paxlite.programs.weights_model import restore_of


def language_model(run: Run) -> LanguageModel:
  """Returns the experiment of a run; UserError if its model is not a language model."""
  if not isinstance(run.experiment, LanguageModel):
    raise UserError(f'{type(run.experiment).__name__} is not a language model')
  return run.experiment


def load(run: Run) -> tuple[inference.Inference, int | None]:
  """Returns the model of the last good checkpoint and its step, or of restored weights and None."""
  e = language_model(run)
  own = bool(run.checkpoints().steps())
  restore = Restore(str(run.folder)) if own else restore_of(e)
  if restore is None:
    raise UserError(
      f'{run.place} holds no checkpoint: train first, or name weights with CHECKPOINT_RESTORE_PATH'
    )
  source = find_source(restore.path)
  vocab = e.tokenizer_path or os.environ.get('VOCAB_PATH', '')
  loaded = inference.load(e, source, restore, vocab)
  return loaded, int(source.folder.name.rpartition('_')[2]) if own else None


def decode(run: Run, options: argparse.Namespace | None = None) -> None:
  """Continues the prompts of DECODE_FILES with the last good checkpoint or restored weights."""
  if holds_weights(run):
    raise UserError(
      f'{run.place} holds weights, not a run: paxlite generate {shlex.quote(str(run.place))} '
      '"Once upon a time" continues a text with them'
    )
  with holding(run, deletes=False) as (held, _):
    _decode(as_begun(held))


def _decode(run: Run) -> None:
  e = language_model(run)
  if not e.DECODE_FILES:
    raise UserError('DECODE_FILES=/path/to/prompts.jsonl is missing')
  compare_configs(run)
  check_present(run)
  check_evaluated(run)
  loaded, step = load(run)
  prompts = read_prompts(e.DECODE_FILES, loaded)
  make_folder(run.folder)
  name = 'restored' if step is None else f'{step:08d}'
  output = run.folder / f'decoded_{name}.jsonl'
  count = decode_file(loaded, prompts, output)
  say(f'{output}: {amount(len(prompts), "prompt")} continued, {count:,} of them now')


@dataclasses.dataclass(frozen=True)
class PromptLine:
  """One line of a file of prompts."""

  record: JsonObject  # the JSON object of the line
  ids: list[int]  # token ids of the prompt
  is_chat: bool = False  # whether the line has messages


def read_prompts(files: Sequence[str], inference: Inference) -> list[PromptLine]:
  """Reads prompts from JSON lines: {"inputs": text} or {"messages": [{"role", "content"} …]}.

  Raises UserError if a line is neither of these, already has a "prediction", or is longer than the
  model takes (the message names the file and line); or there are no prompts.
  """
  prompts = []
  for file in expanded(files):
    for place, record in read_json_lines(file):
      if 'prediction' in record:
        raise UserError(f'{place} already has a "prediction", the key of the output: rename it')
      fields = Fields(record)
      if 'messages' in record:
        with located(place):
          found = chat(fields, fields.get('messages'))
          check_unread(fields, [found])
          ids = inference.encode_chat(found.messages, found.tools)
      elif isinstance(text := fields.get('inputs'), str):
        if any(key in fields for key in (*SYSTEM, 'tools', 'functions')):
          raise UserError(f'{place}: system messages and tools need a chat: write "messages"')
        ids = inference.encode(text)
      else:
        raise UserError(f'{place} has neither a text "inputs" nor a list "messages"')
      if not 0 < len(ids) < inference.max_length:
        raise UserError(
          f'{place}: a prompt of {len(ids):,} tokens; the model takes 1 to '
          f'{inference.max_length - 1:,}, one less than it has positions'
        )
      prompts.append(PromptLine(record, ids, 'messages' in record))
  if not prompts:
    raise UserError(f'{", ".join(files) or "DECODE_FILES"}: no prompts')
  return prompts


def decode_file(inference: Inference, prompts: Sequence[PromptLine], output: pathlib.Path) -> int:
  """Continues every prompt and writes `output`; resumes an interrupted call.

  `output` has the prompts as JSON lines in their order. OUTPUT.partial holds the predictions until
  all prompts are done. The sampling of a prompt depends only on the seed and on the prompt's
  position among the prompts.

  Returns:
    Number of prompts continued by this call; earlier calls continued the others.
  """
  from rich.console import Console
  from rich.progress import track

  e = inference.experiment
  engine = inference.engine()
  _check_settings(output, inference, prompts)
  partial = output.with_name(f'{output.name}.partial')
  if output.exists():
    return 0
  done = _finished(partial)
  todo = sorted(set(range(len(prompts))) - done.keys(), key=lambda i: len(prompts[i].ids))
  ends = {chat: inference.ends(chat) for chat in {prompts[i].is_chat for i in todo}}
  asked = [
    Request(
      prompts[i].ids, min(e.MAX_DECODE_STEPS, inference.max_length - len(prompts[i].ids)),
      engine.sampling, e.SEED, sample=i, ends=ends[prompts[i].is_chat],
    )
    for i in todo
  ]  # fmt: skip
  console = Console(stderr=True)
  answers: Iterable[tuple[int, Completion]] = track(
    engine.answers(asked), 'decoding', total=len(asked), console=console,
    disable=not console.is_terminal,
  )  # fmt: skip
  with open_file(partial, 'a', encoding='utf-8') as f:
    for number, answer in answers:
      done[todo[number]] = answer.text
      f.write(json.dumps({'prompt': todo[number], 'prediction': answer.text}) + '\n')
      f.flush()
      os.fsync(f.fileno())
  records = [prompt.record | {'prediction': done[i]} for i, prompt in enumerate(prompts)]
  lines = [json.dumps(record, ensure_ascii=False) + '\n' for record in records]
  write_file(output, ''.join(lines).encode())
  partial.unlink()
  return len(todo)


def _check_settings(
  output: pathlib.Path, inference: Inference, prompts: Sequence[PromptLine]
) -> None:
  """Saves the settings that `output` depends on next to it, in OUTPUT.settings.

  Raises UserError if `output` was begun with other settings.
  """
  e = inference.experiment
  contents = json.dumps([[p.record, p.ids] for p in prompts])
  names = 'DECODE_FILES', 'SEED', 'FPROP_DTYPE', 'MAX_SEQ_LEN'
  settings = {name: getattr(e, name) for name in names}
  settings |= e.values_of(Kind.GENERATION, Kind.SHAPE, Kind.FUNCTION) | {
    'weights': inference.source.fingerprint,
    'prompts': zlib.crc32(contents.encode()),
  }
  path = output.with_name(f'{output.name}.settings')
  if not path.exists():
    write_file(path, (json.dumps(settings, indent=2) + '\n').encode())
    return
  before = current_values(read_object(path), say=False)
  # an attribute that is newer than the file made no difference then
  changed = [f'{k} {before[k]!r} → {v!r}' for k, v in settings.items() if before.get(k, v) != v]
  if changed:
    raise UserError(
      f'{output} was decoded with other settings: {"; ".join(changed)}. '
      f'Remove {path} and {output.name}* to begin again'
    )


def _finished(partial: pathlib.Path) -> dict[int, str]:
  """Returns the predictions that an interrupted decoding wrote, and cuts off a torn last line."""
  if not partial.exists():
    return {}
  data = partial.read_bytes()
  whole = data[: data.rfind(b'\n') + 1]
  if len(whole) < len(data):
    write_file(partial, whole)
  records = [record for _, record in read_json_lines(str(partial))] if whole else []
  return {int(r['prompt']): r['prediction'] for r in records}
