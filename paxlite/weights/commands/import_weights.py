"""paxlite import WEIGHTS --to=FOLDER

Imports published weights, or a Pax checkpoint with its Adam state, tensor by tensor, into a folder
for CHECKPOINT_RESTORE_PATH and for commands that take a CHECKPOINT. The format follows from the
files, or from --from.

  hf    Hugging Face folder (config.json, *.safetensors), or Hub model, org/name or
        org/name@revision; `paxlite families` lists supported ones
  meta  Meta's LLaMA folder (params.json, consolidated.*.pth)
  peft  adapter (adapter_config.json) of the weights in --base_weights
  pax   Pax checkpoint_%08d; --fdl_config=EXPERIMENT (and NAME=VALUE) names its model

Flags of convert_llama_ckpt.py in saxml and MaxText, such as --base and --pax, also work.

Example:
  paxlite import downloads/Mistral-7B-v0.1 --to=weights/mistral
"""

import os
import pathlib
import shlex
import tempfile
import time
from collections.abc import Sequence

from paxlite import extensions
from paxlite.checkpointing.foreign_weights import formats_at, is_own, way_of_gguf
from paxlite.cli import command_line
from paxlite.cli.parser import Parser, stored
from paxlite.core import shell
from paxlite.core.errors import UserError, located
from paxlite.files import output, schemes
from paxlite.files.schemes import is_address

PARSER = Parser(__doc__)
PARSER.option('--from', 'format', dest='source', choices=('hf', 'meta', 'pax', 'peft'))
PARSER.word('path', 'WEIGHTS', 'weights to read', stored)
PARSER.option('--to', 'folder to make', stored, required=True)
PARSER.option('--tokenizer', 'tokenizer file or folder to add', stored)
PARSER.option('--add_tokens', 'new tokens, as A,B', default='')
PARSER.option('--base_weights', 'imported base weights of a peft adapter', stored)
PARSER.option('--fdl_config', 'experiment of a Pax checkpoint')
PARSER.option('--params_only', "leave out a Pax checkpoint's Adam state", bool)
PARSER.attributes()


def main(argv: Sequence[str]) -> None:
  argv = command_line.translate('import', argv)
  if '--from=gguf' in argv:
    raise UserError(
      '--from=gguf was removed: paxlite import FILE shows how to convert with transformers'
    )
  args = PARSER.parsed(argv)

  download = extensions.hint('published weights', args.path)
  if not download and not is_address(args.path) and not os.path.exists(args.path):
    raise UserError(f'{args.path} does not exist')
  if not is_address(args.to) and os.path.exists(args.to):
    raise UserError(f'--to={args.to} exists already: choose another folder, or remove it')
  source = args.source or ('hf' if download else _source_at(args.path))
  _check_folder(args.path)
  if source == 'pax' and args.fdl_config is None:
    raise UserError('a Pax checkpoint does not name its model: set --fdl_config=EXPERIMENT')
  if args.fdl_config and source != 'pax':
    raise UserError('--fdl_config is for --from=pax: other weights name their model')
  if args.attributes and source != 'pax':
    raise UserError('NAME=VALUE is for --from=pax: other weights name their model')
  if args.params_only and source != 'pax':
    raise UserError('--params_only is for --from=pax: other weights have no Adam state')
  if args.add_tokens and source not in ('hf', 'meta'):
    raise UserError('--add_tokens is for published models: --from=hf or --from=meta')
  if source == 'peft' and args.base_weights is None:
    raise UserError(
      f'{args.path} is a peft adapter: set --base_weights=FOLDER to its base weights, as paxlite '
      'import writes them'
    )
  if args.base_weights and source != 'peft':
    raise UserError('--base_weights is for a peft adapter (--from=peft)')
  if download and source != 'hf':
    raise UserError(f'{args.path} is read with --from=hf alone')
  started = time.perf_counter()
  tokenizer = args.tokenizer
  if tokenizer is not None:
    tokenizer = pathlib.Path(schemes.local(tokenizer, schemes.SMALL))
    if download and not tokenizer.exists():
      raise UserError(f'--tokenizer={tokenizer} does not exist')
  # Tensors of Hugging Face are read from the store one at a time; other files are copied first.
  largest = schemes.SMALL if source == 'hf' else None
  given = download(args.to) if download else schemes.local(args.path, largest)
  path, address = pathlib.Path(given), args.path if is_address(args.path) else None
  with output.output_folder(args.to, last='checksums.json') as to:
    if source == 'pax':
      lines = _import_pax(path, to, args.fdl_config, args.attributes, args.params_only)
    elif source == 'peft':
      lines = _import_adapter(path, to, args.base_weights)
    else:
      named = args.path.partition('@')[0] if download else address or str(path.absolute())
      lines = import_published(source, path, to, tokenizer, address, args.add_tokens, named)
  lines = [line.replace(str(to), args.to) for line in lines]
  print(f'{lines[0]} in {time.perf_counter() - started:.1f} s', *lines[1:], sep='\n')


