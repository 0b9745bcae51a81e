"""Closing brackets: a task whose answers can be checked, for reinforcement learning.

python examples/brackets/brackets.py writes the prompts and a tokenizer with a token for each
character. See docs/reinforcement_learning.md.
"""

import json
import pathlib
import random
import sys

from paxlite.experiments.llama import LLaMA
from paxlite.experiments.rollout_datasets import PromptFiles

PAIRS = {'(': ')', '[': ']', '{': '}', '<': '>'}
HERE = pathlib.Path(__file__).parent


def closed(record: dict, answer: str) -> float:
  """Returns the share of the brackets that the answer closes, up to its first error."""
  expected = record['answer']
  right = 0
  for a, b in zip(answer, expected, strict=False):
    if a != b:
      break
    right += 1
  return right / len(expected) - 0.1 * (answer != expected)


def exact(record: dict, answer: str) -> float:
  """Returns 1 for the right answer, else 0."""
  return float(answer == record['answer'])


class Brackets(PromptFiles, LLaMA):
  """A model of 1.2 million parameters, which begins without weights."""

  NUM_LAYERS = 6
  NUM_HEADS = 4
  NUM_KV_HEADS = 4
  MODEL_DIMS = 128
  HIDDEN_DIMS = 384
  VOCAB_SIZE = 16
  VOCAB_PATH = str(HERE / 'tokenizer.json')
  MAX_SEQ_LEN = 32
  FPROP_DTYPE = 'float32'
  USE_REPEATED_LAYER = False
  START_ID = 1
  TRAIN_FILES = [str(HERE / 'prompts.jsonl')]
  REWARDS = ['brackets.closed', 'brackets.exact']
  MAX_NEW_TOKENS = 12
  GROUP_SIZE = 16
  PERCORE_BATCH_SIZE = 256
  OPTIMIZER = 'adamw'
  LEARNING_RATE = 1e-3
  LR_SCHEDULE = 'constant'
  MAX_STEPS = 600
  SUMMARY_INTERVAL_STEPS = 10
  CHECKPOINT_EVERY_N_STEPS = 200


def main() -> None:
  tokens = ['<pad>', '<s>', '</s>', '=', *PAIRS, *PAIRS.values()]
  special = [
    dict(id=i, content=token, special=True, single_word=False, lstrip=False, rstrip=False,
         normalized=False)
    for i, token in enumerate(tokens[:3])
  ]  # fmt: skip
  tokenizer = dict(
    version='1.0', added_tokens=special, normalizer=None,
    pre_tokenizer=dict(type='Split', pattern=dict(String=''), behavior='Isolated', invert=False),
    post_processor=None, decoder=dict(type='Fuse'),
    model=dict(type='WordLevel', vocab={t: i for i, t in enumerate(tokens)}, unk_token='<pad>'),
  )  # fmt: skip
  folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
  (folder / 'tokenizer.json').write_text(json.dumps(tokenizer))
  config = dict(bos_token='<s>', eos_token='</s>', tokenizer_class='PreTrainedTokenizerFast')
  (folder / 'tokenizer_config.json').write_text(json.dumps(config))
  draw = random.Random(0)
  with (folder / 'prompts.jsonl').open('w') as f:
    for _ in range(20000):
      opened = draw.choices([*PAIRS], k=draw.randint(2, 8))
      answer = ''.join(PAIRS[c] for c in reversed(opened))
      f.write(json.dumps(dict(prompt=''.join(opened) + '=', answer=answer)) + '\n')


if __name__ == '__main__':
  main()
