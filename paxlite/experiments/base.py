"""The experiment: a class whose attributes are hyperparameters and whose methods return configs.

    @register
    class MyGPT(Synthetic, GPT126M):
      NUM_LAYERS = 24

`MyGPT.config()` is an `fdl.Config` of the class in which every value is explicit. The methods of
the built object return the configs of the task and of the inputs. Its properties are the numbers
that the trainer needs.
"""

import inspect
import pathlib
import types
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, cast

import fiddle as fdl

from paxlite import extensions
from paxlite.config import edits
from paxlite.config.attribute_kinds import Kind, Training, names_of
from paxlite.config.attributes import attribute_types, convert, derived
from paxlite.config.experiment_file import WeightsFacts
from paxlite.config.templates import selections_named
from paxlite.core.errors import UserError
from paxlite.core.trees import PyTree
from paxlite.experiments import options
from paxlite.experiments.own_methods import check_overrides
from paxlite.experiments.parts.checkpoints import Checkpointing
from paxlite.experiments.parts.part import Part
from paxlite.experiments.parts.training_loop import TrainingLoop
from paxlite.layers.precision.backends import Backend
from paxlite.optim.optimizers import Optimizer
from paxlite.tracking.writers import Writer
from paxlite.training.callbacks import Callback

if TYPE_CHECKING:
  import jax

  Added = Part
else:  # stands for the parts of extensions among the bases of a class
  Added = types.SimpleNamespace(__mro_entries__=lambda bases: (*extensions.added('parts'),))


class Experiment(TrainingLoop, Checkpointing, Added, subject='Built config'):
  """The base of all experiments; subclasses add the parts of a model and a dataset.

  The parts of extensions are parts of every experiment.

  Sizes are those of the whole run unless the attribute's name says otherwise.
  """

  CONFIG_EDITS: Training[list[str]] = []  # edits of the built config, 'task.PATH=VALUE'

  @classmethod
  def config(cls) -> fdl.Config:
    """Returns an fdl.Config of this class with every attribute set except the derived ones."""
    cfg = fdl.Config(cls)
    for name in inspect.signature(cls).parameters:
      value = getattr(cls, name)
      if not isinstance(value, derived):
        setattr(cfg, name, convert(cls, name, value))
    return cfg

  @classmethod
  def chosen(cls, weights: WeightsFacts) -> tuple[type['Experiment'], dict[str, object]]:
    """Returns the class that a command means which starts from these weights, and values of it.

    A class whose sizes are those of the weights returns another one.
    """
    return cls, {}

  @classmethod
  def of_values(cls, values: Mapping[str, object]) -> type['Experiment']:
    """Returns the class that this one is with these values: another one, if they name its model,
    or set attributes of parts that this one does not have.
    """
    return options.with_parts(cls, values)

  def __new__(cls, **values: object) -> Self:
    """Returns an object of the class that this one is with these values."""
    return super().__new__(cast(type[Self], cls.of_values(values)))

  def __init__(self, **values: object) -> None:
    if not values.keys() <= attribute_types(type(self)).keys():
      options.refuse_lost(type(self), values)
      values = options.kept(type(self), values)
    super().__init__(**values)

  def __init_subclass__(cls, **kwargs: Any) -> None:
    options.refuse_attributes(cls)
    super().__init_subclass__(**kwargs)
    check_overrides(cls, Experiment)

  def task(self) -> fdl.Config:
    """Returns the config of the training.task.Task to train, in plain XLA.

    A subclass overrides this method and edits what super().task() returns.
    """
    raise UserError(f'{type(self).__name__} has no model: derive it from LanguageModel')

  def build_task(self) -> fdl.Config:
    """Returns the config of the Task on the experiment's backend, edited; programs build this one.

    Raises UserError if a value of CONFIG_EDITS has another type than the one in its place.
    """
    with selections_named(type(self).__name__):
      task = self.task()
    self.complete(task)
    return edits.edited(task, self.CONFIG_EDITS) if self.CONFIG_EDITS else task

  def model_of(self, writer: 'Experiment') -> fdl.Config:
    """Returns the config of the model that takes the weights of what `writer` has trained."""
    return self.build_task().model

  def check_continued(self, writer: 'Experiment', stored: Collection[str]) -> None:
    """Raises UserError if the model uses what `writer` has trained in another way, or in part.

    Args:
      writer: The experiment of the checkpoint that a run starts from.
      stored: The names of its parameters, those of an unrolled stack.
    """

  def complete(self, task: fdl.Config) -> None:
    """Edits a plain XLA task config for the experiment's backend."""

  def check_edits(self) -> None:
    """Raises UserError if the built config lacks what CONFIG_EDITS names, or rejects its values."""
    if self.CONFIG_EDITS:
      task = self.task()
      self.complete(task)
      edits.check(type(self), task, self.CONFIG_EDITS)

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
    if not self.TRACKERS:
      return []
    trackers = extensions.hook('TRACKERS')
    found: Sequence[Writer] = trackers(self.TRACKERS, folder, type(self).__name__, self.values())
    return found

  @property
  def max_segments_per_seq(self) -> int:
    """The most segments of a packed row, padding included; 0: any number."""
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

  def attention_choices(self, device: 'jax.Device') -> list[str]:
    """Returns sentences on how such devices compute attention."""
    return []

  @property
  def flops_per_token(self) -> float:
    """Model FLOPs of training all weights per token; 0 if unknown."""
    return 0.0

  def trained_flops(self, optimizer: Optimizer, boxed: PyTree) -> float:
    """Returns the model FLOPs of training per token, without the gradients of what is frozen.

    Args:
      optimizer: Says which variables are trained.
      boxed: The parameters or their shapes, in the boxes of their layers.
    """
    return self.flops_per_token

  @property
  def reference_path(self) -> str:
    """The path of a frozen reference model's weights; '' if no model has its own."""
    return ''

  @property
  def saves_trainable_only(self) -> bool:
    """Whether checkpoints lack frozen variables, because the weights that they are of stay."""
    return False

  @property
  def model_values(self) -> tuple[dict[str, object], dict[str, object]]:
    """Attributes that decide the variables' shapes, and others that decide the function."""
    return self.values_of(Kind.SHAPE), self.values_of(Kind.FUNCTION)

  def values_of(self, *kinds: Kind) -> dict[str, object]:
    """Returns the attributes of these kinds, with their values."""
    return {name: getattr(self, name) for name in names_of(attribute_types(type(self)), *kinds)}


def full_name(cls: type) -> str:
  """Returns the dotted path of a class, which is its name in files."""
  return f'{cls.__module__}.{cls.__qualname__}'
