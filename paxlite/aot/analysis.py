"""Compiles the train step of an experiment for a machine that need not be present, and reports what
the step needs: memory, communication, and time.
"""

import contextlib
import dataclasses
import math
import pathlib
import re
import time
from typing import Any

import fiddle as fdl
import jax
from jax.sharding import Mesh, NamedSharding

from paxlite.aot.chips import Chip
from paxlite.aot.costs import Platform
from paxlite.aot.explanation_tables import short_name
from paxlite.aot.roofline import Links, ProgramCosts, StepProgram
from paxlite.aot.saved_activations import assumed_arrays, loss_of
from paxlite.aot.targets import Target
from paxlite.compilation import compiled_step, compiler
from paxlite.compilation.compiler import Option
from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject
from paxlite.data.base import OnPolicyInput, RowArray
from paxlite.experiments.base import Experiment
from paxlite.optim.moments import is_moment
from paxlite.parallel import partitioning
from paxlite.training.sharded_task import ShardedTask


@dataclasses.dataclass(frozen=True)
class Report:
  """The report of a compiled step; bytes are per device."""

  experiment: str
  target: str
  device: str
  devices: int
  mesh: dict[str, int]
  parameters: int
  batch_size: int
  seq_len: int
  versions: dict[str, str]
  options: dict[str, Option]
  compile_seconds: float = 0.0
  fits: bool | None = None
  verdict: str = ''
  chip: Chip | None = None
  arguments: int = 0
  temporaries: int = 0
  generated_code: int = 0
  total: int = 0
  host: int = 0
  model_flops: float = 0.0
  costs: ProgramCosts | None = None
  mfu: tuple[float, float] | None = None
  notes: tuple[str, ...] = ()
  program: str | None = dataclasses.field(default=None, repr=False)

  def as_json(self) -> JsonObject:
    """Returns the figures, without the text of the program."""
    return dataclasses.asdict(dataclasses.replace(self, program=None))


def compile_step(
  experiment: Experiment, target: Target, save: pathlib.Path | None = None
) -> Report:
  """Compiles `experiment`'s train step for `target`.

  Raises UserError if the mesh and the target differ, the target's compiler is missing or refuses
  the program, or the number of steps depends on data.

  Args:
    experiment: A validated experiment; its mesh is that of the target.
    target: The target, from targets.parse.
    save: The file for the compiled step, which --compiled_step loads.
  """
  e, chip = experiment, target.chip
  if e.NUM_EPOCHS is not None:
    raise UserError(
      f'NUM_EPOCHS={e.NUM_EPOCHS:g} depends on the data, which is not read here: set '
      'NUM_EPOCHS=None and MAX_STEPS=N'
    )
  notes: list[str] = []
  if e.DETERMINISTIC and chip is not None and chip.gpu is not None:
    notes.append('DETERMINISTIC is left out: XLA selects such kernels only on the GPU.')
    if save is not None:
      raise UserError(f'--save={save}: {notes[0]} Save a step with DETERMINISTIC=False')
    e = e.replaced(DETERMINISTIC=False)
  mesh = e.mesh(target.topology())
  notes.append(f'Backend: {e.backend}')
  notes += e.attention_choices(mesh.devices.flat[0])
  if target.chip is not None and e.values().get('CHECKPOINT_POLICY') == 'AUTO':
    notes.append('CHECKPOINT_POLICY=AUTO is SAVE_NOTHING here, and a run may keep more.')
  task = sharded_task(e, mesh)
  lowered = task.lower_step(abstract_batch(e, mesh, notes))
  device = mesh.devices.flat[0]
  options = e.compiler_options(device.platform, compiler.is_known_to(device))
  report = Report(
    experiment=type(e).__name__, target=target.name, device=device.device_kind, devices=mesh.size,
    mesh=dict(mesh.shape), parameters=task.num_parameters, batch_size=e.batch_size,
    seq_len=e.MAX_SEQ_LEN, versions=compiled_step.versions(device.platform), options=options,
    chip=chip,
  )  # fmt: skip
  before = time.perf_counter()
  try:
    with task.compiling():
      compiled = compiled_step.compile_lowered(lowered, options)
  except jax.errors.JaxRuntimeError as error:
    verdict, total = _too_large(target, str(error))
    notes += [] if save is None else [f'{save} was not written.']
    spent = time.perf_counter() - before
    return dataclasses.replace(
      report, compile_seconds=spent, fits=False, verdict=verdict, total=total, notes=tuple(notes)
    )
  spent = time.perf_counter() - before

  memory = compiled.memory_analysis()
  assert memory is not None
  total = peak(memory, device.platform)
  host = memory.host_argument_size_in_bytes + memory.host_temp_size_in_bytes
  fits, verdict = _verdict(total, host, chip)
  of_token = e.trained_flops(task.task.optimizer, task.boxed_params)
  flops = of_token * e.batch_size * e.MAX_SEQ_LEN
  text, costs, mfu = _text(compiled, notes), None, None
  if text:
    costs = StepProgram(text, platform_of(device), links_of(e, mesh), chip).summary()
    if chip is not None and costs.roofline is not None and flops:
      ideal = flops / mesh.size / _peak_flops(costs, chip)
      mfu = (ideal / costs.roofline.step, ideal / costs.roofline.least)
  if save is not None:
    if target.name != 'here' and '__cudnn$' in (text or ''):
      # an H100 loaded such a step (jax 0.11.2), and XLA did not find the kernels when it began
      raise UserError(
        f'--save={save}: the step calls cuDNN attention, which compiles its kernels only on the '
        'GPU. Save a step with USE_FLASH_ATTENTION=False, or compile it on the GPU'
      )
    size = compiled_step.save(save, compiled, lowered, mesh, e.values(), options)
    notes.append(f'The compiled step is in {save}: {size:,} bytes.')
  return dataclasses.replace(
    report, compile_seconds=spent, fits=fits, verdict=verdict,
    arguments=memory.argument_size_in_bytes, temporaries=memory.temp_size_in_bytes,
    generated_code=memory.generated_code_size_in_bytes, total=total, host=host, model_flops=flops,
    costs=costs, mfu=mfu, notes=tuple(notes), program=text,
  )  # fmt: skip