def _source_at(path: str) -> str:
  """Returns the value of --from that the files at `path` tell."""
  if is_address(path):
    raise UserError(f'--from=hf|meta|pax is needed where WEIGHTS is an address: {path}')
  found = [f.source for f in formats_at(path)]
  if 'hf' in found and os.path.exists(os.path.join(path, 'config.json')):
    return 'hf'
  if os.path.exists(os.path.join(path, 'adapter_config.json')):
    return 'peft'
  if len(found) == 1:
    return found[0]
  if found:
    choices = ' or '.join(f'--from={source}' for source in found)
    raise UserError(f'{path} has files of several formats: choose {choices}')
  if is_own(path):
    raise UserError(
      f"{path} already has paxlite's format: name it where a command takes a CHECKPOINT, as in: "
      'paxlite generate CHECKPOINT'
    )
  if way := way_of_gguf(path):
    raise UserError(way)
  raise UserError(
    f'{path} has no Hugging Face (.safetensors) or Meta (.pth) weights, and is not a Pax '
    "checkpoint folder, as 'checkpoint_00001000'"
  )


def _check_folder(path: str) -> None:
  """Raises UserError where `path` is one file of a folder."""
  if os.path.isfile(path):
    folder = os.path.dirname(path) or '.'
    raise UserError(f'{path} is one file of a folder: name the folder, {folder}')


def import_published(
  source: str,
  path: pathlib.Path,
  to: pathlib.Path,
  tokenizer: pathlib.Path | None,
  address: str | None,
  add_tokens: str = '',
  named: str = '',
) -> list[str]:
  from paxlite.data.tokenizer import check_vocabulary, open_tokenizer
  from paxlite.data.tokenizer_copies import tokenizer_files
  from paxlite.experiments.gpt import GPT2
  from paxlite.weights import added_tokens, folder, huggingface, meta, whole_model
  from paxlite.weights.folder import Tensors

  tensors: Tensors
  if source == 'meta':
    experiment, entries, tensors = meta.read_folder(path)
    ignored = meta.IGNORED
    origin = None
  else:
    experiment, entries, tensors = huggingface.read_folder(path, address)
    ignored = huggingface.IGNORED
    origin = None if address else whole_model.origin_of(path, tensors)
  if tokenizer is not None:
    check_vocabulary(open_tokenizer(str(tokenizer)), experiment.VOCAB_SIZE)
  elif path.is_dir():
    tokenizer = path
  tokenizer_files(tokenizer)  # raises UserError before anything is written
  with located(str(path)):
    folder.check_tensors(entries, tensors.shapes, ignored)
  said = []
  with command_line.progress('importing') as report, tempfile.TemporaryDirectory() as made:
    if add_tokens:
      ids = added_tokens.with_tokenizer(tokenizer, add_tokens, pathlib.Path(made))
      experiment, entries, tensors = added_tokens.with_rows(experiment, entries, tensors, ids)
      tokenizer = pathlib.Path(made)
      said = [
        f'{add_tokens}: ids {ids}, with rows that are the mean of all others. To train these rows '
        f'with low-rank factors: {shell.flag("LORA_TOKENS", ids)}'
      ]
    size = folder.write_weights(to, experiment, entries, tensors, tokenizer, report, origin, named)
  name = type(experiment).__name__
  lines = [f'{to}: {len(entries):,} tensors, {size:,} bytes', f'The model is a {name}.', *said]
  if not any((to / f).exists() for f in ('tokenizer.json', 'tokenizer.model')):
    lines.append('No tokenizer was found: name one with --tokenizer where text is read or written.')
  weights = shlex.quote(str(to))
  lines += [
    'To continue a text, to train on documents, and to fine-tune all weights or low-rank factors:',
    f'  paxlite generate {weights} "Once upon a time"',
  ]
  if not isinstance(experiment, GPT2):
    one_device = "'ICI_MESH_SHAPE=[1,1,1]' 'DCN_MESH_SHAPE=[1,1,1]'"  # brackets need quotes in zsh
    lines += [
      f'  paxlite finetune {weights} --method={method} {one_device} {data}'
      for method, data in {
        'documents': 'TRAIN_SOURCES=text.jsonl',
        'sft': 'TRAIN_FILES=train.jsonl',
        'lora': 'TRAIN_FILES=train.jsonl',
      }.items()
    ]
    lines.append("These train on one device; on 8, for example, with 'ICI_MESH_SHAPE=[1,8,1]'.")
  return lines


def _import_adapter(path: pathlib.Path, to: pathlib.Path, base: str) -> list[str]:
  from paxlite.checkpointing.source import find_source
  from paxlite.weights.adapter_reader import import_adapter

  size, what = import_adapter(path, find_source(base), to)
  return [
    f'{to}: {what}, {size:,} bytes',
    f'They stay next to {base}. To train them further:',
    f'  paxlite finetune {shlex.quote(str(to))} --method=lora TRAIN_FILES=train.jsonl',
  ]


def _import_pax(
  path: pathlib.Path, to: pathlib.Path, name: str, overrides: dict[str, str], params_only: bool
) -> list[str]:
  import fiddle as fdl
  import jax
  from flax.linen import meta as boxes

  from paxlite.programs.launch import build_experiment
  from paxlite.weights.pax import import_checkpoint

  experiment = build_experiment(name, [], overrides)
  task = fdl.build(experiment.plain.build_task())
  abstract = boxes.unbox(jax.eval_shape(task.init, jax.random.key(0)))
  with command_line.progress('importing') as report:
    size, step = import_checkpoint(
      path,
      to,
      experiment,  # type: ignore[arg-type]
      abstract,
      report,
      params_only,
    )
  lines = [f'{to}: {size:,} bytes of {type(experiment).__name__}']
  if step is not None:
    lines.append(
      f'With the optimizer state of step {step:,}: {shell.flag("CHECKPOINT_RESTORE_PATH", to)} '
      'CHECKPOINT_RESTORE_STATE=True continues from there.'
    )
  return lines
