"""paxlite recipe chat_small

A chat model of 4.5 million parameters from nothing, on two cores of a CPU: a tokenizer,
pretraining on the bundled texts and on generated facts and sums, chats with a calculator, and
reinforcement learning on sums that a function checks.
"""

from paxlite.data import packaged
from paxlite.experiments.datasets import TextFiles
from paxlite.experiments.gpt import GPT126M
from paxlite.experiments.muon_recipe import MuonRecipe
from paxlite.finetuning.chats.datasets import SftFiles
from paxlite.finetuning.reinforcement.datasets import PromptFiles
from paxlite.recipes import Files, Recipe, Stage
from paxlite.recipes.chat_data import write_data, write_tokenizer


class SmallChat(MuonRecipe, GPT126M):
  """The model of all stages."""

  NUM_LAYERS = 4
  NUM_HEADS = 4
  MODEL_DIMS = 256
  HIDDEN_DIMS = 1152
  VOCAB_SIZE = 4096
  MAX_SEQ_LEN = 256
  TRAINABLE_POSITION_EMB = False
  FPROP_DTYPE = 'float32'
  PACKED_INPUT = False
  ICI_MESH_SHAPE = [1, 1, 1]
  DCN_MESH_SHAPE = [1, 1, 1]
  PERCORE_BATCH_SIZE = 4
  CHECKPOINT_EVERY_N_STEPS = 100
  CHECKPOINT_MAX_TO_KEEP = 1
  SUMMARY_INTERVAL_STEPS = 20


class SmallChatText(TextFiles, SmallChat):
  """Pretraining; tasks are evaluated at its end."""

  EVAL_BATCH_SIZE = 16
  MAX_STEPS = 1000
  EVAL_INTERVAL_STEPS = 1000
  EVAL_TASKS_IN_TRAINING = True


class SmallChatSft(SftFiles, SmallChat):
  """Chats, some with a calculator."""

  MAX_SEQ_LEN = 128
  PACKED_INPUT = True
  PERCORE_BATCH_SIZE = 8
  MAX_STEPS = 450
  EVAL_INTERVAL_STEPS = 450
  EVAL_FRACTION = 0.01
  LEARNING_RATE = 2e-3


class SmallChatSums(PromptFiles, SmallChat):
  """Sums and calls of the calculator, which a function checks."""

  MAX_SEQ_LEN = 44
  MAX_NEW_TOKENS = 17
  REWARDS = ['paxlite.recipes.chat_data.exact']
  GROUP_SIZE = 8
  PERCORE_BATCH_SIZE = 128
  MAX_STEPS = 120
  OPTIMIZER = 'adamw'
  LEARNING_RATE = 3e-4
  LR_SCHEDULE = 'linear'


_TASKS = {
  'VOCAB_PATH': '{tokenizer}/tokenizer.json',
  'EVAL_TASKS': ['{data}/text.json', '{data}/sums.json', '{data}/calls.json'],
}
_TEXTS = [*packaged.TEXTS, '{data}/facts.txt']

RECIPE = Recipe([
  Files('data', write_data, {'seed': 1, 'paragraphs': 12_000, 'chats': 20_000, 'prompts': 5_000}),
  Files('tokenizer', write_tokenizer, {'files': _TEXTS, 'vocab_size': 4096}),
  Stage(
    'pretrain',
    SmallChatText,
    {**_TASKS, 'TRAIN_FILES': _TEXTS},
    holds='held_out: bits_per_byte <= 2.6',
  ),
  Stage(
    'sft',
    SmallChatSft,
    {**_TASKS, 'TRAIN_FILES': ['{data}/chats.jsonl']},
    starts_from='pretrain',
    holds='held_out: avg_xent <= 1.5',
  ),
  Stage(
    'grpo',
    SmallChatSums,
    {**_TASKS, 'TRAIN_FILES': ['{data}/prompts.jsonl']},
    starts_from='sft',
    holds='sums: exact_match >= 0.6',
  ),
])  # fmt: skip
