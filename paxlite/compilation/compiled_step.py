"""A file with a compiled train step and a description of what it was compiled for.

The file holds one line of JSON and JAX's serialized executable. The JSON lists what must be equal
where the step is loaded. The executable contains a pickle, so a file is loaded only if nobody but
the user can have written it.
"""

import dataclasses
import importlib.metadata
import json
import pathlib
import pickle
import zlib
from collections.abc import Mapping
from typing import Any

import google_crc32c
import jax
from jax.experimental import serialize_executable
from jax.sharding import Mesh
from jax.tree_util import KeyPath

import paxlite
from paxlite.compilation.compiler import Options, flags_of
from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject, parsed
from paxlite.core.trees import PyTree
from paxlite.files.json_files import parse_line
from paxlite.files.ownership import open_to_others

_FORMAT = 'paxlite compiled step 1'
_HEADER = {'crc32c': int, 'program': int, 'arguments': list, 'values': dict}
_COMPILERS = ('libtpu', 'jax-cuda12-pjrt', 'jax-cuda13-pjrt')


@dataclasses.dataclass(frozen=True)
class SavedStep:
  """A file that training loads instead of compiling."""

  path: pathlib.Path  # path of the file
  values: Mapping[str, object]  # values of the experiment, to report which of them differ
  options: Options  # options of the compiler

  def check(self, mesh: Mesh) -> None:
    """Raises UserError if the file cannot be loaded here; called before anything is traced."""
    header, _ = _read(self.path)
    _refuse_other_machine(self.path, header, machine(mesh, self.options))

  def load(
    self, lowered: jax.stages.Lowered, arguments: tuple[PyTree, ...], mesh: Mesh
  ) -> jax.stages.Compiled:
    """Returns the compiled step.

    Raises UserError if the file is damaged, could have been written by others, holds another step,
    or was compiled for another machine.

    Args:
      lowered: The lowered step that would otherwise be compiled.
      arguments: The arguments of the step: state and batch.
      mesh: The mesh of the arguments.
    """
    header, payload = _read(self.path)
    here = identity(lowered, mesh, self.values, self.options)
    _refuse_other_machine(self.path, header, machine(mesh, self.options))
    _refuse_other(self.path, header, here)
    devices = list(mesh.devices.flat)
    try:
      return serialize_executable.deserialize_and_load(
        payload, jax.tree.structure((arguments, {})), lowered.out_tree, backend=devices[0].client,
        execution_devices=devices,
      )  # fmt: skip
    except (jax.errors.JaxRuntimeError, ValueError, TypeError, pickle.UnpicklingError) as e:
      raise UserError(
        f'--compiled_step={self.path} cannot be loaded here: {str(e).splitlines()[0]}'
      ) from None


