"""paxlite doctor

Prints this machine's Python, JAX, devices, drivers, extras, memory and disk, and known conflicts
with their fixes. Exits with 1 if there is a conflict.

--kernels compares attention kernels, and a mesh of eight devices or more, with plain XLA on one
device. Use it after an update of JAX, cuDNN or a driver.

Example:
  paxlite doctor --kernels > machine.txt
"""

import dataclasses
import importlib.metadata
import os
import pathlib
import platform
import re
import shutil
import sys
from collections.abc import Iterator, Sequence

import paxlite
from paxlite.cli.parser import Parser
from paxlite.core import host_memory, shell
from paxlite.parallel import devices

_GPU_FILES = ('/dev/nvidiactl', '/dev/nvidia0', '/dev/dxg')
_TPU_FILES = ('/dev/accel0', '/dev/vfio/0')
_DRIVER = pathlib.Path('/proc/driver/nvidia/version')
_CUDA_12, _CUDA_13 = 525, 580  # the oldest drivers that JAX's packages for them support
_SMALLEST_DISK = 5 << 30  # bytes; a checkpoint of 124M parameters with Adam's state has 1.5 GB

PARSER = Parser(__doc__)
PARSER.option('--kernels', 'compare attention kernels and a mesh with plain XLA', bool)


def main(argv: Sequence[str]) -> None:
  args = PARSER.parsed(argv)
  machine = examine()
  print(machine)
  problems = list(machine.problems())
  if args.kernels and not machine.failure:
    problems += _wrong_kernels()
  print()
  for problem in problems:
    print(f'Problem: {problem}')
  if problems:
    sys.exit(1)
  print('No problem found.')


def _wrong_kernels() -> Iterator[str]:
  """Prints how the kernels of these devices compare; yields what is wrong, and the way out."""
  from paxlite.doctor.kernel_check import comparisons

  print()
  for found in comparisons():
    print(f'{found.what}: {found.difference:.1g} of the largest entry', flush=True)
    if found.is_wrong:
      yield (
        f'{found.what}: results or gradients differ from those of plain XLA on one device by '
        f'{found.difference:.1g} of the largest entry. Do without: {found.way_out}'
      )


@dataclasses.dataclass(frozen=True)
class MachineReport:
  """The findings on a machine."""

  packages: dict[str, str]  # versions of installed packages by their normalized names
  # the packages of each of paxlite's extras, in normalized names
  extras: dict[str, tuple[str, ...]]
  devices: str  # JAX's devices as text, or '' if there are none
  failure: str  # why there are none, or ''
  platform: str  # the platform of JAX's devices: cpu, gpu, tpu
  has_gpu: bool  # whether the machine has an NVIDIA GPU
  has_tpu: bool  # whether the machine has a TPU
  driver: str  # version of NVIDIA's driver, or ''
  memory: int | None  # free bytes of main memory, or None if unknown
  disk: int  # free bytes of the disk of the current folder
  variables: dict[str, str]  # environment variables that change what JAX does

  def __str__(self) -> str:
    version = lambda name: self.packages.get(name, 'not installed')
    lines = [
      ('paxlite', f'{paxlite.__version__} in {pathlib.Path(paxlite.__file__).parent}'),
      ('Python', f'{platform.python_version()} ({sys.executable})'),
      ('system', platform.platform()),
      ('JAX', f'{version("jax")}, jaxlib {version("jaxlib")}'),
      ('devices', self.devices or f'none: {self.failure}'),
      ('CUDA', ', '.join(self._cuda) or "none of JAX's packages for it"),
      ('driver', f'NVIDIA {self.driver}' if self.driver else 'no NVIDIA driver'),
      ('CPU cores', str(os.cpu_count())),
      ('free memory', 'unknown' if self.memory is None else _gib(self.memory)),
      ('free disk', f'{_gib(self.disk)} in {pathlib.Path.cwd()}'),
    ]
    lines += [('variable', f'{name}={value}') for name, value in self.variables.items()]
    for extra, packages in self.extras.items():
      missing = [p for p in packages if p not in self.packages]
      have = 'installed' if not missing else f'not here ({", ".join(missing)})'
      lines.append((f'extra {extra}', have))
    width = max(len(name) for name, _ in lines)
    return '\n'.join(f'{name:<{width}}  {text}' for name, text in lines)

  def problems(self) -> Iterator[str]:
    """Yields what is wrong, and the way out."""
    if self.failure:
      yield f'JAX has no devices: {self.failure}. Leave JAX_PLATFORMS unset'
    jax, jaxlib = (_release(self.packages.get(name, '')) for name in ('jax', 'jaxlib'))
    if jax[:2] != jaxlib[:2]:
      yield 'jax and jaxlib have different versions: pip install --upgrade jax jaxlib'
    plugins = [n for n in (12, 13) if f'jax-cuda{n}-plugin' in self.packages]
    if len(plugins) == 2:
      yield 'the packages for CUDA 12 and 13 are both here: pip uninstall jax-cuda12-plugin'
    for n in plugins:
      name = f'jax-cuda{n}-plugin'
      if _release(self.packages[name])[:2] != jax[:2]:
        yield f'{name} {self.packages[name]} is of another version than jax: {_install(n)}'
    driver = int(self.driver.partition('.')[0] or 0)
    if 13 in plugins and 0 < driver < _CUDA_13:
      yield f'the driver {self.driver} is too old for CUDA 13: {_install(12)}'
    if self.has_gpu and self.platform == 'cpu' and 'cpu' not in self._asked:
      best = 13 if driver >= _CUDA_13 or not driver else 12
      why = 'JAX does not use it' if plugins else "JAX's package for it is missing"
      yield f'there is an NVIDIA GPU, and {why}: {_install(best)}'
    if self.has_gpu and 0 < driver < _CUDA_12:
      yield f'the driver {self.driver} is older than {_CUDA_12}, which CUDA 12 needs: update it'
    if self.has_tpu and not self.has_gpu and self.platform == 'cpu' and 'cpu' not in self._asked:
      yield f"JAX does not use this machine's TPU: {shell.install('tpu')}"
    if self.memory is not None and self.memory < 2 << 30:
      yield f'only {_gib(self.memory)} of memory are free: the tests and the demo need 2 GiB'
    if self.disk < _SMALLEST_DISK:
      yield f'only {_gib(self.disk)} of disk are free: checkpoints may not fit'

  @property
  def _cuda(self) -> list[str]:
    """JAX's packages for CUDA, and the CUDA runtimes that pip has installed, with versions."""
    found = ('jax-cuda12-plugin', 'jax-cuda13-plugin', 'nvidia-cuda-runtime-cu12')
    names = [n for n in (*found, 'nvidia-cuda-runtime') if n in self.packages]
    return [f'{name} {self.packages[name]}' for name in names]

  @property
  def _asked(self) -> str:
    return self.variables.get('JAX_PLATFORMS', '')


