"""python benchmarks/gpu.py [--suite=backends] [--cases='gpt126m/*'] [--minutes=9] [--json]

Trains models for 30 steps on one GPU, a process for each case, and prints a line of its table as
soon as a case is done: step times, MFU, losses beside those of a reference, and what XLA made of
the step. What is not installed, fails, or does not fit into --minutes is told, and the rest goes
on. --dry_run lists the cases; --tiny runs the same code with small sizes, on a CPU too.
"""

import argparse
import contextlib
import dataclasses
import fnmatch
import importlib
import importlib.metadata
import json
import math
import os
import pathlib
import re
import statistics
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from typing import Any

HERE = pathlib.Path(__file__).parent

Values = dict[str, Any]
Result = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Model:
  """A model to train.

  Attributes:
    experiment: Dotted path of its class.
    values: Attributes that differ from the class's.
    tiny: Those of --tiny, on top.
    fitted: Whether it gets as many layers as fit the memory, from NUM_LAYERS downward.
    environment: Of its processes.
    reference: Name of the case whose losses and speed the others are compared with.
  """

  experiment: str
  values: Values
  tiny: Values
  fitted: bool = False
  environment: dict[str, str] = dataclasses.field(default_factory=dict)
  reference: str = 'xla'


@dataclasses.dataclass(frozen=True)
class Variant:
  """What a model is trained with.

  Attributes:
    values: Attributes of the experiment.
    needs: A module that must be there.
    capability: The GPU's compute capability that it needs.
    environment: Of its processes.
  """

  values: Values = dataclasses.field(default_factory=dict)
  needs: str | None = None
  capability: float = 0.0
  environment: dict[str, str] = dataclasses.field(default_factory=dict)


TINY = dict(MODEL_DIMS=64, NUM_HEADS=4, VOCAB_SIZE=512, MAX_SEQ_LEN=64)
MODELS = {
  'gpt126m': Model(
    'paxlite.experiments.gpt.GPT126M',
    # Pax's own rows a device
    dict(PERCORE_BATCH_SIZE=4, LEARNING_RATE=6e-4),
    TINY | dict(NUM_LAYERS=2),
  ),
  'llama7b_wide': Model(
    'paxlite.experiments.llama.LLaMA7B',
    dict(PERCORE_BATCH_SIZE=2, NUM_LOSS_CHUNKS=4, LEARNING_RATE=1e-4),
    TINY | dict(NUM_LAYERS=8, HIDDEN_DIMS=176),
    fitted=True,
  ),
  # the device against a CPU: the same arithmetic, in float32 throughout
  'small': Model(
    'paxlite.experiments.gpt.GPT126M',
    dict(
      NUM_LAYERS=4,
      MODEL_DIMS=256,
      NUM_HEADS=4,
      VOCAB_SIZE=2048,
      MAX_SEQ_LEN=128,
      PERCORE_BATCH_SIZE=4,
      FPROP_DTYPE='float32',
      LEARNING_RATE=6e-4,
    ),
    TINY | dict(NUM_LAYERS=2),
    # matrix products of float32 are otherwise computed in TF32
    environment={'JAX_DEFAULT_MATMUL_PRECISION': 'highest'},
    reference='cpu',
  ),
}


def te(use: str, recipe: str, capability: float = 0.0) -> Variant:
  return Variant(dict(USE_TE=use, TE_RECIPE=recipe), 'transformer_engine', capability)


VARIANTS = {
  'cpu': Variant(environment={'JAX_PLATFORMS': 'cpu'}),
  'xla': Variant(),
  'xla_fp8': Variant(dict(USE_FP8=True)),
  'te_gemm': te('gemm', 'bf16'),
  'te_layer': te('layer', 'bf16'),
  'te_gemm_delayed': te('gemm', 'DelayedScaling'),
  'te_layer_delayed': te('layer', 'DelayedScaling'),
  'te_gemm_current': te('gemm', 'Float8CurrentScaling'),
  'te_layer_current': te('layer', 'Float8CurrentScaling'),
  'te_gemm_mxfp8': te('gemm', 'MXFP8', 10),
  'te_layer_mxfp8': te('layer', 'MXFP8', 10),
  'int8_forward': Variant(dict(USE_INT8='forward'), 'qwix'),
  'int8_forward_backward': Variant(dict(USE_INT8='forward_backward'), 'qwix'),
}

