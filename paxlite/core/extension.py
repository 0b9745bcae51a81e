"""What a leaf of paxlite, or an installed package of a user, adds to the core.

What is added is named by text, 'package.module:name', and imported when it is used: modules with
extensions are read at each start, and import this module alone.
"""

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Command:
  """One command of `paxlite`.

  Attributes:
    name: Its name on the command line.
    purpose: What it does, as a line of the list of commands.
    module: The module whose function `main` runs it, and whose PARSER reads its arguments.
    group: The heading below which it is listed.
    is_run: Whether it has the signals and exit codes of `paxlite.main`.
    has_parser: Whether the module has a PARSER; another program reads the arguments otherwise.
  """

  name: str
  purpose: str
  module: str
  group: str
  is_run: bool = False
  has_parser: bool = True

  @property
  def main(self) -> Callable[[Sequence[str]], None]:
    """The function that runs the command with its arguments; it raises errors of the user."""
    found: Callable[[Sequence[str]], None] = importlib.import_module(self.module).main
    return found

  @property
  def parser(self) -> Any:
    """The `paxlite.cli.parser.Parser` of its arguments, or None."""
    return importlib.import_module(self.module).PARSER if self.has_parser else None


@dataclasses.dataclass(frozen=True)
class Extension:
  """What one leaf or package adds; `paxlite/extensions.py` finds the extensions.

  Attributes:
    name: The name of the leaf or of the package, for messages.
    needs: Names of leaves without which it is absent too.
    commands: Commands of `paxlite`.
    schemes: What reads and writes the paths of a scheme, by scheme: {'gs': 'module:name'} for
      gs://bucket/file. The name is that of a `paxlite.files.schemes.Scheme`.
    parts: Attributes of all experiments: subclasses of `paxlite.experiments.parts.part.Part`.
    options: The names of attributes of few experiments, by the part that has them: a subclass of
      LanguageModel. An experiment gets the part when a value for one of them is given, and a class
      that states one names the part as a base; see `paxlite.experiments.options`.
    optimizers: Classes of the names by which `paxlite.optim.by_name.register` registers them. The
      attributes that their fields declare are those of experiments.
    callbacks: Functions (run, trainer) that return callbacks of a run that trains: lists of
      `paxlite.Callback`. They get the `programs.run.Run` and its Trainer, before the first step.
    inputs: Functions (run, inputs, beat) that complete the rows of a run's inputs, by their names,
      before they are read: in training, evaluation and replays. `beat` is called now and then.
    hooks: Functions that the core calls in one place each, by what asks for them there: a mode of a
      run, an attribute, a flag. `paxlite.extensions.hook` finds them.
    sections: Functions of the records of runs (`report.records.RunRecords`) that return
      tables of `paxlite report`: each a (title, header, rows, sentences below the table) of texts.
    hints: Functions that answer users who write the names of other systems, by what they write.
      That of an 'attribute', an 'experiment', a 'flag', a 'mode' or the 'words' of a command line
      returns a sentence, or ''; that of the 'path' of a class returns its path or name here, or ''.
      That of a 'command line' gets the name of the command and the arguments; it returns those that
      the command understands, and warnings. That of the 'arguments of a run' returns those that
      are left out, and warnings. For a text in the place of a path, that of 'weights' returns the
      folders of imported weights, the newest first, and that of 'files' the files of records, which
      it makes if need be;
      that of 'published weights' returns what makes the folder of weights of others, for --to.
    experiments: Packages whose modules register experiments.
    former_modules: Of a leaf: the present names of modules and packages, by their former ones. What
      is in a package has moved with it.
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
    """The names that only one extension may add: commands, schemes, optimizers, hooks
    and attributes of options."""
    commands, schemes = (c.name for c in self.commands), (f'{s}://' for s in self.schemes)
    optimizers = (f'OPTIMIZER={name.partition(":")[2]}' for name in self.optimizers)
    attributes = (name for names in self.options.values() for name in names)
    return tuple(dict.fromkeys((*commands, *schemes, *optimizers, *self.hooks, *attributes)))


def imported(reference: str) -> Any:
  """Returns what 'package.module:name' names."""
  module, _, name = reference.partition(':')
  return getattr(importlib.import_module(module), name)
