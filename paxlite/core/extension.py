"""Declarations of what a leaf of paxlite, or a user's installed package, adds to the core.

Additions are named by text, 'package.module:name', and imported at first use: every start reads the
modules with extensions, which import this module alone.
"""

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Command:
  """One command of `paxlite`."""

  name: str  # the name on the command line
  purpose: str  # what the command does, for the list of commands
  module: str  # the module with the function `main`, which runs the command, and with its PARSER
  group: str  # the heading in the list of commands
  is_run: bool = False  # whether the command has the signals and exit codes of `paxlite.main`
  # whether the module has a PARSER; if not, another program reads the arguments
  has_parser: bool = True

  @property
  def main(self) -> Callable[[Sequence[str]], None]:
    """The function that runs the command with its arguments; it raises UserErrors."""
    found: Callable[[Sequence[str]], None] = importlib.import_module(self.module).main
    return found

  @property
  def parser(self) -> Any:
    """The `paxlite.cli.parser.Parser` of its arguments, or None."""
    return importlib.import_module(self.module).PARSER if self.has_parser else None


@dataclasses.dataclass(frozen=True)
class Extension:
  """The additions of one leaf or package; `paxlite/extensions.py` finds all extensions."""

  name: str  # the name of the leaf or package, for messages
  needs: tuple[str, ...] = ()  # names of leaves that it needs; it is absent without them
  commands: tuple[Command, ...] = ()  # commands of `paxlite`
  # readers and writers of paths by scheme: {'gs': 'module:name'} for gs://bucket/file, where the
  # name is a `paxlite.files.schemes.Scheme`
  schemes: Mapping[str, str] = dataclasses.field(default_factory=dict)
  # attributes of all experiments: subclasses of `paxlite.experiments.parts.part.Part`
  parts: tuple[str, ...] = ()
  # Attribute names of few experiments, by the part that declares them: a subclass of LanguageModel.
  # An experiment gets the part when one of them is set, and a class that sets one names the part as
  # a base; see `paxlite.experiments.options`.
  options: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
  # Optimizer classes, named as `paxlite.optim.by_name.register` registers them. Their fields
  # declare attributes of experiments.
  optimizers: tuple[str, ...] = ()
  # Functions (run, trainer) that return lists of `paxlite.Callback` for a training run. They are
  # called before the first step with the `programs.run.Run` and its Trainer.
  callbacks: tuple[str, ...] = ()
  # Functions (run, inputs, beat) that complete the rows of a run's inputs, by name, before they are
  # read: in training, evaluation and replays. They call `beat` now and then.
  inputs: tuple[str, ...] = ()
  # functions that the core calls in one place each, by the name used there: a mode of a run, an
  # attribute, a flag. `paxlite.extensions.hook` finds them
  hooks: Mapping[str, str] = dataclasses.field(default_factory=dict)
  # functions of run records (`report.records.RunRecords`) that return tables for `paxlite report`,
  # each as texts (title, header, rows, sentences below the table)
  sections: tuple[str, ...] = ()
  # Functions that understand names of other systems, by the kind of input. For 'attribute',
  # 'experiment', 'flag', 'mode' and 'words' (of a command line) they return a sentence or ''; for
  # 'path' (of a class), its path or name here or ''; for 'command line', called with the command
  # and its arguments, the arguments that the command understands and warnings; for 'arguments of a
  # run', the arguments to leave out and warnings. For a text in place of a path, 'weights' returns
  # folders of imported weights, newest first, and 'files' the files of records, which it makes if
  # necessary; 'published weights' returns what makes a folder of published weights, for --to.
  hints: Mapping[str, str] = dataclasses.field(default_factory=dict)
  experiments: tuple[str, ...] = ()  # packages with modules that register experiments
  # For a leaf, the current names of modules and packages by former name. The contents of a package
  # moved with it.
  former_modules: Mapping[str, str] = dataclasses.field(default_factory=dict)

  @property
  def added(self) -> tuple[str, ...]:
    """The names that only one extension may add: commands, schemes, optimizers, hooks and
    attributes of options."""
    commands, schemes = (c.name for c in self.commands), (f'{s}://' for s in self.schemes)
    optimizers = (f'OPTIMIZER={name.partition(":")[2]}' for name in self.optimizers)
    attributes = (name for names in self.options.values() for name in names)
    return tuple(dict.fromkeys((*commands, *schemes, *optimizers, *self.hooks, *attributes)))


def imported(reference: str) -> Any:
  """Imports and returns the object 'package.module:name'."""
  module, _, name = reference.partition(':')
  return getattr(importlib.import_module(module), name)
