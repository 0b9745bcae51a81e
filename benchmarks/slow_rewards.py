"""python -m benchmarks.slow_rewards [--seconds=0.2] [--batches=8]

Times batches of rewarded answers and their train steps, with a reward that sleeps: at once
(MAX_STALENESS=0), and computed while other rollouts are made and trained on.
"""

import argparse
import json
import os
import pathlib
import tempfile
import time

import fiddle as fdl
import jax
import numpy as np

from paxlite.data import packaged
from paxlite.data.base import one_segment
from paxlite.experiments.llama import LLaMA
from paxlite.finetuning.reinforcement.datasets import PromptFiles
from paxlite.programs.run import Run

_SECONDS = 'SLOW_REWARDS_SECONDS'  # the environment variable that processes of rewards read


def slow(record: dict, answer: str) -> float:
  """Returns the length of an answer, after a pause."""
  time.sleep(float(os.environ[_SECONDS]))
  return float(len(answer))


class Slow(PromptFiles, LLaMA):
  """A small model with a slow reward."""

  NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS, NUM_KV_HEADS = 4, 128, 384, 4, 4
  VOCAB_SIZE, VOCAB_PATH = 8192, packaged.VOCAB
  MAX_SEQ_LEN, MAX_NEW_TOKENS, FPROP_DTYPE = 96, 64, 'float32'
  ICI_MESH_SHAPE, DCN_MESH_SHAPE = [1, 1, 1], [1, 1, 1]
  PERCORE_BATCH_SIZE, GROUP_SIZE = 16, 4
  REWARDS = ['benchmarks.slow_rewards.slow']


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--seconds', default='0.2', help='the seconds of a reward')
  parser.add_argument('--batches', type=int, default=8)
  parser.add_argument('--json', help='append the results to this file')
  args = parser.parse_args()
  os.environ[_SECONDS] = args.seconds
  found = {}
  for staleness in (0, 1, 2):
    found[f'MAX_STALENESS={staleness}'] = round(seconds(staleness, args.batches), 3)
  result = {**vars(args), 'seconds_per_step': found, 'date': time.strftime('%Y-%m-%d')}
  print(json.dumps(result))
  if args.json:
    with open(args.json, 'a') as f:
      f.write(json.dumps(result) + '\n')


def seconds(staleness: int, batches: int) -> float:
  """Returns the seconds of a step, after the first ones."""
  folder = pathlib.Path(tempfile.mkdtemp())
  lines = [json.dumps({'prompt': f'The number {i} is'}) for i in range(64)]
  (folder / 'prompts.jsonl').write_text('\n'.join(lines))
  e = Slow(TRAIN_FILES=[str(folder / 'prompts.jsonl')], MAX_STALENESS=staleness)
  trainer = Run(e, folder, save=False).trainer()
  state, _ = trainer.store.initial()
  rollouts, jitted = fdl.build(e.train_input()), trainer.store.task.jitted_step()
  first, start = 2 + staleness, 0.0
  for number in range(first + batches):
    if number == first:
      jax.block_until_ready(state)
      start = time.perf_counter()
    batch = rollouts.next_batch(state.params, number, slice(0, e.batch_size))
    batch = {k: np.asarray(x) for k, x in batch.items()}
    state, _ = jitted(state, batch | one_segment(batch['weights']))
  jax.block_until_ready(state)
  return (time.perf_counter() - start) / batches


if __name__ == '__main__':
  main()
