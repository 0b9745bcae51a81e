"""A compiled train step in a file, and what it was compiled for.

The file is a line of JSON, which tells what must be the same where it is loaded, and JAX's
serialized executable. That is a pickle inside, so that a file is loaded only where nobody but its
user can have written it.
"""

import dataclasses
import importlib.metadata
import json
import os
import pathlib
import pickle
import zlib
from collections.abc import Mapping
from typing import Any

import google_crc32c
import jax
from jax.experimental import serialize_executable
from jax.sharding import Mesh

from paxlite import __version__
from paxlite.errors import UserError

_FORMAT = 'paxlite compiled step 1'
_COMPILERS = ('libtpu', 'jax-cuda12-pjrt', 'jax-cuda13-pjrt')


@dataclasses.dataclass(frozen=True)
class SavedStep:
  """A file that training loads instead of compiling.

  Attributes:
    path: Of the file.
    values: The experiment's, to tell which of them differ.
    options: Of the compiler.
  """

  path: pathlib.Path
  values: Mapping[str, Any]
  options: Mapping[str, Any]

  def load(self, lowered: Any, arguments: tuple[Any, ...], mesh: Mesh) -> Any:
    """The compiled step.

    Args:
      lowered: What would be compiled.
      arguments: State and batch.
      mesh: Where they lie.

    Raises:
      UserError: the file is damaged, others could have written it, or it is of another step.
    """
    header, payload = _read(self.path)
    here = identity(lowered, mesh, self.values, self.options)
    _refuse_other(self.path, header, here)
    devices = list(mesh.devices.flat)
    try:
      return serialize_executable.deserialize_and_load(
        payload,
        jax.tree.structure((arguments, {})),
        lowered.out_tree,
        backend=devices[0].client,
        execution_devices=devices,
      )
    except (jax.errors.JaxRuntimeError, ValueError, TypeError, pickle.UnpicklingError) as e:
      raise UserError(
        f'--compiled_step={self.path} cannot be loaded here: {str(e).splitlines()[0]}'
      ) from None


def save(
  path: pathlib.Path,
  compiled: Any,
  lowered: Any,
  mesh: Mesh,
  values: Mapping[str, Any],
  options: Mapping[str, Any],
) -> int:
  """Writes a compiled step; returns its bytes.

  Raises:
    UserError: it cannot be written.
  """
  payload, _, _ = serialize_executable.serialize(compiled)
  header = identity(lowered, mesh, values, options)
  header['crc32c'] = google_crc32c.value(payload)
  unfinished = path.with_name(f'.{path.name}.unfinished')
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished.touch(mode=0o600)
    unfinished.write_bytes(json.dumps(header).encode() + b'\n' + payload)
    unfinished.replace(path)
  except OSError as e:
    raise UserError(f'--save={path} cannot be written: {e.strerror or e}') from None
  return path.stat().st_size


def identity(
  lowered: Any, mesh: Mesh, values: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, Any]:
  """What must be the same for a compiled step to do the work of another."""
  devices = list(mesh.devices.flat)
  # fake devices of a CPU are counted below
  flags = [f for f in os.environ.get('XLA_FLAGS', '').split() if 'host_platform_device' not in f]
  return {
    'format': _FORMAT,
    'versions': {'paxlite': __version__} | versions(devices[0].platform),
    'device': devices[0].device_kind,
    'devices': len(devices),
    'mesh': dict(mesh.shape),
    'device ids': zlib.crc32(json.dumps([d.id for d in devices]).encode()),
    'XLA_FLAGS': sorted(flags),
    'COMPILER_OPTIONS': dict(options),
    'arguments': [_argument(path, x) for path, x in _arguments(lowered)],
    'program': zlib.crc32(lowered.as_text().encode()),
    'values': json.loads(json.dumps(dict(values))),
  }


def versions(platform: str) -> dict[str, str]:
  """What compiles for devices of a platform, and its version."""
  names = ['jax', 'jaxlib']
  names += [n for n in _COMPILERS if platform != 'cpu' and (n == 'libtpu') == (platform == 'tpu')]
  found = {}
  for name in names:
    try:
      found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      continue
  return found


def _arguments(lowered: Any) -> Any:
  return jax.tree_util.tree_leaves_with_path(lowered.args_info[0])


def _argument(path: Any, x: Any) -> str:
  name = jax.tree_util.keystr(path, simple=True, separator='.')
  return f'{name} {x.dtype}{list(x.shape)}'


def _read(path: pathlib.Path) -> tuple[dict[str, Any], bytes]:
  try:
    for p in (path, path.absolute().parent):
      status = p.stat()
      if status.st_uid not in (os.geteuid(), 0) or (status.st_mode & 0o022 and not _sticky(p)):
        raise UserError(
          f'--compiled_step={path}: others can write {p}, and loading runs what is in it. '
          'Put it into a folder of your own: chmod go-w'
        )
    line, _, payload = path.read_bytes().partition(b'\n')
    header = json.loads(line)
    if header['format'] != _FORMAT:
      raise ValueError(header['format'])
  except OSError as e:
    raise UserError(f'--compiled_step={path}: {e.strerror or e}') from None
  except UserError:
    raise
  except (ValueError, KeyError, TypeError):
    raise UserError(f'--compiled_step={path} is no compiled step') from None
  if google_crc32c.value(payload) != header['crc32c']:
    raise UserError(f'--compiled_step={path} is damaged: compile it again')
  return header, payload


def _sticky(folder: pathlib.Path) -> bool:
  """Whether others can add files and not change those of their owner, as in /tmp."""
  return folder.is_dir() and bool(folder.stat().st_mode & 0o1000)


def _refuse_other(path: pathlib.Path, saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
  """Raises UserError with the first difference that explains why a step is another."""
  for name in (
    'versions',
    'device',
    'devices',
    'mesh',
    'XLA_FLAGS',
    'COMPILER_OPTIONS',
    'device ids',
  ):
    if saved.get(name) != here[name]:
      raise UserError(
        f'--compiled_step={path} was compiled for {name} {saved.get(name)} and here is {here[name]}'
      )
  if saved['program'] == here['program'] and saved['arguments'] == here['arguments']:
    return
  before, now = saved['values'], here['values']
  changed = [
    f'{k} {before.get(k)!r} → {now.get(k)!r}'
    for k in sorted(before.keys() | now.keys())
    if before.get(k) != now.get(k)
  ]
  others = sorted(set(here['arguments']) ^ set(saved['arguments']))
  changed += [f'the argument {a} is on one side alone' for a in others[:3]]
  reason = '; '.join(changed) or 'the code of paxlite, flax or optax'
  raise UserError(f'--compiled_step={path} is of another train step. What differs: {reason}')