# Cases 'model/variant' by suite, those first that tell the most
SUITES: dict[str, list[str]] = {
  'backends': [
    'llama7b_wide/xla',
    'llama7b_wide/xla_fp8',
    'llama7b_wide/te_layer_delayed',
    'llama7b_wide/te_gemm_delayed',
    'llama7b_wide/te_layer',
    'llama7b_wide/te_gemm',
    'small/cpu',
    'small/xla',
    'gpt126m/xla',
    'gpt126m/te_layer',
    'gpt126m/te_layer_delayed',
    'gpt126m/xla_fp8',
    'llama7b_wide/int8_forward',
    'llama7b_wide/int8_forward_backward',
    'llama7b_wide/te_layer_current',
    'llama7b_wide/te_gemm_current',
    'llama7b_wide/te_layer_mxfp8',
    'llama7b_wide/te_gemm_mxfp8',
    'gpt126m/te_gemm',
    'gpt126m/te_gemm_delayed',
    'gpt126m/int8_forward',
    'gpt126m/int8_forward_backward',
    'gpt126m/te_layer_current',
    'gpt126m/te_gemm_current',
  ],
}

STEPS = 30
WARM_UP = 5  # of them not timed
NUM_BATCHES = 4  # taken in turn
# Of a parameter in float32, two moments and a gradient; of repeated layers with what XLA copies
STATE_BYTES, REPEATED_BYTES = 16, 20
MEMORY_FRACTION = 0.92  # of the device's memory for JAX; libraries need some of their own
# Of JAX's memory: with more, XLA recomputes to save some, which would be timed. The reference
# leaves room, so that others, which need more, get its layers too
USABLE, USABLE_OF_REFERENCE = 0.85, 0.8
TINY_MEMORY = 5_800_000  # of --tiny, so that it looks for layers that fit

# What a compiled step holds, in its HLO; the body of a loop counts once
PATTERNS = {
  'f8': r'custom_call_target="__cublas\$lt\$matmul\$f8"',
  'cublasLt': r'custom_call_target="__cublas\$lt\$matmul"',
  'cublas': r'custom_call_target="__cublas\$gemm"',
  'triton': r'"kind":"__triton\w*gemm\w*"',
  'cudnn': r'custom_call_target="__cudnn[^"]*"',
  'te': r'custom_call_target="te_\w+"',
}

HEADER = (
  '| case | layers | step ms | quartiles | tokens/s | TFLOP/s | MFU | of matmul | ratio |'
  ' compiled s | peak GiB | last loss | against reference | in the program |'
)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--suite', default='backends', choices=[*SUITES, 'all'])
  parser.add_argument('--cases', default='*', help='patterns of cases, with commas between')
  parser.add_argument('--minutes', type=float, default=9.0)
  parser.add_argument(
    '--json', nargs='?', const='', metavar='FILE', help='benchmarks/results/gpu_DEVICE_SUITE.json'
  )
  parser.add_argument('--tiny', action='store_true')
  parser.add_argument('--dry_run', action='store_true')
  parser.add_argument('--serve', help=argparse.SUPPRESS)
  parser.add_argument('--layers', type=int, help=argparse.SUPPRESS)
  args = parser.parse_args()
  sys.path.insert(0, str(HERE.parent))
  if args.serve:
    serve(args.serve, args.tiny, args.layers)
    return
  suites = SUITES if args.suite == 'all' else {args.suite: SUITES[args.suite]}
  patterns = args.cases.split(',')
  known = [n for cases in suites.values() for n in cases]
  names = [n for n in known if any(fnmatch.fnmatch(n, p) for p in patterns)]
  if not names:
    parser.error(f'--cases={args.cases}: none of {", ".join(known)}')
  if args.dry_run:
    dry_run(names, args.tiny)
    return
  run(names, args)


def run(names: list[str], args: argparse.Namespace) -> None:
  """Runs the cases, and writes what is known after each of them: the next may never end."""
  deadline = time.monotonic() + 60 * args.minutes
  device = ask('device', args.tiny, deadline)
  if device.pop('status') != 'ok':
    raise SystemExit(f'no device: {device["reason"]}')
  result = {'suite': args.suite, 'date': time.strftime('%Y-%m-%d'), **device, 'cases': {}}
  modules = {module for n in names if (module := find(n)[1].needs)}
  probes = {module: ask(module, args.tiny, deadline) for module in sorted(modules)}
  result['missing'] = {m: r['reason'] for m, r in probes.items() if r['status'] != 'ok'}
  for line in about(result):
    print(line)
  print(f'\n{HEADER}\n|{"---|" * (HEADER.count("|") - 1)}', flush=True)
  for name in names:
    case = skipped(name, result)
    if case is None:
      case = ask(name, args.tiny, deadline, reference(name, result).get('layers'))
    result['cases'][name] = case
    compare(name, result)
    print(row(name, case), flush=True)
    if args.json is not None:
      write(args.json, result)


