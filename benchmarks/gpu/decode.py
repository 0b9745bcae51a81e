"""Measures decoding with paxlite's engine, greedy, with random weights."""

import statistics
import time
from typing import Any

from benchmarks.gpu.cases import Values
from benchmarks.gpu.device import Result
from benchmarks.gpu.sizes import PROMPT, ROUND_TOKENS, ROUNDS, experiment


def measure(name: str, tiny: bool, most: int | None, sizes: Values) -> Result:
  """Continues prompts in rounds of tokens; the final figures are per token."""
  del most, sizes
  import fiddle as fdl
  import jax
  import numpy as np

  from paxlite.generation.engine import Engine
  from paxlite.generation.fused_projections import FusedProjections
  from paxlite.generation.request import Request
  from paxlite.quantization.frozen_weights import put_scheme
  from paxlite.quantization.schemes import Int8

  device = jax.devices()[0]
  e = experiment(name, tiny)
  e = experiment(name, tiny, **e.decoding_values)
  mesh, config = e.mesh([device]), e.plain.build_task()
  plain = shapes(config, mesh, e)
  if e.INT8_WEIGHTS:
    put_scheme(config.model, Int8)
  params = random_params(shapes(config, mesh, e), plain, e.FPROP_DTYPE)
  params = FusedProjections(config, mesh, e.rules).fused(params)
  model = fdl.build(config).model
  # Like Inference.engine, but without end tokens.
  engine = Engine(
    model,
    params,
    e.MAX_SEQ_LEN,
    e.sampling(),
    is_token=np.ones(e.VOCAB_SIZE, bool),
    mesh=mesh,
    rules=e.rules,
    most_rows=e.DECODE_BATCH_SIZE,
    kv_cache_dtype=e.KV_CACHE_DTYPE,
  )
  shape = (e.DECODE_BATCH_SIZE, PROMPT)
  prompts = np.random.default_rng(0).integers(0, e.VOCAB_SIZE, shape).tolist()
  new = 1 + (ROUNDS + 2) * ROUND_TOKENS

  def round_of_tokens() -> float:
    before = time.perf_counter()
    engine.step(most=ROUND_TOKENS)
    return time.perf_counter() - before

  def read() -> float:
    """Reads all prompts, and generates a token after each."""
    engine.params = params  # so that no prompt is known
    before = time.perf_counter()
    engine.continuations(prompts, 1)
    return time.perf_counter() - before

  jax.block_until_ready(params)
  first_prompts, prompt_seconds = read(), read()
  engine.params = params
  jobs = [engine.add(Request(prompt, new)) for prompt in prompts]
  before = time.perf_counter()
  while not all(len(job.known) > PROMPT + ROUND_TOKENS for job in jobs):
    engine.step(most=ROUND_TOKENS)
  first_round = time.perf_counter() - before
  seconds = []
  while all(job.num_left >= ROUND_TOKENS for job in jobs):
    seconds.append(round_of_tokens() / ROUND_TOKENS)
  low, median, high = statistics.quantiles(seconds, n=4)
  total = sum(x.nbytes for x in jax.tree.leaves(params))
  # A token needs one row of the embedding table, and all other weights.
  table = e.VOCAB_SIZE * e.MODEL_DIMS * np.dtype(jax.numpy.dtype(e.FPROP_DTYPE)).itemsize
  read = total - table if e.SEPARATE_EMBEDDING else total
  return {
    'platform': device.platform,
    'layers': e.NUM_LAYERS,
    'fitted': {},
    'batch': [e.DECODE_BATCH_SIZE, PROMPT],
    'parameters': sum(x.size for x in jax.tree.leaves(params)),
    'median_seconds': median,
    'quartile_seconds': [low, high],
    'tokens_per_second': e.DECODE_BATCH_SIZE / median,
    'prompt_seconds': prompt_seconds,
    'compile_seconds': first_prompts + first_round,
    'peak_bytes': (device.memory_stats() or {}).get('peak_bytes_in_use'),
    'compiled_bytes': total,
    'weight_bytes': read,
    'cache_bytes': engine.cache_bytes(e.DECODE_BATCH_SIZE, 512),
    'bandwidth': read / median,
  }


def shapes(config: Any, mesh: Any, e: Any) -> Any:
  """Returns the shapes of a task's parameters on the mesh."""
  import fiddle as fdl
  import jax

  from paxlite.parallel import partitioning

  boxed = jax.eval_shape(fdl.build(config).init_params, jax.random.key(0))
  return partitioning.sharded_shapes(boxed, mesh, e.rules)


def random_params(wanted: Any, plain: Any, dtype: str) -> Any:
  """Returns random weights of these shapes.

  Args:
    wanted: The shapes; integers and their scales keep their dtypes.
    plain: Shapes of the same model without integers; variables that are not in it are scales.
    dtype: The dtype of all other weights.
  """
  import jax
  import jax.numpy as jnp
  from flax.traverse_util import flatten_dict, unflatten_dict

  flat, known = flatten_dict(wanted), flatten_dict(plain)
  programs: dict[Any, Any] = {}
  found = {}
  for i, (name, like) in enumerate(flat.items()):
    integers = jnp.issubdtype(like.dtype, jnp.integer)
    kind = like.dtype if integers or name not in known else jnp.dtype(dtype)
    if (like.shape, kind) not in programs:  # layers share their shapes
      programs[like.shape, kind] = jax.jit(
        lambda key, shape=like.shape, kind=kind: (
          jax.random.randint(key, shape, -127, 128, kind)
          if jnp.issubdtype(kind, jnp.integer)
          else 0.02 * jax.random.normal(key, shape, kind)
        ),
        out_shardings=like.sharding,
      )
    found[name] = programs[like.shape, kind](jax.random.key(i))
  return unflatten_dict(found)
