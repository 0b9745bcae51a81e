"""The experiment of a case, its sizes, and estimates of its needs; no device is used."""

import importlib
from typing import Any

from benchmarks.gpu.cases import Values, find, kind, reference_name

# Bytes per parameter: float32, two moments, a gradient; for repeated layers, also XLA's copies.
STATE_BYTES, REPEATED_BYTES = 16, 20
START_BYTES = 6  # in the cases of a start: gradients are bfloat16, moments on the host
MEMORY_FRACTION = 0.92  # of the device's memory, for JAX; libraries need some too
# Shares of JAX's memory. With more, XLA would recompute to save memory, which would be timed. The
# reference leaves room, so that variants that need more memory still get the same layers.
USABLE, USABLE_OF_REFERENCE = 0.85, 0.8

START_SECONDS, PROBE_SECONDS = 8, 10  # of a case's process before it compiles, and of a probe
# Steps waited for one by one, how many of them warm up, and steps waited for together.
STEPS, TINY_STEPS = (55, 5, 5), (20, 5, 2)
# Of an H100, according to the targets: FLOP/s of models below this width, and of wider models.
GUESSED_WIDTH, GUESSED_FLOPS = 2048, (0.35 * 989e12, 0.6 * 989e12)
GUESSED_BANDWIDTH = 0.7 * 3.35e12


def experiment(case: str, tiny: bool, **changes: Any) -> Any:
  """Returns the experiment of a case, for its devices."""
  module, _, name = find(case)[0].experiment.rpartition('.')
  found = getattr(importlib.import_module(module), name)(**attributes(case, tiny) | changes)
  found.validate()
  return found


def attributes(case: str, tiny: bool) -> Values:
  """Returns the attributes of a case's experiment; several devices share the batch of one."""
  model, variant = find(case)
  module, _, name = model.experiment.rpartition('.')
  one = dict(
    ICI_MESH_SHAPE=[1, 1, 1],
    DCN_MESH_SHAPE=[1, 1, 1],
    PACKED_INPUT=False,  # Transformer Engine's layers support nothing else
    LR_SCHEDULE='constant',
  )
  cls = getattr(importlib.import_module(module), name)
  values = cls().plain_backend | one | model.values | (model.tiny if tiny else {})
  if variant.devices > 1:
    rows = values.get('PERCORE_BATCH_SIZE', cls().PERCORE_BATCH_SIZE)
    values |= dict(PERCORE_BATCH_SIZE=rows / variant.devices)
  return values | variant.values


def parameters(e: Any) -> int:
  """Returns the number of parameters in all matrices, including all experts."""
  embeddings = (2 if e.SEPARATE_EMBEDDING else 1) * e.VOCAB_SIZE * e.MODEL_DIMS
  blocks = getattr(e, 'num_expert_blocks', 0)
  idle = e.NUM_EXPERTS - e.NUM_EXPERTS_PER_TOKEN if blocks else 0
  return e.matmul_params + embeddings + blocks * idle * expert_parameters(e)


def expert_parameters(e: Any) -> int:
  return 2 * e.MODEL_DIMS * e.HIDDEN_DIMS


def kept_bytes(e: Any) -> float:
  """Estimates the bytes that a block keeps for its backward pass, from its matrix products."""
  hidden = (2 if e.USE_GATED_ACTIVATION else 1) * e.HIDDEN_DIMS
  heads = (e.NUM_HEADS + 2 * e.NUM_KV_HEADS) * e.DIMS_PER_HEAD
  kept = {
    'SAVE_DOT_WITH_NO_BATCH_DIM': 3 * e.MODEL_DIMS + heads + hidden,
    'SAVE_EVERYTHING': 12 * e.MODEL_DIMS + 2 * heads + 3 * hidden,
  }
  width = kept.get(e.CHECKPOINT_POLICY, e.MODEL_DIMS)
  return 2.0 * width * e.batch_size * e.MAX_SEQ_LEN


