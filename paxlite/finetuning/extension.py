"""The extension for fine-tuning: its command, SftFiles, rollouts, and frozen models' values."""

from paxlite.core.extension import Command, Extension

_HERE = 'paxlite.finetuning'
_PURPOSE = 'fine-tune published weights, or continue such a run'
EXTENSION = Extension(
  'finetuning',
  needs=('chats', 'generation'),
  commands=(Command('finetune', _PURPOSE, f'{_HERE}.command', 'Runs', is_run=True),),
  callbacks=(
    f'{_HERE}.reference_values:callbacks',
    f'{_HERE}.distillation.teachers:callbacks',
    f'{_HERE}.reinforcement.rollouts:callbacks',
  ),
  hooks={
    'data of examples': f'{_HERE}.datasets:dataset_of',
    'a reference model': f'{_HERE}.reference:Reference',
    'SftFiles': f'{_HERE}.chats.datasets:SftFiles',
  },
  inputs=(f'{_HERE}.reference_values:fill',),
  sections=(f'{_HERE}.reinforcement.report_sections:sections',),
  former_modules={
    'paxlite.data.labelled_answers': f'{_HERE}.preferences.labelled_answers',
    'paxlite.data.preferences': f'{_HERE}.preferences.preference_rows',
    'paxlite.data.rollouts': f'{_HERE}.reinforcement.rollouts',
    'paxlite.data.sft': f'{_HERE}.chats.sft',
    'paxlite.experiments.distillation': f'{_HERE}.distillation.experiment',
    'paxlite.experiments.parts.policy': f'{_HERE}.reinforcement.attributes',
    'paxlite.experiments.parts.preferences': f'{_HERE}.preferences.attributes',
    'paxlite.experiments.parts.stored_values': f'{_HERE}.stored_values',
    'paxlite.experiments.preference_datasets': f'{_HERE}.preferences.datasets',
    'paxlite.experiments.reward_model': f'{_HERE}.preferences.reward_model',
    'paxlite.experiments.rollout_datasets': f'{_HERE}.reinforcement.datasets',
    'paxlite.losses.distillation_losses': f'{_HERE}.distillation.distillation_losses',
    'paxlite.losses.kto_loss': f'{_HERE}.preferences.kto_loss',
    'paxlite.losses.policy_loss': f'{_HERE}.reinforcement.policy_loss',
    'paxlite.losses.preference_losses': f'{_HERE}.preferences.preference_losses',
    'paxlite.losses.reward_loss': f'{_HERE}.preferences.reward_loss',
    'paxlite.reinforcement': f'{_HERE}.reinforcement',
    'paxlite.training.reference': f'{_HERE}.reference',
  },
)
