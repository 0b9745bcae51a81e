"""The commands of `paxlite`, and the modules that run them."""

import dataclasses
import importlib
from collections.abc import Sequence

from paxlite.cli.parser import Parser


@dataclasses.dataclass(frozen=True)
class Command:
  """One command of `paxlite`.

  Attributes:
    name: Its name on the command line.
    purpose: What it does, as a line of the list of commands.
    module: The module whose function `main` runs it, and whose PARSER reads its arguments.
  """

  name: str
  purpose: str
  module: str

  def run(self, arguments: Sequence[str]) -> None:
    """Runs the command; errors of the user are raised."""
    importlib.import_module(f'paxlite.tools.{self.module}').main(arguments)

  @property
  def parser(self) -> Parser | None:
    """The parser of its arguments; None for lm-eval, whose arguments are the harness's."""
    if self.name == 'lm-eval':
      return None
    return importlib.import_module(f'paxlite.tools.{self.module}').PARSER


GROUPS: dict[str, tuple[Command, ...]] = {
  'Runs': (
    Command('train', 'train an experiment, or continue its run', 'train'),
    Command('finetune', 'train published weights further, or continue such a run', 'finetune'),
    Command('eval', 'evaluate the last checkpoint of a run', 'eval'),
    Command('decode', 'continue the prompts of an experiment', 'decode'),
    Command('verify', 'replay steps of a run, and compare every bit', 'verify'),
    Command('bisect', 'the first step and array where two runs part', 'bisect'),
    Command('report', 'one page about runs: curves, tables, samples', 'report'),
    Command('goodput', "what a run's time was spent on, over all restarts", 'goodput'),
  ),
  'Experiments': (
    Command('list', 'all experiments, with their sizes', 'experiments'),
    Command('show', 'the values of an experiment and what they mean', 'show'),
    Command('diff', 'where two experiments differ', 'diff'),
    Command('attributes', 'what every attribute means', 'attributes'),
    Command('ladder', 'foretell its loss by small models of its kind', 'ladder'),
    Command('new', 'write a file with an experiment of your own', 'new'),
  ),
  'Models': (
    Command('generate', 'continue a text', 'generate'),
    Command('serve', "answer requests in the form of OpenAI's API", 'serve'),
    Command('chat', 'talk with a model that was trained on chats', 'chat'),
    Command('zero-shot', 'evaluate on LAMBADA, BoolQ and tasks of your own', 'zero_shot'),
    Command('lm-eval', "evaluate by EleutherAI's harness", 'lm_eval'),
    Command('import', 'read weights of Hugging Face, Meta, GGUF or Pax', 'import_weights'),
    Command('export', 'write weights for Hugging Face or llama.cpp', 'export_weights'),
    Command('prove', 'check that an export or a server has the same model', 'prove'),
    Command('convert-te', "to and from Transformer Engine's layers", 'convert_te'),
  ),
  'Data': (
    Command('data', 'what a run would see of its data', 'data'),
    Command('tokenize', 'turn text into a dataset of tokens', 'tokenize'),
    Command('train-tokenizer', 'make a tokenizer of your own text', 'train_tokenizer'),
  ),
  'Machines': (
    Command('doctor', 'what is installed, what is missing, and what to do', 'doctor'),
    Command('plan', 'the fastest mesh and batch that fit a machine', 'plan'),
    Command('compile', 'does it fit, and how fast, on a machine that is not here', 'compile'),
    Command('explain', 'every array, collective and recomputed product of a step', 'explain'),
    Command('read-hlo', 'the costs of any compiled program', 'read_hlo'),
    Command('completion', 'complete commands and names in bash, zsh or fish', 'completion'),
  ),
}
# they have the signals and exit codes of paxlite.main
RUNS = 'train', 'finetune', 'eval', 'decode', 'verify'
COMMANDS = {command.name: command for group in GROUPS.values() for command in group}


def listing() -> str:
  """Returns the list of commands by group."""
  width = max(map(len, COMMANDS))
  blocks = [
    '\n'.join([f'{group}:', *(f'  {c.name:<{width}}  {c.purpose}' for c in commands)])
    for group, commands in GROUPS.items()
  ]
  return '\n'.join(blocks)