def ask(name: str, tiny: bool, deadline: float, layers: int | None = None) -> Result:
  """What a process of its own finds out about a case, or what PROBES does.

  Args:
    name: Of a case or a probe.
    tiny: See --tiny.
    deadline: When it must be done.
    layers: At most so many of a fitted model.

  Returns:
    Whose status is ok; or skipped, failed or not run, with a reason.
  """
  environment = dict(os.environ)
  if name not in PROBES:
    model, variant = find(name)
    environment |= model.environment | variant.environment
  if 'XLA_CLIENT_MEM_FRACTION' not in environment:  # its newer name; JAX refuses both
    environment.setdefault('XLA_PYTHON_CLIENT_MEM_FRACTION', str(MEMORY_FRACTION))
  command = [sys.executable, __file__, f'--serve={name}']
  command += ['--tiny'] * tiny + ([f'--layers={layers}'] if layers else [])
  left = deadline - time.monotonic()
  over = {'status': 'not run', 'reason': 'the time was over'}
  if left <= 0:
    return over
  try:
    done = subprocess.run(
      command, capture_output=True, text=True, env=environment, timeout=left, check=False
    )
  except subprocess.TimeoutExpired:
    return over | {'reason': f'the time was over, {left:.0f} s after its start'}
  for line in done.stdout.splitlines():
    if line.startswith('@'):
      return json.loads(line[1:])
  last = (done.stderr.strip().splitlines() or ['no word'])[-1]
  return {'status': 'failed', 'reason': f'exit code {done.returncode}: {last[:300]}'}


def serve(name: str, tiny: bool, layers: int | None) -> None:
  """Prints the result of a case or a probe as a line of JSON after an @."""
  from paxlite.errors import UserError

  try:
    result = PROBES[name](tiny) if name in PROBES else measure(name, tiny, layers)
    result['status'] = 'ok'
  except UserError as e:
    result = {'status': 'skipped', 'reason': str(e)}
  except Exception as e:  # out of memory, refused by a compiler, …: the next case goes on
    first = (str(e).strip().splitlines() or [''])[0]
    result = {'status': 'failed', 'reason': f'{type(e).__name__}: {first[:300]}'}
  print('@' + json.dumps(result), flush=True)


def find(name: str) -> tuple[Model, Variant]:
  model, _, variant = name.partition('/')
  return MODELS[model], VARIANTS[variant]


def reference_name(name: str) -> str:
  """The case that a case is compared with."""
  model = name.partition('/')[0]
  return f'{model}/{MODELS[model].reference}'


def reference(name: str, result: Result) -> Result:
  """What was measured of the case that a case is compared with; empty where that did not run."""
  found = result['cases'].get(reference_name(name), {})
  return found if found.get('status') == 'ok' else {}


def skipped(name: str, result: Result) -> Result | None:
  """The result of a case that the device or what is installed rules out."""
  _, variant = find(name)
  reason = result['missing'].get(variant.needs)
  capability = result['capability'] or 0.0
  if not reason and capability < variant.capability:
    reason = f'needs compute capability {variant.capability:g}, this is {capability:g}'
  return {'status': 'skipped', 'reason': reason} if reason else None


def experiment(name: str, tiny: bool, **changes: Any) -> Any:
  """The experiment of a case, for one device."""
  from paxlite.experiments.backend import PLAIN_XLA

  model, variant = find(name)
  module, _, cls = model.experiment.rpartition('.')
  one = dict(
    ICI_MESH_SHAPE=[1, 1, 1],
    DCN_MESH_SHAPE=[1, 1, 1],
    PACKED_INPUT=False,  # Transformer Engine's layers know no other
    LR_SCHEDULE='constant',
  )
  values = PLAIN_XLA | one | model.values | (model.tiny if tiny else {}) | variant.values | changes
  found = getattr(importlib.import_module(module), cls)(**values)
  found.validate()
  return found


def parameters(e: Any) -> int:
  """Of all matrices."""
  return e.matmul_params + (2 if e.SEPARATE_EMBEDDING else 1) * e.VOCAB_SIZE * e.MODEL_DIMS


