"""What fine-tuning adds: its command, SftFiles, rollouts, and values of frozen models in rows."""

from paxlite.core.extension import Command, Extension

_PURPOSE = 'train published weights further, or continue such a run'
EXTENSION = Extension(
  'finetuning',
  needs=('chats', 'generation'),
  commands=(Command('finetune', _PURPOSE, 'paxlite.finetuning.command', 'Runs', is_run=True),),
  callbacks=(
    'paxlite.finetuning.reference_values:callbacks',
    'paxlite.finetuning.reinforcement.rollouts:callbacks',
  ),
  hooks={
    'data of examples': 'paxlite.finetuning.datasets:dataset_of',
    'a reference model': 'paxlite.finetuning.reference:Reference',
    'SftFiles': 'paxlite.finetuning.chats.datasets:SftFiles',
  },
  inputs=('paxlite.finetuning.reference_values:fill',),
)
