"""Judges programs that a model wrote: pass@k."""

import json
import math
from collections.abc import Sequence

import jax

from paxlite.core.errors import UserError
from paxlite.core.json_text import parsed
from paxlite.eval import code_sandbox
from paxlite.eval.eval_tasks import GENERATED, TaskExample, last_match
from paxlite.eval.task_spec import TaskSpec
from paxlite.processes.process_messages import broadcast


def check_allowed(spec: TaskSpec, run_code: bool) -> None:
  """Raises UserError if a task runs programs, and that is not allowed, or not possible here."""
  if spec.kind != 'code':
    return
  if not run_code:
    raise UserError(
      'this task runs programs that the model wrote, and nobody has read them. They would run '
      'without a network, with read-only files and limits, as your user: if you want that, '
      '--run_code (EVAL_RUN_CODE=True) allows it'
    )
  code_sandbox.check()


def failures(
  spec: TaskSpec, examples: Sequence[TaskExample], answers: Sequence[Sequence[str]]
) -> list[list[str | None]]:
  """Returns why the program of each answer fails; None: it passes.

  Every process calls this, and the first one runs the programs.

  Args:
    spec: The task.
    examples: Its examples.
    answers: The answers to each.
  """
  programs = [
    example.target.replace(GENERATED, last_match(answer, spec.generation_pattern) or '')
    for example, row in zip(examples, answers, strict=True)
    for answer in row
  ]
  ran: list[str | None] = []
  if jax.process_index() == 0:
    ran = code_sandbox.CodeSandbox(spec.timeout).failures(programs)
  found = iter(parsed(broadcast(json.dumps(ran).encode())))
  return [[next(found) for _ in row] for row in answers]


def pass_at(k: int, passed: int, count: int) -> float:
  """Returns the probability that one of k answers passes, where `passed` of `count` do.

  It is 1 − C(count − passed, k) / C(count, k), equation 1 of https://arxiv.org/abs/2107.03374.
  """
  return 1 - math.comb(count - passed, k) / math.comb(count, k)
