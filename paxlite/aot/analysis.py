"""Compiles a train step for a machine that need not be present, and reports what the step needs.

The report has the memory, the communication, and the shortest time that the hardware allows.
"""

import contextlib
import dataclasses
import pathlib
import re
import time
from typing import Any

import fiddle as fdl
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from paxlite.aot import hlo
from paxlite.aot.targets import Chip, Target
from paxlite.core.errors import UserError
from paxlite.experiments.base import Experiment
from paxlite.parallel import partitioning
from paxlite.runtime import compiled_step
from paxlite.training.sharded_task import ShardedTask


@dataclasses.dataclass(frozen=True)
class Communication:
  """All collectives of one kind along the same mesh axes, in one step of one device.

  Attributes:
    kind: One of hlo.KINDS.
    axes: Mesh axes along which devices communicate.
    runs: Number of runs in a step.
    bytes: Bytes of the arrays, summed over all runs.
    ici_bytes: Bytes sent within a slice or host.
    dcn_bytes: Bytes sent to other slices or hosts.
  """

  kind: str
  axes: tuple[str, ...]
  runs: int
  bytes: int
  ici_bytes: float
  dcn_bytes: float


@dataclasses.dataclass(frozen=True)
class Roofline:
  """Seconds per step that each resource needs by itself, at the speed of its data sheet.

  Attributes:
    compute: Seconds for the model's FLOPs at the peak, including recomputation if the checkpoint
      policy keeps nothing, and including the ticks in which stages of a pipeline are idle.
    memory: Seconds to read the arguments, to write the results, and to write and read the
      temporaries once, which is roughly the minimum.
    ici: Seconds to send the bytes within slices or hosts.
    dcn: Seconds to send the bytes between slices or hosts.
  """

  compute: float
  memory: float
  ici: float
  dcn: float

  @property
  def overlapped(self) -> float:
    """Seconds of a step that uses all four resources at the same time."""
    return max(self.compute, self.memory, self.ici, self.dcn)

  @property
  def in_turn(self) -> float:
    """Seconds of a step in which computation and communication do not overlap."""
    return max(self.compute, self.memory) + self.ici + self.dcn


@dataclasses.dataclass(frozen=True)
class Report:
  """The report of a compiled step; bytes are those of one device."""

  experiment: str
  target: str
  device: str
  devices: int
  mesh: dict[str, int]
  parameters: int
  batch_size: int
  seq_len: int
  lower_seconds: float
  compile_seconds: float
  versions: dict[str, str]
  fits: bool | None
  verdict: str
  chip: Chip | None = None
  arguments: int = 0
  temporaries: int = 0
  generated_code: int = 0
  total: int = 0
  model_flops: float = 0.0
  communication: tuple[Communication, ...] = ()
  roofline: Roofline | None = None
  mfu: tuple[float, float] | None = None
  saved: str | None = None
  notes: tuple[str, ...] = ()

  def as_json(self) -> dict[str, Any]:
    return dataclasses.asdict(self)


def compile_step(
  experiment: Experiment,
  target: Target,
  save: pathlib.Path | None = None,
) -> Report:
  """Compiles `experiment`'s train step for `target`.

  Args:
    experiment: A validated experiment, whose mesh must have the devices of the target.
    target: The target, from targets.parse.
    save: File to which the compiled step is saved, for --compiled_step; None saves nothing.

  Raises:
    UserError: The mesh and the target differ, or the target's compiler is missing or refuses the
      program.
  """
  e, chip = experiment, target.chip
  notes: list[str] = []
  mesh = e.mesh(target.topology())
  notes.append(f'Backend: {e.backend}')
  task = ShardedTask(fdl.build(e.task()), mesh, e.rules, e.SEED)
  lowered, seconds = _timed(lambda: task.lower_step(abstract_batch(e, mesh, notes)))
  state = lowered.args_info[0][0]
  device = mesh.devices.flat[0]
  known: dict[str, Any] = dict(
    experiment=type(e).__name__,
    target=target.name,
    device=device.device_kind,
    devices=mesh.size,
    mesh=dict(mesh.shape),
    parameters=sum(x.size for x in jax.tree.leaves(_shapes(state.params))),
    batch_size=e.batch_size,
    seq_len=e.MAX_SEQ_LEN,
    lower_seconds=seconds,
    versions=compiled_step.versions(device.platform),
    chip=chip,
  )
  options = e.compiler_options(device.platform)
  before = time.perf_counter()
  try:
    with task.compiling():
      compiled = compiled_step.compile_lowered(lowered, options)
  except jax.errors.JaxRuntimeError as error:
    verdict = _too_large(str(error))
    if verdict is None:
      raise UserError(f'--target={target.name}: {str(error).splitlines()[0]}') from None
    spent = time.perf_counter() - before
    if save is not None:
      notes.append(f'Nothing is in {save}.')
    return Report(**known, compile_seconds=spent, fits=False, verdict=verdict, notes=tuple(notes))
  known['compile_seconds'] = time.perf_counter() - before

  memory = compiled.memory_analysis()
  total = _peak(memory, device.platform)
  fits, verdict = _verdict(total, chip)
  found = _communication(e, compiled, mesh, notes)
  flops = e.flops_per_token * e.batch_size * e.MAX_SEQ_LEN
  roofline = None
  if chip is not None:
    roofline = _roofline(e, chip, device.platform, flops / mesh.size, memory, found)
  mfu = None
  if chip is not None and roofline is not None and flops:
    ideal = flops / mesh.size / chip.peak_flops
    mfu = (ideal / roofline.in_turn, ideal / roofline.overlapped)
  if save is not None:
    size = compiled_step.save(save, compiled, lowered, mesh, e.values(), options)
    notes.append(f'The compiled step is in {save}: {size:,} bytes.')
  return Report(
    **known,
    fits=fits,
    verdict=verdict,
    arguments=memory.argument_size_in_bytes,
    temporaries=memory.temp_size_in_bytes,
    generated_code=memory.generated_code_size_in_bytes,
    total=total,
    model_flops=flops,
    communication=tuple(found),
    roofline=roofline,
    mfu=mfu,
    saved=None if save is None else str(save),
    notes=tuple(notes),
  )


