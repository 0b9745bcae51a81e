"""The experiment: a class whose attributes are numbers and whose methods return Fiddle configs.

    @register
    class MyGPT(Synthetic, GPT126M):
      NUM_LAYERS = 24

`MyGPT.config()` is an `fdl.Config` of the class in which every value is explicit. The methods of
the built object return the configs of the task and of the inputs. Its properties are the numbers
that the trainer needs.
"""

import copy
import inspect
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Literal, Self

import fiddle as fdl
from jax.sharding import Mesh

from paxlite.compilation import compiler
from paxlite.config.attribute_kinds import (
  Bounds,
  Count,
  Kind,
  NotNegativeInt,
  OffAtZero,
  OffAtZeroInt,
  Run,
  Training,
  Uint32,
  at_most,
  names_of,
)
from paxlite.config.attributes import (
  Attributes,
  LocalPath,
  StoredPath,
  attribute_types,
  convert,
  derived,
)
from paxlite.config.experiment_file import UNKNOWN, WeightsFacts
from paxlite.core.errors import UserError
from paxlite.experiments.own_methods import check_overrides
from paxlite.layers.precision.backends import Backend
from paxlite.parallel import mesh, partitioning
from paxlite.tracking.trackers import trackers
from paxlite.tracking.writers import Writer
from paxlite.training.callbacks import Callback

if TYPE_CHECKING:
  import jax


