"""paxlite zero-shot CHECKPOINT --tasks=lambada:FILE.jsonl[,TASK.json …]

Evaluates a run or imported weights on zero-shot tasks. Prints a table with standard errors;
--output writes JSON. A task is lambada:FILE, boolq:FILE, or a .json file that names the fields of
its records (docs/evaluation.md).

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
PARSER.word('checkpoint', 'CHECKPOINT', 'run folder, or imported weights', stored)
PARSER.option('--tasks', 'tasks', stored, required=True, nargs='+')
PARSER.option('--chat', 'use the chat template', bool)
PARSER.option('--limit', 'first examples of each task only', int)
PARSER.option('--batch_tokens', 'tokens per batch (4096)', int, default=4096)
PARSER.option('--skip_unreadable', 'skip bad records', bool)
_too_long = 'cut the beginning of a text that is too long, and say so, or fail'
PARSER.option('--too_long', _too_long, choices=('truncate', 'error'), default='truncate')
PARSER.option('--output', "folder for results.json and each task's examples", stored)
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