def _timed(function: Any) -> tuple[Any, float]:
  before = time.perf_counter()
  result = function()
  return result, time.perf_counter() - before


def abstract_batch(e: Experiment, mesh: Mesh, notes: list[str]) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns the shapes, dtypes and shardings of a batch; they are assumed if the data is missing.

  In that case a note is added to `notes`.
  """
  sharding = partitioning.batch_sharding(mesh, e.rules)
  packed = dict(ids='int32', labels='int32', weights='float32')
  if e.packed:
    packed |= dict(segment_ids='int32', segment_pos='int32')
  found = {k: jnp.dtype(v) for k, v in packed.items()}
  try:
    data = fdl.build(e.train_input())
    row = next(iter(data.train_batches(0, slice(0, 1))))
    found = {k: v.dtype for k, v in row.items()}
  except (UserError, OSError, ImportError):
    notes.append(
      f'The data is not here: a batch is taken to hold {", ".join(found)}, and training refuses '
      'the compiled step if its data differs.'
    )
  shape = (e.batch_size, e.MAX_SEQ_LEN)
  return {k: jax.ShapeDtypeStruct(shape, v, sharding=sharding) for k, v in found.items()}


def _shapes(tree: Any) -> Any:
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def _too_large(error: str) -> str | None:
  """Turns a compiler's error about too little memory into a verdict; None for other errors."""
  if 'RESOURCE_EXHAUSTED' not in error:
    return None
  sizes = re.search(r'\(([\d.]+)G\) exceeds available HBM \(([\d.]+)G\)', error)
  if sizes is None:
    return f'does not fit: {error.splitlines()[0]}'
  return f'does not fit: {sizes[1]} GiB are needed and {sizes[2]} GiB are there'


def _peak(memory: Any, platform: str) -> int:
  """Returns the peak number of bytes in use.

  On a TPU, the sum of temporaries counts shared memory once for each buffer that shares it. The TPU
  compiler itself refuses programs that do not fit.
  """
  code = memory.generated_code_size_in_bytes
  peak = getattr(memory, 'peak_memory_in_bytes', 0)
  if platform != 'cpu' and peak:
    return peak + code
  return memory.argument_size_in_bytes + memory.temp_size_in_bytes + code


def _verdict(total: int, chip: Chip | None) -> tuple[bool | None, str]:
  if chip is None:
    return None, 'compiled; how much memory there is is not known'
  share = total / chip.memory
  of = f'{total / 2**30:.2f} GiB of {chip.memory / 2**30:.2f} GiB, {share:.0%}'
  if share > 1:
    return False, f'does not fit: {of}'
  if share > chip.default_share:
    return True, (
      f'fits: {of}, with XLA_PYTHON_CLIENT_MEM_FRACTION above {share:.2f} '
      f'(JAX takes {chip.default_share:.0%} by default)'
    )
  return True, f'fits: {of}'


