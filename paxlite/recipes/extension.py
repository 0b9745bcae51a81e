"""What recipes add: their command, and the experiments of those that ship with paxlite."""

from paxlite.core.extension import Command, Extension

_PURPOSE = 'run the stages of a recipe, or those that have changed'
EXTENSION = Extension(
  'recipes',
  needs=('aot', 'eval', 'finetuning'),  # for hours, files of tasks, and the bundled recipes
  commands=(Command('recipe', _PURPOSE, 'paxlite.recipes.command', 'Runs'),),
  experiments=('paxlite.recipes.bundled',),
)
