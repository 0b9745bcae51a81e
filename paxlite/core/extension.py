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
  """One command of `paxlite`.

  Attributes:
    name: The name on the command line.
    purpose: What the command does, for the list of commands.
    module: The module with the function `main`, which runs the command, and with its PARSER.
    group: The heading in the list of commands.
    is_run: Whether the command has the signals and exit codes of `paxlite.main`.
    has_parser: Whether the module has a PARSER; if not, another program reads the arguments.
  """

  name: str
  purpose: str
  module: str
  group: str
  is_run: bool = False
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
  """The additions of one leaf or package; `paxlite/extensions.py` finds all extensions.

  Attributes:
    name: The name of the leaf or package, for messages.
    needs: Names of leaves that it needs; it is absent without them.
    commands: Commands of `paxlite`.
    schemes: Readers and writers of paths by scheme: {'gs': 'module:name'} for gs://bucket/file,
      where the name is a `paxlite.files.schemes.Scheme`.
    parts: Attributes of all experiments: subclasses of `paxlite.experiments.parts.part.Part`.
    options: Attribute names of few experiments, by the part that declares them: a subclass of
      LanguageModel. An experiment gets the part when one of them is set, and a class that sets one
      names the part as a base; see `paxlite.experiments.options`.
    optimizers: Optimizer classes, named as `paxlite.optim.by_name.register` registers them. Their
      fields declare attributes of experiments.
    callbacks: Functions (run, trainer) that return lists of `paxlite.Callback` for a training run.
      They are called before the first step with the `programs.run.Run` and its Trainer.
    inputs: Functions (run, inputs, beat) that complete the rows of a run's inputs, by name, before
      they are read: in training, evaluation and replays. They call `beat` now and then.
    hooks: Functions that the core calls in one place each, by the name used there: a mode of a run,
      an attribute, a flag. `paxlite.extensions.hook` finds them.
    sections: Functions of run records (`report.records.RunRecords`) that return tables for
      `paxlite report`, each as texts (title, header, rows, sentences below the table).
    hints: Functions that understand names of other systems, by the kind of input. For 'attribute',
      'experiment', 'flag', 'mode' and 'words' (of a command line) they return a sentence or ''; for
      'path' (of a class), its path or name here or ''; for 'command line', called with the command
      and its arguments, the arguments that the command understands and warnings; for 'arguments of
      a run', the arguments to leave out and warnings. For a text in place of a path, 'weights'
      returns folders of imported weights, newest first, and 'files' the files of records, which it
      makes if necessary; 'published weights' returns what makes a folder of published weights, for
      --to.
    experiments: Packages with modules that register experiments.
    former_modules: For a leaf, the current names of modules and packages by former name. The
      contents of a package moved with it.
  """

  name: str
  needs: tuple[str, ...] = ()
  commands: tuple[Command, ...] = ()
  schemes: Mapping[str, str] = dataclasses.field(default_factory=dict)
  parts: tuple[str, ...] = ()
  options: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
  optimizers: tuple[str, ...] = ()
  callbacks: tuple[str, ...] = ()
  inputs: tuple[str, ...] = ()
  hooks: Mapping[str, str] = dataclasses.field(default_factory=dict)
  sections: tuple[str, ...] = ()
  hints: Mapping[str, str] = dataclasses.field(default_factory=dict)
  experiments: tuple[str, ...] = ()
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
