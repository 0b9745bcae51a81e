"""Tokens whose rows were never trained, and stay frozen."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from paxlite.adapters.untrained_rows import untrained, warnings
from paxlite.data import packaged
from paxlite.data.base import RowInput
from paxlite.data.synthetic import SyntheticRows
from paxlite.experiments.demo import TinyGPT
from paxlite.optim.optimizers import Optimizer


@pytest.mark.cases(fast=4)
@pytest.mark.parametrize('seed', range(6))
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_rows_near_zero_and_equal_rows_are_found_and_no_others(seed, dtype):
  rng = np.random.default_rng(seed)
  V, D = int(rng.integers(400, 4000)), int(rng.integers(8, 300))
  rows_VD = rng.normal(size=(V, D)) * rng.uniform(0.5, 2, (V, 1)) * 0.02
  drawn = rng.permutation(V)[: int(rng.integers(2, 40))]
  equal, small = np.split(drawn, [int(rng.integers(2, len(drawn) + 1))])
  rows_VD[equal] = rows_VD.mean(0) if seed % 2 else rows_VD[equal[0]]
  rows_VD[small] *= rng.uniform(0, 1e-3, (len(small), 1))
  found = untrained(jnp.asarray(rows_VD, dtype), np.arange(V))
  assert set(found) == set(drawn)
  some = np.array(sorted({*map(int, drawn[::2]), *range(0, V, 7)}))
  assert set(untrained(jnp.asarray(rows_VD, dtype), some)) == set(drawn) & set(some)


class Spelled(TinyGPT):
  @property
  def tokenizer_path(self):
    return packaged.VOCAB


@pytest.mark.parametrize('seed', range(3))
def test_a_run_that_freezes_them_says_so(seed):
  rng = np.random.default_rng(seed)
  data = RowInput(SyntheticRows(128, 32), 4)
  labels = np.unique(data.source.read(np.arange(4))['labels'])
  learned = int(rng.choice(labels))
  embedding = rng.normal(size=(128, 16)).astype('float32')
  head = rng.normal(size=(128, 16)).astype('float32')
  head[learned] = 0
  params = {'embedding': {'emb_var': embedding}, 'softmax': {'w': head}, 'a': {'lora_a': head}}
  params = jax.tree.map(jnp.asarray, params)
  of = lambda *trainable: warnings(
    Spelled(USE_LORA=True), Optimizer(optax.sgd(0.1), trainable=trainable), params, data
  )
  (said,) = of('.*/lora_[ab]')
  assert 'stay frozen in softmax/w:' in said
  assert re.search(r'TRAINABLE_VARIABLES=.*lora_\[ab\].*softmax/w', said)
  assert of('.*/lora_[ab]', 'softmax/w') == []
  assert of('.*') == []
