"""The extension for the data of runs: data.jsonl, `paxlite data`, and LEAVE_OUT."""

from paxlite.core.extension import Command, Extension

_PURPOSE = 'what a run would see of its data'
EXTENSION = Extension(
  'run_data',
  commands=(Command('data', _PURPOSE, 'paxlite.run_data.data', 'Data'),),
  callbacks=('paxlite.run_data.data_records:callbacks',),
  hooks={'LEAVE_OUT': 'paxlite.run_data.left_out:without'},
  former_modules={
    'paxlite.data.odd_records': 'paxlite.run_data.odd_records',
    'paxlite.tools.data': 'paxlite.run_data.data',
  },
)