class Experiment(Attributes):
  """Mesh, batch and training loop; subclasses add a model and data.

  Sizes are those of the whole run unless the attribute's name says otherwise.
  """

  # Mesh: devices per axis within a slice or host (ICI), and copies across slices or hosts (DCN).
  # Further axes: stage (pipeline), expert, context (splits the sequence); see partitioning.
  MESH_AXES: Run[list[str]] = ['replica', 'data', 'mdl']  # the mesh axes, the slowest first
  ICI_MESH_SHAPE: Run[list[int]] = [1, 1, 1]  # sizes of the mesh axes within a host or slice
  DCN_MESH_SHAPE: Run[list[int]] = [1, 1, 1]  # the same between hosts or slices
  SEQUENCE_SHARDED_ACTIVATIONS: Run[bool] = False  # over mdl, by length instead of width

  # XLA options of the train step as NAME=VALUE. Options of other kinds of device are ignored.
  COMPILER_OPTIONS: Run[list[str]] = []  # options of XLA, as 'name=value'

  # Batch: global batch = PERCORE_BATCH_SIZE × devices, for every mesh. Fractions are allowed.
  PERCORE_BATCH_SIZE: Run[float] = 1.0  # rows of a batch per device
  MAX_SEQ_LEN: Training[Count] = 1024  # tokens of a row
  NUM_MICROBATCHES: Run[Count] = 1  # parts of a batch, whose gradients are added up
  ROWS_PER_EXAMPLE: Training[Count] = 1  # rows of the data that belong together, such as pairs
  SEED: Training[Uint32] = 1234  # of initial values, of dropout and of the order of data

  # Training loop; intervals are in steps.
  MAX_STEPS: Run[Count] = 1_000_000  # training ends after this step
  NUM_EPOCHS: Run[Annotated[float, Bounds('must be above 0', above=0)] | None] = (
    None  # passes over the data, which then decide MAX_STEPS when a run starts
  )
  CHECKPOINT_EVERY_N_STEPS: Run[Count] = 5000  # steps between two checkpoints
  CHECKPOINT_EVERY_N_MINUTES: Run[Annotated[OffAtZero, at_most(1e6)]] = (
    10.0  # also saves after so many minutes if the steps take longer; 0: only by steps
  )
  CHECKPOINT_MAX_TO_KEEP: Run[Count] = 10  # older checkpoints are deleted
  LOCAL_CHECKPOINT_EVERY_N_STEPS: Run[OffAtZeroInt] = (
    0  # most steps that a crash may lose; a local state is written every N / 2 steps; 0: off
  )
  LOCAL_CHECKPOINT_DIR: Run[LocalPath] = ''  # folder for them, on each host; '': /dev/shm
  SUMMARY_INTERVAL_STEPS: Run[Count] = 100  # steps between two records of metrics
  EVAL_INTERVAL_STEPS: Run[Count] = 100  # steps between two evaluations
  TRACKERS: Run[list[Literal['wandb', 'mlflow', 'trackio']]] = []  # services that compare runs
  KEEP_BEST: Run[bool] = False  # keeps the checkpoint of the best evaluation, in best/
  BEST_METRIC: Run[str] = 'avg_xent'  # metric that decides which checkpoint is best
  EARLY_STOPPING_PATIENCE: Run[OffAtZeroInt] = (
    0  # ends after so many evaluations without a best; 0: off
  )
  MAX_EVAL_BATCHES: Run[Count | None] = None  # of an evaluation; None: all
  # At most 1000: streams remember their positions before the last 1024 steps (data/base.py).
  MAX_SKIPPED_STEPS: Run[Annotated[Count, at_most(1000)]] = 100  # in a row; then a run ends

  # Faults: see docs/reliability.md. Times are in seconds; 0 turns a check off.
  STEP_TIMEOUT: Run[OffAtZero] = (
    1800.0  # seconds without a finished step after which a run writes stacks and ends; 0: no limit
  )
  PHASE_TIMEOUT: Run[OffAtZero] = (
    14400.0  # the same for starting, restoring, compiling and the last save
  )
  STACK_TRACE_INTERVAL: Run[OffAtZero] = (
    0.0  # seconds between stack traces, even without a hang; 0: none
  )
  LOSS_SPIKE_FACTOR: Run[OffAtZero] = (
    0.0  # rolls back at a loss above so many times the recent mean; 0: off
  )
  LOSS_SPIKE_WINDOW: Run[Annotated[Count, at_most(1e6)]] = 100  # number of steps in that mean
  MAX_ROLLBACKS: Run[NotNegativeInt] = 3  # a run ends at the next loss spike after so many
  STOP_ON_FAILED_SAVE: Run[bool] = False  # ends a run that cannot save, at the next save

  PROFILER_NUM_STEPS: Run[Count] = 2  # steps that are traced
  PROFILER_CAPTURE_STEP: Run[int | None] = None  # the step before the first one that is traced

  # Start of a new run: imported weights, or a job_log_dir or one checkpoint of another run.
  CHECKPOINT_RESTORE_PATH: Run[StoredPath] = ''  # weights, or a run, that a new run starts from
  CHECKPOINT_IGNORE_RULES: Training[
    list[str]
  ] = []  # regular expressions; matching variables keep their initial values
  CHECKPOINT_RENAME_RULES: Training[list[str]] = []  # 'name here=>name there', regular expressions
  CHECKPOINT_RESTORE_STATE: Training[bool] = False  # also restores optimizer state and step
  CHECKPOINT_RESTORE_CHANGES: Training[
    list[str]
  ] = []  # attributes of the model that may differ from that checkpoint

  @classmethod
  def config(cls) -> fdl.Config:
    """Returns an fdl.Config of this class with every attribute set except the derived ones."""
    cfg = fdl.Config(cls)
    for name in inspect.signature(cls).parameters:
      value = getattr(cls, name)
      if not isinstance(value, derived):
        setattr(cfg, name, convert(cls, name, value))
    return cfg

  _weights = UNKNOWN

  @property
  def weights(self) -> WeightsFacts:
    """What is known of the weights in CHECKPOINT_RESTORE_PATH; no experiment reads a file for it.

    Programs read it once, when they are built: see programs.weights_model.
    """
    is_of_path = self._weights.path == self.CHECKPOINT_RESTORE_PATH
    return self._weights if is_of_path else UNKNOWN

  def knowing(self, weights: WeightsFacts) -> Self:
    """Returns a copy that knows this of the weights at `weights.path`."""
    known = copy.copy(self)
    known._weights = weights
    return known

  def replaced(self, **changes: object) -> Self:
    return super().replaced(**changes).knowing(self._weights)

  @classmethod
  def chosen(cls, weights: WeightsFacts) -> tuple[type['Experiment'], dict[str, object]]:
    """Returns the class that a command means which starts from these weights, and values of it.

    A class whose sizes are those of the weights returns another one.
    """
    return cls, {}

  def __init_subclass__(cls, **kwargs: object):
    super().__init_subclass__(**kwargs)
    check_overrides(cls, Experiment, cls._finish)

  def _finish(self, task: fdl.Config) -> None:
    """Edits what the task() of the most derived class returns."""
    self.put_on_backend(task)
    self.check_optimizer(task)

  def task(self) -> fdl.Config:
    """Returns the config of the training.task.Task to train, on the experiment's backend.

    A subclass overrides this method and edits what super().task() returns, which is the model in
    plain XLA. The backend is put into the result, so that it reaches the edits too.
    """
    raise UserError(f'{type(self).__name__} has no model: derive it from LanguageModel')

  def check_optimizer(self, task: fdl.Config) -> None:
    """Raises UserError if the config of a task has another optimizer than that of optimizer()."""

  def put_on_backend(self, task: fdl.Config) -> None:
    """Edits the config of a task in plain XLA so that it computes on the experiment's backend."""

  def train_input(self) -> fdl.Config:
    """Returns the config of the data.base.Input to train on."""
    raise UserError(
      f'{type(self).__name__} has no dataset: mix one in, such as '
      'paxlite.experiments.datasets.Synthetic'
    )

  def eval_inputs(self) -> dict[str, fdl.Config]:
    """Returns the configs of the inputs to evaluate on, by name."""
    return {}

  @property
  def backend(self) -> Backend:
    """The backend that computes matrix multiplications."""
    return Backend('xla', 'the default')

  @property
  def dataset(self) -> str:
    """A short name of the data that the experiment trains on."""
    return '-'

  @property
  def vocab_size(self) -> int | None:
    """The number of token ids that the model knows; None if it has no vocabulary."""
    return None

  @property
  def packed(self) -> bool:
    """Whether a row of the data may hold several documents."""
    return False

  @property
  def tokenizer_path(self) -> str:
    """The path of the data's tokenizer; '' if the data has none."""
    return ''

  def callbacks(self) -> list[Callback]:
    """Returns what the training loop calls while a run goes; a subclass may add its own."""
    return []

  def trackers(self, folder: pathlib.Path) -> Sequence[Writer]:
    """Returns the writers of metrics besides files, TensorBoard and the terminal.

    A subclass may add its own to those of TRACKERS. Their methods are called in process 0 alone.

    Args:
      folder: The run's job_log_dir.
    """
    return trackers(self.TRACKERS, folder, type(self).__name__, self.values())

  @property
  def max_texts_per_row(self) -> int:
    """The most texts of a packed row, padding included; 0: any number."""
    return 0

  @property
  def plain_backend(self) -> dict[str, object]:
    """The values with which the attributes that choose a backend choose plain XLA."""
    return {}

  @property
  def plain(self) -> Self:
    """The same experiment in plain XLA."""
    return self.replaced(**self.plain_backend)

  @property
  def unread_attributes(self) -> set[str]:
    """Attributes that do nothing, because the optimizer does not read them."""
    return set()

  @property
  def remarks(self) -> list[str]:
    """Sentences to print at the start about values that are valid but unusual."""
    return []

  def attention_remarks(self, device: 'jax.Device') -> list[str]:
    """Returns sentences on how such devices compute attention."""
    return []

  @property
  def flops_per_token(self) -> float:
    """Model FLOPs of training per token; 0 if unknown."""
    return 0.0

  @property
  def reference_path(self) -> str:
    """Where the weights of a frozen reference model are; '' if there is none that has its own."""
    return ''

  @property
  def model_values(self) -> tuple[dict[str, object], dict[str, object]]:
    """Attributes that decide the variables' shapes, and others that decide the function."""
    return self.values_of(Kind.SHAPE), self.values_of(Kind.FUNCTION)

  def values_of(self, *kinds: Kind) -> dict[str, object]:
    """Returns the attributes of these kinds, with their values."""
    return {name: getattr(self, name) for name in names_of(attribute_types(type(self)), *kinds)}

  @property
  def rules(self) -> partitioning.Rules:
    """The mesh axes of each logical axis."""
    rules = dict(partitioning.ALL_RULES)
    if self.SEQUENCE_SHARDED_ACTIVATIONS:
      rules |= {'residual_length': ('context', 'mdl'), 'act_embed': None}
    if 'stage' in self.MESH_AXES:
      # data is smaller than the number of devices by the stages: rows are looked up where they
      # enter the pipeline, and not by all devices along data
      rules |= {'lookup_batch': rules['outer_batch'], 'lookup_length': rules['length']}
      rules |= {'lookup_embed': None, 'exchanged_embed': None}
      rules |= {'embed': 'data'}  # stages gather weights over data alone: see stage_weights
    return partitioning.rules_for(self.MESH_AXES, rules)

  @property
  def mesh_sizes(self) -> dict[str, int]:
    """The number of devices by mesh axis."""
    shape = mesh.mesh_shape(self.ICI_MESH_SHAPE, self.DCN_MESH_SHAPE)
    return dict(zip(self.MESH_AXES, shape, strict=True))

  @property
  def num_devices(self) -> int:
    return math.prod(self.mesh_sizes.values())

  def mesh(self, devices: Sequence['jax.Device'] | None = None) -> Mesh:
    """Returns the mesh over `devices`, or all devices; UserError if their number does not fit."""
    return mesh.make_mesh(self.ICI_MESH_SHAPE, self.DCN_MESH_SHAPE, self.MESH_AXES, devices)

  def compiler_options(
    self,
    platform: str,
    is_known: Callable[[str, compiler.Option], bool] = compiler.is_known_here,
  ) -> dict[str, compiler.Option]:
    """Returns the options of the train step for the devices of a platform: cpu, gpu, tpu.

    They are those of COMPILER_OPTIONS and, for several GPUs or TPUs, paxlite's own.

    Args:
      platform: JAX's name of the platform.
      is_known: Whether the XLA of the devices takes an option.
    """
    given = compiler.of_kind(platform, dict(map(compiler_option, self.COMPILER_OPTIONS)))
    scatters_each = self.scatters_each_gradient(platform)
    return compiler.step_options(platform, self.mesh_sizes, given, is_known, scatters_each)

  def scatters_each_gradient(self, platform: str) -> bool:
    """Returns whether XLA scatters the gradient of each weight of a step by itself.

    Args:
      platform: JAX's name of the platform.
    """
    return False

  @property
  def batch_shards(self) -> int:
    """The number of parts that the rows of a batch are split into."""
    return partitioning.num_shards(self.mesh_sizes, self.rules, 'batch')

  @property
  def batch_size(self) -> int:
    """The number of rows in a global batch."""
    exact = self.PERCORE_BATCH_SIZE * self.num_devices
    return round(exact) if math.isfinite(exact) else 0

  def check_restore(self) -> None:
    """Raises UserError if there are restore rules but no checkpoint to apply them to."""
    for kind in ('IGNORE_RULES', 'RENAME_RULES', 'RESTORE_STATE', 'RESTORE_CHANGES'):
      name = f'CHECKPOINT_{kind}'
      if getattr(self, name) and not self.CHECKPOINT_RESTORE_PATH:
        raise UserError(f'{name} needs --fdl.CHECKPOINT_RESTORE_PATH=FOLDER')

  def check_batch_size(self) -> None:
    """Raises UserError if the global batch is not a whole number or cannot be split."""
    exact, batch = self.PERCORE_BATCH_SIZE * self.num_devices, self.batch_size
    where = f'PERCORE_BATCH_SIZE={self.PERCORE_BATCH_SIZE:g} × {self.num_devices} devices'
    if batch < 1 or abs(batch - exact) > 1e-6:
      raise UserError(f'{where} is a global batch of {exact:g}: it must be a whole number ≥ 1')
    shards = self.batch_shards
    parts = {n: getattr(self, n) for n in ('NUM_MICROBATCHES', 'ROWS_PER_EXAMPLE')}
    if batch % (shards * math.prod(parts.values())):
      micro = ''.join(f' × {name}={n}' for name, n in parts.items() if n != 1)
      axes = ' × '.join(partitioning.axes_of(self.rules['batch']))
      raise UserError(
        f'{where} is a global batch of {batch}, not divisible by {axes} = {shards}{micro}'
      )

  def validate(self) -> None:
    """Checks everything that can be checked without a device; raises UserError."""
    mesh.check_mesh_shape(self.ICI_MESH_SHAPE, self.DCN_MESH_SHAPE, self.MESH_AXES, devices=None)
    self.check_bounds()  # of properties that depend on the mesh, too
    length_shards = partitioning.num_shards(self.mesh_sizes, self.rules, 'residual_length')
    if self.MAX_SEQ_LEN % length_shards:
      axes = ' × '.join(partitioning.axes_of(self.rules['residual_length']))
      raise UserError(
        f'MAX_SEQ_LEN={self.MAX_SEQ_LEN} is not divisible by {axes} = {length_shards}'
      )
    if self.LOSS_SPIKE_FACTOR and self.LOSS_SPIKE_FACTOR <= 1:
      raise UserError(
        f'LOSS_SPIKE_FACTOR={self.LOSS_SPIKE_FACTOR:g} must be above 1, or 0 for none'
      )
    self.compiler_options('')  # raises UserError for an invalid option
    self.check_restore()
    self.check_batch_size()


def compiler_option(text: str) -> tuple[str, compiler.Option]:
  """Parses 'xla_name=true' into ('xla_name', True); raises UserError for any other form."""
  name, equals, value = (part.strip() for part in text.strip().lstrip('-').partition('='))
  if not equals or not name.startswith('xla_'):
    raise UserError(f'COMPILER_OPTIONS: {text!r} must be xla_NAME=VALUE')
  plain: dict[str, compiler.Option] = {'true': True, 'false': False}
  return name, plain.get(value.lower(), int(value) if value.isdigit() else value)


def full_name(cls: type) -> str:
  """Returns the dotted path of a class, which is its name in files."""
  return f'{cls.__module__}.{cls.__qualname__}'
