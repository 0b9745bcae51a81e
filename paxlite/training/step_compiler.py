"""Compiles the train step before the training loop, or loads a compiled step."""

import dataclasses
import json
import re
import zlib
from collections.abc import Callable

import jax

from paxlite.compilation.compiled_step import SavedStep, compile_lowered
from paxlite.compilation.compiler import Options, without_pipelining
from paxlite.core.errors import UserError
from paxlite.core.trees import PyTree
from paxlite.processes.agreement import compare
from paxlite.processes.process_messages import meet
from paxlite.training.memory_check import MemoryCheck

# where a callback of Python, as jax.debug.print makes one, is in the memory of a process
_ADDRESS = re.compile(r'(?<=index = )\d+|(?<=backend_config = ")\d+')


@dataclasses.dataclass(frozen=True)
class StepCompiler:
  """Compiles the train step, or loads a compiled step."""

  memory: MemoryCheck  # compares the memory that the step needs with the memory left
  options: Options = dataclasses.field(default_factory=dict)  # XLA compiler options
  saved_step: SavedStep | None = None  # a compiled step to load; None compiles the step
  beat: Callable[[], None] = lambda: None  # called before this process waits for others
  # called with the executable
  on_compiled: Callable[[jax.stages.Compiled], None] = lambda compiled: None

  def __call__(
    self, lowered: jax.stages.Lowered, arguments: tuple[PyTree, PyTree]
  ) -> tuple[jax.stages.Compiled, str]:
    """Returns the executable, and a text that says whether it was compiled or loaded.

    Raises UserError if the step needs more memory than is left, the saved step does not fit this
    run, or another process has another step.
    """
    self._compare(lowered)
    compiled = self._compiled(lowered, arguments)
    self.beat()
    meet()  # one process may have compiled for longer than another one
    self.on_compiled(compiled[0])
    return compiled

  def _compiled(
    self, lowered: jax.stages.Lowered, arguments: tuple[PyTree, PyTree]
  ) -> tuple[jax.stages.Compiled, str]:
    if self.saved_step is not None:
      compiled = self.saved_step.load(lowered, arguments, self.memory.mesh)
      self.memory.step(compiled)
      return compiled, f'Loaded the train step of {self.saved_step.path}'
    compiled = compile_lowered(lowered, self.options)
    smaller = without_pipelining(self.options)
    try:
      self.memory.step(compiled)
    except UserError:
      if smaller == self.options:
        raise
    else:
      return compiled, 'Compiled the train step'
    compiled = compile_lowered(lowered, smaller)
    self.memory.step(compiled)
    return compiled, 'Compiled the train step again, without pipelined collectives, to save memory,'

  def _compare(self, lowered: jax.stages.Lowered) -> None:
    """Compares the programs of all processes, which would wait for each other or compute nonsense.

    Raises UserError if they differ.
    """
    if jax.process_count() > 1:
      program = _ADDRESS.sub('', lowered.as_text())
      self.beat()
      compare(
        {
          'the program of the train step': f'{zlib.crc32(program.encode()):08x}',
          'COMPILER_OPTIONS': json.dumps(dict(self.options), sort_keys=True),
        }
      )
