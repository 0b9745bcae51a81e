"""What the package adds; its entry point for `paxlite.extensions` names EXTENSION."""

from paxlite.core.extension import Command, Extension

_HERE = 'tests.outside.parts.package'
EXTENSION = Extension(
  'budgets', commands=(Command('budget', 'the steps that are left', f'{_HERE}.command', 'Runs'),),
  schemes={'shelf': f'{_HERE}.shelf:SHELF'}, parts=(f'{_HERE}.attributes:Budget',),
  optimizers=(f'{_HERE}.optimizer:thrifty',), callbacks=(f'{_HERE}.callback:callbacks',),
)  # fmt: skip
