"""The sides that benchmarks/train_step.py compares: train steps of the same sizes.

A side is a function of a Size. It returns a function that runs one step and waits for it. All sides
use float32, AdamW, global-norm clipping at 1, the same shapes and random tokens.
"""

import dataclasses
from collections.abc import Callable

import numpy as np


@dataclasses.dataclass(frozen=True)
class Size:
  """The sizes of a GPT and its batch."""

  layers: int
  model: int
  heads: int
  vocab: int
  length: int
  batch: int

  @property
  def tokens(self) -> int:
    return self.batch * self.length

  @property
  def flops(self) -> float:
    """Model FLOPs of a step, with causal attention."""
    matmul = self.layers * 12 * self.model**2 + self.vocab * self.model
    return self.tokens * (6.0 * matmul + 6.0 * self.layers * self.model * self.length)


SIZES = {
  '1M': Size(layers=2, model=64, heads=2, vocab=8192, length=64, batch=2),  # to try a command
  '11M': Size(layers=4, model=256, heads=4, vocab=32000, length=256, batch=4),
  '124M': Size(layers=12, model=768, heads=12, vocab=50304, length=512, batch=1),
}

Step = Callable[[], float]


def tokens(size: Size) -> np.ndarray:
  return np.random.default_rng(0).integers(size.vocab, size=(size.batch, size.length + 1))


def plain_jax(size: Size) -> Step:
  """Returns the step of benchmarks/plain_jax.py."""
  import jax
  import plain_jax as plain

  state = plain.init_state(
    jax.random.key(0),
    layers=size.layers,
    model=size.model,
    heads=size.heads,
    hidden=4 * size.model,
    vocab=size.vocab,
    length=size.length,
  )
  batch = tokens(size)

  def step() -> float:
    nonlocal state
    state, loss = plain.train_step(state, batch[:, :-1], batch[:, 1:])
    jax.block_until_ready(state)
    return float(loss)

  return step


def paxlite(size: Size, repeated: bool = False) -> Step:
  """Returns the jitted step that paxlite's Trainer runs, with all of its metrics."""
  import pathlib
  import tempfile

  import jax

  from paxlite.experiments.datasets import Synthetic
  from paxlite.experiments.gpt import GPT126M
  from paxlite.programs.run import Run

  class Benchmark(Synthetic, GPT126M):
    PACKED_INPUT = False
    FPROP_DTYPE = 'float32'
    ICI_MESH_SHAPE = [1, 1, 1]
    DCN_MESH_SHAPE = [1, 1, 1]

  experiment = Benchmark(
    NUM_LAYERS=size.layers,
    MODEL_DIMS=size.model,
    NUM_HEADS=size.heads,
    VOCAB_SIZE=size.vocab,
    MAX_SEQ_LEN=size.length,
    PERCORE_BATCH_SIZE=size.batch,
    USE_REPEATED_LAYER=repeated,
  )
  t = Run(experiment, pathlib.Path(tempfile.gettempdir()), save=False).trainer()
  state, _ = t.store.initial()
  jitted = t.store.task.jitted_step()
  ids = tokens(size).astype(np.int32)
  batch = {
    'ids': ids[:, :-1],
    'labels': ids[:, 1:],
    'weights': np.ones((size.batch, size.length), np.float32),
  }

  def step() -> float:
    nonlocal state
    state, metrics = jitted(state, batch)
    jax.block_until_ready(state)
    return float(metrics['Metrics/total_loss'].value)

  return step


def paxlite_repeated(size: Size) -> Step:
  return paxlite(size, repeated=True)


def torch_gpt2(size: Size, compiled: bool = False) -> Step:
  """Returns a step of Hugging Face's GPT-2 with torch's AdamW."""
  import torch
  from transformers import GPT2Config, GPT2LMHeadModel

  config = GPT2Config(
    vocab_size=size.vocab,
    n_positions=size.length,
    n_embd=size.model,
    n_layer=size.layers,
    n_head=size.heads,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    use_cache=False,
  )
  model = GPT2LMHeadModel(config).train()
  run = torch.compile(model) if compiled else model
  optimizer = torch.optim.AdamW(
    model.parameters(), lr=6e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
  )
  ids = torch.tensor(tokens(size)[:, :-1])

  def step() -> float:
    optimizer.zero_grad(set_to_none=True)
    loss = run(input_ids=ids, labels=ids).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach())

  return step


def torch_gpt2_compiled(size: Size) -> Step:
  return torch_gpt2(size, compiled=True)


SIDES: dict[str, Callable[[Size], Step]] = {
  'paxlite': paxlite,
  'paxlite repeated': paxlite_repeated,
  'plain JAX': plain_jax,
  'torch eager': torch_gpt2,
  'torch compiled': torch_gpt2_compiled,
}
