"""Sampling from a language model.

Without a key/value cache: every token runs the model over the whole row. That is quick enough for a
sample at the end of a run of a small model, and for nothing larger.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from paxlite.inputs.tokenizer import Tokenizer
from paxlite.layers.language_model import TransformerLm


def sample(
  model: TransformerLm,
  params: Any,
  tokenizer: Tokenizer,
  prompt: str,
  seq_len: int,
  num_tokens: int = 100,
  temperature: float = 0.8,
  seed: int = 0,
) -> str:
  """Continues `prompt` by up to `num_tokens` sampled tokens; returns both as text."""
  tokens = tokenizer.encode(prompt)[: seq_len - 2]
  start, end = len(tokens) + 1, min(len(tokens) + 1 + num_tokens, seq_len)
  # training rows begin with a token of context; 0 stands for none
  row = jnp.zeros((1, seq_len), jnp.int32).at[0, 1:start].set(jnp.array(tokens, jnp.int32))
  vocab = tokenizer.vocab_size
  row = _sample_row(model, params, row, start, end, vocab, temperature, jax.random.key(seed))
  ids = [int(i) for i in jax.device_get(row)[0, 1:end]]
  if tokenizer.eos_id in ids:
    ids = ids[: ids.index(tokenizer.eos_id)]
  return tokenizer.decode(ids)


@functools.partial(jax.jit, static_argnums=0)
def _sample_row(
  model: TransformerLm,
  params: Any,
  row_1T: jax.Array,
  start: jax.Array,
  end: jax.Array,
  vocab: jax.Array,
  temperature: jax.Array,
  key: jax.Array,
) -> jax.Array:
  def step(i: jax.Array, row: jax.Array) -> jax.Array:
    x_1TD: Any = model.apply({'params': params}, row, None, None, method='hidden')
    x_11D = jax.lax.dynamic_slice_in_dim(x_1TD, i - 1, 1, axis=1)
    logits_11V: Any = model.apply({'params': params}, x_11D, method='logits')
    # a vocabulary that was rounded up has ids that the tokenizer does not know
    logits_V = jnp.where(jnp.arange(logits_11V.shape[-1]) < vocab, logits_11V[0, 0], -jnp.inf)
    token = jax.random.categorical(jax.random.fold_in(key, i), logits_V / temperature)
    return row.at[0, i].set(token.astype(row.dtype))

  return jax.lax.fori_loop(start, end, step, row_1T)
