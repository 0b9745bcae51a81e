"""Measures a train step of paxlite: the step that training compiles, with a donated state."""

import dataclasses
import math
import re
import statistics
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.cases import Values, find
from benchmarks.gpu.device import Result, memory_limit
from benchmarks.gpu.sizes import (
  STEPS,
  TINY_STEPS,
  experiment,
  fewest,
  unit_bytes,
  units_to_try,
  usable,
)

NUM_BATCHES = 4  # used in turn

# Operations to count in a compiled step's HLO; the body of a loop counts once.
PATTERNS = {
  'f8': r'custom_call_target="__cublas\$lt\$matmul\$f8"',
  'cublasLt': r'custom_call_target="__cublas\$lt\$matmul"',
  'cublas': r'custom_call_target="__cublas\$gemm"',
  'triton': r'"kind":"__triton\w*gemm\w*"',
  'cudnn': r'custom_call_target="__cudnn[^"]*"',
  'te': r'custom_call_target="te_\w+"',
}


def measure(name: str, tiny: bool, most: int | None, sizes: Values) -> Result:
  """Trains a case and returns the measurements; see fitting_step."""
  del sizes
  import jax

  variant = find(name)[1]
  of_process = lambda i: [d for d in jax.devices() if d.process_index == i]
  each = variant.devices // variant.processes
  devices = [d for i in range(variant.processes) for d in of_process(i)[:each]]
  device = jax.local_devices()[0]
  program = fitting_step(name, devices, tiny, most)
  e = program.experiment
  made = batches(e, variant.texts)
  put = lambda x: jax.make_array_from_callback(x.shape, program.sharding, lambda i: x[i])
  data = [jax.tree.map(put, next(made)) for _ in range(NUM_BATCHES)]
  state = program.task.new(lambda state: state, program.task.abstract)
  jax.block_until_ready((state, data))
  steps, warm_up, queued_steps = TINY_STEPS if tiny else STEPS
  losses, seconds = [], []
  for i in range(steps):
    before = time.perf_counter()
    state, metrics = program.compiled(state, data[i % NUM_BATCHES])
    jax.block_until_ready((state, metrics))
    seconds.append(time.perf_counter() - before)
    losses.append(float(metrics['Metrics/total_loss'].value))
  before = time.perf_counter()
  for i in range(queued_steps):
    state, metrics = program.compiled(state, data[i % NUM_BATCHES])
  jax.block_until_ready((state, metrics))
  queued = (time.perf_counter() - before) / queued_steps
  low, median, high = statistics.quantiles(seconds[warm_up:], n=4)
  tokens = e.batch_size * e.MAX_SEQ_LEN / median
  text = program.compiled.as_text()
  fitted = find(name)[0].fitted
  return {
    'backend': str(e.backend),
    'platform': device.platform,
    'layers': e.NUM_LAYERS,
    'experts': e.NUM_EXPERTS if getattr(e, 'num_expert_blocks', 0) else None,
    'fitted': {fitted: getattr(e, fitted)} if fitted else {},
    'batch': [e.batch_size, e.MAX_SEQ_LEN],
    'parameters': sum(x.size for x in jax.tree.leaves(state.params)),
    'median_seconds': median,
    'quartile_seconds': [low, high],
    'queued_seconds': queued,
    'tokens_per_second': tokens,
    'model_flops': tokens * e.flops_per_token,
    'compile_seconds': program.seconds,
    'compiled_bytes': program.needed,
    'peak_bytes': (device.memory_stats() or {}).get('peak_bytes_in_use'),
    'skipped_steps': int(state.skipped),
    'losses': losses,
    'program': {k: n for k, p in PATTERNS.items() if (n := len(re.findall(p, text)))},
  }


@dataclasses.dataclass
class Program:
  """A compiled train step.

  Attributes:
    experiment: The experiment of the step.
    states: Makes its initial state.
    compiled: The program for (state, batch); it overwrites the state.
    sharding: The sharding of a batch.
    seconds: Seconds of tracing and compilation.
    needed: Bytes of device memory.
  """

  experiment: Any
  task: Any
  compiled: Any
  sharding: Any
  seconds: float
  needed: int


def compile_step(e: Any, devices: list[Any], texts: int) -> Program:
  """Returns the step that training compiles, before there is a state."""
  import fiddle as fdl
  import jax

  from paxlite.compilation.compiled_step import compile_lowered
  from paxlite.training.sharded_task import ShardedTask

  before = time.perf_counter()
  task = ShardedTask(fdl.build(e.build_task()), e.mesh(devices), e.rules, e.SEED)
  sharding = task.batch_sharding
  batch = {
    k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    for k, x in next(batches(e, texts)).items()
  }
  with task.compiling():
    compiled = compile_lowered(task.lower_step(batch), e.compiler_options(devices[0].platform))
  seconds = time.perf_counter() - before
  return Program(e, task, compiled, sharding, seconds, needed_bytes(compiled.memory_analysis()))


def needed_bytes(memory: Any) -> int:
  """Returns the bytes of a step whose results replace its arguments where possible."""
  return (
    memory.argument_size_in_bytes
    + memory.temp_size_in_bytes
    + memory.output_size_in_bytes
    - memory.alias_size_in_bytes
    + memory.generated_code_size_in_bytes
  )


def fitting_step(name: str, devices: list[Any], tiny: bool, most: int | None) -> Program:
  """Returns the step of a case; a fitted model has the layers or experts that fit into memory.

  Args:
    name: Name of the case.
    devices: The devices that it runs on.
    tiny: See --tiny.
    most: The number to start with; None: an estimate.
  """
  import jax

  e, fitted = experiment(name, tiny), find(name)[0].fitted
  limit = memory_limit(jax.local_devices()[0], tiny)
  texts = find(name)[1].texts
  if limit is None or fitted is None:
    return compile_step(e, devices, texts)
  room, least = usable(name, limit), fewest(e, fitted)
  units = most or units_to_try(e, fitted, room)
  while True:
    try:
      program = compile_step(experiment(name, tiny, **{fitted: units}), devices, texts)
      excess = program.needed - room
      if excess <= 0 or units == least:
        return program
    except jax.errors.JaxRuntimeError as error:
      if 'RESOURCE_EXHAUSTED' not in str(error) or units == least:
        raise
      excess = unit_bytes(e, fitted)
    units = max(units - math.ceil(excess / unit_bytes(e, fitted)), least)


def batches(e: Any, texts: int) -> Iterator[dict[str, Any]]:
  """Yields random tokens, always the same; the k-th is about 1/k as frequent as the first.

  Args:
    e: The experiment.
    texts: Texts of the same length in a row; 0: rows are not packed.
  """
  import numpy as np

  rng = np.random.default_rng(0)
  shape = (e.batch_size, e.MAX_SEQ_LEN + 1)
  while True:
    ids = (e.VOCAB_SIZE ** rng.random(shape)).astype(np.int32) - 1
    weights = np.ones((e.batch_size, e.MAX_SEQ_LEN), np.float32)
    batch = {'ids': ids[:, :-1], 'labels': ids[:, 1:], 'weights': weights}
    if texts:
      position = np.arange(e.MAX_SEQ_LEN, dtype=np.int32)
      length = -(-e.MAX_SEQ_LEN // texts)
      packed = dict(segment_ids=1 + position // length, segment_pos=position % length)
      batch |= {k: np.broadcast_to(v, weights.shape) for k, v in packed.items()}
    yield batch