def examine() -> MachineReport:
  """Returns what is found on this machine. JAX takes the devices for it."""
  described, failure, kind = '', '', ''
  try:
    import jax

    found = jax.devices()
    described, kind = devices.text(found), found[0].platform
  except Exception as e:  # whatever a broken installation raises is what is reported
    failure = (str(e) or type(e).__name__).splitlines()[0]
  names = ('JAX_PLATFORMS', 'XLA_FLAGS', 'LIBTPU_INIT_ARGS', 'CUDA_VISIBLE_DEVICES', 'VOCAB_PATH')
  return MachineReport(
    packages={_normal(d.name): d.version for d in importlib.metadata.distributions() if d.name},
    extras=_extras(), devices=described, failure=failure, platform=kind,
    has_gpu=any(map(os.path.exists, _GPU_FILES)), has_tpu=any(map(os.path.exists, _TPU_FILES)),
    driver=_driver(), memory=host_memory.available(), disk=shutil.disk_usage('.').free,
    variables={n: os.environ[n] for n in names if n in os.environ},
  )  # fmt: skip


def _extras() -> dict[str, tuple[str, ...]]:
  """Returns the packages of each extra that is for users, as the installed paxlite states them."""
  found: dict[str, list[str]] = {}
  try:
    requirements = importlib.metadata.requires('paxlite') or []
  except importlib.metadata.PackageNotFoundError:
    requirements = []
  for requirement in requirements:
    name = re.match(r'[A-Za-z0-9._-]+', requirement)
    extra = re.search(r'extra == .([a-z0-9-]+)', requirement)
    if name and extra and extra[1] not in ('test', 'dev', 'bench', 'cuda'):
      generation = re.search(r'\[(cuda\d+|tpu)\]', requirement)
      package = (
        {'tpu': 'libtpu'}.get(generation[1], f'jax-{generation[1]}-plugin')
        if (generation)
        else name[0]
      )
      found.setdefault(extra[1], []).append(_normal(package))
  return {extra: tuple(packages) for extra, packages in found.items()}


def _driver() -> str:
  try:
    found = re.search(r'Kernel Module.*?(\d+\.\d+[.\d]*)', _DRIVER.read_text())
  except OSError:
    return ''
  return found[1] if found else ''


def _install(generation: int) -> str:
  return shell.install(f'cuda{generation}')


def _normal(name: str) -> str:
  return re.sub('[-_.]+', '-', name).lower()


def _release(version: str) -> tuple[int, ...]:
  return tuple(map(int, re.findall(r'\d+', version)[:3]))


def _gib(size: int) -> str:
  return f'{size / 2**30:.1f} GiB'
