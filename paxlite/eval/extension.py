"""What evaluation by tasks adds: its commands."""

from paxlite.core.extension import Command, Extension

EXTENSION = Extension(
  'eval',
  commands=(
    Command(
      'zero-shot',
      'evaluate on LAMBADA, BoolQ and tasks of your own',
      'paxlite.tools.zero_shot',
      'Models',
    ),
    Command(
      'lm-eval',
      "evaluate by EleutherAI's harness",
      'paxlite.tools.lm_eval',
      'Models',
      has_parser=False,  # the arguments are the harness's
    ),
  ),
)
