"""A run that goes on from factors with others: what would lose some of them is refused."""

import json
import random

import numpy as np
import pytest

from paxlite.checkpointing.checksums import write_checksums
from paxlite.checkpointing.source import find_source
from paxlite.checkpointing.variables import write_variable
from paxlite.core.errors import UserError
from paxlite.experiments.llama import LLaMA
from paxlite.programs.weights_model import restore_of

SIZES = dict(
  NUM_LAYERS=2, NUM_HEADS=2, NUM_KV_HEADS=2, MODEL_DIMS=16, HIDDEN_DIMS=20, VOCAB_SIZE=32,
  MAX_SEQ_LEN=8, USE_LORA=True,
)  # fmt: skip
PARTS = ['q_proj', 'k_proj', 'v_proj']


def written(folder, values, is_repeated) -> None:
  """Writes what a check reads of a checkpoint with the factors of combined queries and others."""
  layers = ['repeat'] if is_repeated else ['x_layers_0', 'x_layers_1']
  leaves = [f'self_attention.qkv.combined.{leaf}' for leaf in ('w', 'lora_a', 'lora_b')]
  ones = np.ones((2, 3, 4), np.float32)
  names = [f'params.transformer.{layer}.{leaf}' for layer in layers for leaf in leaves]
  stated = {'experiment': 'paxlite.experiments.llama.LLaMA', 'values': SIZES | values}
  (folder / 'experiment.json').write_text(json.dumps(stated))
  write_checksums(folder, dict(write_variable(folder / 'state', name, ones) for name in names))


def drawn(rng) -> dict:
  targets = rng.sample(PARTS, rng.randint(1, 3))
  values = dict(LORA_RANK=4, LORA_TARGETS=targets, LORA_ALPHA=rng.choice([4.0, 4.0, 6.0]))
  if rng.random() < 0.3:
    values['LORA_RANK_PATTERN'] = [f'{targets[0]}={rng.choice([2, 8])}']
  return values if rng.random() < 0.8 else dict(LORA_RANK=4)


def sizes(values) -> dict[str, tuple[int, float]]:
  """Returns the rank and the scale of each part, from what the attributes say."""
  ranks = dict.fromkeys(values.get('LORA_TARGETS', PARTS), 4)
  ranks |= {n: int(r) for n, r in (x.split('=') for x in values.get('LORA_RANK_PATTERN', []))}
  return {name: (rank, values.get('LORA_ALPHA', rank) / rank) for name, rank in ranks.items()}


@pytest.mark.parametrize('seed', range(16))
def test_factors_that_would_lose_columns_or_be_scaled_otherwise_are_refused(seed, tmp_path):
  rng = random.Random(seed)
  theirs, ours = drawn(rng), drawn(rng)
  written(tmp_path, theirs, is_repeated=rng.random() < 0.5)
  before, now = sizes(theirs), sizes(ours)
  is_lost = lambda name, rank, scale: (
    now.get(name, (0, 1))[0] < rank or now[name][1] != pytest.approx(scale)
  )
  stated = dict(CHECKPOINT_RESTORE_PATH=str(tmp_path), USE_REPEATED_LAYER=rng.random() < 0.5)
  check = lambda **more: restore_of(LLaMA(**(SIZES | ours | stated | more))).check(
    find_source(tmp_path)
  )
  check(CHECKPOINT_IGNORE_RULES=['.*/lora_.*'])  # which begins them anew
  restore_of(LLaMA(**(SIZES | theirs | stated))).check(find_source(tmp_path))
  if not any(is_lost(name, *size) for name, size in before.items()):
    return check()
  with pytest.raises(UserError, match=r'the factors of .*combined have rank') as found:
    check()
  assert '\n' not in str(found.value)
  assert all(f'{k}=' in str(found.value) for k, v in theirs.items() if ours.get(k) != v)
