"""paxlite zero-shot CHECKPOINT --tasks=lambada:FILE.jsonl[,TASK.json …]

Zero-shot evaluation of a job_log_dir or of imported weights. Prints a table with standard errors,
and writes JSON with --output. A task is lambada:FILE or boolq:FILE, or a .json file that names the
fields of its records (docs/evaluation.md).

Example:
  paxlite zero-shot runs/llama --tasks=lambada:lambada.jsonl,boolq:boolq.jsonl --output=scores
"""

import json
from collections.abc import Sequence

from paxlite.cli import command_line
from paxlite.cli.parser import Parser, stored
from paxlite.core.errors import UserError
from paxlite.files.output import check_output, write_output
from paxlite.generation.checkpoint_options import add_weights

PARSER = Parser(__doc__)
PARSER.word('checkpoint', 'CHECKPOINT', 'a job_log_dir, or imported weights', stored)
PARSER.option('--tasks', 'what to evaluate', stored, required=True, nargs='+')
PARSER.option('--chat', 'ask in a chat, by the chat template', bool)
PARSER.option('--limit', 'only the first examples of each task', int)
PARSER.option('--batch_tokens', 'tokens of a batch (4096)', int, default=4096)
PARSER.option('--skip_unreadable', 'leave out bad records', bool)
_too_long = 'what to do with a text that the model cannot take: cut its beginning off (and say so)'
PARSER.option('--too_long', _too_long, choices=('truncate', 'error'), default='truncate')
PARSER.option('--output', 'folder for results.json and the examples of each task', stored)
add_weights(PARSER)


def main(argv: Sequence[str]) -> None:
  args = PARSER.parsed(argv)
  for name in ('limit', 'batch_tokens'):
    if getattr(args, name) is not None and getattr(args, name) < 1:
      raise UserError(f'--{name}={getattr(args, name)} must be at least 1')
  if args.dtype is not None:
    args.attributes['FPROP_DTYPE'] = args.dtype

  import jax

  from paxlite.eval.eval_tasks import read_tasks
  from paxlite.eval.zero_shot import ZeroShot, as_json
  from paxlite.generation.inference import load_checkpoint

  tasks = read_tasks(args.tasks, args.limit, args.skip_unreadable, chat=args.chat)
  if args.output is not None:
    check_output('--output', f'{args.output}/results.json')
  inference = load_checkpoint(args.checkpoint, args.tokenizer, args.attributes, args.base_weights)
  evaluate = ZeroShot(inference, args.batch_tokens, args.too_long)
  is_first = jax.process_index() == 0  # only one of several processes prints and writes
  results = {}
  for task in tasks:
    with command_line.progress(task.name) as report:
      results[task.name] = evaluate(task, report)
    if not is_first:
      continue
    print(results[task.name].table(task.name), flush=True)
    if args.output is not None:
      lines = [json.dumps(x, ensure_ascii=False) + '\n' for x in results[task.name].examples]
      write_output(f'{args.output}/{task.name}.jsonl', ''.join(lines).encode())
      write_output(f'{args.output}/results.json', f'{as_json(results)}\n'.encode())
