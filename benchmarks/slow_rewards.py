"""python -m benchmarks.slow_rewards [--seconds=0.2] [--batches=6]

Times batches of rewarded answers and their train steps, with a reward that sleeps: at once
(MAX_STALENESS=0), computed while other rollouts are made and trained on, and with a device of its
own for generation (ROLLOUT_DEVICES=1). Each case is a process; on CPUs the devices share the cores.
Six minutes on two loaded cores.
"""

import argparse
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np

from paxlite.data import packaged
from paxlite.data.base import one_segment
from paxlite.experiments.llama import LLaMA
from paxlite.finetuning.reinforcement.datasets import PromptFiles
from paxlite.finetuning.reinforcement.rollouts import RolloutInput
from paxlite.programs.run import Run

_SECONDS = 'SLOW_REWARDS_SECONDS'  # the environment variable that processes of rewards read


def slow(record: dict, answer: str) -> float:
  """Returns the length of an answer, after a pause."""
  time.sleep(float(os.environ[_SECONDS]))
  return float(len(answer))


class Slow(PromptFiles, LLaMA):
  """A small model with a slow reward."""

  NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS, NUM_KV_HEADS = 2, 64, 192, 2, 2
  VOCAB_SIZE, VOCAB_PATH = 8192, packaged.VOCAB
  MAX_SEQ_LEN, MAX_NEW_TOKENS, FPROP_DTYPE = 64, 32, 'float32'
  ICI_MESH_SHAPE, DCN_MESH_SHAPE = [1, 1, 1], [1, 1, 1]
  PERCORE_BATCH_SIZE, GROUP_SIZE = 16, 4
  REWARDS = ['benchmarks.slow_rewards.slow']


CASES = (0, 0), (1, 0), (2, 0), (1, 1), (2, 1)  # MAX_STALENESS, ROLLOUT_DEVICES


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--seconds', type=float, default=0.2, help='the seconds of a reward')
  parser.add_argument('--batches', type=int, default=6)
  parser.add_argument('--json', help='append the results to this file')
  parser.add_argument('--case', type=int, nargs=2, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.case:
    print(json.dumps(seconds(*args.case, args.batches)))
    return
  for staleness, devices in CASES:
    command = [sys.executable, '-m', 'benchmarks.slow_rewards', f'--batches={args.batches}']
    count = f'--xla_force_host_platform_device_count={1 + devices}'
    environment = {'XLA_FLAGS': count, 'JAX_PLATFORMS': 'cpu', _SECONDS: str(args.seconds)}
    environment = os.environ | environment
    ended = subprocess.run(
      [*command, '--case', str(staleness), str(devices)], env=environment, check=True,
      stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    result = {
      'MAX_STALENESS': staleness, 'ROLLOUT_DEVICES': devices, 'reward_seconds': args.seconds,
      'batches': args.batches, **json.loads(ended.stdout.splitlines()[-1]),
      'date': time.strftime('%Y-%m-%d'), 'device': f'cpu, {os.cpu_count()} cores',
      'python': platform.python_version(), 'jax': jax.__version__,
    }  # fmt: skip
    print(json.dumps(result), flush=True)
    if args.json:
      with open(args.json, 'a') as f:
        f.write(json.dumps(result) + '\n')


def seconds(staleness: int, devices: int, batches: int) -> dict[str, float]:
  """Returns the seconds of a step after the first ones, and those that training has waited."""
  folder = pathlib.Path(tempfile.mkdtemp())
  lines = [json.dumps({'prompt': f'The number {i} is'}) for i in range(64)]
  (folder / 'prompts.jsonl').write_text('\n'.join(lines))
  files = [str(folder / 'prompts.jsonl')]
  e = Slow(TRAIN_FILES=files, MAX_STALENESS=staleness, ROLLOUT_DEVICES=devices)
  trainer = Run(e, folder, save=False).trainer()
  state, _ = trainer.store.initial()
  rollouts, jitted = trainer.data.input, trainer.store.task.jitted_step()
  assert isinstance(rollouts, RolloutInput)
  first, start, waited = 2 + staleness, 0.0, 0.0
  for number in range(first + batches):
    if number == first:
      jax.block_until_ready(state)
      start, waited = time.perf_counter(), 0.0
    before = time.perf_counter()
    batch = rollouts.next_batch(state.params, number, slice(0, e.batch_size))
    waited += time.perf_counter() - before
    batch = {k: np.asarray(x) for k, x in batch.items()}
    state, _ = jitted(state, batch | one_segment(batch['weights']))
  jax.block_until_ready(state)
  whole = time.perf_counter() - start
  rollouts.close()
  return {'step_seconds': round(whole / batches, 3), 'waited_seconds': round(waited / batches, 3)}


if __name__ == '__main__':
  main()
