"""The experiment of a case, its numbers, and guesses of what it needs, without a device."""

import importlib
from typing import Any

from benchmarks.gpu.cases import Values, find, kind, reference_name

# Of a parameter in float32, two moments and a gradient; of repeated layers with what XLA copies
STATE_BYTES, REPEATED_BYTES = 16, 20
MEMORY_FRACTION = 0.92  # of the device's memory for JAX; libraries need some of their own
# Of JAX's memory: with more, XLA recomputes to save some, which would be timed. The reference
# leaves room, so that others, which need more, get its layers too
USABLE, USABLE_OF_REFERENCE = 0.85, 0.8

START_SECONDS, PROBE_SECONDS = 8, 10  # of a case's process until it compiles; of a probe
# Steps waited for one by one, not timed of them, and not waited for; the same of --tiny
STEPS, TINY_STEPS = (55, 5, 5), (20, 5, 2)
# Of an H100, as the targets have it: FLOP/s of models below this width, and from it on
GUESSED_WIDTH, GUESSED_FLOPS = 2048, (0.35 * 989e12, 0.6 * 989e12)
GUESSED_BANDWIDTH = 0.7 * 3.35e12


def experiment(case: str, tiny: bool, **changes: Any) -> Any:
  """The experiment of a case, for one device."""
  model, variant = find(case)
  module, _, name = model.experiment.rpartition('.')
  one = dict(
    ICI_MESH_SHAPE=[1, 1, 1],
    DCN_MESH_SHAPE=[1, 1, 1],
    PACKED_INPUT=False,  # Transformer Engine's layers know no other
    LR_SCHEDULE='constant',
  )
  cls = getattr(importlib.import_module(module), name)
  values = cls().plain_backend | one | model.values | (model.tiny if tiny else {})
  values |= variant.values | changes
  found = cls(**values)
  found.validate()
  return found


def parameters(e: Any) -> int:
  """Of all matrices, all experts' included."""
  embeddings = (2 if e.SEPARATE_EMBEDDING else 1) * e.VOCAB_SIZE * e.MODEL_DIMS
  blocks = getattr(e, 'num_expert_blocks', 0)
  idle = e.NUM_EXPERTS - e.NUM_EXPERTS_PER_TOKEN if blocks else 0
  return e.matmul_params + embeddings + blocks * idle * expert_parameters(e)


def expert_parameters(e: Any) -> int:
  return 2 * e.MODEL_DIMS * e.HIDDEN_DIMS


def kept_bytes(e: Any) -> float:
  """What a block keeps for its backward pass, about, by the widths of its matrix products."""
  hidden = (2 if e.USE_GATED_ACTIVATION else 1) * e.HIDDEN_DIMS
  heads = (e.NUM_HEADS + 2 * e.NUM_KV_HEADS) * e.DIMS_PER_HEAD
  kept = {
    'SAVE_DOT_WITH_NO_BATCH_DIM': 3 * e.MODEL_DIMS + heads + hidden,
    'SAVE_EVERYTHING': 12 * e.MODEL_DIMS + 2 * heads + 3 * hidden,
  }
  width = kept.get(e.CHECKPOINT_POLICY, e.MODEL_DIMS)
  return 2.0 * width * e.batch_size * e.MAX_SEQ_LEN


def unit_bytes(e: Any, fitted: str) -> float:
  """What one more layer, or one more expert in all of them, needs."""
  if fitted == 'NUM_EXPERTS':
    return REPEATED_BYTES * e.num_expert_blocks * expert_parameters(e)
  return REPEATED_BYTES * e.matmul_params / e.NUM_LAYERS + kept_bytes(e)


def fewest(e: Any, fitted: str) -> int:
  return e.NUM_EXPERTS_PER_TOKEN if fitted == 'NUM_EXPERTS' else 1


def units_to_try(e: Any, fitted: str, memory: float) -> int:
  """About how many layers, or experts, fit beside all else."""
  embeddings = STATE_BYTES * (parameters(e) - e.matmul_params)
  if fitted == 'NUM_EXPERTS':
    active = e.matmul_params - e.NUM_EXPERTS_PER_TOKEN * e.num_expert_blocks * expert_parameters(e)
    embeddings = STATE_BYTES * e.VOCAB_SIZE * e.MODEL_DIMS + REPEATED_BYTES * active
  tokens = e.batch_size * e.MAX_SEQ_LEN
  logits = 10 * tokens * e.VOCAB_SIZE / e.NUM_LOSS_CHUNKS  # in float32, bfloat16, and a gradient
  # of one layer; cuDNN keeps none
  scores = 0 if e.USE_FLASH_ATTENTION else 10 * tokens * e.NUM_HEADS * e.MAX_SEQ_LEN
  room = memory - embeddings - max(logits, scores)
  return max(min(int(room / unit_bytes(e, fitted)), getattr(e, fitted)), fewest(e, fitted))


def usable(name: str, memory: float) -> float:
  """Bytes that the step of a case may need."""
  return memory * (USABLE_OF_REFERENCE if name == reference_name(name) else USABLE)


def guessed(name: str, tiny: bool, memory: float) -> Any:
  """The experiment of a case with about as many layers or experts as fit."""
  e, fitted = experiment(name, tiny), find(name)[0].fitted
  if fitted is None:
    return e
  room = usable(reference_name(name), memory)
  return experiment(name, tiny, **{fitted: units_to_try(e, fitted, room)})


def guessed_seconds(name: str, e: Any) -> float:
  """What a case takes on an H100, from the start of its process to its end."""
  before = START_SECONDS + find(name)[0].compile_seconds
  if kind(name) == 'decode':
    return before + DECODED * 2 * parameters(e) / GUESSED_BANDWIDTH
  flops = e.batch_size * e.MAX_SEQ_LEN * e.flops_per_token
  return before + (STEPS[0] + STEPS[2]) * flops / GUESSED_FLOPS[e.MODEL_DIMS >= GUESSED_WIDTH]


# Tokens of the prompt, rounds, and tokens of each: a bucket of 256 slots, but for the first round
PROMPT, ROUNDS, ROUND_TOKENS = 128, 10, 23
DECODED = (ROUNDS + 1) * ROUND_TOKENS


def torch_sizes(name: str, tiny: bool, fitted: Values) -> Values:
  """What a process that knows no experiment builds of a case on torch."""
  e = experiment(name, tiny, **fitted)
  return {
    'architecture': find(name)[0].architecture,
    'layers': e.NUM_LAYERS,
    'model': e.MODEL_DIMS,
    'heads': e.NUM_HEADS,
    'hidden': e.HIDDEN_DIMS,
    'vocab': e.VOCAB_SIZE,
    'batch': [e.batch_size, e.MAX_SEQ_LEN],
    'recomputes': e.CHECKPOINT_POLICY == 'SAVE_NOTHING',
    'learning_rate': e.LEARNING_RATE,
    'flops_per_token': e.flops_per_token,
    'steps': TINY_STEPS if tiny else STEPS,
  }
