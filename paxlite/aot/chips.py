"""Chips by their data sheets, and what kernels reach of them."""

import dataclasses
import pathlib
import re
from collections.abc import Mapping
from typing import Any, Literal

from paxlite.core.errors import UserError
from paxlite.files import schemes
from paxlite.files.json_files import read_object
from paxlite.parallel.devices import peak_flops

GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Rates:
  """The measured share of a data sheet's speeds that kernels reach.

  Kernels of attention have rates of their own; see attention_case.Kernel.peak_share.
  """

  matmul: float = 1.0  # share of the peak FLOP/s that a matrix multiplication reaches
  memory: float = 1.0  # share of the memory bandwidth that the other kernels reach
  large_matmul: float = 1.0  # share of the peak FLOP/s that one large matrix multiplication reaches
  copy: float = 1.0  # share of the memory bandwidth that a large copy reaches
  launch: float = 0.0  # seconds that a kernel takes beside its work
  source: str = ''  # where and when they were measured


# from the kernels of eight training steps; see docs/measurements.md#measured-on-a-gpu
_OF_GPUS = Rates(0.73, 0.74, 0.757, 0.857, 2.4e-6, 'one NVIDIA H200, jax 0.11.2, 2026-11')


@dataclasses.dataclass(frozen=True)
class Gpu:
  """The facts, besides memory, that XLA needs to compile for an absent GPU."""

  kind: str  # what JAX calls the device
  capability: str  # the compute capability, such as 9.0
  cores: int  # number of multiprocessors
  shared_memory: int  # bytes of shared memory of a multiprocessor
  l2_cache: int  # bytes
  clock: float  # GHz
  units: int = 128  # units for floats of a multiprocessor
  threads: int = 2048  # threads of a multiprocessor
  of_host: int = 8  # GPUs of a host
  domain: int = 8  # GPUs that NVLink, or the host, connects


@dataclasses.dataclass(frozen=True)
class Chip:
  """The capacity and speed of one device, in bytes and seconds."""

  name: str  # the name in a target
  peak_flops: float  # peak bf16 FLOP/s of dense matrices, by the data sheet
  memory: int  # bytes that programs can use
  memory_bandwidth: float  # bytes/s
  # bytes/s that a device sends to its neighbors along one mesh axis, over two links of a TPU's
  # torus or the whole NVLink of a GPU
  ici_bandwidth: float
  # bytes/s that a device sends to other slices or hosts, as its share of the host's network
  dcn_bandwidth: float
  source: str  # the source of the numbers
  default_share: float = 1.0  # the share of the device's memory that JAX allocates by default
  # bytes/s between a device and its host, each way; 0 where it is not known
  host_bandwidth: float = 0.0
  # the same with operands of 8 bits, by their types in HLO; empty where such operands are no faster
  peak_flops_8bit: Mapping[str, float] = dataclasses.field(default_factory=dict)
  # FLOP/s that were measured, by the types of the operands in HLO
  measured_flops: Mapping[str, float] = dataclasses.field(default_factory=dict)
  gpu: Gpu | None = None  # what XLA has to know of a GPU; None for TPUs
  rates: Rates = dataclasses.field(default_factory=Rates)  # what kernels reach of these numbers

  @property
  def platform(self) -> Literal['gpu', 'tpu']:
    return 'tpu' if self.gpu is None else 'gpu'

  @property
  def domain(self) -> int:
    """GPUs of one host, or of the hosts that NVLink connects; 0 for TPUs."""
    return 0 if self.gpu is None else self.gpu.domain

  @property
  def flops_by_type(self) -> dict[str, float]:
    """FLOP/s by the type of the operands, measured or of the data sheet; '' is every other type."""
    measured = dict(self.measured_flops)
    bf16 = measured.pop('bf16', self.peak_flops)
    return {**self._by_type(bf16), **measured}

  @property
  def sheet_flops(self) -> dict[str, float]:
    """Peak FLOP/s of the data sheet by the type of the operands; '' is every other type."""
    return self._by_type(self.peak_flops)

  def _by_type(self, bf16: float) -> dict[str, float]:
    float32 = {'f32': bf16 / 2} if self.platform == 'gpu' else {}  # TF32
    return {'': bf16, **float32, **self.peak_flops_8bit}

  @property
  def reached_flops(self) -> dict[str, float]:
    """FLOP/s that matrix multiplications reach by the type of the operands."""
    measured = {*self.measured_flops, *(('', 'f32') if 'bf16' in self.measured_flops else ())}
    share = lambda dtype: self.rates.large_matmul if dtype in measured else 1.0
    of_type = self.flops_by_type.items()
    return {dtype: self.rates.matmul / share(dtype) * flops for dtype, flops in of_type}

  @property
  def reached_bandwidth(self) -> float:
    """Bytes/s of main memory that kernels reach."""
    return self.rates.memory * self.memory_bandwidth


def _tpu(
  name: str, flops: float, gib: float, memory: float, ici: float, dcn: float, **flops_8bit: float
) -> Chip:
  source = 'Google Cloud TPU documentation; memory as its compiler says'
  size = int(gib * GIB)
  return Chip(name, flops, size, memory, ici, dcn, source, peak_flops_8bit=flops_8bit)


def _gpu(
  name: str,
  flops: float,
  memory: int,
  bandwidth: float,
  links: float,
  network: float,
  host: float,
  gpu: Gpu,
  types: tuple[str, ...] = ('f8e4m3fn', 'f8e5m2', 's8'),
  flops_8bit: float = 0.0,
) -> Chip:
  return Chip(
    name, flops, memory, bandwidth, links, network,
    f'{gpu.kind} data sheet; {network * 8e-9:g} Gb/s of network a GPU', default_share=0.75,
    host_bandwidth=host, peak_flops_8bit=dict.fromkeys(types, flops_8bit or 2 * flops), gpu=gpu,
    rates=_OF_GPUS,
  )  # fmt: skip