def unit_bytes(e: Any, fitted: str) -> float:
  """Returns the bytes for one more layer, or for one more expert in all layers."""
  if fitted == 'NUM_EXPERTS':
    return REPEATED_BYTES * e.num_expert_blocks * expert_parameters(e)
  return REPEATED_BYTES * e.matmul_params / e.NUM_LAYERS + kept_bytes(e)


def fewest(e: Any, fitted: str) -> int:
  return e.NUM_EXPERTS_PER_TOKEN if fitted == 'NUM_EXPERTS' else 1


def units_to_try(e: Any, fitted: str, memory: float) -> int:
  """Estimates how many layers, or experts, fit into memory."""
  embeddings = STATE_BYTES * (parameters(e) - e.matmul_params)
  if fitted == 'NUM_EXPERTS':
    active = e.matmul_params - e.NUM_EXPERTS_PER_TOKEN * e.num_expert_blocks * expert_parameters(e)
    embeddings = STATE_BYTES * e.VOCAB_SIZE * e.MODEL_DIMS + REPEATED_BYTES * active
  tokens = e.batch_size * e.MAX_SEQ_LEN
  logits = 10 * tokens * e.VOCAB_SIZE / e.NUM_LOSS_CHUNKS  # in float32 and bfloat16, and a gradient
  # The scores of one layer; cuDNN keeps none.
  scores = 0 if e.USE_FLASH_ATTENTION else 10 * tokens * e.NUM_HEADS * e.MAX_SEQ_LEN
  room = memory - embeddings - max(logits, scores)
  return max(min(int(room / unit_bytes(e, fitted)), getattr(e, fitted)), fewest(e, fitted))


def usable(name: str, memory: float) -> float:
  """Returns the number of bytes that the step of a case may need."""
  return memory * (USABLE_OF_REFERENCE if name == reference_name(name) else USABLE)


def guessed(name: str, tiny: bool, memory: float) -> Any:
  """Returns the experiment of a case with about as many layers or experts as fit."""
  e, fitted = experiment(name, tiny), find(name)[0].fitted
  if fitted is None:
    return e
  room = usable(reference_name(name), memory)
  return experiment(name, tiny, **{fitted: units_to_try(e, fitted, room)})


def guessed_seconds(name: str, e: Any) -> float:
  """Estimates the seconds of a case on an H100, from the start of its process to its end."""
  before = START_SECONDS + find(name)[0].compile_seconds
  if kind(name) == 'start':  # twice, and the initial values of the state
    return 2 * before + 2 * START_BYTES * parameters(e) / GUESSED_BANDWIDTH
  if kind(name) == 'decode':
    return before + DECODED * 2 * parameters(e) / GUESSED_BANDWIDTH
  flops = e.batch_size * e.MAX_SEQ_LEN * e.flops_per_token
  return before + (STEPS[0] + STEPS[2]) * flops / GUESSED_FLOPS[e.MODEL_DIMS >= GUESSED_WIDTH]


# Tokens of the prompt, rounds, and tokens per round. All rounds but the first use 256 slots.
PROMPT, ROUNDS, ROUND_TOKENS = 128, 10, 30
DECODED = (ROUNDS + 1) * ROUND_TOKENS


def torch_sizes(name: str, tiny: bool, fitted: Values) -> Values:
  """Returns sizes for a process that builds the case on torch without an experiment."""
  e = experiment(name, tiny, **fitted)
  return {
    'architecture': find(name)[0].architecture,
    'layers': e.NUM_LAYERS,
    'model': e.MODEL_DIMS,
    'heads': e.NUM_HEADS,
    'hidden': e.HIDDEN_DIMS,
    'vocab': e.VOCAB_SIZE,
    'batch': [e.batch_size, e.MAX_SEQ_LEN],
    'recomputes': e.CHECKPOINT_POLICY in ('AUTO', 'SAVE_NOTHING'),
    'learning_rate': e.LEARNING_RATE,
    'flops_per_token': e.flops_per_token,
    'steps': TINY_STEPS if tiny else STEPS,
  }
