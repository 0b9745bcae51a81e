"""A source of rollouts: the model samples rows, and learns those that have many even tokens."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from paxlite.config.templates import config
from paxlite.experiments.demo import TinyGPT
from paxlite.finetuning.reinforcement.rollouts import RolloutInput


class EvenRows(RolloutInput):
  """Rows that are sampled from the newest parameters, weighted by their share of even tokens."""

  name = 'even rows'

  def __init__(self, model, batch_size, seq_len, vocab_size, seed):
    self.batch_size, self.seq_len, self.max_token_id = batch_size, seq_len, vocab_size - 1
    self._sampled = 0

    @jax.jit
    def sample(params, number):
      key = jax.random.fold_in(jax.random.key(seed), number)

      def add(t, ids_BT):
        logits_BV = model.apply({'params': params}, ids_BT)[:, t]
        tokens_B = jax.random.categorical(jax.random.fold_in(key, t), logits_BV)
        return ids_BT.at[:, t + 1].set(tokens_B)

      return jax.lax.fori_loop(0, seq_len, add, jnp.zeros((batch_size, seq_len + 1), jnp.int32))

    self._sample = sample

  def next_batch(self, params, number, rows):
    sampled = self._sample(params, self._sampled)
    tokens = multihost_utils.process_allgather(sampled, tiled=True)[rows]
    self._sampled += 1
    ids, labels = tokens[:, :-1], tokens[:, 1:]
    reward = (labels % 2 == 0).mean(1, keepdims=True, dtype=np.float32)
    return {'ids': ids, 'labels': labels, 'weights': np.broadcast_to(reward, labels.shape)}

  def state(self):
    return {'sampled': self._sampled}

  def restore(self, state):
    self._sampled = state['sampled']


class OnRollouts(TinyGPT):
  NUM_LAYERS = 1
  MAX_SEQ_LEN = 16
  PERCORE_BATCH_SIZE = 1
  MAX_STEPS = 6
  CHECKPOINT_EVERY_N_STEPS = 3
  LEARNING_RATE = 0.02

  def train_input(self):
    sizes = dict(batch_size=self.batch_size, seq_len=self.MAX_SEQ_LEN, vocab_size=self.VOCAB_SIZE)
    return config(EvenRows, model=self.build_task().model, seed=self.SEED, **sizes)
