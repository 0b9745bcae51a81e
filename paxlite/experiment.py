"""The experiment: a class that states numbers and returns Fiddle configs.

    @register
    class MyGPT(Synthetic, GPT126M):
      NUM_LAYERS = 24

`MyGPT.config()` is an `fdl.Config` of the class with every value explicit; built, its methods
return the configs of the task and of the inputs, and properties for the trainer's numbers.
"""

import difflib
import importlib
import inspect
import math
import pkgutil
import sys
from collections.abc import Sequence
from typing import Any, TypeVar

import fiddle as fdl
from jax.sharding import Mesh

from paxlite import compiler, partitioning
from paxlite.backends import Backend
from paxlite.errors import UserError
from paxlite.params import LocalPath, Parameters, convert, derived
from paxlite.restoring import Restore

_REGISTRY: dict[str, type['Experiment']] = {}
_PACKAGES = ('paxlite.experiments', 'paxlite.contrib.gpu.scripts_gpu')

E = TypeVar('E', bound=type['Experiment'])


class Experiment(Parameters):
  """Mesh, batch and loop; subclasses add a model and data.

  Sizes are per the whole run unless a name says otherwise.
  """

  # Mesh: devices per axis within a slice or host (ICI), and copies across slices or hosts (DCN).
  # Further axes: stage (pipeline), expert, context (of the length); see partitioning
  MESH_AXES: list[str] = ['replica', 'data', 'mdl']
  ICI_MESH_SHAPE: list[int] = [1, 1, 1]
  DCN_MESH_SHAPE: list[int] = [1, 1, 1]
  SEQUENCE_SHARDED_ACTIVATIONS: bool = False  # between layers, over mdl: length and not width

  # Options of XLA for the train step, NAME=VALUE; those of another kind of device are left out
  COMPILER_OPTIONS: list[str] = []

  # Batch: global batch = PERCORE_BATCH_SIZE × devices, whatever the mesh; fractions are fine
  PERCORE_BATCH_SIZE: float = 1.0
  MAX_SEQ_LEN: int = 1024
  NUM_MICROBATCHES: int = 1
  SEED: int = 1234

  # Loop, in steps
  MAX_STEPS: int = 1_000_000
  CHECKPOINT_EVERY_N_STEPS: int = 5000
  CHECKPOINT_EVERY_N_MINUTES: float = 10.0  # where so many steps take longer; 0: only by steps
  CHECKPOINT_MAX_TO_KEEP: int = 10
  SUMMARY_INTERVAL_STEPS: int = 100
  EVAL_INTERVAL_STEPS: int = 100
  MAX_EVAL_BATCHES: int | None = None
  MAX_SKIPPED_STEPS: int = 100

  # Faults: see docs/reliability.md. Times in seconds; 0 turns a thing off
  STEP_TIMEOUT: float = 1800.0  # without a step the run writes its stacks and ends
  PHASE_TIMEOUT: float = 14400.0  # the same for starting, restoring, compiling and the last save
  STACK_TRACE_INTERVAL: float = 0.0  # stacks are written every so often in any case
  LOSS_SPIKE_FACTOR: float = 0.0  # a loss above this times the mean before is rolled back
  LOSS_SPIKE_WINDOW: int = 100  # steps of that mean
  MAX_ROLLBACKS: int = 3
  STOP_ON_FAILED_SAVE: bool = False

  PROFILER_NUM_STEPS: int = 2
  PROFILER_CAPTURE_STEP: int | None = None

  # What a new run starts from: imported weights, or a job_log_dir or one checkpoint of another run
  CHECKPOINT_RESTORE_PATH: LocalPath = ''
  CHECKPOINT_IGNORE_RULES: list[str] = []  # regular expressions of variables that start fresh
  CHECKPOINT_RENAME_RULES: list[str] = []  # 'name here=>name there', regular expressions
  CHECKPOINT_RESTORE_STATE: bool = False  # optimizer state and step too
  CHECKPOINT_RESTORE_CHANGES: list[str] = []  # attributes of the model that may differ from there

  # What may differ from the run that wrote a job_log_dir when it is continued there
  RESUMABLE_CHANGES: list[str] = [
    'MESH_AXES',
    'ICI_MESH_SHAPE',
    'DCN_MESH_SHAPE',
    'SEQUENCE_SHARDED_ACTIVATIONS',
    'COMPILER_OPTIONS',
    'ATTENTION_BLOCK_SIZE',
    'USE_FLASH_ATTENTION',
    'EXPERT_AXIS',  # this and the next follow the mesh
    'NUM_MOE_GROUPS',
    'PERCORE_BATCH_SIZE',  # the global batch is checked against the checkpoint's
    'NUM_MICROBATCHES',
    'MAX_STEPS',
    'CHECKPOINT_EVERY_N_STEPS',
    'CHECKPOINT_EVERY_N_MINUTES',
    'CHECKPOINT_MAX_TO_KEEP',
    'CHECKPOINT_POLICY',
    'CHECKPOINT_RESTORE_PATH',  # LoRA checks that its contents are the same
    'NUM_LOSS_CHUNKS',
    'SUMMARY_INTERVAL_STEPS',
    'EVAL_INTERVAL_STEPS',
    'MAX_EVAL_BATCHES',
    'MAX_SKIPPED_STEPS',
    'STEP_TIMEOUT',
    'PHASE_TIMEOUT',
    'STACK_TRACE_INTERVAL',
    'LOSS_SPIKE_FACTOR',
    'LOSS_SPIKE_WINDOW',
    'MAX_ROLLBACKS',
    'STOP_ON_FAILED_SAVE',
    'PROFILER_NUM_STEPS',
    'PROFILER_CAPTURE_STEP',
    'RESUMABLE_CHANGES',
    'EVAL_BATCH_SIZE',
    'EVAL_SPLIT',
    'SAMPLE_PROMPT',
    'TRAIN_FILES',  # files move; what is in them is the user's word
    'VOCAB_PATH',
    'DATASET_PATH',
  ]

  @classmethod
  def config(cls) -> fdl.Config:
    """An fdl.Config of this class with every attribute set but the derived ones."""
    cfg: Any = fdl.Config(cls)
    for name in inspect.signature(cls).parameters:
      value = getattr(cls, name)
      if not isinstance(value, derived):
        setattr(cfg, name, convert(cls, name, value))
    return cfg

  def task(self) -> fdl.Config:
    """The config of the task.Task to train."""
    raise UserError(f'{type(self).__name__} has no model: derive it from LanguageModel')

  def training_task(self) -> fdl.Config:
    """The config of the task on the experiment's backend."""
    return self.task()

  def train_input(self) -> fdl.Config:
    """The config of the inputs.base.Input to train on."""
    raise UserError(
      f'{type(self).__name__} has no dataset: mix one in, such as '
      'paxlite.experiments.datasets.Synthetic'
    )

  def eval_inputs(self) -> dict[str, fdl.Config]:
    """The configs of the inputs to evaluate on, by name."""
    return {}

  @property
  def backend(self) -> Backend:
    """What computes matrix multiplications."""
    return Backend('xla', 'nothing else was asked for')

  @property
  def dataset(self) -> str:
    """What the experiment trains on, in a word."""
    return '-'

  @property
  def remarks(self) -> list[str]:
    """What is no mistake and yet worth a line at the start, in whole sentences."""
    return []

  @property
  def flops_per_token(self) -> float:
    """Model FLOPs of training per token; 0 where they are not known."""
    return 0.0

  @property
  def restore(self) -> Restore | None:
    """What a new run starts from instead of initial values alone.

    Raises:
      UserError: there are rules and no checkpoint that they could apply to.
    """
    if not self.CHECKPOINT_RESTORE_PATH:
      for name in (
        'CHECKPOINT_IGNORE_RULES',
        'CHECKPOINT_RENAME_RULES',
        'CHECKPOINT_RESTORE_STATE',
        'CHECKPOINT_RESTORE_CHANGES',
      ):
        if getattr(self, name):
          raise UserError(f'{name} needs --fdl.CHECKPOINT_RESTORE_PATH=FOLDER')
      return None
    sizes, function = self.model_values
    return Restore(
      self.CHECKPOINT_RESTORE_PATH,
      tuple(self.CHECKPOINT_IGNORE_RULES),
      tuple(self.CHECKPOINT_RENAME_RULES),
      self.CHECKPOINT_RESTORE_STATE,
      sizes,
      function,
      tuple(self.CHECKPOINT_RESTORE_CHANGES),
    )

  @property
  def model_values(self) -> tuple[dict[str, Any], dict[str, Any]]:
    """Attributes that decide the shapes of the model's variables, and its function beyond them."""
    return {}, {}

  @property
  def saves_trainable_only(self) -> bool:
    """Whether checkpoints leave out frozen variables, which `restore` gives each time."""
    return False

  @property
  def rules(self) -> partitioning.Rules:
    """Logical axis → mesh axes."""
    rules = dict(partitioning.ALL_RULES)
    if self.SEQUENCE_SHARDED_ACTIVATIONS:
      rules |= {'residual_length': ('context', 'mdl'), 'act_embed': None}
    return partitioning.rules_for(self.MESH_AXES, rules)

  @property
  def mesh_sizes(self) -> dict[str, int]:
    """Devices by mesh axis."""
    shape = partitioning.mesh_shape(self.ICI_MESH_SHAPE, self.DCN_MESH_SHAPE)
    return dict(zip(self.MESH_AXES, shape, strict=True))

  @property
  def num_devices(self) -> int:
    return math.prod(self.mesh_sizes.values())

  def mesh(self, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh over all devices that are present, or over `devices`; UserError if they differ."""
    return partitioning.make_mesh(self.ICI_MESH_SHAPE, self.DCN_MESH_SHAPE, self.MESH_AXES, devices)

  def compiler_options(self, platform: str) -> dict[str, Any]:
    """COMPILER_OPTIONS for devices of a platform: cpu, gpu, tpu."""
    return compiler.of_kind(platform, dict(map(compiler_option, self.COMPILER_OPTIONS)))

  @property
  def batch_shards(self) -> int:
    """Parts that a batch's rows are split into."""
    return partitioning.num_shards(self.mesh_sizes, self.rules, 'batch')

  @property
  def batch_size(self) -> int:
    """Rows of a global batch.

    Raises:
      UserError: not a whole number, or not divisible over the mesh or into microbatches.
    """
    exact = self.PERCORE_BATCH_SIZE * self.num_devices
    batch = round(exact) if math.isfinite(exact) else 0
    where = f'PERCORE_BATCH_SIZE={self.PERCORE_BATCH_SIZE:g} × {self.num_devices} devices'
    if batch < 1 or abs(batch - exact) > 1e-6:
      raise UserError(f'{where} is a global batch of {exact:g}: it must be a whole number ≥ 1')
    shards = self.batch_shards
    if batch % (shards * self.NUM_MICROBATCHES):
      micro = f' × NUM_MICROBATCHES={self.NUM_MICROBATCHES}' if self.NUM_MICROBATCHES != 1 else ''
      axes = ' × '.join(partitioning.axes_of(self.rules['batch']))
      raise UserError(
        f'{where} is a global batch of {batch}, not divisible by {axes} = {shards}{micro}'
      )
    return batch

  def validate(self) -> None:
    """Checks what can be checked without a device; raises UserError."""
    partitioning.check_mesh_shape(
      self.ICI_MESH_SHAPE, self.DCN_MESH_SHAPE, self.MESH_AXES, devices=None
    )
    length_shards = partitioning.num_shards(self.mesh_sizes, self.rules, 'residual_length')
    if self.MAX_SEQ_LEN % length_shards:
      axes = ' × '.join(partitioning.axes_of(self.rules['residual_length']))
      raise UserError(
        f'MAX_SEQ_LEN={self.MAX_SEQ_LEN} is not divisible by {axes} = {length_shards}'
      )
    for name in (
      'MAX_SEQ_LEN',
      'NUM_MICROBATCHES',
      'MAX_STEPS',
      'CHECKPOINT_EVERY_N_STEPS',
      'CHECKPOINT_MAX_TO_KEEP',
      'SUMMARY_INTERVAL_STEPS',
      'EVAL_INTERVAL_STEPS',
      'MAX_SKIPPED_STEPS',
      'PROFILER_NUM_STEPS',
      'LOSS_SPIKE_WINDOW',
    ):
      if getattr(self, name) < 1:
        raise UserError(f'{name}={getattr(self, name)} must be at least 1')
    for name in (
      'CHECKPOINT_EVERY_N_MINUTES',
      'STEP_TIMEOUT',
      'PHASE_TIMEOUT',
      'STACK_TRACE_INTERVAL',
      'MAX_ROLLBACKS',
    ):
      if getattr(self, name) < 0:
        raise UserError(f'{name}={getattr(self, name):g} must not be negative; 0 turns it off')
    for name, most in (
      ('CHECKPOINT_EVERY_N_MINUTES', 1e6),
      ('MAX_SKIPPED_STEPS', 1e9),
      ('LOSS_SPIKE_WINDOW', 1e6),
    ):
      if getattr(self, name) > most:
        raise UserError(f'{name}={getattr(self, name):g} must be at most {most:g}')
    if self.LOSS_SPIKE_FACTOR and self.LOSS_SPIKE_FACTOR <= 1:
      raise UserError(
        f'LOSS_SPIKE_FACTOR={self.LOSS_SPIKE_FACTOR:g} must be above 1, or 0 for none'
      )
    self.compiler_options('')  # raises where one is none
    self.restore  # noqa: B018 - raises where rules have nothing to apply to
    if not 0 <= self.SEED < 1 << 32:
      raise UserError(f'SEED={self.SEED} must be from 0 to 2**32 - 1')
    if self.MAX_EVAL_BATCHES is not None and self.MAX_EVAL_BATCHES < 1:
      raise UserError(
        f'MAX_EVAL_BATCHES={self.MAX_EVAL_BATCHES} must be at least 1, or None for all'
      )
    self.batch_size  # noqa: B018 - raises where it does not come out even


def compiler_option(text: str) -> tuple[str, Any]:
  """'xla_name=true' as ('xla_name', True); UserError where it is no such thing."""
  name, equals, value = (part.strip() for part in text.strip().lstrip('-').partition('='))
  if not equals or not name.startswith('xla_'):
    raise UserError(f'COMPILER_OPTIONS: {text!r} must be xla_NAME=VALUE')
  plain: dict[str, Any] = {'true': True, 'false': False}
  return name, plain.get(value.lower(), int(value) if value.isdigit() else value)


def register(cls: E) -> E:
  """Makes an experiment known by its bare name.

  Raises:
    UserError: another experiment of that name is registered.
  """
  other = _REGISTRY.get(cls.__name__)
  if other is not None and (other.__module__, other.__qualname__) != (
    cls.__module__,
    cls.__qualname__,
  ):
    raise UserError(
      f'an experiment {cls.__name__} is registered by {other.__module__} already: give the one of '
      f'{cls.__module__} another name, or no @register'
    )
  _REGISTRY[cls.__name__] = cls
  return cls


def experiments() -> dict[str, type[Experiment]]:
  """Every registered experiment of paxlite's own packages and of modules imported so far."""
  for package in _PACKAGES:
    path = importlib.import_module(package).__path__
    for module in pkgutil.iter_modules(path):
      importlib.import_module(f'{package}.{module.name}')
  return dict(sorted(_REGISTRY.items()))


def find(name: str) -> type[Experiment]:
  """The experiment of a bare registered name or a dotted path.

  Only subclasses of Experiment are returned; nothing else is ever called or instantiated.

  Raises:
    UserError: there is no such experiment (the nearest names are told).
  """
  if '.' not in name:
    known = experiments()
    if name not in known:
      near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
      hint = (
        f'Did you mean {" or ".join(near)}?'
        if near
        else 'List them: python -m paxlite.tools.experiments'
      )
      raise UserError(f'--fdl_config={name}: no experiment of that name. {hint}')
    return known[name]
  cls = _attribute(name, '--fdl_config')
  if not (isinstance(cls, type) and issubclass(cls, Experiment)):
    raise UserError(f'--fdl_config={name} is not an Experiment class')
  return cls


def find_known(name: str, way_out: str = '--import={}') -> type[Experiment]:
  """The experiment that a file names: one of paxlite's, or of a module that is imported already.

  Checkpoints come from anywhere, and importing a module runs it.

  Args:
    name: A dotted path.
    way_out: The flag that names a module, {}, of the user's own.

  Raises:
    UserError: there is no such experiment, or its module is not imported.
  """
  module = name.rpartition('.')[0]
  if module and not module.startswith(_PACKAGES) and module not in sys.modules:
    raise UserError(
      f'the checkpoint is of the experiment {name}, and no file has modules imported: if that one '
      f'is yours, {way_out.format(module)}'
    )
  return find(name)


def apply_fiddler(cfg: fdl.Config, name: str) -> None:
  """Calls the function at dotted path `name` (or of that name in the experiment's module) on `cfg`.

  Raises:
    UserError: there is no such function.
  """
  if '.' not in name:
    name = f'{fdl.get_callable(cfg).__module__}.{name}'
  function = _attribute(name, '--fiddler')
  if not inspect.isfunction(function):
    raise UserError(f'--fiddler={name} is not a function')
  function(cfg)


def _attribute(dotted: str, flag: str) -> Any:
  module_name, _, attribute = dotted.rpartition('.')
  if not all(dotted.split('.')):
    raise UserError(f'{flag}={dotted} is no dotted path: write package.module.Name')
  try:
    module = importlib.import_module(module_name)
  except ModuleNotFoundError as e:
    if e.name is not None and (module_name + '.').startswith(e.name + '.'):
      here = f'. It is {flag}={attribute} here' if attribute in experiments() else ''
      raise UserError(f'{flag}={dotted}: there is no module {e.name}{here}') from None
    raise  # the module is there and lacks something itself
  if not hasattr(module, attribute):
    near = difflib.get_close_matches(attribute, dir(module), n=3, cutoff=0.5)
    hint = f' Did you mean {" or ".join(near)}?' if near else ''
    raise UserError(f'{flag}={dotted}: {module_name} has no {attribute}.{hint}')
  return getattr(module, attribute)