def layer_bytes(e: Any) -> float:
  """What one more repeated layer needs."""
  return REPEATED_BYTES * e.matmul_params / e.NUM_LAYERS


def layers_to_try(e: Any, memory: float) -> int:
  """About how many layers fit beside the embeddings and the scores of one layer's attention."""
  embeddings = STATE_BYTES * (parameters(e) - e.matmul_params)
  scores = 4 * e.batch_size * e.NUM_HEADS * e.MAX_SEQ_LEN**2
  return max(min(int((memory - embeddings - scores) / layer_bytes(e)), e.NUM_LAYERS), 1)


def usable(name: str, memory: float) -> float:
  """Bytes that the step of a case may need."""
  return memory * (USABLE_OF_REFERENCE if name == reference_name(name) else USABLE)


def describe(tiny: bool) -> Result:
  """The device, the versions of everything, and how fast a matrix product is."""
  import jax

  from paxlite import profiling

  device = jax.devices()[0]
  packages = ('jax', 'jaxlib', 'flax', 'optax', 'numpy', 'transformer_engine', 'qwix')
  plugins = [f'jax-cuda{n}-plugin' for n in (12, 13)]
  capability = getattr(device, 'compute_capability', None)
  size, flops = matmul_flops(256 if tiny else 8192)
  return {
    'tiny': tiny,
    'device': device.device_kind,
    'platform': device.platform,
    'capability': None if capability is None else float(capability),
    'memory': memory_limit(device, tiny),
    'driver': driver(),
    'python': sys.version.split()[0],
    'versions': {p: v for p in (*packages, *plugins) if (v := version(p))},
    'peak_flops': profiling.peak_flops(device.device_kind),
    'matmul': {'size': size, 'dtype': 'bfloat16', 'flops': flops},
  }


def version(package: str) -> str | None:
  with contextlib.suppress(importlib.metadata.PackageNotFoundError):
    return importlib.metadata.version(package)
  return None


def load_transformer_engine(tiny: bool) -> Result:
  del tiny
  from paxlite import backends

  backends.transformer_engine()
  return {}


def load_qwix(tiny: bool) -> Result:
  del tiny
  importlib.import_module('qwix')
  return {}


# Asked before the cases; in processes of their own, as a library may end the one that loads it
PROBES: dict[str, Callable[[bool], Result]] = {
  'device': describe,
  'transformer_engine': load_transformer_engine,
  'qwix': load_qwix,
}


def driver() -> str | None:
  """The driver's version and the GPU's power limit, where nvidia-smi tells them."""
  command = ['nvidia-smi', '--query-gpu=driver_version,power.limit', '--format=csv,noheader']
  with contextlib.suppress(OSError, subprocess.SubprocessError):
    told = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    return told.strip().splitlines()[0]
  return None


def memory_limit(device: Any, tiny: bool) -> int | None:
  """Bytes that JAX has on the device; None where it does not know, as on a CPU."""
  if tiny:
    return TINY_MEMORY
  return (device.memory_stats() or {}).get('bytes_limit')


def matmul_flops(size: int) -> tuple[int, float]:
  """(size, FLOP/s) of a square bfloat16 product of random numbers: zeros would be faster."""
  import jax
  import jax.numpy as jnp

  a, b = jax.random.normal(jax.random.key(0), (2, size, size), jnp.bfloat16)
  product = jax.jit(jnp.dot)
  product(a, b).block_until_ready()
  seconds = []
  for _ in range(5):
    before = time.perf_counter()
    for _ in range(10):
      c = product(a, b)
    c.block_until_ready()
    seconds.append((time.perf_counter() - before) / 10)
  return size, 2 * size**3 / statistics.median(seconds)


@dataclasses.dataclass
class Program:
  """A compiled train step.

  Attributes:
    experiment: Whose step it is.
    states: Makes its first state.
    compiled: Of (state, batch); overwrites the state.
    sharding: Of a batch.
    seconds: That tracing and compiling took.
    needed: Bytes of the device.
  """

  experiment: Any
  states: Any
  compiled: Any
  sharding: Any
  seconds: float
  needed: int


