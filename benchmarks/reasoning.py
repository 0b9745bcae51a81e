"""python -m benchmarks.reasoning FOLDER [--tasks=gcd,…] [--seeds=0,1,2]

Three tasks of reasoning-gym, learned from their rewards by a model of 1.2 million parameters. It
has a token for each character, and for each phrase that these tasks repeat. It first learns the
form of the answers, and a little of the tasks, from SHOWN solved examples of each; each run starts
from this one. Held-out tasks occur in no training. The same command goes on where it was stopped.

Prints a line of JSON for each run: the share of right greedy answers to HELD_OUT held-out tasks
before and after, the mean reward of the first and last twenty steps, and seconds.
"""

import argparse
import json
import os
import pathlib
import string
import subprocess
import sys
import time

from paxlite.experiments.datasets import SftFiles
from paxlite.experiments.llama import LLaMA
from paxlite.finetuning.reinforcement.datasets import PromptFiles

TASKS = {  # with the options of their configurations
  'gcd': dict(min_numbers=2, max_numbers=2, min_value=1, max_value=60),
  'simple_equations': dict(min_terms=2, max_terms=2, min_value=1, max_value=10),
  'spell_backward': dict(min_word_len=3, max_word_len=5),
}
PHRASES = [
  'Find the Greatest Common Divisor (GCD) of these numbers: ',
  '. Give only the GCD as your final answer.', 'Solve for ',
  'Find the value of ', 'Determine the value of ', ' in the equation: ', ' that satisfies: ',
  'Spell this word backward (example: sun -> nus): ',
]  # fmt: skip
SHOWN, PROMPTS, HELD_OUT = 1500, 4000, 400
SEEDS = 1, 100_000, 200_000  # of them: far apart, as reasoning-gym draws a task from seed + index
FOLDER = pathlib.Path(os.environ.get('REASONING_DATA', 'reasoning_data'))


class Small(LLaMA):
  """A model of 1.2 million parameters."""

  NUM_LAYERS = 6
  NUM_HEADS = 4
  NUM_KV_HEADS = 4
  MODEL_DIMS = 128
  HIDDEN_DIMS = 384
  VOCAB_SIZE = 128
  START_ID = 1
  MAX_SEQ_LEN = 32
  FPROP_DTYPE = 'float32'
  USE_REPEATED_LAYER = False
  PACKED_INPUT = False
  LR_SCHEDULE = 'constant'
  SUMMARY_INTERVAL_STEPS = 1
  CHECKPOINT_EVERY_N_STEPS = 50


class Shown(SftFiles, Small):
  """It sees solved examples of all tasks."""

  VOCAB_PATH = str(FOLDER / 'tokenizer.json')
  TRAIN_FILES = [str(FOLDER / 'shown.jsonl')]
  PERCORE_BATCH_SIZE = 64
  LEARNING_RATE = 1e-3
  MAX_STEPS = 700


class Reasoning(PromptFiles, Small):
  """It learns a task from the task's own score; TRAIN_FILES and EVAL_TASKS name it."""

  VOCAB_PATH = str(FOLDER / 'tokenizer.json')
  MAX_NEW_TOKENS = 8
  REWARDS = []
  ENVIRONMENT = 'paxlite.environments.reasoning_gym.ReasoningGym'
  REWARD_TIMEOUT = 60.0
  GROUP_SIZE = 8
  PERCORE_BATCH_SIZE = 128
  LEARNING_RATE = 3e-4
  LR_SCHEDULE = 'linear'
  MAX_STEPS = 120
  EVAL_INTERVAL_STEPS = 1000


def source(task: str, size: int, seed: int) -> str:
  """Returns the name of tasks with their options."""
  options = '&'.join(f'{name}={value}' for name, value in TASKS[task].items())
  return f'reasoning_gym:{task}?size={size}&seed={seed}&prompt=text&{options}'


