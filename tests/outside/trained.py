"""Trains an experiment of tests/outside/parts on a mesh of eight CPU devices.

Each file of that folder adds one part from outside the package.
"""

import pathlib

from tests.support import runs

EIGHT = '--fdl.ICI_MESH_SHAPE=[2,2,2]'  # data, model axes: replica, data, mdl


def trained(folder: pathlib.Path, part: str, *flags: str) -> dict[int, float]:
  """Trains `part`, such as 'z_loss.WithZLoss', with two microbatches; returns losses by step."""
  config = f'tests.outside.parts.{part}'
  flags = (EIGHT, '--fdl.NUM_MICROBATCHES=2', *flags)
  runs.run(folder, *flags, config=config, devices=8)
  return runs.losses(folder)


def trained_on_one(folder: pathlib.Path, part: str, rows: int, *flags: str) -> dict[int, float]:
  """Trains `part` on one device without microbatches, `rows` rows a step; returns the losses."""
  flags = ('--fdl.ICI_MESH_SHAPE=[1,1,1]', f'--fdl.PERCORE_BATCH_SIZE={rows}', *flags)
  runs.run(folder, *flags, config=f'tests.outside.parts.{part}')
  return runs.losses(folder)