def compile_step(e: Any, device: Any) -> Program:
  """The step that training compiles, before there is a state."""
  import fiddle as fdl
  import jax

  from paxlite import partitioning
  from paxlite.checkpoints import Checkpoints
  from paxlite.compiled_step import compile_lowered
  from paxlite.states import States
  from paxlite.trainer import jitted_step

  before = time.perf_counter()
  mesh, rules, task = e.mesh([device]), e.rules, fdl.build(e.training_task())
  nowhere = Checkpoints(pathlib.Path(os.devnull), read_only=True)
  states = States(task, mesh, rules, nowhere, e.SEED, e.batch_size)
  sharding = partitioning.batch_sharding(mesh, rules)
  batch = {
    k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    for k, x in next(batches(e)).items()
  }
  with task.compiling(mesh, rules):
    lowered = jitted_step(task, mesh, rules, e.SEED, states.abstract).lower(states.abstract, batch)
    compiled = compile_lowered(lowered, e.compiler_options(device.platform))
  seconds = time.perf_counter() - before
  return Program(e, states, compiled, sharding, seconds, needed_bytes(compiled.memory_analysis()))


def needed_bytes(memory: Any) -> int:
  """Of a step whose results take the place of its arguments where they can."""
  return (
    memory.argument_size_in_bytes
    + memory.temp_size_in_bytes
    + memory.output_size_in_bytes
    - memory.alias_size_in_bytes
    + memory.generated_code_size_in_bytes
  )


def fitting_step(name: str, device: Any, tiny: bool, most: int | None) -> Program:
  """The step of a case, of a fitted model with as many layers as the memory has room for.

  Args:
    name: Of the case.
    device: Where it runs.
    tiny: See --tiny.
    most: Layers to begin with; None: an estimate.
  """
  import jax

  e, limit = experiment(name, tiny), memory_limit(device, tiny)
  if limit is None or not find(name)[0].fitted:
    return compile_step(e, device)
  room = usable(name, limit)
  layers = most or layers_to_try(e, room)
  while True:
    try:
      program = compile_step(experiment(name, tiny, NUM_LAYERS=layers), device)
      excess = program.needed - room
      if excess <= 0 or layers == 1:
        return program
    except jax.errors.JaxRuntimeError as error:
      if 'RESOURCE_EXHAUSTED' not in str(error) or layers == 1:
        raise
      excess = layer_bytes(e)
    layers = max(layers - math.ceil(excess / layer_bytes(e)), 1)


def batches(e: Any) -> Iterator[dict[str, Any]]:
  """Random tokens of which the k-th is about 1/k as frequent as the first, always the same."""
  import numpy as np

  rng = np.random.default_rng(0)
  shape = (e.batch_size, e.MAX_SEQ_LEN + 1)
  while True:
    ids = (e.VOCAB_SIZE ** rng.random(shape)).astype(np.int32) - 1
    weights = np.ones((e.batch_size, e.MAX_SEQ_LEN), np.float32)
    yield {'ids': ids[:, :-1], 'labels': ids[:, 1:], 'weights': weights}


def measure(name: str, tiny: bool, layers: int | None) -> Result:
  """Trains a case and tells how that went."""
  import jax

  from paxlite import profiling

  device = jax.devices()[0]
  program = fitting_step(name, device, tiny, layers)
  e = program.experiment
  made = batches(e)
  data = [jax.device_put(next(made), program.sharding) for _ in range(NUM_BATCHES)]
  state, _ = program.states.initial()
  jax.block_until_ready((state, data))
  losses, seconds = [], []
  for i in range(STEPS):
    before = time.perf_counter()
    state, metrics = program.compiled(state, data[i % NUM_BATCHES])
    jax.block_until_ready((state, metrics))
    seconds.append(time.perf_counter() - before)
    losses.append(float(metrics['Metrics/total_loss'].value))
  low, median, high = statistics.quantiles(seconds[WARM_UP:], n=4)
  tokens = e.batch_size * e.MAX_SEQ_LEN / median
  flops, peak = tokens * e.flops_per_token, profiling.peak_flops(device.device_kind)
  text = program.compiled.as_text()
  return {
    'backend': str(e.backend),
    'platform': device.platform,
    'layers': e.NUM_LAYERS,
    'batch': [e.batch_size, e.MAX_SEQ_LEN],
    'parameters': sum(x.size for x in jax.tree.leaves(state.params)),
    'median_seconds': median,
    'quartile_seconds': [low, high],
    'tokens_per_second': tokens,
    'model_flops': flops,
    'mfu': peak and flops / peak,
    'compile_seconds': program.seconds,
    'compiled_bytes': program.needed,
    'peak_bytes': (device.memory_stats() or {}).get('peak_bytes_in_use'),
    'skipped_steps': int(state.skipped),
    'losses': losses,
    'program': {k: n for k, p in PATTERNS.items() if (n := len(re.findall(p, text)))},
  }


