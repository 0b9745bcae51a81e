"""What the data of a run add: data.jsonl, `paxlite data RUN`, and LEAVE_OUT."""

from paxlite.core.extension import Extension

EXTENSION = Extension(
  'run_data',
  callbacks=('paxlite.run_data.data_records:callbacks',),
  hooks={
    'data RUN': 'paxlite.run_data.command:show',
    'LEAVE_OUT': 'paxlite.run_data.left_out:without',
  },
)