_HOPPER: dict[str, Any] = dict(
  capability='9.0', cores=132, shared_memory=233_472, l2_cache=50 << 20, clock=1.98
)
_BLACKWELL: dict[str, Any] = dict(
  capability='10.0', cores=148, shared_memory=233_472, l2_cache=126 << 20, clock=1.965
)
CHIPS = {
  chip.name: chip
  for chip in (
    _tpu('v5e', 197e12, 15.75, 819e9, 100e9, 3.1e9, s8=394e12),
    _tpu('v5p', 459e12, 95.74, 2765e9, 200e9, 6.25e9, s8=918e12),
    _tpu('v6e', 918e12, 31.25, 1638e9, 200e9, 3.1e9, s8=1836e12),
    # a device is one of the two cores of a chip, with half of what it has
    _tpu('tpu7x', 1153.5e12, 94.74, 3690e9, 100e9, 6.25e9, f8e4m3fn=2307e12, f8e5m2=2307e12),
    _gpu(
      'a100', 312e12, 85_094_825_984, 2039e9, 300e9, 25e9, 32e9,
      Gpu('NVIDIA A100-SXM4-80GB', '8.0', 108, 167_936, 40 << 20, 1.41, units=64), ('s8',),
    ),
    _gpu(
      'l40s', 362e12, 47_664_988_160, 864e9, 32e9, 12.5e9, 32e9,
      Gpu('NVIDIA L40S', '8.9', 142, 102_400, 96 << 20, 2.52, threads=1536),
    ),
    _gpu(
      'h100', 989e12, 84_929_347_584, 3352e9, 450e9, 50e9, 64e9,
      Gpu('NVIDIA H100 80GB HBM3', **_HOPPER), flops_8bit=1979e12,
    ),
    _gpu(
      'h200', 989e12, 150_110_492_939, 4800e9, 450e9, 50e9, 64e9, Gpu('NVIDIA H200', **_HOPPER),
      flops_8bit=1979e12,
    ),
    _gpu(
      'b200', 2250e12, 191_500_000_000, 8000e9, 900e9, 50e9, 64e9, Gpu('NVIDIA B200', **_BLACKWELL),
    ),
    _gpu(
      'gb200', 2500e12, 198_000_000_000, 8000e9, 900e9, 50e9, 450e9,
      Gpu('NVIDIA GB200', **_BLACKWELL, of_host=4, domain=72),
    ),
  )
}  # fmt: skip

# what JAX calls a device, and its chip
_KINDS = {'TPU v5 lite': 'v5e', 'TPU v5e': 'v5e', 'TPU v5p': 'v5p', 'TPU v5': 'v5p',
          'TPU v6': 'v6e', 'TPU7x': 'tpu7x', 'GB200': 'gb200', 'B200': 'b200', 'H200': 'h200',
          'H100': 'h100', 'A100': 'a100', 'L40S': 'l40s'}  # fmt: skip


def chip_of_kind(kind: str) -> Chip | None:
  """Returns the chip of a device by JAX's name of its kind; None if it is not known.

  Another product of the same name, such as an H100 for PCIe or an A100 with 40 GB, is not known.
  """
  found = next((CHIPS[c] for name, c in _KINDS.items() if re.search(rf'\b{name}\b', kind)), None)
  if found is None or peak_flops(kind) != found.peak_flops or '40GB' in kind:
    return None
  return found


def calibrated(chip: Chip, path: str) -> Chip:
  """Returns a chip with the measured speeds of a file.

  It is a JSON object: `chip` is the name of the chip, `flops` has FLOP/s by the types of the
  operands in HLO (bf16, f32, f8e4m3fn …). memory_bandwidth, ici_bandwidth, dcn_bandwidth, and
  host_bandwidth between a device and its host (each way) are in bytes/s. What it does not have
  stays as the data sheet says. Its FLOP/s are those of one large matrix multiplication, and its
  memory_bandwidth is that of a large copy: the kernels of a step reach a little less. Raises
  UserError if the file cannot be read, is of another chip, or has a speed that is none.
  """
  found = read_object(pathlib.Path(schemes.local(path)))
  speeds = ('memory_bandwidth', 'ici_bandwidth', 'dcn_bandwidth', 'host_bandwidth')
  if unknown := sorted(found.keys() - {'chip', 'flops', 'source', *speeds}):
    raise UserError(
      f'--calibration={path}: {unknown[0]} is not a key of this file: use chip, flops, '
      f'{", ".join(speeds)}'
    )
  if found.get('chip') != chip.name:
    raise UserError(
      f'--calibration={path} is for {found.get("chip")}, but the target is {chip.name}'
    )
  flops = found.get('flops', {})
  numbers = {**(flops if isinstance(flops, dict) else {'flops': None})}
  numbers |= {name: found[name] for name in speeds if name in found}
  for name, value in numbers.items():
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e18:
      raise UserError(f'--calibration={path}: {name}={value} must be a number of FLOP/s or bytes/s')
  changes: dict[str, Any] = {name: float(found[name]) for name in speeds if name in found}
  measured = {name: float(value) for name, value in flops.items()}
  rates = chip.rates
  if 'memory_bandwidth' in found:
    rates = dataclasses.replace(rates, memory=rates.memory / rates.copy)
  source = f'{path}; otherwise {chip.source}'
  return dataclasses.replace(chip, measured_flops=measured, rates=rates, source=source, **changes)
