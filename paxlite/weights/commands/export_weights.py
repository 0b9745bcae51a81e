"""paxlite export CHECKPOINT --to=hf|peft|gguf --path=OUT

Writes the weights of a run, or imported weights, for other programs, tensor by tensor.

  hf    folder for transformers: Llama, Mistral, Gemma, GPT-2; LoRA factors are merged. Weights
        imported from a model with images become that model again: its other tensors and files are
        copied byte for byte. --text_only writes the text model alone
  peft  LoRA factors, as a folder that peft loads on top of the base model
  gguf  folder with one llama.cpp file, including tokenizer and chat template

In GGUF, matrices have the --type and vectors are f32. If a row's length is not a multiple of 256,
q4_k becomes q8_0; if not of 32, q8_0 becomes f16.

Examples:
  paxlite export runs/zed --to=hf --path=exported/zed
  paxlite export runs/zed --into=downloads/gemma-3-4b-it --path=exported/zed
  paxlite export runs/zed --to=gguf --type=q8_0 --path=exported/zed_gguf
"""

import pathlib
import time
from collections.abc import Sequence

from paxlite import extensions
from paxlite.cli import command_line
from paxlite.cli.parser import Parser, local, stored
from paxlite.core.errors import UserError
from paxlite.files import output
from paxlite.files.schemes import is_address
from paxlite.generation.checkpoint_options import BASE_WEIGHTS

_LAST = {'hf': 'config.json', 'peft': 'adapter_config.json', 'gguf': ''}  # what is copied last

PARSER = Parser(__doc__)
PARSER.option('--to', 'format (hf)', choices=('hf', 'peft', 'gguf'), default='hf')
PARSER.word('checkpoint', 'CHECKPOINT', 'run folder, or imported weights', stored)
PARSER.option('--path', 'folder to make', stored, required=True)
PARSER.option('--dtype', 'tensor dtype (as stored)', choices=('float32', 'bfloat16', 'float16'))
PARSER.option(
  '--type', 'GGUF tensor type (as stored)', choices=('f32', 'f16', 'bf16', 'q8_0', 'q4_k')
)
PARSER.option('--into', 'folder of the whole model (as at its import)', local, default='')
PARSER.option('--text_only', "write only an image model's text model", bool)
PARSER.option('--proof', 'write proof.json for `paxlite prove`', bool)
PARSER.option('--base', 'base model that a PEFT adapter names (its imported base)', default='')
PARSER.option('--base_weights', BASE_WEIGHTS, stored, default='')
PARSER.option('--push', 'upload to the Hugging Face Hub', metavar='ORG/NAME')
PARSER.option('--private', 'make a new Hub model private', bool)


def main(argv: Sequence[str]) -> None:
  args = PARSER.parsed(argv)

  from paxlite.checkpointing.source import find_source
  from paxlite.experiments import options
  from paxlite.experiments.compatibility import refuse_edited_model
  from paxlite.generation.inference import experiment_of, refuse_te_layers
  from paxlite.weights import gguf_writer, huggingface, lora, whole_model
  from paxlite.weights.families import family_of
  from paxlite.weights.family_tables import FAMILIES
  from paxlite.weights.layout import has_modules

  if args.type and args.to != 'gguf':
    raise UserError(f'--type={args.type} is for --to=gguf: use --dtype for other formats')
  if args.dtype and args.to == 'gguf':
    raise UserError(f'--dtype={args.dtype} is not for --to=gguf: use --type')
  if args.private and not args.push:
    raise UserError('--private is for --push=ORG/NAME')
  if args.push and is_address(args.path):
    raise UserError(f'--push uploads a folder of this machine, which --path={args.path} is not')
  if args.proof and args.to == 'peft':
    raise UserError('--proof is for whole models: --to=hf or --to=gguf')
  if (args.into or args.text_only) and (args.to != 'hf' or (args.into and args.text_only)):
    raise UserError('--into and --text_only exclude each other, and are for --to=hf')
  pushing = extensions.hook('export --push') if args.push else None
  push = pushing and pushing(args.push, args.private, args.to)
  source = find_source(args.checkpoint, args.base_weights)
  experiment = experiment_of(source)
  refuse_te_layers(source)
  refuse_edited_model(experiment)
  variables = source.unrolled_params()
  if args.to != 'peft' and any(v.dtype.kind in 'iu' for v in variables.values()):
    raise UserError(
      f'{source.folder} holds {experiment.FROZEN_DTYPE} weights, which cannot be exported: '
      '--to=peft exports the factors, and a run that started from weights exports those'
    )
  original = None
  if args.to == 'hf' and not args.text_only:
    original = whole_model.original_of(args.checkpoint, args.base_weights, args.into)
  if original and args.dtype:
    raise UserError(
      f'--dtype={args.dtype} is for --text_only: {original.folder} gets its own dtypes back'
    )
  started = time.perf_counter()
  whole = original and whole_model.WholeModel(
    original, experiment, lora.merged(experiment, variables), source.tokenizer
  )
  # before anything is written: it may be that there is no tokenizer
  prove = extensions.hook('export --proof') if args.proof else None
  write_proof = prove and prove(args.checkpoint, args.base_weights)
  with (
    output.output_folder(args.path, last=_LAST[args.to]) as folder,
    command_line.progress('exporting') as report,
  ):
    if args.to == 'peft':
      base = args.base or lora.named_base(args.checkpoint, args.base_weights)
      size = lora.write_adapter(folder, experiment, variables, base, args.dtype or 'float32')
    elif args.to == 'gguf':
      written = gguf_writer.write_folder(
        folder, experiment, lora.merged(experiment, variables), args.type, source.tokenizer, report
      )
      size = written.size
    elif whole:
      size = whole.write(folder, report)
    else:
      size = huggingface.write_folder(
        folder, experiment, lora.merged(experiment, variables), args.dtype, source.tokenizer, report
      )
    if write_proof:
      write_proof(folder, experiment)
  print(f'{args.path}: {size:,} bytes in {time.perf_counter() - started:.1f} s')
  if whole:
    print(whole.summary)
  elif options.value(experiment, 'NUM_PREDICTION_MODULES') and (
    args.to == 'gguf' or not has_modules(FAMILIES[family_of(experiment)].names)
  ):
    print('Its prediction modules are left out: the format has no names for them')
  if args.to == 'gguf':
    print(f'{written.name} has {written.kinds} tensors')
  if push:
    push(pathlib.Path(args.path))
