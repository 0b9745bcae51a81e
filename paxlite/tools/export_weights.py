"""paxlite export CHECKPOINT --to=hf|peft --path=OUT

Writes the weights of a run, or imported weights, for Hugging Face, tensor by tensor.

  hf    a folder that transformers loads: Llama, Mistral, Gemma, GPT-2; LoRA factors are merged
  peft  the LoRA factors, as a folder that peft loads in addition to the base model

Example:
  paxlite export runs/zed --to=hf --path=exported/zed
"""

import time
from collections.abc import Sequence

from paxlite.cli import command_line
from paxlite.core.errors import UserError
from paxlite.files import stored_output

_LAST = {'hf': 'config.json', 'peft': 'adapter_config.json'}  # the file that is written last


def main(argv: Sequence[str]) -> None:
  parser = command_line.Parser(__doc__, stored=['path'])
  parser.add_argument('--to', required=True, choices=('hf', 'peft'))
  parser.word('checkpoint', 'CHECKPOINT', 'a job_log_dir, or imported weights')
  parser.add_argument('--path', required=True, help='the folder to make')
  parser.add_argument(
    '--dtype', choices=('float32', 'bfloat16', 'float16'), help='of the tensors (as stored)'
  )
  parser.add_argument('--base', default='', help='base model that a PEFT adapter names')
  parser.add_argument('--base_weights', default='', help=command_line.BASE_WEIGHTS)
  args = command_line.parse_args(parser, argv)

  from paxlite.checkpointing.source import find_source, tokenizer_of
  from paxlite.eval.inference import experiment_of, refuse_te_layers
  from paxlite.weights import huggingface, lora

  source = find_source(args.checkpoint, args.base_weights)
  experiment = experiment_of(source)
  refuse_te_layers(source)
  variables = source.unrolled_params()
  if args.to != 'peft' and any(v.dtype.kind in 'iu' for v in variables.values()):
    raise UserError(
      f'{source.folder} holds weights in the form {experiment.FROZEN_DTYPE}, of which there is no '
      'export: --to=peft exports the factors, and a run that began from weights exports those'
    )
  started = time.perf_counter()
  with (
    stored_output.output_folder(args.path, last=_LAST[args.to]) as folder,
    command_line.progress('exporting') as report,
  ):
    if args.to == 'peft':
      size = lora.write_adapter(folder, experiment, variables, args.base, args.dtype or 'float32')
    else:
      size = huggingface.write_folder(
        folder, experiment, lora.merged(variables), args.dtype, tokenizer_of(source.folder), report
      )
  print(f'{args.path}: {size:,} bytes in {time.perf_counter() - started:.1f} s')


if __name__ == '__main__':
  command_line.run(main)
