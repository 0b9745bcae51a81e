"""The extension for task evaluation: its commands, --mode=decode, and EVAL_TASKS."""

from paxlite.core.extension import Command, Extension

_COMMANDS = 'paxlite.eval.commands'
_ZERO_SHOT = 'evaluate on LAMBADA, BoolQ and your own tasks'
_LM_EVAL = "evaluate by EleutherAI's harness"
_DECODE = 'continue the prompts of an experiment'
EXTENSION = Extension(
  'eval',
  needs=('generation',),
  commands=(
    Command('zero-shot', _ZERO_SHOT, f'{_COMMANDS}.zero_shot', 'Models'),
    # its arguments are the harness's
    Command('lm-eval', _LM_EVAL, f'{_COMMANDS}.lm_eval', 'Models', has_parser=False),
    Command('decode', _DECODE, f'{_COMMANDS}.decode', 'Runs', is_run=True),
  ),
  callbacks=('paxlite.eval.task_evaluation:callbacks',),
  sections=('paxlite.eval.changes:sections',),
  hooks={
    'decode': 'paxlite.eval.decoding:decode',
    'EVAL_TASKS': 'paxlite.eval.task_evaluation:evaluate_tasks',
  },
  former_modules={f'paxlite.tools.{n}': f'{_COMMANDS}.{n}' for n in ('lm_eval', 'zero_shot')},
)
