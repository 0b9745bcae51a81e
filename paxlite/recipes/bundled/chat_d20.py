"""paxlite recipe chat_d20

A chat model of 468 million parameters on one node of 8 H100, from public data of the Hub: a
tokenizer and pretraining on FineWeb-Edu, chats of smol-smoltalk and with a calculator, and
reinforcement learning on the questions of GSM8K. It was not run: docs/recipes.md has its predicted
hours.
"""

from paxlite.experiments.datasets import DocumentFiles
from paxlite.finetuning.chats.datasets import SftFiles
from paxlite.finetuning.reinforcement.datasets import PromptFiles
from paxlite.layers.remat import PolicyChoice
from paxlite.recipes import Chat, Files, Recipe, Stage
from paxlite.recipes.chat_data import write_data, write_questions, write_tokenizer


class D20(Chat(depth=20)):  # type: ignore[misc]
  """The model of all stages."""

  PACKED_INPUT = False
  ICI_MESH_SHAPE = [1, 8, 1]
  DCN_MESH_SHAPE = [1, 1, 1]
  USE_REPEATED_LAYER = True
  CHECKPOINT_POLICY: PolicyChoice = 'SAVE_DOT_ONLY'
  NUM_LOSS_CHUNKS = 8
  CHECKPOINT_EVERY_N_STEPS = 1000
  CHECKPOINT_MAX_TO_KEEP = 1
  SUMMARY_INTERVAL_STEPS = 20


class D20Text(DocumentFiles, D20):
  """Pretraining; tasks are evaluated at its end."""

  EVAL_INTERVAL_STEPS = 2000
  MAX_EVAL_BATCHES = 40
  EVAL_TASKS_IN_TRAINING = True


class D20Sft(SftFiles, D20):
  """Chats, some with a calculator."""

  PACKED_INPUT = True
  MAX_STEPS = 2000
  PERCORE_BATCH_SIZE = 16
  EVAL_INTERVAL_STEPS = 1000
  EVAL_FRACTION = 0.01
  TOO_LONG = 'truncate'
  LEARNING_RATE = 2e-3
  WEIGHT_DECAY = 0.0


class D20Questions(PromptFiles, D20):
  """Questions, whose answers a function checks."""

  MAX_SEQ_LEN = 512
  MAX_NEW_TOKENS = 256
  REWARDS = ['paxlite.recipes.chat_data.last_number']
  GROUP_SIZE = 16
  PERCORE_BATCH_SIZE = 32
  MAX_STEPS = 400
  OPTIMIZER = 'adamw'
  LEARNING_RATE = 1e-4
  WEIGHT_DECAY = 0.0
  LR_SCHEDULE = 'linear'


_TEXTS = 'hf:HuggingFaceFW/fineweb-edu:sample/10BT'
_TASKS = {
  'VOCAB_PATH': '{tokenizer}/tokenizer.json',
  'EVAL_TASKS': ['{data}/sums.json', '{data}/calls.json'],
}

RECIPE = Recipe([
  Files('data', write_data, {'seed': 1, 'paragraphs': 1, 'chats': 20_000, 'prompts': 1}),
  Files('questions', write_questions, {'source': 'hf:openai/gsm8k:main/train*.parquet'}),
  Files(
    'tokenizer',
    write_tokenizer,
    {'files': [f'{_TEXTS}/000_00000.parquet'], 'vocab_size': 32_768, 'characters': 1_000_000_000},
  ),
  Stage('pretrain', D20Text, {**_TASKS, 'TRAIN_SOURCES': [f'{_TEXTS}/*.parquet']}),
  Stage(
    'sft',
    D20Sft,
    {**_TASKS, 'TRAIN_FILES': ['hf:HuggingFaceTB/smol-smoltalk', '{data}/chats.jsonl']},
    starts_from='pretrain',
  ),
  Stage(
    'grpo',
    D20Questions,
    {**_TASKS, 'TRAIN_FILES': ['{questions}/prompts.jsonl']},
    starts_from='sft',
  ),
])  # fmt: skip
