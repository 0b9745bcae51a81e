"""The extension for recipes: its command, and the experiments of bundled recipes."""

from paxlite.core.extension import Command, Extension

_PURPOSE = 'run the stages of a recipe that are new or changed'
EXTENSION = Extension(
  'recipes',
  needs=('aot', 'eval', 'finetuning'),  # for hours, files of tasks, and the bundled recipes
  commands=(Command('recipe', _PURPOSE, 'paxlite.recipes.command', 'Runs'),),
  experiments=('paxlite.recipes.bundled',),
)