def compare(name: str, result: Result) -> None:
  """Adds to a case how it stands to its reference and to the matrix product, where these ran.

  Speed is that of model FLOPs: with the same layers the ratio is that of tokens.
  """
  case, other = result['cases'][name], reference(name, result)
  if case['status'] != 'ok':
    return
  if case['platform'] == result['platform']:
    case['share_of_matmul'] = case['model_flops'] / result['matmul']['flops']
  if other and case['layers'] == other['layers']:
    pairs = zip(case['losses'], other['losses'], strict=True)
    case['loss_differences'] = [abs(a - b) / abs(b) for a, b in pairs]
  if other and case['platform'] == other['platform']:
    case['ratio'] = case['model_flops'] / other['model_flops']


def about(result: Result) -> Iterator[str]:
  """What stands above the table."""
  versions = {'driver': result['driver'], 'Python': result['python'], **result['versions']}
  yield ', '.join([result['device'], *(f'{k} {v}' for k, v in versions.items() if v)])
  matmul, peak = result['matmul'], result['peak_flops']
  of = f', peak {peak / 1e12:,.0f}' if peak else ', peak unknown'
  yield f'{matmul["size"]}³ {matmul["dtype"]} product: {matmul["flops"] / 1e12:,.2f} TFLOP/s{of}'
  if result['memory']:
    yield f'memory for JAX: {result["memory"] / 2**30:.3g} GiB'


def row(name: str, case: Result) -> str:
  """A case as a line of the table."""
  if case['status'] != 'ok':
    return f'| {name} | {case["status"]}: {textwrap.shorten(case["reason"], 150)} |'
  share = lambda key: f'{case[key]:.1%}' if case.get(key) is not None else '–'
  low, high = case['quartile_seconds']
  differences = case.get('loss_differences')
  peak = case['peak_bytes'] or case['compiled_bytes']
  notes = [f'{k} {n}' for k, n in case['program'].items()]
  if case['skipped_steps']:
    notes.append(f'{case["skipped_steps"]} steps skipped')
  cells = [
    name,
    case['layers'],
    f'{1000 * case["median_seconds"]:.1f}',
    f'{1000 * low:.1f} to {1000 * high:.1f}',
    f'{case["tokens_per_second"]:,.0f}',
    f'{case["model_flops"] / 1e12:.3g}',
    share('mfu'),
    share('share_of_matmul'),
    f'{case["ratio"]:.2f}' if 'ratio' in case else '–',
    f'{case["compile_seconds"]:.0f}',
    f'{peak / 2**30:.3g}',
    f'{case["losses"][-1]:.4f}',
    f'{differences[-1]:.1e}' if differences else '–',
    ', '.join(notes) or '–',
  ]
  return f'| {" | ".join(map(str, cells))} |'


def write(path: str, result: Result) -> None:
  device = re.sub(r'\W+', '_', result['device']).strip('_')
  default = HERE / 'results' / f'gpu_{device}_{result["suite"]}.json'
  pathlib.Path(path or default).write_text(json.dumps(result, indent=1) + '\n')


def dry_run(names: list[str], tiny: bool) -> None:
  """Prints the cases with their sizes and estimates of memory; looks for no device."""
  memory = TINY_MEMORY if tiny else MEMORY_FRACTION * (80 << 30)
  print(f'{"case":36} {"layers":>8} {"parameters":>14} {"state GiB":>9} {"batch":>10}  backend')
  for name in names:
    model, variant = find(name)
    e = experiment(name, tiny)
    if model.fitted:
      room = usable(reference_name(name), memory)
      e = experiment(name, tiny, NUM_LAYERS=layers_to_try(e, room))
    count = parameters(e)
    layers = f'about {e.NUM_LAYERS}' if model.fitted else e.NUM_LAYERS
    batch = f'{e.batch_size} × {e.MAX_SEQ_LEN}'
    needs = [f'needs {variant.needs}'] if variant.needs else []
    needs += [f'compute capability {variant.capability:g}'] if variant.capability else []
    what = ', '.join([str(e.backend), *needs])
    state = STATE_BYTES * count / 2**30
    print(f'{name:36} {layers:>8} {count:>14,} {state:9.3g} {batch:>10}  {what}')
  print(f'\nstate: {STATE_BYTES} bytes a parameter, activations not counted')
  if any(find(name)[0].fitted for name in names):
    print(f'about: what {memory / 2**30:.3g} GiB for JAX hold; the compiler decides on the device')


if __name__ == '__main__':
  main()
