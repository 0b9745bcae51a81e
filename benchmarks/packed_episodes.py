"""python -m benchmarks.packed_episodes [--rounds=5] [--length=512] [--layers=4] [--model=256]

Times train steps of the same episodes, or pairs, packed and one a row. Their lengths are drawn
between T / 8 and T, uniformly and log-uniformly. Both sides take steps in turn in one process.
Prints training tokens a second, without padding, and the ratio of both medians.
"""

import argparse
import json
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import fiddle as fdl
import jax
import numpy as np

from paxlite.data.base import Batch, one_segment
from paxlite.experiments.llama import LLaMA
from paxlite.finetuning.chats.sft import pack
from paxlite.finetuning.preferences.attributes import Preferences
from paxlite.finetuning.preferences.datasets import PreferenceFiles
from paxlite.finetuning.reinforcement.datasets import PromptFiles
from paxlite.finetuning.reinforcement.packing import Packing
from paxlite.finetuning.reinforcement.rollouts import RolloutInput
from paxlite.programs.run import Run

VOCAB, EPISODES, MICROBATCHES = 4096, 32, 16
ONE = {'ICI_MESH_SHAPE': [1, 1, 1], 'DCN_MESH_SHAPE': [1, 1, 1]}


class Grpo(PromptFiles, LLaMA):
  """Episodes with rewards, which are drawn here."""

  def train_input(self) -> fdl.Config:
    return fdl.Config(dict)


class Dpo(PreferenceFiles, Preferences, LLaMA):
  """Pairs of answers, likewise."""

  PREFERENCE_LOSS = 'simpo'  # without a reference, whose forward pass packing speeds up as much

  def train_input(self) -> fdl.Config:
    return fdl.Config(dict)


class Drawn(RolloutInput):
  """Stands for the data of a run, whose batches are drawn here."""

  max_token_id = VOCAB - 1

  def __init__(self, batch: Batch):
    self.batch_size, self.seq_len = batch['ids'].shape
    self._shapes = {k: jax.ShapeDtypeStruct(x.shape, x.dtype) for k, x in batch.items()}

  def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
    return self._shapes

  def next_batch(self, params: Any, number: int, rows: slice) -> Batch:
    raise AssertionError

  def state(self) -> dict[str, Any]:
    return {}

  def restore(self, state: Mapping[str, Any]) -> None:
    pass


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--rounds', type=int, default=5)
  parser.add_argument('--length', type=int, default=512)
  parser.add_argument('--layers', type=int, default=4)
  parser.add_argument('--model', type=int, default=256)
  parser.add_argument('--json', help='append the results to this file')
  args = parser.parse_args()
  for method in ('grpo', 'dpo'):
    for spread in ('uniform', 'log-uniform'):
      lengths = drawn_lengths(spread, args.length)
      plain, packed = (grpo if method == 'grpo' else dpo)(lengths, args.length)
      sides = {'one a row': stepper(method, plain, False, args)}
      sides['packed'] = stepper(method, packed, True, args)
      speeds: dict[str, list[float]] = {name: [] for name in sides}
      for _ in range(args.rounds):
        for name, step in sides.items():
          speeds[name].append(step())
      found: dict[str, Any] = {k: round(statistics.median(x), 1) for k, x in speeds.items()}
      found['ratio'] = round(found['packed'] / found['one a row'], 3)
      result = {'method': method, 'lengths': spread, **found, 'date': time.strftime('%Y-%m-%d')}
      print(json.dumps(result), flush=True)
      if args.json:
        with open(args.json, 'a') as f:
          f.write(json.dumps({**vars(args), **result}) + '\n')


def drawn_lengths(spread: str, longest: int) -> list[int]:
  """Returns the lengths of all episodes, of which the longest is 8 times the shortest."""
  ranks = np.random.default_rng(0).permutation(EPISODES) / (EPISODES - 1)
  shares = (1 + 7 * ranks) / 8 if spread == 'uniform' else 8.0 ** (ranks - 1)
  return [round(longest * share) for share in shares.tolist()]


def grpo(lengths: list[int], T: int) -> tuple[Batch, Batch]:
  """Returns a batch of episodes one a row, and packed."""
  rng, rows = np.random.default_rng(1), []
  for length in lengths:
    here = np.arange(T) < length
    own = (here & (np.arange(T) >= length // 4)).astype(np.float32)
    ids = lambda here=here: np.where(here, rng.integers(1, VOCAB, T), 0).astype(np.int32)
    values = {'advantages': own * np.float32(rng.normal()), 'rewards': own}
    rows.append({'ids': ids(), 'labels': ids(), 'weights': own, **values})
  plain = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
  return plain | one_segment(plain['weights']), Packing(MICROBATCHES).batch(rows, lengths)


def dpo(lengths: list[int], T: int) -> tuple[Batch, Batch]:
  """Returns pairs of these lengths, one a row and packed as PreferenceRows packs them."""
  return _pairs([[i] for i in range(len(lengths))], lengths, T), _pairs(
    pack(lengths, T), lengths, T
  )


def _pairs(rows: list[list[int]], lengths: list[int], T: int) -> Batch:
  rng = np.random.default_rng(1)
  found = {k: np.zeros((len(rows), T), np.int32) for k in ('segment_ids', 'segment_pos')}
  found |= {'preferences': np.zeros((len(rows), T), np.int32)}
  for row, pairs in enumerate(rows):
    start = 0
    for number, pair in enumerate(pairs):
      for answer, length in enumerate((lengths[pair] // 2, lengths[pair] - lengths[pair] // 2)):
        at = row, slice(start, start + length)
        found['segment_ids'][at], found['segment_pos'][at] = 2 * number + answer + 1, range(length)
        found['preferences'][at] = 1 - 2 * answer
        start += length
  is_text = found['segment_ids'] > 0
  ids = lambda: np.where(is_text, rng.integers(1, VOCAB, is_text.shape), 0).astype(np.int32)
  return found | {'ids': ids(), 'labels': ids(), 'weights': is_text.astype(np.float32)}


def stepper(method: str, batch: Batch, packed: bool, args: Any) -> Callable[[], float]:
  """Returns a function that takes a step, and returns its training tokens a second."""
  grows = method == 'grpo'
  e = (Grpo if grows else Dpo)(
    NUM_LAYERS=args.layers, MODEL_DIMS=args.model, NUM_HEADS=args.model // 32,
    NUM_KV_HEADS=args.model // 64, HIDDEN_DIMS=3 * args.model, VOCAB_SIZE=VOCAB,
    MAX_SEQ_LEN=args.length, PERCORE_BATCH_SIZE=len(batch['ids']), FPROP_DTYPE='float32',
    NUM_MICROBATCHES=MICROBATCHES if grows else 1, PACKED_INPUT=packed or not grows, **ONE,
  )  # fmt: skip
  folder = pathlib.Path(tempfile.mkdtemp())
  trainer = Run(e, folder, save=False, data=Drawn(batch)).trainer()
  state, _ = trainer.store.initial()
  jitted = trainer.store.task.jitted_step()
  tokens = int((batch['segment_ids'] > 0).sum())

  def step() -> float:
    nonlocal state
    start = time.perf_counter()
    state, _ = jitted(state, batch)
    jax.block_until_ready(state)
    return tokens / (time.perf_counter() - start)

  step()  # compiles
  return step


if __name__ == '__main__':
  main()