def _communication(
  e: Experiment, compiled: Any, mesh: Mesh, notes: list[str]
) -> list[Communication]:
  text = None
  with contextlib.suppress(jax.errors.JaxRuntimeError):
    text = compiled.as_text()
  if text is None:
    notes.append('This version of the compiler cannot print its program: collectives unknown.')
    return []
  ici = dict(zip(mesh.axis_names, e.ICI_MESH_SHAPE, strict=True))
  # with several TPU slices, the compiled program is the program of one slice
  sizes = ici if mesh.devices.flat[0].platform == 'tpu' else dict(mesh.shape)
  found = []
  for kind, axes, runs, total, sent in hlo.totals(hlo.collectives(text, sizes)):
    if axes == (hlo.BETWEEN_SLICES,):
      found.append(Communication(kind, axes, runs, total, 0.0, float(total)))
      continue
    members, near = 1, 1
    for axis in axes:
      members *= sizes[axis]
      near *= ici[axis]
    # A hierarchical algorithm is assumed: data of other hosts crosses the network once per host,
    # split over the host's devices. Then it is exchanged within the host.
    far = sent * (members - near) / (members - 1) / near if members > near else 0.0
    found.append(Communication(kind, axes, runs, total, sent if near > 1 else 0.0, far))
  return found


def _roofline(
  e: Experiment, chip: Chip, platform: str, flops: float, memory: Any, found: list[Communication]
) -> Roofline:
  moved = (
    memory.argument_size_in_bytes
    + memory.output_size_in_bytes
    + 2 * min(memory.temp_size_in_bytes, _peak(memory, platform))
  )
  return Roofline(
    compute=flops * e.recomputed / chip.peak_flops,
    memory=moved / chip.memory_bandwidth,
    ici=sum(c.ici_bytes for c in found) / chip.ici_bandwidth,
    dcn=sum(c.dcn_bytes for c in found) / chip.dcn_bandwidth,
  )


def page(report: Report) -> str:
  """Returns the report as a page of text."""
  r, chip = report, report.chip
  axes = ' × '.join(f'{a} {n}' for a, n in r.mesh.items() if n > 1) or 'one device'
  gib = lambda n: f'{n / 2**30:.2f} GiB' if n >= 1 << 30 else f'{n / 2**20:.2f} MiB'
  lines = [
    f'{r.experiment} on {r.target}: {r.verdict}',
    '',
    f'  devices     {r.devices:,} × {r.device}, mesh {axes}',
    f'  parameters  {r.parameters:,}',
    f'  batch       {r.batch_size:,} × {r.seq_len:,} tokens',
    f'  compiled    in {r.compile_seconds:.1f} s, after {r.lower_seconds:.1f} s of tracing',
    '  versions    ' + ', '.join(f'{k} {v}' for k, v in r.versions.items()),
  ]
  if r.total:
    lines += [
      '',
      'Memory of a device',
      f'  arguments       {gib(r.arguments):>12}   state and batch',
      f'  temporaries     {gib(r.temporaries):>12}',
      f'  generated code  {gib(r.generated_code):>12}',
      f'  in use at most  {gib(r.total):>12}',
    ]
    if chip is not None:
      lines.append(f'  there is        {gib(chip.memory):>12}')
  if r.communication:
    lines += ['', 'Collectives of a step', '  kind                 axes              runs']
    lines[-1] += '    array bytes   sent within    sent between'
    for c in r.communication:
      lines.append(
        f'  {c.kind:20} {"+".join(c.axes):16} {c.runs:5,} {c.bytes:14,} {c.ici_bytes:13,.0f} '
        f'{c.dcn_bytes:15,.0f}'
      )
    lines.append('  within and between slices or hosts, by one device, in rings')
  if r.roofline is not None and chip is not None:
    t = r.roofline
    lines += [
      '',
      f'Model FLOPs of a step: {r.model_flops:.4g} (attention counted causally)',
      f'Seconds of a step at the numbers of its data sheet ({chip.source})',
      f'  compute  {t.compute:9.4f}   at {chip.peak_flops / 1e12:,.0f} TFLOP/s',
      f'  memory   {t.memory:9.4f}   at {chip.memory_bandwidth / 1e9:,.0f} GB/s, at least',
      f'  within   {t.ici:9.4f}   at {chip.ici_bandwidth / 1e9:,.0f} GB/s a device and axis',
      f'  between  {t.dcn:9.4f}   at {chip.dcn_bandwidth / 1e9:,.1f} GB/s a device',
    ]
    if r.mfu is not None:
      low, high = r.mfu
      lines.append(
        f'  a step   {t.overlapped:9.4f} to {t.in_turn:.4f}: MFU {low:.0%} to {high:.0%}, '
        'communication in turn or overlapped'
      )
  return '\n'.join([*lines, *([''] if r.notes else []), *r.notes])
