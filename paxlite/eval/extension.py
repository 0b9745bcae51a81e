"""What evaluation by tasks adds: its commands, --mode=decode, and EVAL_TASKS."""

from paxlite.core.extension import Command, Extension

EXTENSION = Extension(
  'eval',
  needs=('generation',),
  commands=(
    Command(
      'zero-shot',
      'evaluate on LAMBADA, BoolQ and tasks of your own',
      'paxlite.eval.commands.zero_shot',
      'Models',
    ),
    Command(
      'lm-eval',
      "evaluate by EleutherAI's harness",
      'paxlite.eval.commands.lm_eval',
      'Models',
      has_parser=False,  # the arguments are the harness's
    ),
    Command(
      'decode',
      'continue the prompts of an experiment',
      'paxlite.eval.commands.decode',
      'Runs',
      is_run=True,
    ),
  ),
  callbacks=('paxlite.eval.task_evaluation:callbacks',),
  hooks={
    'decode': 'paxlite.eval.decoding:decode',
    'EVAL_TASKS': 'paxlite.eval.task_evaluation:evaluate_tasks',
  },
)