def explain(experiment: Experiment, target: Target) -> JsonObject:
  """Compiles the train step of an experiment for a target, and explains it.

  Raises UserError as compile_step does.

  Returns:
    An object for JSON. `report` is what `paxlite compile --json` writes. `totals` are bytes of one
    device: parameters, moments, other state, the batch, gradients, and saved activations of one
    microbatch. `activations` are the latter by origin, as `_activations` returns them. Those of a
    pipeline are in neither.
  """
  e = experiment
  report = compile_step(e, target)
  mesh = e.mesh(target.topology())
  sharded = sharded_task(e, mesh)
  state, task, count = sharded.abstract, sharded.task, partitioning.bytes_per_device
  trained, _ = task.optimizer.split(state.params)
  moments = [x for x in jax.tree.leaves(state.opt_state) if is_moment(x)]
  totals = {
    'parameters': count(state.params),
    'moments': 0 if task.optimizer.on_host else count(moments),
    'other state': count(state) - count(state.params) - count(moments),
    'batch': count(abstract_batch(e, mesh, [])),
    'gradients': count(jax.tree.map(lambda w: w.update(dtype=task.gradient_dtype), trained)),
  }
  found: JsonObject = {'report': report.as_json(), 'totals': totals}
  if e.mesh_sizes.get('stage', 1) == 1:
    found['activations'] = _activations(e, mesh, e.batch_size // task.num_microbatches)
    totals['saved activations'] = sum(row['bytes'] for row in found['activations'])
  return found


def _activations(e: Experiment, mesh: Mesh, rows: int) -> list[JsonObject]:
  """Returns the arrays that the forward pass of `rows` sequences saves, by origin, largest first.

  `module` has made them, by the operation of JAX `made_by` or under this name of checkpoint
  policies. `bytes` are those of one device, of all `arrays` together.
  """
  found = dict[tuple[str, str], JsonObject]()
  for array in loss_of(e, mesh, rows).saved()[0]:
    partition = partitioning.spec(array.names, e.rules)
    partition = partitioning.fitting(partition, array.shape, dict(mesh.shape))
    shape = NamedSharding(mesh, partition).shard_shape(array.shape)
    origin = short_name(array.source or 'loss'), array.label or array.operation
    about = {'module': origin[0], 'made_by': origin[1], 'arrays': 0, 'bytes': 0}
    row = found.setdefault(origin, about)
    row['arrays'] += 1
    row['bytes'] += math.prod(shape) * jax.numpy.dtype(array.dtype).itemsize
  return sorted(found.values(), key=lambda row: -row['bytes'])


def sharded_task(experiment: Experiment, mesh: Mesh) -> ShardedTask:
  """Returns the task of an experiment on a mesh."""
  e = experiment
  return ShardedTask(fdl.build(e.build_task()), mesh, e.rules, e.SEED)


def abstract_batch(e: Experiment, mesh: Mesh, notes: list[str]) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns the shapes, dtypes and shardings of a batch: of the data, or assumed without it."""
  sharding = partitioning.batch_sharding(mesh, e.rules)
  found = assumed_arrays(e)
  try:
    data = fdl.build(e.train_input())
    is_drawn = isinstance(data, OnPolicyInput)
    row = data.drawn_shapes() if is_drawn else next(iter(data.train_batches(0, slice(0, 1))))
    found = {k: RowArray(v.dtype.name, v.shape[2:]) for k, v in row.items()}
  except (UserError, OSError, ImportError):
    notes.append(
      f'The data is not on this machine. The step assumes batches with {", ".join(found)}; '
      'training refuses it if the data differs.'
    )
  shape = (e.batch_size, e.MAX_SEQ_LEN)
  return {
    name: jax.ShapeDtypeStruct((*shape, *array.dims), array.dtype, sharding=sharding)
    for name, array in found.items()
  }


def _too_large(target: Target, error: str) -> tuple[str, int]:
  """Returns (verdict, needed bytes or 0) of a compiler's error.

  Raises UserError if memory is not why.
  """
  if 'RESOURCE_EXHAUSTED' not in error:
    raise UserError(f'--target={target.name}: {error.splitlines()[0]}')
  sizes = re.search(r'\(([\d.]+)G\) exceeds available HBM \(([\d.]+)G\)', error)
  if sizes is None:
    return f'does not fit: {error.splitlines()[0]}', 0
  verdict = f'does not fit: needs {sizes[1]} GiB of {sizes[2]} GiB'
  return verdict, int(float(sizes[1]) * 2**30)


def peak(memory: Any, platform: str) -> int:
  """Returns the peak memory in bytes from a compiled program's memory_analysis.

  On a TPU, the sum of temporaries counts shared memory once for each buffer that shares it. The TPU
  compiler itself refuses programs that do not fit. The compiler's peak counts the memory of the
  host as well, where the arguments are all the time.
  """
  code = memory.generated_code_size_in_bytes
  allocated = memory.argument_size_in_bytes + memory.temp_size_in_bytes
  peak = getattr(memory, 'peak_memory_in_bytes', 0)
  if platform == 'cpu' or not peak:
    return allocated + code
  on_host = memory.host_argument_size_in_bytes
  return (min(allocated, peak - on_host) if on_host else peak) + code


def _verdict(total: int, host: int, chip: Chip | None) -> tuple[bool | None, str]:
  if chip is None:
    return None, 'compiled; the device memory is unknown'
  share = total / chip.memory
  of = f'{total / 2**30:.2f} GiB of {chip.memory / 2**30:.2f} GiB, {share:.0%}'
  if host:
    of += f', and {host / 2**30:.2f} GiB of the host for each device'
  if share > 1:
    return False, f'does not fit: {of}'
  if share > chip.default_share:
    return True, (
      f'fits: {of}, with XLA_PYTHON_CLIENT_MEM_FRACTION above {share:.2f} '
      f'(JAX takes {chip.default_share:.0%} by default)'
    )
  return True, f'fits: {of}'


def _text(compiled: jax.stages.Compiled, notes: list[str]) -> str | None:
  """Returns the text of a compiled program; None where this compiler cannot print it."""
  with contextlib.suppress(jax.errors.JaxRuntimeError):
    return compiled.as_text()
  notes.append('This version of the compiler cannot print its program: its costs are unknown.')
  return None


def platform_of(device: jax.Device) -> Platform:
  """Returns the kind of a device, as the costs of its programs are counted."""
  return {'cpu': 'cpu', 'tpu': 'tpu'}.get(device.platform, 'gpu')  # type: ignore[return-value]


def links_of(e: Experiment, mesh: Mesh) -> Links:
  """Returns the mesh of an experiment's program, and which of its devices are near each other."""
  near = dict(zip(mesh.axis_names, e.ICI_MESH_SHAPE, strict=True))
  # with several slices of TPUs, the program is that of one slice
  return Links(near if mesh.devices.flat[0].platform == 'tpu' else dict(mesh.shape), near)


def _peak_flops(costs: ProgramCosts, chip: Chip) -> float:
  """Returns the peak for the type of operands that most FLOPs have."""
  peaks = chip.flops_by_type
  most = max(costs.flops, key=lambda dtype: costs.flops[dtype], default='')
  return max(peaks.get(most, 0.0), chip.peak_flops)
