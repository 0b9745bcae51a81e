"""Compares, before the first step, what all processes of a run must share.

Only what belongs to one machine may differ: the number of a process, LOCAL_CHECKPOINT_DIR,
--local_dir, and where files are. Files that must hold the same, as training data, are compared by
their contents.
"""

import importlib.metadata
import os
import pathlib
import platform
import sys
import zlib
from collections.abc import Mapping, Sized

import jax

import paxlite
from paxlite.checkpointing.saved_record import SavedRecord
from paxlite.compilation.compiled_step import versions
from paxlite.compilation.compiler import environment_of_programs
from paxlite.compilation.versions import checksum, code_of_paxlite
from paxlite.config.attributes import attribute_types
from paxlite.core.json_text import Json
from paxlite.data.fingerprints import fingerprint
from paxlite.experiments.base import Experiment, full_name
from paxlite.experiments.description import configs_text
from paxlite.files import paths
from paxlite.files.schemes import is_address
from paxlite.processes.agreement import Statement, compare
from paxlite.processes.hosts import check_alike
from paxlite.programs.run import Run
from paxlite.training.trainer import Trainer

_PACKAGES = 'paxlite', 'jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'fiddle', 'numpy'
# Settings of JAX that change what a program computes. What else changes it is in its text.
_SETTINGS = (
  'jax_default_matmul_precision', 'jax_default_prng_impl', 'jax_disable_jit',
  'jax_disable_most_optimizations', 'jax_enable_x64', 'jax_exec_time_optimization_effort',
  'jax_memory_fitting_effort', 'jax_numpy_dtype_promotion', 'jax_optimization_level',
  'jax_threefry_partitionable', 'jax_use_shardy_partitioner',
)  # fmt: skip


def statement(run: Run, mode: str = 'train') -> Statement:
  """Returns what is known of a run before there are devices: values, flags, code and versions."""
  e = run.experiment
  types = attribute_types(type(e))
  stated = {'--fdl_config': full_name(type(e)), '--mode': mode}
  for name, value in e.values().items():  # but not paths of one machine, as each names its own
    if paths.local not in getattr(types.get(name), '__metadata__', ()):
      stated[name] = repr(value)
  stated |= {
    'the backend': str(e.backend),
    '--enable_checkpoint_saving': str(run.save),
    '--accept_changes': str(run.accept_changes),
    '--start_over': str(run.start_over),
    '--check_memory': str(run.check_memory),
    '--compiled_step': 'a file' if run.compiled_step else 'nothing',
    '--job_log_dir': str(run.address or 'a folder'),  # a folder is compared by what it holds
    'Python': '.'.join(platform.python_version_tuple()[:2]),
  }
  stated |= {f'the version of {name}': _version(name) for name in _PACKAGES}
  stated |= _code(type(e))
  stated |= environment_of_programs()
  settings: Mapping[str, object] = jax.config.values
  return stated | {name: repr(settings[name]) for name in _SETTINGS if name in settings}


def compare_configs(run: Run) -> None:
  """Compares the statements of all processes, their built configs, and their devices."""
  if jax.process_count() == 1:
    return
  local = jax.local_devices()
  built = {'the built config': f'{zlib.crc32(configs_text(run.experiment).encode()):08x}'}
  devices = {'devices': f'{len(local)} × {local[0].device_kind}'}
  compilers = {f'the version of {k}': v for k, v in versions(local[0].platform).items()}
  compare({**statement(run), **built, **devices, **compilers})


def compare_folders(run: Run) -> None:
  """Compares what the processes see in the folder of a run that will be trained.

  An evaluation does not, because a run that trains meanwhile changes what is there.
  """
  if run.address is None:
    check_alike(run.folder, lambda: _seen(run))


def compare_data(run: Run, trainer: Trainer) -> None:
  """Compares the data, the tokenizer and the restored checkpoint of all processes."""
  if jax.process_count() == 1:
    return
  e = run.experiment
  inputs = {'training': trainer.data.input, **trainer.evaluator.inputs}
  stated = {'MAX_STEPS': str(e.MAX_STEPS)}  # NUM_EPOCHS counts them in the data
  for name, data in inputs.items():
    found = fingerprint(data)
    source = getattr(data, 'source', None)
    rows = len(source) if isinstance(source, Sized) else 'unknown'
    stated[f'the {name} data'] = 'unknown' if found is None else f'{found:08x}'
    stated[f'the number of rows of the {name} data'] = str(rows)
  if trainer.store.plan is not None:
    stated['CHECKPOINT_RESTORE_PATH'] = str(trainer.store.plan.source.fingerprint)
  if trainer.store.reference_plan is not None:
    stated['REFERENCE_RESTORE_PATH'] = str(trainer.store.reference_plan.source.fingerprint)
  tokenizer = e.tokenizer_path or e.weights.tokenizer or os.environ.get('VOCAB_PATH')
  if tokenizer and not is_address(str(tokenizer)):
    stated['the tokenizer'] = checksum(_tokenizer_files(pathlib.Path(tokenizer)))
  if run.compiled_step is not None:
    stated['--compiled_step'] = checksum([run.compiled_step])
  compare(stated)


def _tokenizer_files(tokenizer: pathlib.Path) -> list[pathlib.Path]:
  """Returns the files of a tokenizer: a file or a folder, and what is beside it on its tokens."""
  folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
  names = 'tokenizer*', 'special_tokens_map.json', 'added_tokens.json', 'chat_template*'
  found = {p for name in names for p in folder.glob(name) if p.is_file()}
  return sorted(found | ({tokenizer} if tokenizer.is_file() else set()))


def _seen(run: Run) -> list[Json]:
  """Returns what decides how a run continues."""
  path = run.folder / 'experiment.json'
  of_run = zlib.crc32(path.read_bytes()) if path.is_file() else None
  return [run.checkpoints().steps(), of_run, SavedRecord(run.folder).exists]


def _version(package: str) -> str:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return 'not installed as a package'


def _code(cls: type[Experiment]) -> dict[str, str]:
  """Returns checksums of paxlite's source, and of the user's modules that define an experiment."""
  package = pathlib.Path(paxlite.__file__).parent
  found = {'the code of paxlite': code_of_paxlite()}
  for base in cls.__mro__:
    module = sys.modules.get(base.__module__)
    path = getattr(module, '__file__', None)
    if path and path.endswith('.py') and package not in pathlib.Path(path).parents:
      found[f'the code of {base.__module__}'] = checksum([pathlib.Path(path)])
  return found
