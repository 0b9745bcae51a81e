"""paxlite generate CHECKPOINT PROMPT [--chat] [--before] [NAME=VALUE …]

Continues PROMPT and prints the text as it is generated. CHECKPOINT is a run folder or imported
weights. --chat asks PROMPT as a chat message. --before also continues it with the run's initial
weights.

Example:
  paxlite generate runs/demo "And it came to pass" --temperature=0.8
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from paxlite.cli.parser import Parser, stored
from paxlite.cli.terminal import warn
from paxlite.core.errors import UserError
from paxlite.core.foreign_text import printable
from paxlite.core.wording import amount
from paxlite.generation.checkpoint_options import add_weights

if TYPE_CHECKING:
  from paxlite.generation.inference import Inference


def add_options(parser: Parser) -> None:
  """Declares the options of generation."""
  parser.option('--system', 'system message')
  parser.option('--before', 'also show text from the initial weights', bool)
  parser.option('--max_new_tokens', 'maximum new tokens (256)', int, default=256)
  parser.option('--temperature', '0: the most likely token (0)', float)
  parser.option('--top_k', 'most likely tokens to sample from (0: all)', int)
  parser.option('--top_p', 'probability mass to sample from (1: all)', float)
  parser.option('--repetition_penalty', 'above 1: fewer repetitions (1)', float)
  parser.option('--drafts', 'speculative decoding', bool)
  parser.option('--seed', 'sampling seed (0)', int, default=0)
  add_weights(parser)


_ENDS = 'exit', 'quit', '/exit', '/quit', '/bye'  # what ends a conversation

PARSER = Parser(__doc__)
PARSER.word('checkpoint', 'CHECKPOINT', 'run folder, or imported weights', stored)
PARSER.word('prompt', 'PROMPT', 'text to continue or answer', required=False)
PARSER.option('--chat', 'use the chat template', bool)
add_options(PARSER)


def main(argv: Sequence[str]) -> None:
  answer(PARSER.parsed(argv))


def answer(args: argparse.Namespace) -> None:
  """Continues the prompt of a command line, or answers it."""
  overrides = args.attributes
  if args.prompt is None and not args.chat:
    raise UserError(
      'PROMPT is missing: paxlite generate CHECKPOINT PROMPT. paxlite asks for it with --chat'
    )
  if not 0 <= args.seed < 1 << 32:
    raise UserError(f'--seed={args.seed} must be from 0 to 2**32 - 1')
  if args.before and args.prompt is None:
    raise UserError('--before needs a prompt for both the run and its initial weights')
  if args.system is not None and not args.chat:
    raise UserError('--system needs --chat')
  for flag, name in (
    ('temperature', 'TEMPERATURE'),
    ('top_k', 'TOP_K'),
    ('top_p', 'TOP_P'),
    ('repetition_penalty', 'REPETITION_PENALTY'),
    ('dtype', 'FPROP_DTYPE'),
  ):
    if getattr(args, flag) is not None:
      overrides[name] = str(getattr(args, flag))

  from paxlite.generation.inference import load_before, load_checkpoint

  given = args.tokenizer, overrides, args.base_weights
  if args.before:
    before = load_before(args.checkpoint, *given)
    print(f'Before, {before.source.folder}:', flush=True)
    _respond(before, args)
    del before  # room for the other weights
    print(f'\nAfter, {args.checkpoint}:', flush=True)
  _respond(load_checkpoint(args.checkpoint, *given), args)


def _respond(inference: 'Inference', args: argparse.Namespace) -> None:
  """Continues the prompt, or answers the questions of a chat."""
  engine = inference.engine(chat=args.chat, most_rows=1, drafts=args.drafts)

  def show(ids: list[int]) -> str:
    tokens, steps = engine.num_tokens, engine.num_steps
    text = _show(engine.parts(ids, args.max_new_tokens, seed=args.seed))
    if args.drafts:  # the first token comes with the prompt
      steps = engine.num_steps - steps + 1
      print(
        f'{amount(engine.num_tokens - tokens, "token")} in {amount(steps, "step")}', file=sys.stderr
      )
    return text

  if not args.chat:
    if not show(inference.encode(args.prompt)):
      warn('The model ends the text at once. If it was trained on chats, use `paxlite chat`.')
    return
  messages = [] if args.system is None else [{'role': 'system', 'content': args.system}]
  for text in [args.prompt] if args.prompt is not None else _questions():
    asked = [*messages, {'role': 'user', 'content': text}]
    try:
      answer = show(inference.encode_chat(asked, special=False))
    except UserError as e:
      if args.prompt is not None:
        raise
      warn(f'error: {e}')  # the conversation so far is kept
      continue
    messages = [*asked, {'role': 'assistant', 'content': answer}]


def _show(parts: Iterator[str]) -> str:
  """Prints text while it is generated, and returns all of it, with its special tokens.

  On a terminal, control characters are escaped; a file gets the text itself.
  """
  from paxlite.generation.spelling import shown

  found, on_screen = [], printable if sys.stdout.isatty() else str
  for part in parts:
    print(on_screen(shown([part])), end='', flush=True)
    found.append(part)
  print()
  return ''.join(found)


def _questions() -> Iterator[str]:
  """Yields the lines of the standard input that are not empty, until it ends or says so."""
  while True:
    try:
      text = input('> ' if sys.stdin.isatty() else '')
    except (EOFError, KeyboardInterrupt):
      return
    if text.strip().lower() in _ENDS:
      return
    if text.strip():
      yield text