def save(
  path: pathlib.Path,
  compiled: jax.stages.Compiled,
  lowered: jax.stages.Lowered,
  mesh: Mesh,
  values: Mapping[str, object],
  options: Options,
) -> int:
  """Writes a compiled step to a file; returns the size of the file in bytes.

  Raises UserError if the file cannot be written.
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
  finally:
    unfinished.unlink(missing_ok=True)
  return path.stat().st_size


def compile_lowered(lowered: jax.stages.Lowered, options: Options) -> jax.stages.Compiled:
  """Returns the compiled program; raises UserError if XLA does not know an option."""
  try:
    given: dict[str, Any] = dict(options)  # some versions of JAX declare texts and bools alone
    return lowered.compile(compiler_options=given)
  except jax.errors.JaxRuntimeError as e:
    message = str(e).splitlines()[0]
    if 'compile option' in message or 'While setting option' in message:
      raise UserError(f'COMPILER_OPTIONS={dict(options)}: {message}') from None
    raise


def check_options(options: Options) -> None:
  """Raises UserError if XLA does not know an option; compiles a trivial program to find out."""
  if options:
    compile_lowered(jax.jit(lambda: 0).lower(), options)


def identity(
  lowered: jax.stages.Lowered, mesh: Mesh, values: Mapping[str, object], options: Options
) -> JsonObject:
  """Describes a step: what must be equal for a compiled step to be used in its place."""
  return machine(mesh, options) | {
    'format': _FORMAT, 'arguments': [_argument(path, x) for path, x in _arguments(lowered)],
    'program': zlib.crc32(lowered.as_text().encode()), 'values': parsed(json.dumps(dict(values))),
  }  # fmt: skip


def machine(mesh: Mesh, options: Options) -> JsonObject:
  """Describes the software versions, devices and flags that compile and run a step."""
  devices = list(mesh.devices.flat)
  return {
    'versions': {'paxlite': paxlite.__version__} | versions(devices[0].platform),
    'device': devices[0].device_kind, 'devices': len(devices), 'mesh': dict(mesh.shape),
    'device ids': zlib.crc32(json.dumps([d.id for d in devices]).encode()),
    'XLA_FLAGS': flags_of('XLA_FLAGS'), 'LIBTPU_INIT_ARGS': flags_of('LIBTPU_INIT_ARGS'),
    'COMPILER_OPTIONS': dict(options),
  }  # fmt: skip


def versions(platform: str) -> dict[str, str]:
  """Returns the versions of the packages that compile for devices of a platform."""
  names = ['jax', 'jaxlib']
  names += [n for n in _COMPILERS if platform != 'cpu' and (n == 'libtpu') == (platform == 'tpu')]
  found = {}
  for name in names:
    try:
      found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      continue
  return found


def _arguments(lowered: jax.stages.Lowered) -> list[tuple[KeyPath, jax.stages.ArgInfo]]:
  return jax.tree_util.tree_leaves_with_path(lowered.args_info[0])


def _argument(path: KeyPath, x: jax.stages.ArgInfo) -> str:
  name = jax.tree_util.keystr(path, simple=True, separator='.')
  return f'{name} {x.dtype}{list(x.shape)}'


def _read(path: pathlib.Path) -> tuple[JsonObject, bytes]:
  given = path
  try:
    path = path.resolve(strict=True)  # A link could be changed after the check.
    if (others := open_to_others(path)) is not None:
      raise UserError(
        f'--compiled_step={given}: others can write {others}, and loading it runs its code. Put '
        'it into your own folder: chmod go-w'
      )
    line, _, payload = path.read_bytes().partition(b'\n')
    header = _parsed(line)
  except OSError as e:
    raise UserError(f'--compiled_step={given}: {e.strerror or e}') from None
  except UserError:
    raise
  except ValueError:
    raise UserError(f'--compiled_step={given} is not a compiled step') from None
  if google_crc32c.value(payload) != header['crc32c']:
    raise UserError(f'--compiled_step={given} is damaged: compile it again')
  return header, payload


def _parsed(line: bytes) -> JsonObject:
  """Returns the parsed header; raises ValueError if a part is missing or of another type."""
  try:
    header = parse_line(line, 'the header')
  except UserError as e:
    raise ValueError(e) from None
  if header.get('format') != _FORMAT:
    raise ValueError(header.get('format'))
  for name, kind in _HEADER.items():
    if not isinstance(header.get(name), kind):
      raise ValueError(name)
  return header


def _refuse_other(path: pathlib.Path, saved: JsonObject, here: JsonObject) -> None:
  """Raises UserError if a step differs, with the values that may explain why."""
  if saved['program'] == here['program'] and saved['arguments'] == here['arguments']:
    return
  before, now = saved['values'], here['values']
  changed = [
    f'{k} {before.get(k)!r} → {now.get(k)!r}'
    for k in sorted(before.keys() | now.keys())
    if before.get(k) != now.get(k)
  ]
  others = sorted(set(here['arguments']) ^ set(saved['arguments']))
  changed += [f'the argument {a} is on one side only' for a in others[:3]]
  reason = '; '.join(changed) or 'the code of paxlite, flax or optax'
  raise UserError(
    f'--compiled_step={path} was compiled for another train step. What differs: {reason}'
  )


def _refuse_other_machine(path: pathlib.Path, saved: JsonObject, here: JsonObject) -> None:
  for name, value in here.items():
    if saved.get(name) != value:
      raise UserError(
        f'--compiled_step={path} was compiled for {name} {saved.get(name)}, not {value}'
      )