def write_data() -> None:
  """Writes a tokenizer of characters, solved examples, and held-out tasks for evaluation."""
  import reasoning_gym

  FOLDER.mkdir(parents=True, exist_ok=True)
  tokens = ['<pad>', '<s>', '</s>', *PHRASES, *string.printable[:95], '\n']
  plain = dict(single_word=False, lstrip=False, rstrip=False, normalized=False)
  split = {'type': 'Split', 'pattern': {'Regex': r'[\s\S]'}, 'behavior': 'Isolated'}
  vocabulary = {t: i for i, t in enumerate(tokens)}
  tokenizer = {
    'version': '1.0',
    'added_tokens': [
      dict(id=i, content=t, special=i < 3, **plain)
      for i, t in enumerate(tokens[: 3 + len(PHRASES)])
    ],
    'pre_tokenizer': {**split, 'invert': False},
    'decoder': {'type': 'Fuse'},
    'model': {'type': 'WordLevel', 'vocab': vocabulary, 'unk_token': '<pad>'},
  }
  (FOLDER / 'tokenizer.json').write_text(json.dumps(tokenizer))
  (FOLDER / 'tokenizer_config.json').write_text(json.dumps({'eos_token': '</s>'}))
  shown = []
  for task, options in TASKS.items():
    drawn = lambda size, seed, of=(task, options): {
      e['question']: json.dumps({'prompt': e['question'], 'completion': e['answer']}) + '\n'
      for e in reasoning_gym.create_dataset(of[0], size=size, seed=seed, **of[1])
    }
    seen = drawn(SHOWN, SEEDS[0])
    shown += seen.values()
    seen |= drawn(PROMPTS, SEEDS[1])
    more = drawn(10 * HELD_OUT, SEEDS[2]).items()
    others = [line for question, line in more if question not in seen]
    (FOLDER / f'{task}.jsonl').write_text(''.join(others[:HELD_OUT]))
    asked = {
      'kind': 'generate', 'files': f'{task}.jsonl', 'doc_to_text': '{{prompt}}',
      'doc_to_target': '{{completion}}', 'target_delimiter': '', 'max_new_tokens': 8,
    }  # fmt: skip
    (FOLDER / f'{task}.json').write_text(json.dumps(asked))
  (FOLDER / 'shown.jsonl').write_text(''.join(shown))


def run(name: str, folder: pathlib.Path, *flags: str) -> float:
  """Trains an experiment of this file, if it is not done; returns the seconds of this start."""
  start = time.time()
  command = ['-m', 'paxlite', 'train', f'benchmarks.reasoning.{name}', f'--folder={folder}', *flags]
  subprocess.run([sys.executable, *command], check=True)
  return time.time() - start


def records(path: pathlib.Path) -> list[dict]:
  return [json.loads(line) for line in path.read_text().splitlines()]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('folder', type=pathlib.Path)
  parser.add_argument('--tasks', default=','.join(TASKS))
  parser.add_argument('--seeds', default='0,1,2')
  parser.add_argument('flags', nargs='*', help='of the runs, as LEARNING_RATE=1e-4')
  args = parser.parse_intermixed_args()
  if not (FOLDER / 'shown.jsonl').exists():
    write_data()
  run('Shown', args.folder / 'shown')
  for seed in args.seeds.split(','):
    for task in args.tasks.split(','):
      folder = args.folder / f'{task}_{seed}'
      seconds = run(
        'Reasoning', folder, f'SEED={seed}', f"TRAIN_FILES=['{source(task, PROMPTS, SEEDS[1])}']",
        f"EVAL_TASKS=['{FOLDER}/{task}.json']", f'CHECKPOINT_RESTORE_PATH={args.folder}/shown',
        *args.flags,
      )  # fmt: skip
      rewards = [r['reward'] for r in records(folder / 'metrics.jsonl') if 'reward' in r]
      mean = lambda values: round(sum(values) / len(values), 4)
      evaluations = records(folder / 'eval_metrics.jsonl')
      evaluated = [r['exact_match'] for r in evaluations if 'exact_match' in r]
      print(json.dumps({
        'task': task, 'seed': int(seed), 'steps': len(rewards), 'seconds': round(seconds),
        'held_out': evaluated, 'reward': [mean(rewards[:20]), mean(rewards[-20:])],
      }), flush=True)  # fmt: skip


if __name__ == '__main__':
  main()
